"""``zoomkv generate`` on a tiny model: what it streams, what it reports, what it refuses."""

import io
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from zoomkv.cli import main
from zoomkv.generation import Generator, load


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model on disk, with a tokenizer of single letters."""
    from tests.conftest import make_tiny

    letters = ["<pad>", "<end>", "<unk>", *map(chr, range(32, 127))]
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    raw.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<unk>",
        chat_template="{% for m in messages %}{{ m['role'] + ' ' + m['content'] }}{% endfor %}:",
    )
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny("llama").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def answer(folder, prompt, tokens=20, policy="full", seed=None, sampling=None, **options):
    generator = Generator(*load(folder), policy, **options)
    if seed is not None:
        torch.manual_seed(seed)
    return "".join(generator.stream(prompt, tokens, **(sampling or {})))


POLICY_FILES = sorted((Path(__file__).parents[2] / "configs" / "policy").glob("*.yaml"))
STREAMING = ["--policy", "streaming_llm"]


def run(capsys, folder, *words):
    code = main(["generate", folder, *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_streams_the_answer(folder, capsys, monkeypatch, tmp_path):
    expected = answer(folder, "who?") + "\n"
    (tmp_path / "prompt.txt").write_bytes(b"\xef\xbb\xbfwho?\r\n")
    tokens = ["--max-new-tokens", "20"]
    assert run(capsys, folder, "--prompt", "who?", *tokens)[:2] == (0, expected)
    assert run(capsys, folder, "--file", str(tmp_path / "prompt.txt"), *tokens)[1] == expected
    monkeypatch.setattr(sys, "stdin", io.StringIO("who?\n"))
    assert run(capsys, folder, "-", *tokens)[1] == expected


def test_policy_and_its_options(folder, capsys):
    words = ["--prompt", "who?" * 8, "--policy", "streaming_llm", "--max-new-tokens", "20"]
    _, narrow, _ = run(capsys, folder, *words, "--budget", "12", "-o", "n-sink=2")
    expected = answer(folder, "who?" * 8, policy="streaming_llm", budget=12, n_sink=2)
    assert narrow == expected + "\n" != answer(folder, "who?" * 8) + "\n"


@pytest.mark.parametrize("path", POLICY_FILES, ids=lambda path: path.stem)
def test_every_policy_file_can_be_given(folder, capsys, path):
    summaries = ["--textual-summaries"] if path.stem in ("sumr", "zoomr") else []
    narrow = ["-o", "width=8"] if path.stem == "sekv" else []
    words = ["--prompt", "who?", "--policy", str(path), "--max-new-tokens", "3"]
    code, out, err = run(capsys, folder, *words, *summaries, *narrow)
    assert (code, err) == (0, "") and len(out) > 1


def test_a_policy_file_and_what_wins_over_it(folder, capsys, tmp_path):
    prompt = "who?" * 8
    words = ["--prompt", prompt, "--max-new-tokens", "20"]
    named, other = tmp_path / "streaming_llm.yaml", tmp_path / "small.yml"
    named.write_text("budget: 12\nn_sink: 2\n", encoding="utf-8")
    other.write_text("policy: streaming_llm\nbudget: 9\nn_sink: 2\n", encoding="utf-8")
    narrow = answer(folder, prompt, policy="streaming_llm", budget=12, n_sink=2) + "\n"
    assert run(capsys, folder, *words, "--policy", str(named))[1] == narrow
    assert run(capsys, folder, *words, "--policy", str(other))[1] != narrow
    for more in (["--budget", "12"], ["-o", "budget=12"]):
        assert run(capsys, folder, *words, "--policy", str(other), *more)[1] == narrow


def test_an_artifacts_own_policy_takes_a_file(folder, capsys, tmp_path, monkeypatch):
    """What the artifact says is the default, a file is more, and ``-o`` most."""
    artifact = SimpleNamespace(method="streaming_llm", options={"budget": 40, "n_sink": 3})
    monkeypatch.setattr("zoomkv.export.artifact.is_artifact", lambda path: True)
    monkeypatch.setattr("zoomkv.export.artifact.read_artifact", lambda path: artifact)
    (tmp_path / "streaming_llm.yaml").write_text("budget: 20\n", encoding="utf-8")
    words = ["--prompt", "who?" * 8, "--policy", str(tmp_path / "streaming_llm.yaml")]
    words += ["--max-new-tokens", "20"]
    for more, options in (([], {"budget": 20}), (["--budget", "9"], {"budget": 9})):
        expected = answer(folder, "who?" * 8, policy="streaming_llm", n_sink=3, **options)
        assert run(capsys, folder, *words, *more)[1] == expected + "\n"


def test_a_policy_of_ones_own(folder, capsys):
    words = ["--prompt", "who?" * 8, "--max-new-tokens", "20", "--budget", "12", "-o", "n-sink=2"]
    target = "zoomkv.caches.streaming_llm:StreamingLLMCache"
    named = run(capsys, folder, *words, "--policy", "streaming_llm")
    assert run(capsys, folder, *words, "--policy", target) == named and named[0] == 0


def test_sampling_follows_the_seed(folder, capsys):
    words = ["--prompt", "who?", "--temperature", "2.0", "--top-p", "0.9", "--max-new-tokens", "20"]
    _, first, _ = run(capsys, folder, *words, "--seed", "3")
    sampling = {"do_sample": True, "temperature": 2.0, "top_p": 0.9}
    assert first == answer(folder, "who?", seed=3, sampling=sampling) + "\n"
    assert first != run(capsys, folder, *words, "--seed", "4")[1]


def test_stats_go_to_stderr(folder, capsys):
    _, out, err = run(capsys, folder, "--prompt", "who?", "--max-new-tokens", "20", "--stats")
    figures = dict(line.split("  ", 1) for line in err.splitlines() if "  " in line)
    assert int(figures["tokens"]) == 20
    assert {"device KV, peak", "host KV", "moved to device", "agreeability"} <= set(figures)
    assert "device KV" not in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give one prompt: --prompt TEXT, --file F, or - to read it from stdin"),
        (["-", "--prompt", "x"], "give one prompt"),
        (["--prompt", " "], "the prompt is empty"),
        (["--file", "/no/such/file"], "No such file or directory: '/no/such/file'"),
        (["--prompt", "x", "--policy", "stremaing_llm"], "did you mean 'streaming_llm'?"),
        (["--prompt", "x", "--policy", "/no/zoomr.yaml"], "/no/zoomr.yaml: there is no such file"),
        (
            ["--prompt", "x", "--policy", "no.such:Thing"],
            "can't be imported (No module named 'no')",
        ),
        (["--prompt", "x", "--policy", "zoomkv.caches.full:Ful"], "has no attribute 'Ful'"),
        (["--prompt", "x", "--policy", "zoomkv:load"], "load of zoomkv is no PolicyCache class"),
        (["--prompt", "x", "--policy", "zoomkv:"], "is not of the form module:Class"),
        (["--prompt", "x", "--policy", ".full:FullCache"], "is not of the form module:Class"),
        (["--prompt", "x", "--budget", "much"], "argument --budget: 'much' is not a number"),
        (["--prompt", "x", "--policy", "streaming_llm", "--budget", "0"], "budget=0"),
        (["--prompt", "x", "--policy", "streaming_llm", "--budget", "1.5"], "budget=1.5"),
        (["--prompt", "x", "--option", "window"], "--option window: write NAME=VALUE"),
        (["--prompt", "x", "--option", "nothing=1"], "policy 'full' has no option 'nothing'"),
        (["--prompt", "x", "--temperature", "-1"], "choose --temperature of at least 0"),
        (["--prompt", "x", "--max-new-tokens", "0"], "'0' is not a whole number of at least 1"),
        (["--prompt", "x", "--precision", "fp8"], "precision 'fp8'"),
        (["--prompt", "x\udcff"], "--prompt is not UTF-8"),
        (["--prompt", "x", "--temperature", "nan"], "choose --temperature of at least 0"),
        (["--prompt", "x", "--temperature", "inf"], "choose --temperature of at least 0"),
        (["--prompt", "x", "--top-p", "0.9"], "--top-p is for sampling"),
        (["--prompt", "x", "--seed", "-1"], "'-1' is not a whole number from 0"),
        (["--prompt", "x", "--seed", str(2**64)], "is not a whole number from 0"),
        (["--prompt", "x", "--base", "elsewhere"], "base='elsewhere' goes with an artifact"),
        (["--prompt", "x", "-o", "system=y"], "policy 'full' has no option 'system'"),
        (["--prompt", "x", "-o", "policy=sumr"], "policy 'full' has no option 'policy'"),
        (["--prompt", "x", "-o", "chat=false"], "policy 'full' has no option 'chat'"),
        (["--prompt", "x", *STREAMING, "--budget", "9", "-o", "budget=8"], "'budget' is given twi"),
        (["--prompt", "x", *STREAMING, "-o", "n_sink=9", "-o", "n-sink=8"], "'n_sink' is given tw"),
        (["--prompt", "x", "--policy", "zoomr"], "has no token <|begin_of_summary|>"),
        (["--prompt", "x", "--policy", "zoomr", "-o", "window=w", "--budget", "9"], "window='w'"),
        (["--prompt", "x", "--policy", "sumr", "-o", "window=512.0"], "window=512.0: give a whole"),
    ],
)
def test_bad_input_is_one_line(folder, capsys, words, message):
    code, out, err = run(capsys, folder, *words)
    assert (code, out) == (2, "")
    assert message in err.splitlines()[-1]


def test_summaries_are_for_policies_that_read_them(capsys):
    for policy in ("full", "streaming_llm", "zoomkv.caches.tova:TOVACache"):
        words = ["--prompt", "x", "--policy", policy, "--textual-summaries"]
        code, _, err = run(capsys, "/no/such/model", *words)
        assert (code, len(err.splitlines())) == (2, 1)
        assert f"policy '{policy}' has no use for them; choose zoomr or sumr" in err


@pytest.mark.parametrize("words", [["--prompt", "x", "-o", "windw=3"], ["--prompt", " "], []])
def test_what_needs_no_model_is_told_before_one_is_loaded(capsys, words):
    code, _, err = run(capsys, "/no/such/model", *words, "--policy", "zoomr")
    assert code == 2 and "no/such/model" not in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("budget: [\n", "can't be read (while parsing"),
        ("- budget\n", "write NAME: VALUE lines"),
        ("", "write NAME: VALUE lines"),
        ("3: 4\n", "write NAME: VALUE lines"),
        ("budgt: 4\n", "policy 'tova' has no option 'budgt': did you mean 'budget'?"),
        ("policy: tvoa\n", "unknown policy 'tvoa': did you mean 'tova'?"),
        ("budget: 0\n", "policy 'tova': budget=0: this policy needs at least"),
    ],
)
def test_policy_files_that_are_none(folder, capsys, tmp_path, text, message):
    (tmp_path / "tova.yaml").write_text(text, encoding="utf-8")
    code, out, err = run(capsys, folder, "--prompt", "x", "--policy", str(tmp_path / "tova.yaml"))
    assert (code, out) == (2, "") and message in err and len(err.splitlines()) == 1


def test_a_file_that_is_not_text(folder, capsys, tmp_path):
    (tmp_path / "f").write_bytes(b"\xff\xfe")
    assert run(capsys, folder, "--file", str(tmp_path / "f"))[2] == (
        f"zoomkv: {tmp_path / 'f'} is not UTF-8\n"
    )


def test_a_misspelt_model_is_told_before_anything_heavy_is_imported():
    code = """
import sys
from zoomkv.cli import main
assert main(["generate", "smollm-135m", "--prompt", "x"]) == 2
assert not {"torch", "transformers"} & set(sys.modules)
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stderr == "zoomkv: model 'smollm-135m': did you mean smollm2-135m?\n"


def test_a_checkpoint_that_is_none(tmp_path, capsys):
    code, _, err = run(capsys, str(tmp_path), "--prompt", "x")
    assert code == 2 and "neither an artifact" in err
