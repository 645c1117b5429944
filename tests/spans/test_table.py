"""The readable set against one built from Python sets, position by position."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zoomkv.spans.table import SegmentTable


@st.composite
def rows(draw: st.DrawFn) -> dict:
    """One row: a prompt, closed segments behind it, an open paragraph, and a choice."""
    prompt = at = draw(st.integers(1, 6))
    segments = []
    for _ in range(draw(st.integers(0, 20))):
        parts = [draw(st.integers(0, 4)), 1, draw(st.integers(1, 3)), 1]
        edges = [at + sum(parts[:i]) for i in range(5)]
        segments.append(tuple(edges))
        at = edges[-1]
    length = at + draw(st.integers(0, 9))
    start = draw(st.integers(0, length))
    pinned = (start, draw(st.integers(start, length)))
    choice = [draw(st.sampled_from(["zoomed", "summarised", "unread"])) for _ in segments]
    return {
        "prompt": prompt,
        "segments": segments,
        "open": at,
        "length": length,
        "pinned": pinned,
        "choice": choice,
    }


def table_of(batch: list[dict]) -> SegmentTable:
    table = SegmentTable(len(batch))
    table.open_start = torch.tensor([row["prompt"] for row in batch])
    for i in range(max(len(row["segments"]) for row in batch)):
        present = torch.tensor([i < len(row["segments"]) for row in batch])
        bounds = [row["segments"][i] if i < len(row["segments"]) else (0,) * 5 for row in batch]
        _, summary, interior, interior_end, end = torch.tensor(bounds).T
        table.append(present, summary, interior, interior_end, end)
    table.pin(*torch.tensor([row["pinned"] for row in batch]).T)
    return table


def readable(table: SegmentTable, batch: list[dict], **options) -> torch.Tensor:
    size = int(table.count.max())

    def mask(kind: str) -> torch.Tensor:
        padded = [row["choice"] + [kind] * (size - len(row["choice"])) for row in batch]
        return torch.tensor([[c == kind for c in row] for row in padded], dtype=torch.bool).reshape(
            len(batch), size
        )

    length, prompt = (torch.tensor([row[key] for row in batch]) for key in ("length", "prompt"))
    return table.readable(mask("zoomed"), mask("summarised"), length, prompt, **options)


def expected(row: dict, window: int, open_cap: int | None) -> set[int]:
    length = row["length"]
    kept = set(range(row["prompt"])) | set(range(*row["pinned"]))
    kept |= {p for p in range(length) if p >= length - window}
    kept |= {p for p in range(row["open"], length) if open_cap is None or p >= length - open_cap}
    for (start, middle, _, _, end), choice in zip(row["segments"], row["choice"], strict=True):
        if choice == "zoomed" and start < middle:
            kept |= set(range(start, middle))
        elif choice != "unread":
            kept |= set(range(middle, end))
    return kept


@given(
    st.lists(rows(), min_size=1, max_size=3),
    st.integers(0, 12),
    st.none() | st.integers(0, 5),
)
def test_readable_is_the_set(batch: list[dict], window: int, open_cap: int | None) -> None:
    mask = readable(table_of(batch), batch, window=window, open_cap=open_cap)
    assert mask.shape == (len(batch), max(row["length"] for row in batch))
    for row, got in zip(batch, mask, strict=True):
        assert set(got.nonzero().flatten().tolist()) == expected(row, window, open_cap)


@given(st.lists(rows(), min_size=1, max_size=3), st.data())
def test_rows_move_together(batch: list[dict], data: st.DataObject) -> None:
    order = data.draw(st.lists(st.integers(0, len(batch) - 1), min_size=1, max_size=4))
    table = table_of(batch)
    kept = copy.deepcopy(table)
    table.index_select(torch.tensor(order))
    moved = [batch[i] for i in order]
    got = readable(table, moved, window=3)
    for row, mask in zip(moved, got, strict=True):
        assert set(mask.nonzero().flatten().tolist()) == expected(row, 3, None)
    table.append(torch.ones(len(order), dtype=torch.bool), *torch.full((4, len(order)), 999))
    assert torch.equal(readable(kept, batch, window=3), readable(table_of(batch), batch, window=3))


def test_named_bounds() -> None:
    table = SegmentTable(1)
    table.open_start = torch.tensor([3])
    one = torch.tensor([True])
    table.append(one, *torch.tensor([5, 6, 8, 9])[:, None])
    names = ("regular_start", "regular_end", "summary_start", "interior_start", "interior_end")
    assert [int(getattr(table, name)[0, 0]) for name in (*names, "summary_end")] == [
        3, 5, 5, 6, 8, 9,
    ]  # fmt: skip
    assert table.count.tolist() == [1] and table.open_start.tolist() == [9]


def test_made_in_inference_mode_used_outside() -> None:
    with torch.inference_mode():
        table = SegmentTable(1)
        table.append(torch.tensor([True]), *torch.tensor([2, 3, 4, 5])[:, None])
    table.append(torch.tensor([True]), *torch.tensor([7, 8, 9, 10])[:, None])
    nothing, all_ = torch.zeros(1, 2, dtype=torch.bool), torch.ones(1, 2, dtype=torch.bool)
    mask = table.readable(nothing, all_, torch.tensor([12]), torch.tensor([0]), window=0)
    assert mask.nonzero()[:, 1].tolist() == [2, 3, 4, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_nothing_closed_yet_reads_everything(batch_size: int) -> None:
    table = SegmentTable(batch_size)
    length = torch.arange(batch_size) + 4
    table.open_start = prompt = torch.full((batch_size,), 2)
    none = torch.zeros(batch_size, 0, dtype=torch.bool)
    mask = table.readable(none, none, length, prompt, window=1)
    assert mask.sum(1).tolist() == length.tolist()
