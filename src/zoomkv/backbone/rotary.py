"""The rotary embedding of a transformers model, as our own ``Rotary``."""

from typing import Any

from zoomkv.backbone.families import check_supported
from zoomkv.ops.rope import Rotary

SUPPORTED_ROPE = ("default", "linear", "llama3", "yarn")


def rotary_of(model: Any) -> Rotary:
    """Reads how a model rotates its queries and keys.

    Frequencies and scaling come from the live rotary module, which knows every scaling rule and
    has what a cast to bf16 left of them. Take it after the model has its final dtype.

    Args:
        model: A causal LM of a supported family, plain or wrapped by PEFT.

    Returns:
        A rotation with fp32 copies of the frequencies; shared, not copied, by ``deepcopy``.

    Raises:
        ValueError: A family that we don't know, or a rope type: frequencies that change with
            the sequence's length can't be undone later.
    """
    decoder = model.get_decoder()
    check_supported(decoder.config, decoder.config.name_or_path or type(model).__name__)
    embedding = decoder.rotary_emb
    if embedding.rope_type not in SUPPORTED_ROPE:
        raise ValueError(
            f"rope type '{embedding.rope_type}' is not supported; "
            f"supported are {', '.join(SUPPORTED_ROPE)}"
        )
    return Rotary(embedding.inv_freq, float(embedding.attention_scaling))
