"""The reasoning benchmark goes on from its record, and runs nothing twice."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from zoomkv.caches.registry import check_options

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def reasoning():
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("reasoning")
    finally:
        sys.path.remove(str(FOLDER))


def run(reasoning: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["reasoning.py", *words])
    reasoning.main()


def test_arms_are_real_options_of_real_policies(reasoning):
    budgets = [128, 256]
    arms = reasoning._fidelity_arms(budgets) | reasoning._ablation_arms(budgets)
    for policy, options in arms.values():
        check_options(policy, options)
    splits = [o for name, (_, o) in arms.items() if name.startswith("split")]
    assert {o["beacons"] + o["recent_queries"] for o in splits} == {32}
    assert sorted(o["beacons"] for o in splits) == [0, 1, 4, 16, 28, 31]
    assert all(f"{policy} {budget}" in arms for policy in reasoning.POLICIES for budget in budgets)


def test_an_arm_that_was_measured_under_another_name_is_known(reasoning):
    arms = reasoning._ablation_arms([128])
    key = {name: reasoning._key(*arm) for name, arm in arms.items()}
    assert key["split 16+16"] == key["max 128"] == key["continual 128"]
    assert len(set(key.values())) == len(key) - 2


def test_the_record_in_the_repository_is_what_the_defaults_go_on_with(
    reasoning, monkeypatch, capsys
):
    monkeypatch.chdir(FOLDER.parent)
    run(reasoning, monkeypatch, "tables")
    printed = capsys.readouterr().out
    assert "| full | 30 |" in printed and "beacon_kv 128" in printed
    # What the page says is what the record says.
    page = (FOLDER.parent / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert all(line in page for line in printed.splitlines())


def test_a_record_of_other_settings_is_refused(reasoning, monkeypatch, tmp_path):
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"settings": {"n": 7}, "recall": {}}))
    with pytest.raises(SystemExit, match="another --out"):
        run(reasoning, monkeypatch, "tables", "--out", str(path))
