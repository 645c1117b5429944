"""What is derived from a whole vocabulary, once for each tokenizer."""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

_DERIVED: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()


def of_vocabulary(tokenizer: Any, key: Any, make: Callable[[Any], Any]) -> Any:
    """Returns what ``make`` makes of a tokenizer, made once.

    Args:
        tokenizer: Whose vocabulary is read.
        key: Tells what is made from other things made of the same vocabulary.
        make: Called with the tokenizer if need be.

    Raises:
        ValueError: If there is no tokenizer.
    """
    if tokenizer is None:
        raise ValueError(
            "it needs the model's tokenizer: pass tokenizer=..., or load the model with zoomkv.load"
        )
    known = _DERIVED.setdefault(tokenizer, {})
    # A tokenizer that has grown since is another one.
    key = (key, len(tokenizer.get_vocab()))
    if key not in known:
        known[key] = make(tokenizer)
    return known[key]
