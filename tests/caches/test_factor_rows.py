"""Rows out of factors against an SVD of one span after the other, and what moving them costs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from zoomkv.caches.factor_rows import Factoriser, FactorRows
from zoomkv.caches.tally import Tally
from zoomkv.caches.tiers import Traffic
from zoomkv.ops.rope import Rotary
from zoomkv.spans.splitter import Splitter
from zoomkv.spans.surprisal import span_sums, span_weights

B, KV, D = 2, 2, 8
JOINS = (((3, 30), (3, 17)), ((30, 45), (17, 17)))  # of each batch row; the last one adds nothing


class Case:
    """Two batch rows whose tokens join in two goes, some of them in no span."""

    def __init__(self, *, pre: bool = False, rank: int = 8, energy: float = 0.9) -> None:
        torch.manual_seed(0)
        self.rotary = Rotary(torch.tensor([1.0, 0.3, 0.1, 0.03])) if pre else None
        self.rank, self.energy = rank, energy
        self.keys = torch.randn(B, KV, 60, D) * torch.arange(1, D + 1) ** -1.0
        self.values = torch.randn(B, KV, 60, D).bfloat16()
        self.spans: list[list[list[int]]] = [[], []]
        factoriser = Factoriser(rank, 1.0, energy, self.rotary, None)
        self.traffic = Traffic()
        self.rows = FactorRows(self.keys, self.values, factoriser, self.traffic)
        for ranges in JOINS:
            self._join(ranges)

    def _join(self, ranges: tuple[tuple[int, int], ...]) -> None:
        start = torch.tensor([first for first, _ in ranges])
        size = torch.tensor([end - first for first, end in ranges])
        nats = torch.rand(B, int(size.max()))
        spans = Splitter("fine", 3, 6, anchor_share=0.15).cut(nats, size.clamp(min=1))
        spans.number[size == 0], spans.size[size == 0], spans.count[size == 0] = -1, 0, 0
        present = torch.arange(nats.shape[1]) < size[:, None]
        at = (start[:, None] + torch.arange(nats.shape[1])).clamp(max=59)
        index = at[:, None, :, None].expand(-1, KV, -1, D)
        keys, values = (
            x.gather(2, index) * present[:, None, :, None] for x in (self.keys, self.values)
        )
        means = span_sums(keys, span_weights(nats, spans), spans)
        self.rows.put(spans, start, keys, values, means)
        for row, (first, _) in enumerate(ranges):
            for number in range(int(spans.count[row])):
                inside = (spans.number[row] == number).nonzero().flatten()
                self.spans[row].append([first + i for i in inside.tolist()])

    def factors(self, row: int, head: int, span: list[int]) -> tuple[list[Tensor], list[int]]:
        """A span's keys and values as they should come back, in fp64, and their ranks."""
        found, ranks = [], []
        for kind, x in enumerate((self.keys, self.values)):
            own = x[row, head, span].double()
            if kind == 0 and self.rotary is not None:
                own = self.rotary.unrotate(own.float(), torch.tensor(span)).double()
            u, sigma, vh = torch.linalg.svd(own, full_matrices=False)
            most = max(1, min(self.rank, len(span) * D // (len(span) + D + 1)))
            squares = sigma[:most].square().tolist()
            rank = 1
            while rank < most and sum(squares[:rank]) < self.energy * sum(squares):
                rank += 1
            own = u[:, :rank] @ torch.diag(sigma[:rank]) @ vh[:rank]
            if kind == 0 and self.rotary is not None:
                own = self.rotary.rotate(own.float(), torch.tensor(span)).double()
            found.append(own)
            ranks.append(rank)
        return found, ranks


@pytest.mark.parametrize("pre", [False, True])
def test_rows_are_those_of_an_svd_and_bytes_those_of_its_factors(pre: bool) -> None:
    case = Case(pre=pre)
    assert len(case.spans[0]) > 5 and len(case.spans[1]) > 1
    everything = [
        (row, head, number, i)
        for row in range(B)
        for head in range(KV)
        for number, span in enumerate(case.spans[row])
        for i in range(len(span))
    ]
    draw = torch.Generator().manual_seed(1)
    chosen = [everything[i] for i in torch.randperm(len(everything), generator=draw)[:40].tolist()]
    batch, head = (torch.tensor([one[i] for one in chosen]) for i in (0, 1))
    position = torch.tensor([case.spans[row][number][i] for row, _, number, i in chosen])
    stored = case.traffic.to_host
    keys, values = case.rows.take(batch, head, position)
    assert keys.dtype == torch.float32 and values.dtype == torch.bfloat16
    moved, ranks = [0, 0], set()
    blocks = {(row, head, number) for row, head, number, _ in chosen}
    for row, h, number in sorted(blocks):
        own, rank = case.factors(row, h, case.spans[row][number])
        mine = [n for n, one in enumerate(chosen) if one[:3] == (row, h, number)]
        for n in mine:
            torch.testing.assert_close(keys[n].double(), own[0][chosen[n][3]], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(
                values[n].double(), own[1][chosen[n][3]], atol=3e-2, rtol=3e-2
            )
        for r, width in zip(rank, (4, 2), strict=True):
            moved[row] += r * (D + len(mine)) * width
        ranks |= set(rank)
    assert case.rows.moved.tolist() == moved and case.traffic.to_device == sum(moved)
    assert len(ranks) > 1
    expected = 0
    for row in range(B):
        for h in range(KV):
            for span in case.spans[row]:
                rank = case.factors(row, h, span)[1]
                expected += (D + len(span)) * (4 * rank[0] + 2 * rank[1])
    assert stored == expected == case.traffic.to_host


def test_all_keys_at_once_cost_no_traffic() -> None:
    case = Case(pre=True)
    keys = case.rows.keys(45)
    assert case.traffic.to_device == 0 and not case.rows.moved.any()
    inside = [sorted(p for span in spans for p in span) for spans in case.spans]
    for row in range(B):
        outside = sorted(set(range(45)) - set(inside[row]))
        assert not keys[row, :, outside].any()
        for head in range(KV):
            for span in case.spans[row]:
                own = case.factors(row, head, span)[0][0]
                torch.testing.assert_close(
                    keys[row, head, span].double(), own, atol=1e-5, rtol=1e-4
                )


def test_selected_rows_keep_their_factors() -> None:
    case = Case()
    before, mine = case.rows.keys(45), copy.deepcopy(case.rows)
    mine.select(torch.tensor([1, 1, 0]))
    assert torch.equal(mine.keys(45), before[[1, 1, 0]])
    assert torch.equal(case.rows.keys(45), before)
    assert mine._factoriser is case.rows._factoriser
    held = {id(x) for x in case.rows.tensors()}
    owned = [x for x in vars(case.rows).values() if isinstance(x, Tensor)]
    assert held == {id(x) for x in [*owned, *case.rows._pools]}


def test_nothing_is_asked_for() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    keys, values = Case().rows.take(none, none, none)
    assert keys.shape == values.shape == (0, D)


def test_counts_of_a_step_that_broke_off() -> None:
    tally = Tally()
    tally.start("fetched", torch.zeros(2, 1, dtype=torch.int64))
    two, three = torch.tensor([[2], [0]]), torch.tensor([[3], [1]])
    for count in (two, three):  # the first one breaks off
        tally.note("fetched", count, again=True)
        tally.note("asked", count)
    tally.commit()
    assert tally.of("fetched").tolist() == [[5], [1]] and tally.of("asked").tolist() == [[3], [1]]
    tally.commit()  # a step that noted nothing
    tally.note("asked", two)
    tally.select(torch.tensor([1, 0]))
    tally.commit()
    assert tally.of("asked").tolist() == [[1], [5]] and tally.of("fetched").tolist() == [[1], [5]]
    assert len(list(tally.tensors())) == len(tally.names()) == 2
