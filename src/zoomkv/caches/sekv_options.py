"""What the options of ``sekv`` come to, with the router that it has.

An option that is not given is what the router was trained with; with no such router, it is what
the policy's page says.
"""

from __future__ import annotations

from typing import Any, cast, get_args

from zoomkv.backbone.attach import attached_router
from zoomkv.backbone.rotary import rotary_of
from zoomkv.caches.base import ModelShape
from zoomkv.caches.budget import check_at_least
from zoomkv.caches.factor_rows import Factoriser
from zoomkv.caches.routing import TRAINING_FREE
from zoomkv.modules.memory import Recovery
from zoomkv.modules.router import Router
from zoomkv.modules.sketch import Sketch
from zoomkv.spans.splitter import Scheme, Splitter
from zoomkv.spans.surprisal import SINKS

AnyRouter = str | Sketch | Router

_ALPHA = 1.0
_BOUNDS: dict[str, tuple[int, int | None]] = {
    "fine": (12, 32),
    "paper": (16, 256),
    "fixed": (1, 32),
}
_OF_SCHEME = {
    "fine": ("min_span", "max_span", "anchor_share"),
    "paper": ("alpha", "min_span", "max_span"),
    "fixed": ("max_span",),
}


def choose_router(model: Any, router: Any) -> AnyRouter:
    """The router that an option names, or the model's own.

    Raises:
        ValueError: There is none of that name, or it was made for other heads.
    """
    own = attached_router(model)
    if router == "paper":
        if not isinstance(own, Router):
            raise ValueError(
                "router='paper': the model was loaded without a router of this form; load a "
                "checkpoint of RouterDistill, or give the router itself"
            )
        router = own
    router = router or own or "sketch"
    if not isinstance(router, Sketch | Router):
        if router not in ("sketch", *TRAINING_FREE):
            known = ", ".join(("sketch", *TRAINING_FREE, "paper"))
            raise ValueError(f"router={router!r}: give a trained one, or one of {known}")
        return str(router)
    shape = ModelShape.of(model)
    for name in ("layers", "heads", "kv_heads", "head_dim"):
        made, has = getattr(router.shape, name), getattr(shape, name)
        if made != has:
            raise ValueError(f"router: made for {name}={made}, this model has {has}")
    return router


def choose_splitter(
    router: AnyRouter,
    spans: str | None,
    alpha: float | str | None,
    min_span: int | None,
    max_span: int | None,
    anchor_share: float | None,
) -> Splitter:
    """How the context is cut.

    Raises:
        ValueError: Options out of range, or others than the router was trained with.
    """
    trained = _trained(router, "splitter")
    scheme = spans or trained.get("scheme") or ("paper" if isinstance(router, Router) else "fine")
    if scheme not in get_args(Scheme):
        raise ValueError(f"spans={spans!r}: choose one of {', '.join(get_args(Scheme))}")
    given = {
        "alpha": None if alpha == "auto" else alpha,
        "min_span": min_span,
        "max_span": max_span,
        "anchor_share": anchor_share,
    }
    if trained:
        _check_trained(scheme, given, trained)
    for name in ("alpha", "anchor_share"):
        value = alpha if name == "alpha" else anchor_share
        if value and name not in _OF_SCHEME[scheme]:
            goes = "paper" if name == "alpha" else "fine"
            raise ValueError(f"{name}={value!r} goes with spans='{goes}', not with '{scheme}'")
    shortest, longest = _BOUNDS[scheme]
    defaults = {"alpha": _ALPHA, "min_span": shortest, "max_span": longest, "anchor_share": 0.0}
    chosen: dict[str, Any] = {
        name: value if value is not None else trained.get(name, defaults[name])
        for name, value in given.items()
    }
    _check_bounds(scheme, chosen["min_span"], chosen["max_span"])
    check_share("anchor_share", chosen["anchor_share"])
    number = chosen["alpha"]
    if isinstance(number, bool) or not isinstance(number, int | float) or number != number:
        raise ValueError(f"alpha={alpha!r}: give a number, or auto")
    if scheme != "fine":
        chosen["anchor_share"] = 0.0
    return Splitter(cast(Scheme, scheme), **chosen, auto=alpha == "auto")


def choose_factoriser(
    model: Any,
    router: AnyRouter,
    recovery: str | None,
    rope: str | None,
    rank: int | None,
    rho: float | None,
    energy: float,
) -> Factoriser | None:
    """How spans are factorised; None if their rows come back as they were.

    Raises:
        ValueError: Options out of range, or a rank that the router's gates don't know.
    """
    trained = _trained(router, "memory")
    paper = isinstance(router, Router)
    recovery = recovery or trained.get("recovery") or ("lowrank" if paper else "exact")
    if recovery not in get_args(Recovery):
        raise ValueError(f"recovery={recovery!r}: choose one of {', '.join(get_args(Recovery))}")
    rope = rope or trained.get("rope") or "post"
    if rope not in ("post", "pre"):
        raise ValueError(f"rope={rope!r}: choose one of post, pre")
    known = router.shape.rank if isinstance(router, Router) else 32
    rank = check_at_least("rank", known if rank is None else rank, 1)
    if paper and rank > known:
        raise ValueError(f"rank={rank}: the router's gates know {known} components")
    rho = trained.get("rho", 1.0) if rho is None else rho
    for name, value in (("rho", rho), ("energy", energy)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ValueError(f"{name}={value!r}: give a share above 0")
    if energy > 1:
        raise ValueError(f"energy={energy!r}: give a share of at most 1")
    if recovery == "exact":
        return None
    return Factoriser(
        rank=rank,
        rho=float(rho),
        energy=float(energy),
        rotary=rotary_of(model) if rope == "pre" else None,
        rank_gate=router.rank_gate if isinstance(router, Router) else None,
    )


def check_share(option: str, share: Any, above: float = 0) -> float:
    """Returns a share.

    Raises:
        ValueError: It is none.
    """
    number = isinstance(share, int | float) and not isinstance(share, bool)
    if not number or not above <= share < 1:
        raise ValueError(f"{option}={share!r}: give a share from 0 to below 1")
    return share


def check_threshold(router: AnyRouter, threshold: float | None) -> float | None:
    """Returns a threshold for all gates.

    Raises:
        ValueError: It is always or never passed, or there are no gates.
    """
    if threshold is None:
        return None
    if isinstance(threshold, bool) or not isinstance(threshold, float) or not 0 < threshold < 1:
        raise ValueError(f"threshold={threshold!r}: give a gate in (0, 1)")
    if not isinstance(router, Router):
        raise ValueError(f"threshold={threshold!r} goes with router='paper' alone")
    return threshold


def _trained(router: AnyRouter, what: str) -> dict[str, Any]:
    return router.trained_with.get(what, {}) if isinstance(router, Router) else {}


def _check_trained(scheme: str, given: dict[str, Any], trained: dict[str, Any]) -> None:
    """A router knows the spans of its own splitter only."""
    wanted = {"spans": scheme} | {name: given[name] for name in _OF_SCHEME[scheme]}
    own = {**trained, "spans": trained["scheme"]}
    for name, value in wanted.items():
        if value is not None and value != own.get(name):
            raise ValueError(
                f"{name}={value!r}: the router was trained with {name}={own.get(name)!r}; "
                "leave the option out"
            )
    if trained.get("sinks", SINKS) != SINKS:
        raise ValueError(
            f"router: trained with {trained['sinks']} sinks, this version has {SINKS}; train anew"
        )


def _check_bounds(scheme: str, shortest: Any, longest: Any) -> None:
    check_at_least("min_span", shortest, 1)
    if longest is None and scheme == "paper":
        return
    check_at_least("max_span", longest, 1)
    if scheme == "fixed":
        return
    if longest < shortest:
        raise ValueError(f"min_span={shortest}, max_span={longest}: give 1 <= min <= max")
    if scheme == "paper" and longest < 2 * shortest - 1:
        raise ValueError(
            f"min_span={shortest}, max_span={longest}: spans='paper' cuts runs into even pieces; "
            "give max_span of at least 2 * min_span - 1"
        )
