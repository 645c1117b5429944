"""Policies by name. Listing them imports none of them.

To add one: write its file, add a line to ``POLICIES``, add a row to the case table of the tests.
Wherever a name is asked for, ``module:Class`` serves too, for a policy of one's own.
"""

import difflib
import inspect
from collections.abc import Iterable
from importlib import import_module
from typing import Any

POLICIES: dict[str, str] = {
    "beacon_kv": "zoomkv.caches.beacon_kv:BeaconKVCache",
    "chunkkv": "zoomkv.caches.chunkkv:ChunkKVCache",
    "full": "zoomkv.caches.full:FullCache",
    "full_offloaded": "zoomkv.caches.full_offloaded:FullOffloadedCache",
    "h2o": "zoomkv.caches.h2o:H2OCache",
    "initial_recent": "zoomkv.caches.initial_recent:InitialRecentCache",
    "keydiff": "zoomkv.caches.keydiff:KeyDiffCache",
    "pyramidkv": "zoomkv.caches.pyramidkv:PyramidKVCache",
    "r_kv": "zoomkv.caches.r_kv:RKVCache",
    "random": "zoomkv.caches.random_rows:RandomCache",
    "rpc": "zoomkv.caches.rpc:RPCCache",
    "sekv": "zoomkv.caches.sekv:SeKVCache",
    "semanticache": "zoomkv.caches.semanticache:SemantiCache",
    "sentence_kv": "zoomkv.caches.sentence_kv:SentenceKVCache",
    "snapkv": "zoomkv.caches.snapkv:SnapKVCache",
    "streaming_llm": "zoomkv.caches.streaming_llm:StreamingLLMCache",
    "sumr": "zoomkv.caches.sumr:SumRCache",
    "tova": "zoomkv.caches.tova:TOVACache",
    "zoomr": "zoomkv.caches.zoomr:ZoomRCache",
}
"""Name of each policy and where its class is, as ``module:Class``."""

_FROM_MODEL = ("tokenizer", "delimiters")


def names() -> list[str]:
    """The registered policies, sorted."""
    return sorted(POLICIES)


def register(name: str, target: str) -> None:
    """Adds a policy of your own.

    Args:
        name: Under which ``make_cache`` finds it.
        target: ``module:Class``; the class takes the model first, then its options by name.

    Raises:
        ValueError: If the name is taken or the target malformed.
    """
    if name in POLICIES:
        raise ValueError(f"policy '{name}' is registered already, as {POLICIES[name]}")
    _parts(name, target)
    POLICIES[name] = target


def policy_class(name: str) -> Any:
    """The class of a policy.

    Args:
        name: One of ``names()``, or ``module:Class``.

    Raises:
        ValueError: If there is none of that name, which may say what is meant, or the class can't
            be imported or is no policy.
    """
    if name not in POLICIES and ":" not in name:
        raise ValueError(f"unknown policy '{name}'{_hint(name, POLICIES)}")
    module, attribute = _parts(name, POLICIES.get(name, name))
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"policy '{name}': it can't be imported ({error})") from error
    from zoomkv.caches.base import PolicyCache

    if not isinstance(found, type) or not issubclass(found, PolicyCache):
        raise ValueError(f"policy '{name}': {attribute} of {module} is no PolicyCache class")
    return found


def reads_summaries(name: str) -> bool:
    """Whether a policy looks for the summaries that a model writes.

    Raises:
        ValueError: As ``policy_class``.
    """
    return "delimiters" in _parameters(policy_class(name))


def options_of(name: str) -> dict[str, Any]:
    """The options of a policy and their defaults; ``inspect.Parameter.empty`` if required."""
    found = _parameters(policy_class(name))
    return {name: p.default for name, p in found.items() if name not in _FROM_MODEL}


def check_options(name: str, options: Iterable[str]) -> None:
    """Checks that a policy has options of these names; their values are its own affair.

    Raises:
        ValueError: Unknown policy or option; says which one may be meant.
    """
    known = options_of(name)
    for option in options:
        if option not in known:
            raise ValueError(f"policy '{name}' has no option '{option}'{_hint(option, known)}")


def make_cache(
    name: str, model: Any, tokenizer: Any = None, delimiters: Any = None, **options: Any
) -> Any:
    """A new, empty cache for an attached model.

    Args:
        name: One of ``names()``, or ``module:Class``.
        model: The causal LM that will use it; the cache does not keep it.
        tokenizer: For policies that look for sentence ends or summaries; by default the one that
            the model was loaded or attached with.
        delimiters: What begins and ends a summary; by default the tokenizer's special tokens.
        **options: The policy's own options.

    Returns:
        The cache.

    Raises:
        ValueError: Unknown policy, unknown option, or a value out of range.
    """
    check_options(name, options)
    if isinstance(tokenizer, str | int | float):
        raise ValueError(f"policy '{name}': {tokenizer!r} is no tokenizer; name options: budget=64")
    cls = policy_class(name)
    accepted = _parameters(cls)
    if "tokenizer" in accepted:
        from zoomkv.backbone.attach import attached_tokenizer

        options["tokenizer"] = attached_tokenizer(model) if tokenizer is None else tokenizer
    if "delimiters" in accepted:
        options["delimiters"] = delimiters
    try:
        return cls(model, **options)
    except ValueError as error:
        raise ValueError(f"policy '{name}': {error}") from error


def _parts(name: str, target: str) -> tuple[str, str]:
    """Module and class of a target."""
    module, _, attribute = target.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), attribute)):
        raise ValueError(f"policy '{name}': target '{target}' is not of the form module:Class")
    return module, attribute


def _parameters(cls: type) -> dict[str, inspect.Parameter]:
    """What a class takes besides the model, also what it hands on to its base as ``**options``."""
    found: dict[str, inspect.Parameter] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        own = list(inspect.signature(vars(base)["__init__"]).parameters.values())[2:]
        open_ended = any(p.kind is p.VAR_KEYWORD for p in own)
        found = {p.name: p for p in own if p.kind is not p.VAR_KEYWORD} | found
        if not open_ended:
            break
    return found


def _hint(name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    listed = f"there are: {', '.join(known)}" if known else "it has none"
    return f": did you mean '{near[0]}'? ({listed})" if near else f"; {listed}"
