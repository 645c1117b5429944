"""Artifacts with a router: what is trained is what routes, and only where it belongs."""

import json
from pathlib import Path

import pytest
import torch
from tests.bases import make_base

from zoomkv.backbone.fingerprint import fingerprint
from zoomkv.backbone.load import load_base
from zoomkv.caches.base import ModelShape
from zoomkv.caches.registry import make_cache
from zoomkv.cli import main
from zoomkv.export.artifact import read_artifact, read_router
from zoomkv.export.from_checkpoint import METADATA, export_checkpoint
from zoomkv.generation import Generator, load
from zoomkv.modules.sketch import Sketch, SketchShape


@pytest.fixture
def run(base: str, tmp_path: Path) -> tuple[Path, Sketch]:
    """A checkpoint as ``zoomkv fit`` writes it, and the sketch in it."""
    model, _ = load_base(base)
    shape = ModelShape.of(model)
    sketch = Sketch(shape.layers, shape.heads, shape.kv_heads, shape.head_dim, 6)
    for value in sketch.parameters():
        torch.nn.init.normal_(value, generator=torch.Generator().manual_seed(1))
    metadata = {
        "method": "sekv",
        "form": "sketch",
        "base": base,
        "precision": "fp32",
        "fingerprint": fingerprint(model),
        "router": dict(sketch.shape.__dict__),
        "steps": 3,
        "metrics": {"val/captured": 0.9},
    }
    state = {f"sketch.{name}": value for name, value in sketch.state_dict().items()}
    torch.save({"state_dict": state, METADATA: metadata}, tmp_path / "last.ckpt")
    return tmp_path / "last.ckpt", sketch


def test_what_is_loaded_is_what_was_trained(run: tuple[Path, Sketch], tmp_path: Path) -> None:
    path, sketch = run
    export_checkpoint(path, tmp_path / "artifact", {"budget": 0.5})
    folder = tmp_path / "artifact"
    assert {file.name for file in folder.iterdir()} == {
        "zoomkv.json",
        "router.safetensors",
        "README.md",
    }
    model, tokenizer = load(str(folder))
    cache = make_cache("sekv", model)
    assert isinstance(cache._router, Sketch)
    for name, value in sketch.state_dict().items():
        assert torch.equal(cache._router.state_dict()[name], value)
    assert not any("router" in name for name, _ in model.named_parameters())
    before = len(model.state_dict())
    assert before == len(load_base(read_artifact(folder).base)[0].state_dict())
    text = Generator(model, tokenizer, "sekv").generate("Begin the ledger", max_new_tokens=4)
    assert text[0].ids
    assert make_cache("sekv", model, router="sketch")._router == "sketch"


def test_commands_take_it(
    run: tuple[Path, Sketch], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "artifact")
    assert main(["export", str(run[0]), folder, "-o", "budget=0.5", "--note", "a test"]) == 0
    options = ["--prompt", "Begin the ledger", "--max-new-tokens", "3", "--stats"]
    assert main(["generate", folder, "--policy", "sekv", "--budget", "0.4", *options]) == 0
    assert "device" in capsys.readouterr().err


def test_a_router_for_other_heads_or_another_base_is_refused(
    run: tuple[Path, Sketch], tmp_path: Path
) -> None:
    folder = tmp_path / "artifact"
    export_checkpoint(run[0], folder)
    deeper = make_base(tmp_path / "deep", num_hidden_layers=3)
    with pytest.raises(ValueError, match="trained on another base: architecture"):
        load(str(folder), base=deeper)
    other, _ = load_base(deeper)
    with pytest.raises(ValueError, match="router: made for layers=2, this model has 3"):
        make_cache("sekv", other, router=run[1])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"router": {"form": "oracle"}}, "unknown form of router 'oracle'"),
        ({"router": {"form": "sketch", "layers": 2}}, "no such router"),
        ({"router": {}, "delimiters": {}}, "bad 'delimiters'"),
    ],
)
def test_broken_manifests_are_refused(
    run: tuple[Path, Sketch], tmp_path: Path, fields: dict[str, object], message: str
) -> None:
    folder = tmp_path / "artifact"
    export_checkpoint(run[0], folder)
    manifest = json.loads((folder / "zoomkv.json").read_text())
    (folder / "zoomkv.json").write_text(json.dumps(manifest | fields))
    with pytest.raises(ValueError, match=message):
        load(str(folder))


def test_weights_of_another_width_are_refused(run: tuple[Path, Sketch], tmp_path: Path) -> None:
    folder = tmp_path / "artifact"
    export_checkpoint(run[0], folder)
    manifest = json.loads((folder / "zoomkv.json").read_text())
    manifest["router"]["width"] = 4
    (folder / "zoomkv.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"router\.safetensors: no such router"):
        read_router(folder, read_artifact(folder))


def test_a_form_that_is_not_known_is_refused(run: tuple[Path, Sketch], tmp_path: Path) -> None:
    saved = torch.load(run[0], weights_only=True)
    saved[METADATA]["form"] = "other"
    torch.save(saved, run[0])
    with pytest.raises(ValueError, match="form 'other' is not known; upgrade zoomkv"):
        export_checkpoint(run[0], tmp_path / "artifact")


def test_a_missing_router_is_named(run: tuple[Path, Sketch], tmp_path: Path) -> None:
    folder = tmp_path / "artifact"
    export_checkpoint(run[0], folder)
    (folder / "router.safetensors").unlink()
    with pytest.raises(ValueError, match=r"router\.safetensors is missing"):
        load(str(folder))


def test_the_router_that_we_ship_is_whole() -> None:
    folder = Path(__file__).parents[2] / "checkpoints" / "sekv-smollm2-135m"
    artifact = read_artifact(folder)
    assert (artifact.method, artifact.base) == ("sekv", "smollm2-135m")
    router = read_router(folder, artifact)
    assert isinstance(router, Sketch)
    assert router.shape == SketchShape(30, 9, 3, 64, 16)
    for value in router.parameters():
        assert value.isfinite().all() and value.flatten(2).abs().amax(-1).gt(0).all()
