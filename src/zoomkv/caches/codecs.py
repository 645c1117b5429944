"""How the host tier writes a row: as it is, or quantised blockwise by bitsandbytes.

A row is what one KV head stores of one token: D numbers. A block never crosses rows, so rows can
be written, moved and fetched one by one.
"""

from typing import Any, Literal, Protocol, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

HostPrecision = Literal["auto", "int8", "nf4"]
_SMALLEST_BLOCK = 64  # of bitsandbytes; narrower heads are padded while they are quantised


class Codec(Protocol):
    """Turns rows into stored tensors and back."""

    def encode(self, rows: Tensor) -> tuple[Tensor, ...]:  # [..., D]
        """Stored form: tensors that keep every dimension but the last."""

    def decode(self, parts: tuple[Tensor, ...]) -> Tensor:  # [..., D]
        """Rows in the dtype that they came in."""


class Exact:
    """Rows as they are."""

    def encode(self, rows: Tensor) -> tuple[Tensor, ...]:
        """See ``Codec``."""
        return (rows,)

    def decode(self, parts: tuple[Tensor, ...]) -> Tensor:
        """See ``Codec``."""
        return parts[0]


class Blockwise:
    """8-bit or NF4 codes with one fp32 scale for each row.

    At D = 64 an int8 row takes 68 bytes, 0.53 of bf16's; an NF4 row takes 36.
    """

    def __init__(self, precision: str, width: int, dtype: torch.dtype) -> None:
        if width % 2:
            raise ValueError(
                f"host_precision '{precision}' needs an even head dimension, this model has {width}"
            )
        self._four_bit = precision == "nf4"
        self._width = width
        self._dtype = dtype
        self._block = max(_SMALLEST_BLOCK, 1 << (width - 1).bit_length())

    def encode(self, rows: Tensor) -> tuple[Tensor, ...]:  # [..., D]
        """See ``Codec``: codes ``[..., D or D/2]`` (uint8) and scales ``[..., 1]`` (fp32)."""
        import bitsandbytes.functional as bnb

        lead = rows.shape[:-1]
        padded = F.pad(rows, (0, self._block - self._width)).contiguous()
        if rows.numel() == 0:
            codes_width = self._width // 2 if self._four_bit else self._width
            codes = rows.new_zeros(*lead, codes_width, dtype=torch.uint8)
            return codes, rows.new_zeros(*lead, 1, dtype=torch.float32)
        if self._four_bit:
            codes, state = bnb.quantize_4bit(padded, blocksize=self._block, quant_type="nf4")
            codes = codes.view(*lead, self._block // 2)[..., : self._width // 2]
        else:
            codes, state = bnb.quantize_blockwise(padded, blocksize=self._block)
            codes = codes.view(*lead, self._block)[..., : self._width]
        return codes, state.absmax.view(*lead, 1)

    def decode(self, parts: tuple[Tensor, ...]) -> Tensor:  # [..., D]
        """See ``Codec``."""
        import bitsandbytes.functional as bnb

        codes, scales = parts
        lead = codes.shape[:-1]
        if codes.numel() == 0:
            return codes.new_zeros(*lead, self._width, dtype=self._dtype)
        stored = self._block // 2 if self._four_bit else self._block
        codes = F.pad(codes, (0, stored - codes.shape[-1])).contiguous()
        state: Any = bnb.QuantState(
            absmax=scales.reshape(-1).contiguous(),
            blocksize=self._block,
            dtype=self._dtype,
            shape=torch.Size((*lead, self._block)),
            quant_type="nf4" if self._four_bit else None,
            code=_code(self._four_bit, codes.device),
        )
        if self._four_bit:
            rows = bnb.dequantize_4bit(codes.view(-1, 1), state, quant_type="nf4")
        else:
            rows = bnb.dequantize_blockwise(codes, state)
        return rows.view(*lead, self._block)[..., : self._width]


def make_codec(precision: str, width: int, dtype: torch.dtype) -> Codec:
    """The codec of a host precision, for rows of ``width`` numbers of ``dtype``."""
    return Exact() if precision == "auto" else Blockwise(precision, width, dtype)


def check_precision(precision: str) -> str:
    """Returns the name.

    Raises:
        ValueError: If it is unknown.
    """
    if precision not in get_args(HostPrecision):
        raise ValueError(
            f"host_precision={precision!r}: choose one of {', '.join(get_args(HostPrecision))}"
        )
    return precision


def _code(four_bit: bool, device: torch.device) -> Tensor:
    import bitsandbytes.functional as bnb

    if four_bit:
        return bnb.get_4bit_type("nf4", device=device)
    if "dynamic" not in bnb.name2qmap:
        bnb.name2qmap["dynamic"] = bnb.create_dynamic_map()
    return bnb.name2qmap["dynamic"].to(device)
