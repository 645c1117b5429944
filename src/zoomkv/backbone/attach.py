"""Attaching a transformers model: hooks on its decoder, attention functions that know a ``Step``.

    zoomkv.attach(model)                 # for good; zoomkv.detach(model) undoes it
    with zoomkv.attach(model): ...       # or for a while

With any other cache, or none, an attached model computes exactly what it computed before.
"""

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from zoomkv.backbone.families import check_supported
from zoomkv.backbone.protocol import Step, SteppedCache
from zoomkv.ops.attention import grouped_attention

_PREFIX = "zoomkv_"
_MARK = "_zoomkv_handles"
_TOKENIZER = "_zoomkv_tokenizer"
_ROUTER = "_zoomkv_router"

AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]


class Attachment:
    """What ``attach`` returns; leaving a ``with`` block undoes what that call did."""

    def __init__(self, model: Any, fresh: bool) -> None:
        self.model = model
        self._fresh = fresh

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._fresh:
            detach(self.model)


def attach(model: Any, tokenizer: Any = None, router: Any = None) -> Attachment:
    """Makes a causal language model accept the caches of this package.

    Idempotent: attaching an attached model does nothing, nor does leaving its ``with`` block.

    Args:
        model: A transformers causal LM of a supported family, plain or wrapped by PEFT.
        tokenizer: Remembered for caches that look for sentence ends or summaries.
        router: Trained for this model; remembered for caches that route by it.

    Returns:
        A context manager that undoes the attachment; it need not be used as one.

    Raises:
        ValueError: Unsupported family, windowed layers, or attention implementation.
    """
    decoder = model.get_decoder()
    if tokenizer is not None:
        setattr(decoder, _TOKENIZER, tokenizer)
    if router is not None:
        decoder.__dict__[_ROUTER] = router  # not as a part of the model
    if hasattr(decoder, _MARK):
        return Attachment(model, fresh=False)
    config = decoder.config
    check_supported(config, config.name_or_path or type(model).__name__)
    base = config._attn_implementation
    if base not in _ATTENTION:
        raise ValueError(
            f"attention implementation '{base}' is not supported; load the model with "
            f"attn_implementation set to one of {', '.join(_ATTENTION)}"
        )
    _register()
    config._attn_implementation = _PREFIX + base
    handles = (
        decoder.register_forward_pre_hook(_before_forward, with_kwargs=True),
        decoder.register_forward_hook(_after_forward, with_kwargs=True),
    )
    setattr(decoder, _MARK, handles)
    return Attachment(model, fresh=True)


def detach(model: Any) -> None:
    """Undoes ``attach``; a model that is not attached is left as it is."""
    decoder = model.get_decoder()
    if not hasattr(decoder, _MARK):
        return
    for handle in getattr(decoder, _MARK):
        handle.remove()
    delattr(decoder, _MARK)
    if hasattr(decoder, _TOKENIZER):
        delattr(decoder, _TOKENIZER)
    decoder.__dict__.pop(_ROUTER, None)
    config = decoder.config
    config._attn_implementation = config._attn_implementation.removeprefix(_PREFIX)


def is_attached(model: Any) -> bool:
    """Whether ``attach`` is in force."""
    return hasattr(model.get_decoder(), _MARK)


def attached_router(model: Any) -> Any:
    """The router that the model was attached with, or None."""
    return model.get_decoder().__dict__.get(_ROUTER)


def attached_tokenizer(model: Any) -> Any:
    """The tokenizer that the model was attached with, or None."""
    return getattr(model.get_decoder(), _TOKENIZER, None)


# The hooks are plain functions: a closure over the model would survive deepcopy wrongly.


def _before_forward(
    decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    if not isinstance(cache, SteppedCache):
        return None
    input_ids = args[0] if args else kwargs.get("input_ids")
    if input_ids is None or kwargs.get("inputs_embeds") is not None:
        raise ValueError(f"{type(cache).__name__} needs input_ids; inputs_embeds is not supported")
    if kwargs.get("use_cache") is False:
        raise ValueError(
            f"use_cache=False contradicts the {type(cache).__name__} that was given: leave it out, "
            "or give no cache"
        )
    step = cache.begin(input_ids, kwargs.get("attention_mask"), kwargs.get("position_ids"))
    kwargs["zoomkv"] = step
    kwargs["position_ids"] = step.positions.to(input_ids.device, non_blocking=True)
    # A mask with four dimensions is handed on as it is, so transformers builds none.
    kwargs["attention_mask"] = torch.empty(1, 1, 1, 0, device=input_ids.device)
    return args, kwargs


def _after_forward(
    decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    step = kwargs.get("zoomkv")
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    if step is not None and isinstance(cache, SteppedCache):
        cache.commit(step, output[0])


def _register() -> None:
    """Registers the attention functions, and their masks for foreign caches, once."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    for base, function in _ATTENTION.items():
        if _PREFIX + base not in ALL_MASK_ATTENTION_FUNCTIONS:
            AttentionInterface.register(_PREFIX + base, function)
            AttentionMaskInterface.register(_PREFIX + base, ALL_MASK_ATTENTION_FUNCTIONS[base])


def _observe(step: Step, module: nn.Module, query: Tensor, key: Tensor) -> None:
    if step.observer is not None:
        with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
            seen = step.observer(step, _layer(module), query.detach(), key.detach())
        step.observations.append(seen)


def _read(
    step: Step, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
) -> tuple[Tensor, None]:
    """What the cache's own attention gives."""
    assert step.reader is not None
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        output = step.reader(_layer(module), query.detach(), key, value, scaling)
    return output.transpose(1, 2), None


def _sdpa(
    module: nn.Module,
    query: Tensor,  # [B, H, Q, D]
    key: Tensor,  # [B, Hkv, T, D]
    value: Tensor,  # [B, Hkv, T, D]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    zoomkv: Step | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    if zoomkv is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    _observe(zoomkv, module, query, key)
    if zoomkv.reader is not None:
        return _read(zoomkv, module, query, key, value, scaling)
    mask = zoomkv.placements[_layer(module)].mask
    if mask is not None and mask.is_floating_point():
        mask = mask.to(query.dtype)  # the only one that SDPA adds
    output = grouped_attention(
        query, key, value, mask, scale=scaling, causal=mask is None and query.shape[2] > 1
    )
    return output.transpose(1, 2), None


def _eager(
    module: nn.Module,
    query: Tensor,  # [B, H, Q, D]
    key: Tensor,  # [B, Hkv, T, D]
    value: Tensor,  # [B, Hkv, T, D]
    attention_mask: Tensor | None,
    scaling: float,
    zoomkv: Step | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    if zoomkv is not None:
        _observe(zoomkv, module, query, key)
        if zoomkv.reader is not None:
            return _read(zoomkv, module, query, key, value, scaling)
        attention_mask = _additive(zoomkv.placements[_layer(module)].mask, query, key.shape[2])
        key, value = key.to(query.dtype), value.to(query.dtype)
    # Every supported family has its own function of this name beside its attention module.
    family = sys.modules[type(module).__module__]
    return family.eager_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **kwargs
    )


def _flash(
    module: nn.Module,
    query: Tensor,  # [B, H, Q, D]
    key: Tensor,  # [B, Hkv, T, D]
    value: Tensor,  # [B, Hkv, T, D]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    zoomkv: Step | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    if zoomkv is not None and (
        zoomkv.reader is not None or zoomkv.placements[_layer(module)].mask is not None
    ):
        # Flash kernels know no mask over slots, and a cache's own attention needs none of them.
        return _sdpa(module, query, key, value, None, scaling=scaling, zoomkv=zoomkv, **kwargs)
    if zoomkv is not None:
        _observe(zoomkv, module, query, key)
        attention_mask = None
        key, value = key.to(query.dtype), value.to(query.dtype)
    from transformers.integrations.flash_attention import flash_attention_forward

    return flash_attention_forward(
        _UnderBaseName(module),  # type: ignore[arg-type]
        query,
        key,
        value,
        attention_mask,
        scaling=scaling,
        **kwargs,
    )


_ATTENTION: dict[str, AttentionFunction] = {
    "sdpa": _sdpa,
    "eager": _eager,
    "flash_attention_2": _flash,
}


def _layer(module: nn.Module) -> int:
    return module.layer_idx  # type: ignore[return-value]


def _additive(mask: Tensor | None, query: Tensor, length: int) -> Tensor | None:
    """The mask as one addend: filled once, since two large negatives may sum to -inf."""
    heads, size = query.shape[1:3]
    if mask is not None and mask.is_floating_point():
        return mask.to(query.dtype).repeat_interleave(heads // mask.shape[1], dim=1)
    if mask is None:
        if size == 1:
            return None
        ones = torch.ones(size, length, dtype=torch.bool, device=query.device)
        mask = ones.tril(length - size)[None, None]
    zeros = torch.zeros((), dtype=query.dtype, device=query.device)
    return torch.where(mask, zeros, torch.finfo(query.dtype).min)


class _UnderBaseName:
    """An attention module whose config names the kernel that transformers can load."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.config = _BaseConfig(module.config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _BaseConfig:
    _attn_implementation = "flash_attention_2"

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)
