"""What every policy's cache is made of: turns, positions and atomic steps.

A policy is a ``PolicyCache``, made of one ``PolicyLayer`` for each layer of the model. Three counts
are kept apart: *columns* fed (padding included; ``get_seq_length``), the *position* of each token
in its own row, and the rows *stored*.

The prompt of a turn ends where ``expect_prompt`` says. Without it, it ends when the first forward
of a single token begins (the very first forward is always prompt): a last chunk of one token then
counts as generated. Nothing is dropped or moved before the prompt ends.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial, wraps
from typing import Any, ClassVar, ParamSpec, Self, TypeVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from zoomkv.backbone.families import check_supported
from zoomkv.backbone.protocol import Step, SteppedCache
from zoomkv.caches.slots import Slots
from zoomkv.caches.tiers import Traffic, storage_bytes
from zoomkv.caches.working_sets import WorkingSet

_PAD, _STORED, _IDLE = 0, 1, 2  # what a column of a row holds

P = ParamSpec("P")
R = TypeVar("R")


def bookkeeping(function: Callable[P, R]) -> Callable[P, R]:
    """Runs without gradients and outside inference mode, so that all state stays writable."""

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return wrapped


@dataclass(frozen=True)
class ModelShape:
    """What a cache needs to know about the model; the model itself it never holds."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    element_bytes: int
    """Of one number of a key, as the weights are; autocast may make it less."""
    vocabulary: int
    max_positions: int
    eos_ids: tuple[int, ...]
    pad_ids: tuple[int, ...]

    @classmethod
    def of(cls, model: Any) -> "ModelShape":
        """Reads a causal LM's configuration.

        Raises:
            ValueError: Unsupported family or windowed layers.
        """
        config = model.config
        check_supported(config, config.name_or_path or type(model).__name__)
        generation = getattr(model, "generation_config", None)
        heads = config.num_attention_heads
        return cls(
            layers=config.num_hidden_layers,
            heads=heads,
            kv_heads=config.num_key_value_heads or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            element_bytes=model.dtype.itemsize,
            vocabulary=config.vocab_size,
            max_positions=config.max_position_embeddings,
            eos_ids=_ids(getattr(generation, "eos_token_id", None)) or _ids(config.eos_token_id),
            pad_ids=_ids(getattr(generation, "pad_token_id", None)) or _ids(config.pad_token_id),
        )


@dataclass(frozen=True)
class Footprint:
    """What a cache occupies and what it has moved, from the storages of its tensors."""

    device_bytes: int
    """Keys, values and indexes on the model's device, slack of buffers included."""
    host_bytes: int
    """Archive, streamed rows and bookkeeping on the host."""
    bytes_to_device: int
    """Keys and values fetched from the host so far."""
    bytes_to_host: int
    """Keys and values written to the host so far."""
    seen: int
    """Columns fed, padding included."""
    rows_max: int
    """Rows that the next query may read, maximum over layers and batch rows."""
    rows_mean: float
    """The same, mean."""

    def to_dict(self) -> dict[str, int | float]:
        """The fields by name."""
        return asdict(self)


class PolicyLayer(CacheLayerMixin):
    """One layer of a policy's cache: a working set, and the slots that say what is in it."""

    def __init__(self, number: int, slots: Slots, working_set: WorkingSet) -> None:
        super().__init__()
        self.number = number
        self.slots = slots
        self.working_set = working_set

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Called with the first keys and values ``[B, Hkv, Q, D]``."""
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, step: Step
    ) -> tuple[Tensor, Tensor]:  # 2 x [B, Hkv, T, D]
        """Stores the rows of one forward beyond those committed; returns what it attends to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.requires_grad or value_states.requires_grad:
            key_states, value_states = key_states.detach(), value_states.detach()
        return self.working_set.extend(step.placements[self.number], key_states, value_states)

    def stored(self) -> tuple[Tensor, Tensor]:  # 2 x [B, Hkv, T, D]
        """Keys and values of the stored rows, in the order of ``slots.positions``."""
        return self.working_set.stored(self.slots.length)

    def rows(self) -> Tensor:  # [B]
        """Rows that a query may read, a mean where heads differ."""
        return self.slots.count

    def get_seq_length(self) -> int:
        """Unused: the cache counts columns."""
        return self.slots.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Unused: masks come from the step."""
        return self.slots.length + query_length, 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def reset(self) -> None:
        """Forgets everything and gives the memory back."""
        self.working_set.clear()
        self.is_initialized = False

    def select(self, rows: Tensor) -> None:  # [B'] CPU
        """Keeps the given batch rows, in the given order; one may come twice."""
        self.working_set.select(rows)

    def device_tensors(self) -> Iterator[Tensor]:
        """What this layer holds on the device."""
        yield from self.working_set.device_tensors()

    def host_tensors(self) -> Iterator[Tensor]:
        """What this layer holds on the host."""
        yield from self.working_set.host_tensors()


class PolicyCache(Cache, SteppedCache):
    """Base of all caches: give it to an attached model as ``cache=`` (or ``past_key_values=``).

    Everything that belongs to a sequence lives in here and moves with ``reset``, ``deepcopy``,
    ``reorder_cache``, ``batch_repeat_interleave`` and ``batch_select_indices``. A forward changes
    the cache in place: copy it first to keep a common prefix.

    Args:
        shape: Of the model.
        layers: One for each layer of the model. Layers that store the same rows share ``slots``.
    """

    name: ClassVar[str] = "policy"
    _moving: bool
    watches_decoding: ClassVar[bool] = False
    """Whether ``watch`` is called in decode steps."""
    watches_prompt: ClassVar[bool] = False
    """Whether ``watch`` is called while prompts are read."""
    layers: list[Any]
    groups: list[tuple[Slots, list[Any]]]
    """Slots, and the layers that store what they say."""
    _seen: int
    _lengths: Tensor  # [B]
    _ended: Tensor  # bool [B]
    _kinds: Tensor  # uint8 [B, columns and slack]
    _prompt_start: Tensor  # [B], tokens of each row before the prompt of this turn
    _prompt_end: int | None
    _step: Step | None
    _device: torch.device
    keeps_everything: ClassVar[bool] = False
    """Whether every row stays in its place for good."""

    def __init__(self, shape: ModelShape, layers: Sequence[PolicyLayer], traffic: Traffic) -> None:
        super().__init__(layers=list(layers))
        self.shape = shape
        self.traffic = traffic
        self._warned = False
        self._eos = torch.tensor(shape.eos_ids, dtype=torch.int64)
        self._idle = torch.tensor(shape.eos_ids + shape.pad_ids, dtype=torch.int64)
        groups: dict[int, tuple[Slots, list[PolicyLayer]]] = {}
        for layer in layers:
            groups.setdefault(id(layer.slots), (layer.slots, []))[1].append(layer)
        self.groups = list(groups.values())
        self._clear()

    # -- what a user calls ----------------------------------------------------------------------

    @property
    def seen(self) -> int:
        """Columns fed so far, padding included."""
        return self._seen

    @property
    def lengths(self) -> Tensor:  # [B]
        """Tokens of each row so far: the position that its next token gets."""
        return self._lengths

    def expect_prompt(self, columns: int) -> None:
        """Says where the prompt of the coming turn ends, counted in columns from the start.

        Raises:
            ValueError: If the cache is already there.
        """
        if columns <= self._seen:
            raise ValueError(
                f"the prompt is to end at column {columns}, but the cache has seen {self._seen}: "
                "an empty prompt, or one that is cached as a whole, can't be read; "
                "feed at least one new token"
            )
        self._prompt_end = columns

    def set_eos(self, eos_ids: Sequence[int] | int | None, pad_id: int | None = None) -> None:
        """Sets the ids that end a row, and the one that is fed to rows that have ended.

        What follows in an ended row is not stored as long as it is one of these ids.
        """
        eos = _ids(eos_ids)
        self._eos = torch.tensor(eos, dtype=torch.int64)
        self._idle = torch.tensor(eos + _ids(pad_id), dtype=torch.int64)

    def readable(self, layer: int) -> Tensor:  # bool [B, 1 or Hkv, longest row]
        """Which positions the next query of a layer may read, itself apart."""
        longest = int(self._lengths.max()) if len(self._lengths) else 0
        return self.layers[layer].slots.readable(longest)

    def columns(self) -> list[Tensor]:
        """The column of each token, by position, for every row."""
        kinds = self._kinds[:, : self._seen]
        return [(row == _STORED).nonzero().squeeze(1) for row in kinds]

    def footprint(self) -> Footprint:
        """Bytes held and moved, and rows stored."""
        counts = torch.stack([layer.rows().double() for layer in self.layers])
        return Footprint(
            device_bytes=storage_bytes(self.device_tensors()),
            host_bytes=storage_bytes(self.host_tensors()),
            bytes_to_device=self.traffic.to_device,
            bytes_to_host=self.traffic.to_host,
            seen=self._seen,
            rows_max=int(counts.max()) if counts.numel() else 0,
            rows_mean=float(counts.mean()) if counts.numel() else 0.0,
        )

    def trace(self) -> list[dict[str, Any]]:
        """What was chosen when; empty for policies that choose nothing."""
        return []

    # -- what an attached model calls -----------------------------------------------------------

    @bookkeeping
    def begin(
        self, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> Step:
        """See ``SteppedCache``."""
        self._step = None
        if self._moving:
            raise ValueError(
                "this cache was interrupted while it was changing: call reset() and start anew"
            )
        ids = input_ids.detach().to("cpu")
        self._check_ids(ids)
        if not self._seen:
            self._begin_anew(ids.shape[0], input_ids.device)
        in_prompt = self._enter(ids.shape[1])
        real = self._real_tokens(ids, attention_mask, in_prompt)
        step = Step(ids, real, self._positions(ids, real), self._seen, in_prompt)
        self._check_positions(step, position_ids)
        if self.watches_prompt if in_prompt else self.watches_decoding:
            step.observer = self.watch
        if not in_prompt:
            self.prepare(step)
        if self.reads_itself:
            step.reader = partial(self.read, step)
        step.placements = [None] * len(self.layers)  # type: ignore[list-item]
        for slots, layers in self.groups:
            place = slots.place(step, self._device)
            for layer in layers:
                step.placements[layer.number] = place
        self._step = step
        return step

    def update(
        self,
        key_states: Tensor,  # [B, Hkv, Q, D]
        value_states: Tensor,  # [B, Hkv, Q, D]
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Stores one layer's rows; returns the keys and values that the forward attends to."""
        if self._step is None:
            raise ValueError(
                f"{type(self).__name__} works with attached models only: "
                "call zoomkv.attach(model) first"
            )
        return self.layers[layer_idx].update(key_states, value_states, self._step)

    @bookkeeping
    def commit(self, step: Step, hidden: Tensor) -> None:
        """See ``SteppedCache``."""
        assert step is self._step, "a step is committed once, by the forward that began it"
        self._step = None
        with self.moving():
            for slots, layers in self.groups:
                slots.append(step, step.placements[layers[0].number])
            self._record_columns(step)
            self._lengths = self._lengths + step.added
            self._seen += step.size
            if step.observer is not None:
                self.watched(step)
            if not step.in_prompt:
                self._record_ends(step)
                self.decoded(step, hidden)
            elif self._prompt_end == self._seen:
                self._finish_prompt()

    # -- what a policy overrides ----------------------------------------------------------------

    def prompt_started(self, first: bool) -> None:
        """The prompt of a turn begins; ``first`` in an empty cache."""

    def prompt_read(self, added: Tensor) -> None:  # [B]
        """The prompt of a turn has been read: ``added`` tokens by row. Rows may be dropped now."""

    def watch(
        self,
        step: Step,
        layer: int,
        query: Tensor,  # [B, H, Q, D]
        key: Tensor,  # [B, Hkv, T, D]
    ) -> Any:
        """What to keep of a layer's queries until the step counts; changes nothing."""
        return query

    @property
    def reads_itself(self) -> bool:
        """Whether the forward that begins calls ``read`` in place of attention."""
        return False

    def read(
        self,
        step: Step,
        layer: int,
        query: Tensor,  # [B, H, Q, D]
        key: Tensor,  # [B, Hkv, T, D]
        value: Tensor,  # [B, Hkv, T, D]
        scaling: float,
    ) -> Tensor:  # [B, H, Q, D]
        """Attention of a layer, where a policy lets the query decide what it reads."""
        raise NotImplementedError

    def watched(self, step: Step) -> None:
        """A step that was watched has been committed: ``step.observations``, layer by layer."""

    def prepare(self, step: Step) -> None:
        """A decode step is about to begin: the last moment to make room for its row."""

    def decoded(self, step: Step, hidden: Tensor) -> None:
        """A decode step has been committed."""

    def device_tensors(self) -> Iterator[Tensor]:
        """All that lies on the device."""
        for slots, _ in self.groups:
            yield from slots.device_tensors()
        for layer in self.layers:
            yield from layer.device_tensors()

    def host_tensors(self) -> Iterator[Tensor]:
        """All that lies on the host, bookkeeping included."""
        yield from (self._lengths, self._ended, self._kinds, self._prompt_start)
        yield from (self._eos, self._idle)
        for slots, _ in self.groups:
            yield from slots.host_tensors()
        for layer in self.layers:
            yield from layer.host_tensors()

    def select(self, rows: Tensor) -> None:  # [B'] CPU
        """Keeps the given batch rows, in the given order; one may come twice."""
        for layer in self.layers:
            layer.select(rows)
        for slots, _ in self.groups:
            slots.select(rows)
        self._lengths = self._lengths[rows]
        self._ended = self._ended[rows]
        self._kinds = self._kinds[rows]
        self._prompt_start = self._prompt_start[rows]

    # -- what transformers calls ----------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns fed so far: what the next column's number is."""
        return self._seen

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Unused by attached models: the mask comes from the step."""
        return self._seen + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No maximum."""
        return -1

    @property
    def batch_size(self) -> int:
        """Batch rows, or -1 before the first forward."""
        return len(self._lengths) or -1

    @property
    def is_croppable(self) -> bool:
        """Whether ``crop`` works; transformers refuses assisted decoding where it does not."""
        return self.keeps_everything

    @bookkeeping
    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last columns, as assisted decoding needs.

        Args:
            tokens_to_remove: How many, as a negative number; 0 does nothing.

        Raises:
            ValueError: If the number is positive, too large, or rows may have been dropped.
        """
        if not self.keeps_everything:
            raise ValueError(
                f"the '{self.name}' cache drops or moves rows, so it can't be cropped and can't "
                "serve assisted decoding: use the 'full' cache for that"
            )
        seen = self._seen + tokens_to_remove
        if tokens_to_remove > 0 or seen < 0:
            raise ValueError(
                f"crop({tokens_to_remove}): give minus the number of columns to remove, "
                f"at most {self._seen}"
            )
        removed = (self._kinds[:, seen : self._seen] == _STORED).sum(1)
        for slots, _ in self.groups:
            slots.count = slots.count - removed
        self._lengths = self._lengths - removed
        self._seen = seen

    @bookkeeping
    def reset(self) -> None:
        """Forgets the sequences and gives their memory back; options stay."""
        for layer in self.layers:
            layer.reset()
        self._clear()

    @bookkeeping
    def reorder_cache(self, beam_idx: Tensor) -> None:  # [B']
        """Keeps the rows that the beams continue, in their order."""
        if len(self._lengths):
            self.select(beam_idx.to("cpu"))

    @bookkeeping
    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row, for beams or several returned sequences."""
        self.reorder_cache(torch.arange(len(self._lengths)).repeat_interleave(repeats))

    @bookkeeping
    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the given rows: indices, or a mask."""
        indices = indices.to("cpu")
        self.reorder_cache(indices.nonzero().squeeze(1) if indices.dtype == torch.bool else indices)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        with torch.inference_mode(False):
            new.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items()})
        return new

    # -- within ---------------------------------------------------------------------------------

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Marks a change that can't be undone half-way: an error inside spoils the cache."""
        outer: bool = self._moving
        self._moving = True
        yield
        self._moving = outer

    def _clear(self) -> None:
        self._seen = 0
        self._prompt_end = None
        self._in_prompt = False
        self._moving = False
        self._step = None
        self._device = torch.device("cpu")
        self.traffic.to_device = self.traffic.to_host = 0
        self._start(0, self._device)

    def _start(self, batch: int, device: torch.device) -> None:
        self._device = device
        self._lengths = torch.zeros(batch, dtype=torch.int64)
        self._ended = torch.zeros(batch, dtype=torch.bool)
        self._kinds = torch.zeros(batch, 0, dtype=torch.uint8)
        self._prompt_start = torch.zeros(batch, dtype=torch.int64)
        for slots, _ in self.groups:
            slots.start(batch, device)

    def _begin_anew(self, batch: int, device: torch.device) -> None:
        """The first forward begins; one that broke off leaves nothing, not even its batch size."""
        for layer in self.layers:
            layer.reset()
        self._in_prompt = False
        self._start(batch, device)

    @property
    def _or(self) -> str:
        """What else may be meant where an input does not continue what the cache holds."""
        if not self._seen:
            return ""
        return (
            f"; the cache holds a text of {self._seen} columns: for another one make a new cache, "
            "or call cache.reset()"
        )

    def _check_ids(self, ids: Tensor) -> None:  # [B, Q]
        batch, size = ids.shape
        if not batch or not size:
            raise ValueError(f"the input holds no token: give at least one for every row{self._or}")
        held = len(self._lengths)
        if self._seen and batch != held:
            raise ValueError(
                f"the input has {batch} rows, the cache holds {held}: for beams or several "
                "returned sequences over a cached prompt first call "
                f"cache.batch_repeat_interleave(n){self._or}"
            )
        if self._seen + size > self.shape.max_positions and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self._seen + size} columns exceed the {self.shape.max_positions} positions "
                "that the model was made for; its output may degrade",
                stacklevel=2,
            )

    def _enter(self, size: int) -> bool:
        """Whether the forward belongs to a prompt; ends or begins one if need be."""
        if self._prompt_end is not None:
            if self._seen + size > self._prompt_end:
                raise ValueError(
                    f"the prompt was announced to end at column {self._prompt_end}, "
                    f"but this forward reaches column {self._seen + size}"
                )
        elif size == 1 and self._seen:
            if self._in_prompt:
                self._finish_prompt()
            return False
        if not self._in_prompt:
            self._in_prompt = True
            self._ended = torch.zeros_like(self._ended)
            self._prompt_start = self._lengths
            self.prompt_started(first=self._seen == 0)
        return True

    def _finish_prompt(self) -> None:
        if bool((self._lengths == 0).any()):
            row = int((self._lengths == 0).nonzero()[0])
            raise ValueError(f"row {row} of the batch holds no token: its prompt is all padding")
        self._in_prompt = False
        self._prompt_end = None
        with self.moving():
            self.prompt_read(self._lengths - self._prompt_start)

    def _real_tokens(
        self, ids: Tensor, attention_mask: Tensor | None, in_prompt: bool
    ) -> Tensor | None:  # bool [B, Q]
        """Which tokens count; None if all do."""
        real = None
        if attention_mask is not None:
            real = self._check_mask(attention_mask, ids.shape[1])
        if not in_prompt and bool(self._ended.any()):
            idle = self._ended[:, None] & torch.isin(ids, self._idle)
            real = ~idle if real is None else real & ~idle
        return None if real is None or bool(real.all()) else real

    def _check_mask(self, mask: Tensor, size: int) -> Tensor:  # bool [B, Q]
        columns = self._seen + size
        if mask.dim() != 2 or mask.shape[1] != columns:
            raise ValueError(
                f"attention_mask has shape {tuple(mask.shape)}, but the cache has seen "
                f"{self._seen} columns and {size} are new: pass a 2D mask over all {columns}"
            )
        if size > 1 and self._seen:
            before, kinds = mask[:, : self._seen].to("cpu").bool(), self._kinds[:, : self._seen]
            wrong = (before & (kinds == _PAD)) | (~before & (kinds == _STORED))
            if bool(wrong.any()):
                row, column = wrong.nonzero()[0].tolist()
                raise ValueError(
                    f"attention_mask contradicts the cache at row {row}, column {column}: that "
                    f"column was {'padding' if before[row, column] else 'a token'} when it was fed"
                )
        return mask[:, self._seen :].to("cpu").bool()

    def _positions(self, ids: Tensor, real: Tensor | None) -> Tensor:  # [B, Q]
        if real is None:
            return self._lengths[:, None] + torch.arange(ids.shape[1])
        return (self._lengths[:, None] + real.cumsum(1) - 1).clamp(min=0)

    def _check_positions(self, step: Step, given: Tensor | None) -> None:
        if given is None:
            return
        wrong = given.to("cpu") != step.positions
        if step.real is not None:
            wrong = wrong & step.real
        if bool(wrong.any()):
            row, column = wrong.nonzero()[0].tolist()
            got = int(given.expand(*wrong.shape)[row, column])
            if self._seen and not step.in_prompt and self._kinds[row, self._seen - 1] == _PAD:
                raise ValueError(
                    f"row {row} of the prompt ends in padding, and what follows would be predicted "
                    "from that: pad on the left (tokenizer.padding_side = 'left')"
                )
            raise ValueError(
                f"row {row} continues at position {int(step.positions[row, column])}, but the "
                f"input says {got}: feed only what is new (a prompt that is cached as a whole "
                "needs at least one new token) and mask with 0 what an ended row was fed"
                f"{self._or}"
            )

    def _record_columns(self, step: Step) -> None:
        end = self._seen + step.size
        if end > self._kinds.shape[1]:
            more = max(end, 2 * self._kinds.shape[1], 256) - self._kinds.shape[1]
            self._kinds = torch.nn.functional.pad(self._kinds, (0, more))
        kinds = self._kinds[:, self._seen : end]
        if step.real is None:
            kinds.fill_(_STORED)
        else:
            absent = _PAD if step.in_prompt else _IDLE
            kinds.copy_(torch.where(step.real, _STORED, absent))

    def _record_ends(self, step: Step) -> None:
        ended = torch.isin(step.ids[:, 0], self._eos)
        if step.real is not None:
            ended = torch.where(step.real[:, 0], ended, self._ended)
        self._ended = ended


def _ids(value: Sequence[int] | int | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
