"""What factors of a text's spans need, against an SVD of one span after the other."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def lowrank() -> Iterator[ModuleType]:
    """The script as a module."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("lowrank")
    finally:
        sys.path.remove(str(FOLDER))


def test_ranks_errors_and_bytes_are_those_of_an_svd(lowrank: ModuleType) -> None:
    torch.manual_seed(0)
    rows = torch.randn(2, 60, 16) * torch.arange(1, 17) ** -1.5
    start, size = torch.tensor([4, 20, 41]), torch.tensor([9, 14, 5])
    ranks, errors, moved, held = [], [], 0, 0
    for head in rows:
        for first, count in zip(start.tolist(), size.tolist(), strict=True):
            block = head[first : first + count].double()
            sigma = torch.linalg.svdvals(block)
            squares, most = sigma.square().tolist(), max(1, count * 16 // (count + 17))
            rank = 0
            while rank < most and sum(squares[:rank]) < 0.9 * sum(squares):
                rank += 1
            ranks.append(rank)
            errors.append((sum(squares[rank:]) / sum(squares)) ** 0.5)
            moved, held = moved + rank * (count + 16), held + count * 16
    found = lowrank._needs(rows, start, size, 0.9)
    expected = (sum(ranks) / 6, sum(errors) / 6, moved / held)
    assert found == pytest.approx(expected, rel=1e-4)
    assert len(set(ranks)) > 1


def test_blocks_anywhere_have_the_same_lengths_and_do_not_overlap(lowrank: ModuleType) -> None:
    size = torch.tensor([5, 3, 8, 3])
    seen = set()
    for seed in range(5):
        start = lowrank._anywhere(size, 40, torch.Generator().manual_seed(seed))
        pairs = zip(start.tolist(), size.tolist(), strict=True)
        tokens = [t for first, count in pairs for t in range(first, first + count)]
        assert len(set(tokens)) == len(tokens) == 19
        assert min(tokens) >= 4 and max(tokens) < 40
        seen.add(tuple(start.tolist()))
    assert len(seen) == 5


def test_a_model_may_be_looked_at(lowrank: ModuleType, base: str, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    assert lowrank.main(["--quick", "--model", base, "--out", str(out)]) == 0
    tables = json.loads(out.read_text())["tables"][2:]
    assert tables and "spans (fine)" in tables[0]["title"]
    names = [row[0] for row in tables[0]["rows"]]
    kinds = ("keys after RoPE", "keys before RoPE", "values")
    assert names == [f"{where}, {what}" for where in ("surprisal", "random") for what in kinds]
