"""What every attention layer computes with, shown to an observer while a ``with`` block lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from zoomkv.backbone.attach import attach
from zoomkv.backbone.replaced import under_attention

Observer = Callable[[int, Tensor, Tensor, float], None]
"""Called as ``observer(layer, query, key, scaling)``: queries ``[B, H, Q, D]`` and keys
``[B, Hkv, T, D]`` after RoPE, and the factor on their products."""

_SUFFIX = "_captured"


@contextmanager
def captured(model: Any, observer: Observer) -> Iterator[None]:
    """Shows ``observer`` the queries and keys of each layer, in order, as forwards reach it.

    The model computes what it computes without. Nothing is kept: what the observer does not copy
    is gone with the layer.

    Args:
        model: A causal LM of a supported family, attached or not. It is not captured twice at a
            time, as its layers know one observer.
        observer: Must not change what it is shown.

    Raises:
        ValueError: As ``attach``.
    """
    with attach(model):
        decoder = model.get_decoder()
        base = decoder.config._attn_implementation
        assert not base.endswith(_SUFFIX), "captured twice"
        _register(base)
        with under_attention(decoder, base + _SUFFIX, zoomkv_observer=observer):
            yield


def _register(base: str) -> None:
    """Registers the attention function, and the mask of what it stands before."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(base + _SUFFIX, _observed)
    AttentionMaskInterface.register(base + _SUFFIX, ALL_MASK_ATTENTION_FUNCTIONS[base])


def _observed(
    module: nn.Module,
    query: Tensor,  # [B, H, Q, D]
    key: Tensor,  # [B, Hkv, T, D]
    *args: Any,
    scaling: float,
    zoomkv_observer: Observer,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    layer: Any = module.layer_idx
    zoomkv_observer(layer, query.detach(), key.detach(), scaling)
    config: Any = module.config
    base = ALL_ATTENTION_FUNCTIONS[config._attn_implementation.removesuffix(_SUFFIX)]
    return base(module, query, key, *args, scaling=scaling, **kwargs)
