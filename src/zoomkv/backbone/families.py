"""The model families that our caches know."""

from typing import Any

SUPPORTED = ("llama", "qwen2", "qwen3", "mistral")


def check_supported(config: Any, name: str = "model") -> None:
    """Refuses, by name, models whose layers the caches don't know.

    Args:
        config: A transformers configuration.
        name: What the user calls the model.

    Raises:
        ValueError: Another family than Llama, Qwen2, Qwen3 or Mistral, or windowed layers.
    """
    family = config.model_type
    if family not in SUPPORTED:
        raise ValueError(
            f"model '{name}': architecture '{family}' is not supported; "
            f"supported are {', '.join(SUPPORTED)}"
        )
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    windowed = "sliding_attention" in kinds or (window is not None and not kinds)
    if windowed and getattr(config, "use_sliding_window", True):
        raise ValueError(
            f"model '{name}': '{family}' with a sliding window of {window} tokens is not "
            "supported; its layers drop rows on their own"
        )
