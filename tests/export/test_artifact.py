"""Artifacts: whole or not at all, exactly what was trained, refused where they don't belong."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.bases import make_base

from zoomkv.backbone.adapter import add_adapter, save_adapter
from zoomkv.backbone.delimiters import add_to_tokenizer
from zoomkv.backbone.fingerprint import fingerprint
from zoomkv.backbone.load import load_base
from zoomkv.cli import main
from zoomkv.export.artifact import Artifact, is_artifact, read_artifact, write_artifact
from zoomkv.export.from_checkpoint import METADATA, export_checkpoint, find_checkpoint
from zoomkv.generation import load

IDS = torch.tensor([[5, 9, 40, 41, 42, 360, 77, 361]])
LORA = {"r": 4, "alpha": 8, "dropout": 0.0, "targets": ["q_proj", "v_proj", "down_proj"]}


def logits(model):
    with torch.inference_mode():
        return model(input_ids=IDS).logits


def make_checkpoint(base, path, precision="fp32"):
    """A training checkpoint as ``zoomkv fit`` writes it, with moved weights, and its model."""
    model, tokenizer = load_base(base, precision)
    identity = fingerprint(model)
    adapted = add_adapter(model, tokenizer, **LORA)
    generator = torch.Generator().manual_seed(3)
    weights = {n: v for n, v in adapted.named_parameters() if v.requires_grad}
    for value in weights.values():
        value.data += 0.1 * torch.randn(value.shape, generator=generator)
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {
        "method": "zoomr",
        "base": base,
        "precision": precision,
        "fingerprint": identity,
        "lora": LORA,
        "delimiter_ids": add_to_tokenizer(tokenizer),
        "steps": 7,
        "metrics": {"val/right": 0.5, "train/loss": float("nan")},
    }
    state = {f"model.{name}": value.detach() for name, value in weights.items()}
    torch.save({"state_dict": state, METADATA: metadata}, path)
    return path, adapted.eval()


@pytest.fixture
def exported(base, tmp_path):
    path, adapted = make_checkpoint(base, tmp_path / "run" / "checkpoints" / "last.ckpt")
    export_checkpoint(path, tmp_path / "artifact")
    return tmp_path / "artifact", adapted


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_what_is_loaded_is_what_was_trained(tmp_path, family, tied):
    base = make_base(tmp_path / "base", family, tied=tied)
    path, adapted = make_checkpoint(base, tmp_path / "last.ckpt")
    export_checkpoint(path, tmp_path / "artifact")
    wanted = logits(adapted)
    apart, _ = load(str(tmp_path / "artifact"), merge=False)
    assert torch.equal(logits(apart), wanted)
    merged, tokenizer = load(str(tmp_path / "artifact"))
    torch.testing.assert_close(logits(merged), wanted, rtol=0, atol=1e-4)
    assert not hasattr(merged, "peft_config")
    assert tokenizer.decode([360]) == "<|begin_of_summary|>"
    assert merged.config.use_cache


def test_holds_no_base_weights_and_no_path_of_this_machine(exported, base):
    folder, _ = exported
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < (Path(base) / "model.safetensors").stat(
    ).st_size / 4  # fmt: skip
    assert {path.suffix for path in files} == {".json", ".safetensors", ".md"}
    artifact = read_artifact(folder)
    assert artifact.training["steps"] == 7
    assert artifact.figures == {"val/right": 0.5}
    assert "NaN" not in (folder / "zoomkv.json").read_text()
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == artifact.base == base
    assert "0.5" in (folder / "README.md").read_text()


def test_a_base_that_has_moved_can_be_named(exported, base, tmp_path):
    folder, adapted = exported
    moved = shutil.copytree(base, tmp_path / "moved")
    manifest = json.loads((folder / "zoomkv.json").read_text())
    (folder / "zoomkv.json").write_text(json.dumps(manifest | {"base": "/gone/base"}))
    with pytest.raises(ValueError, match="/gone/base"):
        load(str(folder))
    model, _ = load(str(folder), base=str(moved), merge=False)
    assert torch.equal(logits(model), logits(adapted))


def test_another_base_is_refused(exported, tmp_path):
    folder, _ = exported
    same_shape = make_base(tmp_path / "other", seed=5)
    with pytest.raises(ValueError, match="trained on another base: embeddings: expected"):
        load(str(folder), base=same_shape)
    deeper = make_base(tmp_path / "deep", num_hidden_layers=3)
    with pytest.raises(ValueError, match="trained on another base: architecture: expected llama"):
        load(str(folder), base=deeper)


def change(**fields):
    def edit(folder):
        path = folder / "zoomkv.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return edit


def replace(name, content):
    return lambda folder: (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (replace("zoomkv.json", b"{"), "can't be read"),
        (replace("zoomkv.json", b"\xff"), "can't be read"),
        (replace("zoomkv.json", b"[]"), "format None, this version reads 1"),
        (change(format=2, novelty=1), "format 2, this version reads 1"),
        (change(novelty=1), "novelty"),
        (change(delimiters=["a", "b"]), "bad 'delimiters'"),
        (change(fingerprint={}), "bad 'fingerprint'"),
        (change(base=None), "bad 'base'"),
        (change(options=None), "bad 'options'"),
        (replace("adapter/adapter_model.safetensors", b"xx"), "can't be read"),
        (replace("adapter/adapter_config.json", b"{"), "can't be read"),
        (lambda folder: (folder / "adapter" / "adapter_config.json").unlink(), "is missing"),
        (lambda folder: (folder / "zoomkv.json").unlink(), "neither an artifact"),
        (change(delimiters={"<|begin_of_summary|>": 7, "<|end_of_summary|>": 8}), "other ids"),
    ],
)
def test_a_broken_artifact_is_one_line(exported, damage, message):
    folder, _ = exported
    damage(folder)
    with pytest.raises(ValueError, match=message) as failed:
        load(str(folder))
    assert "\n" not in str(failed.value) and str(folder) in str(failed.value)


def listing(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def fail_while_writing(folder):
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    raise OSError(28, "No space left on device")


def test_a_full_disk_leaves_the_old_artifact_and_no_litter(exported):
    folder, _ = exported
    before, beside = listing(folder), sorted(folder.parent.iterdir())
    with pytest.raises(OSError, match="No space left"):
        write_artifact(folder, read_artifact(folder), fail_while_writing)
    assert listing(folder) == before and sorted(folder.parent.iterdir()) == beside


@pytest.mark.parametrize("failing", [1, 2])
def test_a_rename_that_fails_puts_the_old_artifact_back(exported, monkeypatch, failing):
    folder, _ = exported
    before, beside = listing(folder), sorted(folder.parent.iterdir())
    rename, calls = Path.rename, []

    def sometimes(self, target):
        calls.append(target)
        if len(calls) == failing:
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", sometimes)
    with pytest.raises(OSError, match="No space left"):
        write_artifact(folder, read_artifact(folder), lambda to: shutil.copytree(
            folder / "adapter", to / "adapter"))  # fmt: skip
    assert listing(folder) == before and sorted(folder.parent.iterdir()) == beside


def test_the_library_that_writes_weights_says_oserror_too(base, tmp_path, monkeypatch):
    from safetensors import SafetensorError

    def full(*args, **options):
        raise SafetensorError("Error while serializing: No space left on device (os error 28)")

    model, tokenizer = load_base(base)
    adapted = add_adapter(model, tokenizer, **LORA)
    monkeypatch.setattr(adapted, "save_pretrained", full, raising=False)
    with pytest.raises(OSError, match="No space left"):
        save_adapter(adapted, base, tmp_path / "adapter")


def test_replacing_an_artifact_leaves_no_litter(exported):
    folder, _ = exported
    new = Artifact(**{**read_artifact(folder).__dict__, "figures": {"x": 1}})
    write_artifact(folder, new, lambda to: shutil.copytree(folder / "adapter", to / "adapter"))
    assert read_artifact(folder).figures == {"x": 1}
    assert not [path for path in folder.parent.iterdir() if path.name.startswith(".")]


def test_a_folder_of_something_else_is_left_alone(exported, tmp_path):
    folder, _ = exported
    other = tmp_path / "thesis"
    other.mkdir()

    def save(to):
        shutil.copytree(folder / "adapter", to / "adapter")

    (other / "chapter1.tex").write_text("years of work")
    with pytest.raises(ValueError, match="is no checkpoint of ours"):
        write_artifact(other, read_artifact(folder), save)
    assert listing(other) == {"chapter1.tex": b"years of work"}
    (other / "chapter1.tex").unlink()
    write_artifact(other, read_artifact(folder), save)  # an empty folder may be filled
    assert is_artifact(other)


def forget_a_weight(checkpoint):
    checkpoint["state_dict"].popitem()


def from_elsewhere(checkpoint):
    checkpoint[METADATA]["fingerprint"]["embeddings"] = "0" * 32


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (forget_a_weight, "1 weights are missing"),
        (from_elsewhere, "is another one now: embeddings"),
        (lambda checkpoint: checkpoint.pop(METADATA), "not a checkpoint of zoomkv fit"),
        (lambda checkpoint: checkpoint[METADATA].update(delimiter_ids=[1, 2]), "delimiter ids"),
    ],
)
def test_a_checkpoint_that_can_not_be_exported(base, tmp_path, edit, message):
    path, _ = make_checkpoint(base, tmp_path / "last.ckpt")
    checkpoint = torch.load(path, weights_only=True)
    edit(checkpoint)
    torch.save(checkpoint, path)
    with pytest.raises(ValueError, match=message):
        export_checkpoint(path, tmp_path / "artifact")
    assert not (tmp_path / "artifact").exists()


def test_finding_the_checkpoint_of_a_run(tmp_path):
    with pytest.raises(ValueError, match="there is no such checkpoint or run"):
        find_checkpoint(tmp_path / "none")
    with pytest.raises(ValueError, match=r"there is no last\.ckpt in this run"):
        find_checkpoint(tmp_path)
    (tmp_path / "broken.ckpt").write_bytes(b"torn")
    with pytest.raises(ValueError, match="not a readable checkpoint"):
        export_checkpoint(tmp_path / "broken.ckpt", tmp_path / "artifact")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "last.ckpt").touch()
    assert find_checkpoint(tmp_path) == tmp_path / "deep" / "last.ckpt"


def test_the_command_ends_with_2_and_one_line_when_the_disk_is_full(exported, base, tmp_path):
    """A real write that fails in the middle: no file may grow beyond two kilobytes."""
    folder, _ = exported
    before = listing(folder)
    code = (
        "import signal, resource, sys; from zoomkv.cli import main\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, resource.RLIM_INFINITY))\n"
        "sys.exit(main(['export', sys.argv[1], sys.argv[2]]))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("zoomkv: ")
    assert "Traceback" not in done.stderr
    assert listing(folder) == before


def test_generate_takes_the_artifacts_own_policy_and_options(base, tmp_path, monkeypatch, capsys):
    made = []

    class Recorder:
        stats = None

        def __init__(self, model, tokenizer, policy, **options):
            made.append((policy, {name: options[name] for name in options.keys() & {"window"}}))

        def stream(self, *args, **settings):
            return iter(())

    monkeypatch.setattr("zoomkv.generation.Generator", Recorder)
    checkpoint, target = tmp_path / "a.ckpt", str(tmp_path / "artifact")
    make_checkpoint(base, checkpoint)
    assert main(["export", str(checkpoint), target, "-o", "window=7"]) == 0
    for words in ([], ["-o", "window=9"], ["--policy", "sumr"]):
        assert main(["generate", target, "--prompt", "x", *words]) == 0
    assert made == [("zoomr", {"window": 7}), ("zoomr", {"window": 9}), ("sumr", {})]
