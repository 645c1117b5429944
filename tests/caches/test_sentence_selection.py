"""What SentenceKV chooses by sentences, against masks over all positions of every head."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig

from zoomkv.caches import sentence_kv
from zoomkv.caches.sentence_kv import SentenceKVCache, _falling

LAYERS, HEADS, KV_HEADS, WIDTH = 2, 4, 2, 4
WORD, DOT, EOS = 0, 1, 2


class Tokenizer:
    """Three tokens; one ends sentences."""

    all_special_ids = [EOS]

    def get_vocab(self) -> dict[str, int]:
        return {"word": WORD, ".": DOT, "<eos>": EOS}

    def batch_decode(self, ids: list[list[int]], **options: Any) -> list[str]:
        return [("word", ".", "<eos>")[token] for (token,) in ids]


TOKENIZER = Tokenizer()
CONFIG = LlamaConfig(
    vocab_size=3,
    hidden_size=HEADS * WIDTH,
    intermediate_size=8,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    max_position_embeddings=8192,
    eos_token_id=EOS,
)
MODEL = SimpleNamespace(config=CONFIG, dtype=torch.float32)


class Checked(SentenceKVCache):
    """Compares each selection with masks, and what is stored with what was fed.

    Attributes:
        fed: Keys by position, ``[L, B, Hkv, T, D]``.
        kept: Which tokens prompts keep, bool ``[L, B, Hkv, T]``.
        selections: How many there were.
        fetched: Whether any of them brought a row back.
    """

    fed: Tensor
    kept: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(MODEL, TOKENIZER, **options)
        self.selections = 0
        self.fetched = False

    def feed(self, ids: Tensor, mask: Tensor | None, keys: Tensor, queries: Tensor) -> None:
        """One forward, as an attached model drives it; keys and queries ``[L, B, *, Q, D]``."""
        batch, size = ids.shape
        if not self.seen:
            self.fed = torch.zeros(LAYERS, batch, KV_HEADS, 0, WIDTH)
            self.kept = torch.zeros(LAYERS, batch, KV_HEADS, 0, dtype=torch.bool)
        # A prompt may end here, and choose.
        self.fed = F.pad(self.fed, (0, 0, 0, size))
        self.kept = F.pad(self.kept, (0, size), value=True)
        step = self.begin(ids, mask, None)
        real = torch.ones_like(ids, dtype=torch.bool) if step.real is None else step.real
        row, column = real.nonzero(as_tuple=True)
        self.fed[:, row, :, step.positions[row, column]] = keys[:, row, :, column]
        for layer in range(LAYERS):
            read, _ = self.update(keys[layer], -keys[layer], layer)
            assert step.observer is not None
            step.observations.append(step.observer(step, layer, queries[layer], read))
        self.commit(step, torch.empty(0))

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self.fed, self.kept = self.fed[:, rows], self.kept[:, rows]

    def _thin(self, added: Tensor) -> Tensor | None:
        stay = super()._thin(added)
        if stay is not None:
            layer, row, head, slot = (~stay).nonzero(as_tuple=True)
            stored = torch.stack([slots.positions for slots, _ in self.groups])
            assert self.kept[layer, row, head, stored[layer, row, head, slot].long()].all()
            self.kept[layer, row, head, stored[layer, row, head, slot].long()] = False
        return stay

    def _select(self, rows: Tensor, stay: Tensor | None = None) -> None:
        before, brought = self._reads(), self.traffic.to_device
        scores: list[Tensor] = []

        def falling(score: Tensor) -> Tensor:
            scores.append(score)
            order = _falling(score)
            assert torch.equal(order, score.argsort(dim=-1, descending=True, stable=True))
            return order

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sentence_kv, "_falling", falling)
            super()._select(rows, stay)
        (score,) = scores
        sentence = self._sentences()
        self._check_scores(score, sentence)
        wanted = self._readable(score, sentence)
        assert torch.equal(self._reads(), torch.where(rows[:, None, None], wanted, before))
        self._check_rows()
        self.selections += 1
        self.fetched |= self.traffic.to_device > brought

    def _reads(self) -> Tensor:
        return torch.stack([self.readable(layer) for layer in range(LAYERS)])

    def _readable(self, score: Tensor, sentence: Tensor) -> Tensor:
        """Masks over all positions of each layer, row and head: ``[L, B, Hkv, T]``."""
        sentence = sentence[:, :-1].contiguous()
        position, length = torch.arange(sentence.shape[1]), self._lengths[:, None]
        always = (position < self._first) | (position >= length - self._recent)
        always &= position < length
        other = (~always & (position < length))[:, None] & self.kept[..., : len(position)]
        room = self._rows() - self._interval - always.sum(1)
        order = score.argsort(dim=-1, descending=True, stable=True)
        before = F.pad(other.cumsum(-1), (1, 0))
        starts = torch.arange(score.shape[-1] + 1).expand(len(length), -1).contiguous()
        starts = torch.searchsorted(sentence, starts)[:, None].expand(*score.shape[:3], -1)
        starts = before.gather(-1, starts)
        size = starts.diff()
        ahead = size.gather(-1, order).cumsum(-1)
        ahead = torch.empty_like(size).scatter_(-1, order, ahead) - size
        shift = (ahead - starts[..., :-1]).gather(-1, sentence[:, None].expand_as(other))
        return other & (before[..., :-1] + shift < room[:, None, None]) | always[:, None]

    def _check_scores(self, score: Tensor, sentence: Tensor) -> None:
        """Products of the query with the means of the keys that were kept."""
        count = score.shape[-1]
        member = F.one_hot(sentence[:, :-1], count).float()  # [B, T, sentences]
        member = member[:, None] * self.kept[..., : member.shape[1], None]
        keys = self.fed[..., : member.shape[3], :]
        mean = member.transpose(-1, -2) @ keys / member.sum(3).clamp(min=1)[..., None]
        wanted = (mean @ self._query[..., None])[..., 0]
        absent = (torch.arange(count) >= sentence[:, -1:])[:, None].expand_as(score)
        torch.testing.assert_close(score, wanted.masked_fill(absent, -torch.inf))

    def _check_rows(self) -> None:
        for layer in self.layers:
            keys, values = layer.stored()
            valid = layer.slots.valid().expand(keys.shape[:3])
            row, head, slot = valid.nonzero(as_tuple=True)
            position = layer.slots.positions[row, head, slot].long()
            assert torch.equal(keys[row, head, slot], self.fed[layer.number, row, head, position])
            assert torch.equal(values[row, head, slot], -keys[row, head, slot])


def run(
    cache: Checked,
    seed: int,
    pads: list[int],
    turns: list[tuple[int, int]],
    ties: str = "",
    ending: float = 0.02,
    beams: bool = True,
) -> None:
    """Prompts and answers with random ends of sentences, rows that end early, and beams."""
    generator = torch.Generator().manual_seed(seed)

    def feed(ids: Tensor, mask: Tensor | None) -> None:
        batch, size = ids.shape
        keys = torch.randn(LAYERS, batch, KV_HEADS, size, WIDTH, generator=generator)
        queries = torch.randn(LAYERS, batch, HEADS, size, WIDTH, generator=generator)
        if ties == "keys":  # all means are equal
            keys = torch.ones_like(keys)
        elif ties == "queries":  # half of all scores are 0 or -0
            queries *= torch.randint(-1, 1, queries.shape[:3], generator=generator)[..., None, None]
        cache.feed(ids, mask, keys, queries)

    def draw(batch: int, size: int, ends: float) -> Tensor:
        chance = torch.rand(batch, size, generator=generator)
        return torch.where(chance < ends, EOS, torch.where(chance > 0.8, DOT, WORD))

    batch = len(pads)
    for prompt, answer in turns:
        cache.expect_prompt(cache.seen + prompt)
        real = torch.arange(prompt) >= torch.tensor(pads)[:, None]
        old = cache._kinds[:, : cache.seen] == 1 if cache.seen else real[:, :0]
        cut = prompt // 2
        ids = draw(batch, prompt, 0.0)
        feed(ids[:, :cut], torch.cat([old, real[:, :cut]], 1))
        feed(ids[:, cut:], torch.cat([old, real], 1))
        for number in range(answer):
            feed(draw(batch, 1, ending), None)
            if beams and number % 9 == 5:
                cache.reorder_cache(torch.randint(batch, (batch,), generator=generator))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    pads=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    turns=st.lists(st.tuples(st.integers(10, 70), st.integers(1, 24)), min_size=1, max_size=2),
    budget=st.one_of(st.integers(24, 60), st.sampled_from([0.3, 0.8])),
    start=st.integers(0, 6),
    recent=st.integers(1, 7),
    factor=st.sampled_from([1, 1.3, 3]),
    interval=st.sampled_from([1, 8]),
    ties=st.sampled_from(["", "", "keys", "queries"]),
)
def test_selections_read_what_masks_say(
    seed: int,
    pads: list[int],
    turns: list[tuple[int, int]],
    budget: int | float,
    start: int,
    recent: int,
    factor: float,
    interval: int,
    ties: str,
) -> None:
    cache = Checked(
        budget=budget,
        start=start,
        recent=recent,
        semantic_factor=factor,
        interval=interval,
        window=4,
        kernel=3,
    )
    run(cache, seed, pads, turns, ties)
    assert cache.selections >= len(turns)


@pytest.mark.parametrize("interval", [1, 8])
def test_rows_come_back_in_a_second_turn_after_two_thinned_prompts(interval: int) -> None:
    options = {"start": 3, "recent": 4, "window": 4, "kernel": 3, "semantic_factor": 1.3}
    cache = Checked(budget=30, interval=interval, **options)
    run(cache, 0, [0, 5, 9], [(70, 30), (60, 30)])
    assert cache.fetched
    assert bool((cache._thinned.count > 31).all())  # more than the first prompt alone loses
    assert cache.selections > 2 + 40 // interval


@pytest.mark.parametrize("seed", range(6))
def test_rows_that_ended_keep_what_they_read(seed: int) -> None:
    """They are left alone while others choose, and go on from there in the next turn."""
    cache = Checked(budget=30, start=0, recent=3, window=4, kernel=3, interval=8)
    run(cache, seed, [0, 1, 2, 3], [(60, 40), (20, 40)], ending=0.04, beams=False)
    assert cache.fetched and len(set(cache.lengths.tolist())) > 1


class Widest(TorchDispatchMode):
    """Notes how many numbers the largest new tensor has; views don't count."""

    size = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        results = out if isinstance(out, tuple | list) else (out,)
        for result, returned in zip(results, func._schema.returns, strict=False):
            if isinstance(result, Tensor) and returned.alias_info is None:
                self.size = max(self.size, result.numel())
        return out


@pytest.mark.parametrize("factor", [1.5, 1000], ids=["thinned", "whole"])
def test_no_tensor_of_a_selection_has_all_tokens_of_every_head(factor: float) -> None:
    """1,500 tokens in few sentences, of which 40 are read."""
    generator = torch.Generator().manual_seed(0)
    options = {"start": 2, "recent": 4, "window": 4, "interval": 1, "semantic_factor": factor}
    cache = SentenceKVCache(MODEL, TOKENIZER, budget=40, **options)
    length, batch = 1500, 2
    cache.expect_prompt(length)
    widest = []
    for number in range(40):
        size = length if number == 0 else 1
        ids = torch.full((batch, size), WORD)
        ids[:, 99::100] = DOT
        with Widest() as seen:
            step = cache.begin(ids, None, None)
        for layer in range(LAYERS):
            keys = torch.randn(batch, KV_HEADS, size, WIDTH, generator=generator)
            queries = torch.randn(batch, HEADS, size, WIDTH, generator=generator)
            read, _ = cache.update(keys, keys, layer)
            assert step.observer is not None
            step.observations.append(step.observer(step, layer, queries, read))
        cache.commit(step, torch.empty(0))
        widest.append(seen.size)
    # Of every batch row all tokens may be looked at, of every head none but those that are read.
    assert max(widest[1:]) < 2 * batch * length < LAYERS * batch * KV_HEADS * length
    assert cache.slots.length == 40


@given(st.lists(st.floats(width=32, allow_nan=False), max_size=40), st.integers(0, 3))
def test_falling_is_a_stable_sort(scores: list[float], repeats: int) -> None:
    score = torch.tensor(scores * (1 + repeats))
    order = score.argsort(descending=True, stable=True)
    assert torch.equal(_falling(score), order)
