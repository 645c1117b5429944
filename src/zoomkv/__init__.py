"""ZoomKV: the whole history on the host, on the device only what the current query needs.

The public names are loaded on first use, so that ``import zoomkv`` stays quick:

    import zoomkv
    model, tokenizer = zoomkv.load("checkpoints/zoomr-smollm2-135m")
    cache = zoomkv.make_cache("zoomr", model, window=512, consensus=2, top_k=2)
    output = model.generate(**inputs, cache=cache, max_new_tokens=2048)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoomkv.backbone.attach import attach
    from zoomkv.caches.registry import make_cache
    from zoomkv.generation import Generator, load

__version__ = "0.1.0"
__all__ = ["Generator", "attach", "load", "make_cache"]

_HOMES = {
    "Generator": "zoomkv.generation",
    "attach": "zoomkv.backbone.attach",
    "load": "zoomkv.generation",
    "make_cache": "zoomkv.caches.registry",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
