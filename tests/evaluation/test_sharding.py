"""Two processes write what one does, to the byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.bases import make_base

from zoomkv.evaluation.results import read, read_timings
from zoomkv.evaluation.sharding import Share, merge, part_path

SETTINGS = """
model: {base}
policies: [full, streaming_llm]
budgets: [0.25]
lengths: [300]
protocols: [unknown]
n: 3
tasks:
  - needle
  - {{task: ledger, lengths: [null], protocols: [inside], batch_size: 2,
     options: {{steps: [3, 4], max_new_tokens: 6}}}}
"""


def evaluated(config: Path, out: Path, *words: str) -> None:
    command = [sys.executable, "-m", "zoomkv", "evaluate", "--config", str(config)]
    command += ["--out", str(out), "--device", "cpu", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("| task |") and done.stdout.count("| task |") == 1


def test_two_processes_write_what_one_does(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    config = tmp_path / "some.yaml"
    config.write_text(SETTINGS.format(base=base))
    evaluated(config, tmp_path / "one.jsonl")
    evaluated(config, tmp_path / "two.jsonl", "--devices", "2")
    one, two = ((tmp_path / f"{name}.jsonl").read_bytes() for name in ("one", "two"))
    assert one == two
    assert len(read(tmp_path / "two.jsonl").answers) == 2 * 3 + 2 * 3
    assert len(read_timings(tmp_path / "two.jsonl")) == 12
    assert not list(tmp_path.glob("*.part-*"))


def test_units_go_round() -> None:
    shares = [Share(rank, 3) for rank in range(3)]
    assert [[n for n in range(7) if share.has(n)] for share in shares] == [
        [0, 3, 6],
        [1, 4],
        [2, 5],
    ]
    assert Share().has(5)


def test_parts_are_put_together_by_unit(tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"

    def answer(id: str) -> dict[str, Any]:
        named = {"task": "t", "label": "l", "budget": None, "protocol": None, "length": None}
        return {"kind": "answer", **named, "seed": 0, "id": id}

    def unit(number: int, *ids: str) -> list[dict[str, Any]]:
        return [{"kind": "unit", "number": number}, *map(answer, ids)]

    header, check = {"kind": "header", "format": 1}, {"kind": "check"}
    parts = [[header, check, *unit(0, "a", "b"), *unit(2, "e")], [header, *unit(1, "c", "d")]]
    for rank, lines in enumerate(parts):
        path = part_path(out, Share(rank, 2))
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        timed = [
            {**line, "kind": "timing", "seconds": 1.0, "batch": 1}
            for line in lines
            if line["kind"] == "answer"
        ]
        text = "".join(json.dumps(line) + "\n" for line in timed)
        path.with_name(f"{path.stem}.timing.jsonl").write_text(text)
    merge(out, Share(0, 2))
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert lines == [header, check, *map(answer, "abcde")]
    assert [line["id"] for line in read_timings(out)] == list("abcde")


@pytest.mark.parametrize(("rank", "world", "name"), [(0, 1, "a"), (1, 8, "a.part-2-of-8")])
def test_parts_have_names_of_their_own(rank: int, world: int, name: str, tmp_path: Path) -> None:
    assert part_path(tmp_path / "a.jsonl", Share(rank, world)) == tmp_path / f"{name}.jsonl"
