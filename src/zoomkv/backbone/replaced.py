"""Every attention layer under another function while a ``with`` block lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from zoomkv.backbone.families import check_supported

Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""Called as ``attend(layer, query, key, value, scaling)``: queries ``[B, H, Q, D]``, keys and
values ``[B, Hkv, Q, D]`` of the tokens of this forward alone, queries and keys after RoPE, and the
factor on their products. It gives ``[B, H, Q, D]``."""

_NAME = "replaced_by_zoomkv"


@contextmanager
def replaced_attention(model: Any, attend: Attend) -> Iterator[None]:
    """Calls ``attend`` in every layer instead of the layer's own attention.

    What a token may read is up to ``attend``: no mask is built, and one that is given is not looked
    at; nor is there dropout. Gradients reach whatever ``attend`` computes with, also if the model
    is frozen, and also behind the block if the model was put under gradient checkpointing before
    it: layers are then recomputed with the same ``attend``, which must not remember its calls.

    Args:
        model: A causal LM of a supported family, plain or wrapped by PEFT, attached or not.
        attend: What to compute instead. Its result is cast to the query's dtype.

    Raises:
        ValueError: An unsupported family; a forward with a cache; a result of another shape.
    """
    decoder = model.get_decoder()
    config = decoder.config
    check_supported(config, config.name_or_path or type(model).__name__)
    _register()
    recomputed = [layer for layer in decoder.layers if hasattr(layer, _CHECKPOINT)]
    was = [getattr(layer, _CHECKPOINT) for layer in recomputed]
    for layer, checkpoint in zip(recomputed, was, strict=True):
        setattr(layer, _CHECKPOINT, partial(_checkpointed, checkpoint, config))
    try:
        with under_attention(decoder, _NAME, zoomkv_attend=attend, use_cache=False):
            yield
    finally:
        for layer, checkpoint in zip(recomputed, was, strict=True):
            setattr(layer, _CHECKPOINT, checkpoint)


@contextmanager
def under_attention(decoder: Any, name: str, **told: Any) -> Iterator[None]:
    """Looks up the attention function ``name`` in every layer, and hands it ``told`` as keywords.

    Args:
        decoder: A causal LM's decoder.
        name: As registered with transformers.
        told: Overrides what the decoder is called with.
    """

    def tell(
        decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, **told}

    handle = decoder.register_forward_pre_hook(tell, with_kwargs=True)
    try:
        with _looked_up(decoder.config, name):
            yield
    finally:
        handle.remove()


@contextmanager
def _looked_up(config: Any, name: str) -> Iterator[None]:
    was = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = was


# transformers' name for what a layer calls to be checkpointed: function and tensors.
_CHECKPOINT = "_gradient_checkpointing_func"


def _checkpointed(
    checkpoint: Callable[..., Any], config: Any, function: Callable[..., Any], *args: Any
) -> Any:
    """Checkpoints a layer so that it is recomputed as it was, long after the block.

    The other kind, ``use_reentrant=True``, gives no gradient to what ``attend`` holds.
    """
    return checkpoint(partial(_as_it_was, config, function), *args, use_reentrant=False)


def _as_it_was(config: Any, function: Callable[..., Any], *args: Any) -> Any:
    with _looked_up(config, _NAME):
        return function(*args)


def _register() -> None:
    """Registers the attention function; without one for masks, transformers builds none."""
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _replaced)


def _replaced(
    module: nn.Module,
    query: Tensor,  # [B, H, Q, D]
    key: Tensor,  # [B, Hkv, Q, D]
    value: Tensor,  # [B, Hkv, Q, D]
    attention_mask: Tensor | None,
    *,
    scaling: float,
    zoomkv_attend: Attend,
    zoomkv: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if zoomkv is not None or key.shape[2] != query.shape[2]:
        raise ValueError("a replaced attention reads no cache; give the tokens alone")
    layer: Any = module.layer_idx
    out = zoomkv_attend(layer, query, key, value, scaling)
    if out.shape != query.shape:
        raise ValueError(
            f"attend gave {list(out.shape)} for layer {layer}; give {list(query.shape)}, a row for "
            "each query"
        )
    return out.to(query.dtype).transpose(1, 2), None
