"""The benchmark of the harness compares the same work."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.bases import make_base

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_both_ways_are_measured(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "harness", raising=False)
    import harness

    out, base = tmp_path / "h.json", make_base(tmp_path / "base")
    words = ["--checkpoint", base, "--policies", "full", "--batch", "2", "--tokens", "6"]
    monkeypatch.setattr(sys, "argv", ["harness", *words, "--rounds", "1", "--out", str(out)])
    harness.main()
    [row] = json.loads(out.read_text())["rows"]
    assert row["policy"] == "full" and row["ratio"] == row["harness"] / row["plain"] > 0
    assert "| full |" in capsys.readouterr().out
