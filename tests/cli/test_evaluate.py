"""``zoomkv evaluate`` on a tiny model: its table, what it refuses, what the guides say of it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zoomkv.cli import main
from zoomkv.cli.dispatch import COMMANDS
from zoomkv.cli.evaluate import _parser, _settings, check_place
from zoomkv.evaluation.results import read, rows, table

ROOT = Path(__file__).parents[2]
_LAUNCHED = re.compile(r"^(?:torchrun .*? -m|srun) zoomkv (.+)$")


def run(capsys: Any, *words: str) -> tuple[int, str, str]:
    code = main(["evaluate", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def settings(*words: str) -> Any:
    return _settings(_parser().parse_args(words))


def test_it_prints_the_table_of_its_file(base: str, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "deep" / "a.jsonl"
    words = ["--model", base, "--policies", "full,streaming_llm", "--budgets", "0.25"]
    words += ["--lengths", "300", "--tasks", "needle", "--n", "1", "--out", str(out)]
    code, said, told = run(capsys, *words)
    assert code == 0, told
    found = read(out)
    assert len(found.answers) == 4 and all(check["ok"] for check in found.checks)
    assert [line.split(" | ")[:5] for line in said.splitlines()[2:6]] == [
        line.split(" | ")[:5] for line in table(rows(found.answers)).splitlines()[2:6]
    ]
    assert "needle, length 300, seed 0" in told
    whole = out.read_bytes()
    out.write_bytes(whole[:-20])
    assert run(capsys, *words)[0] == 0 and out.read_bytes() == whole
    code, said, told = run(capsys, *words, "--n", "2")
    assert (code, said) == (2, "") and "n: 1 there, 2 now" in told and told.count("\n") == 1


def test_a_failed_check_is_exit_1_and_no_table(
    base: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zoomkv.evaluation import runner

    failed = {"kind": "check", "policy": "full", "what": "full is sane", "ok": False, "detail": "x"}
    monkeypatch.setattr(runner, "check_full", lambda *given: failed)
    words = ["--model", base, "--policies", "full", "--lengths", "300", "--n", "1"]
    code, said, told = run(capsys, *words, "--out", str(tmp_path / "a.jsonl"))
    assert (code, said) == (1, "")
    assert "zoomkv: a check failed, so there are no figures: full: full is sane: not so" in told


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--config", "none.yaml"], "--config none.yaml: there is no such file"),
        (["--budgets", "0.1,x"], "'0.1,x': give numbers with commas"),
        (["--budgets", "2.5"], "budgets: 2.5: give a share in (0, 1], or rows"),
        (["--lengths", "1k"], "'1k': give whole numbers"),
        (["--policies", "full,,h2o"], "give names with commas"),
        (["--policies", "h3o", "--out", "a.jsonl"], "unknown policy 'h3o'"),
        (["--tasks", "needles", "--out", "a.jsonl"], "unknown task 'needles'"),
        (["--out", "a.json"], "--out a.json: give a file that ends with .jsonl"),
        (["--devices", "0"], "'0' is not a whole number of at least 1"),
    ],
)
def test_bad_usage_is_one_line(
    words: list[str], named: str, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, said, told = run(capsys, *words)
    assert (code, said) == (2, "") and named in told and told.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("place", "named"),
    [
        ("folder.jsonl", "folder.jsonl can't be written to (Is a directory)"),
        ("file/deep/a.jsonl", "file can't be written to (Not a directory)"),
        ("timed.jsonl", "timed.timing.jsonl can't be written to (Is a directory)"),
        ("/proc/none/a.jsonl", "/proc can't be written to ("),
    ],
)
def test_a_place_that_is_none_is_told_before_anything_is_loaded(
    place: str, named: str, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "timed.timing.jsonl").mkdir()
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    code, said, told = run(capsys, "--model", "/no/such/model", "--out", place)
    assert (code, said) == (2, "") and told.count("\n") == 1
    assert told.startswith(f"zoomkv: --out {place}: ") and named in told


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_place_that_is_read_only_is_told_too(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "a.jsonl").write_text("")
    (tmp_path / "a.jsonl").chmod(0o400)
    tmp_path.chmod(0o500)
    for name in ("a.jsonl", "b.jsonl", "deep/c.jsonl"):
        code, _, told = run(capsys, "--model", "/no/such/model", "--out", str(tmp_path / name))
        assert code == 2 and "can't be written to (Permission denied)" in told


def test_looking_at_a_place_leaves_nothing_there(tmp_path: Path) -> None:
    check_place(tmp_path / "deep" / "a.jsonl")
    (tmp_path / "b.jsonl").write_bytes(b"whole\n")
    check_place(tmp_path / "b.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["b.jsonl"]
    assert (tmp_path / "b.jsonl").read_bytes() == b"whole\n"


def test_policies_may_be_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tova.yaml").write_text("budget: 12\nn_sink: 2\ncount_prefix: false\n")
    Path("small.yml").write_text("policy: h2o\nrecent: 4\n")
    Path("a.yaml").write_text(
        "policies: [tova.yaml, small.yml, tests.evaluation.fakes:NeedyCache,"
        " {policy: tova.yaml, label: x, options: {n_sink: 3, count_prefix: false}, budgets: [0.5]},"
        " {policy: tova.yaml, label: y, options: {budget: 9}}]"
    )
    found = {arm.label: arm for arm in settings("--config", "a.yaml").policies}
    assert {label: (arm.policy, arm.options, arm.budgets) for label, arm in found.items()} == {
        "tova": ("tova", {"n_sink": 2}, (12,)),
        "small": ("h2o", {"recent": 4}, None),
        "tests.evaluation.fakes:NeedyCache": ("tests.evaluation.fakes:NeedyCache", {}, None),
        "x": ("tova", {"n_sink": 3, "count_prefix": False}, (0.5,)),
        "y": ("tova", {"n_sink": 2, "budget": 9}, None),
    }
    words = ["--policies", "full,small.yml,tova.yaml,zoomkv.caches.tova:TOVACache"]
    chosen = settings(*words).policies
    labels = ["full", "small", "tova", "zoomkv.caches.tova:TOVACache"]
    assert [arm.label for arm in chosen] == labels
    assert chosen[1:3] == (found["small"], found["tova"])
    assert settings("--config", "a.yaml", "--policies", "small,x").policies == (
        found["small"],
        found["x"],
    )
    told = settings(*words, "--budgets", "0.25").policies
    assert [arm.budgets for arm in told] == [None, None, (0.25,), None]


def test_every_policy_file_makes_an_arm() -> None:
    from zoomkv.evaluation.budgets import arms_of

    files = sorted((ROOT / "configs" / "policy").glob("*.yaml"))
    arms = arms_of(settings("--policies", ",".join(map(str, files))))
    assert {arm.label for arm in arms} == {path.stem for path in files}
    (beacon,) = (arm for arm in arms if arm.label == "beacon_kv")
    assert beacon.budgets == (1024,) and beacon.options["refill"] == 0.875
    assert all(arm.options.get("count_prefix", True) for arm in arms)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no such file"),
        ("- budget\n", "write NAME: VALUE lines"),
        ("budget: [\n", "can't be read (while parsing"),
        ("policy: tvoa\n", "unknown policy 'tvoa': did you mean 'tova'?"),
        ("budgt: 4\n", "policy 'tova' has no option 'budgt': did you mean 'budget'?"),
        ("budget: 0\n", "policies: tova: budgets: 0: give a share"),
    ],
)
def test_policy_files_that_are_none(
    text: str | None, message: str, capsys: Any, tmp_path: Path
) -> None:
    file, config = tmp_path / "tova.yaml", tmp_path / "a.yaml"
    if text is not None:
        file.write_text(text)
    config.write_text(f"policies: [{file}]")
    out = ["--out", str(tmp_path / "a.jsonl")]
    for words in (["--config", str(config)], ["--policies", str(file)]):
        code, said, told = run(capsys, "--model", "/no/such/model", *words, *out)
        assert (code, said) == (2, "") and message in told and told.count("\n") == 1


def test_a_policy_file_runs(base: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "narrow.yaml").write_text("policy: streaming_llm\nn_sink: 2\nbudget: 0.25\n")
    out = tmp_path / "a.jsonl"
    words = ["--model", base, "--policies", str(tmp_path / "narrow.yaml"), "--lengths", "300"]
    code, said, told = run(capsys, *words, "--n", "1", "--out", str(out))
    assert code == 0, told
    answers = read(out).answers
    assert {(line["policy"], line["label"], line["budget"]) for line in answers} == {
        ("streaming_llm", "narrow", 0.25)
    }
    assert all(line["options"]["n_sink"] == 2 for line in answers) and "| narrow |" in said


def test_options_override_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = ["--config", "configs/eval/needle.yaml", "--policies", "full,zoomr,tova", "--n", "3"]
    words += ["--budgets", "0.05,64", "--seeds", "4,5", "--lengths", "512", "--tasks", "needle"]
    found = settings(*words)
    assert [arm.label for arm in found.policies] == ["full", "zoomr", "tova"]
    assert found.policies[1].model == "checkpoints/zoomr-smollm2-135m"
    assert (found.budgets, found.seeds, found.lengths, found.n) == ((0.05, 64), (4, 5), (512,), 3)
    assert found.tasks[0].options["haystack"] == "book"
    moved = settings("--config", "configs/eval/needle.yaml", "--model", "smollm2-135m")
    assert {arm.model for arm in moved.policies} == {None} and moved.model == "smollm2-135m"
    assert settings("--precision", "bf16").precision == "bf16"


def test_what_has_budgets_of_its_own_is_overridden_too(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("policies: [full, h2o, {policy: tova, budgets: [0.5, 9]}]")
    found = settings("--config", str(path), "--budgets", "0.2")
    assert found.budgets == (0.2,)
    assert [arm.budgets for arm in found.policies] == [None, None, (0.2,)]


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from zoomkv.cli import main; import zoomkv.evaluation\n"
        "try: main(['evaluate', '--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'lightning', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


def launched() -> list[str]:
    text = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines()]


def test_launched_commands_of_the_guide_exist_and_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = [_LAUNCHED.match(line) for line in launched() if not line.startswith("vllm serve ")]
    assert len(found) == 4
    for match in found:
        assert match is not None
        command, *words = shlex.split(match[1])
        assert command in COMMANDS
        assert all((ROOT / word).is_file() for word in words if word.endswith(".yaml"))
        if command == "evaluate":
            assert settings(*words).policies


def test_the_settings_of_the_guide_can_be_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zoomkv.evaluation.budgets import arms_of

    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    [block] = re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (tmp_path / "a.yaml").write_text(block)
    found = settings("--config", str(tmp_path / "a.yaml"))
    labels = [arm.label for arm in arms_of(found)]
    assert labels == ["full", "zoomr consensus=2 top_k=3", "sekv by lot"]
    assert found.tasks[1].lengths == (None,)
