"""A router of the paper's form: fitted, exported, loaded and decoded with."""

import csv
import json
from pathlib import Path

import pytest
import torch
import yaml
from lightning import Trainer

from zoomkv.caches.registry import make_cache
from zoomkv.cli import main
from zoomkv.data.asked import NeedleQuestions
from zoomkv.data.long_module import LongTextData
from zoomkv.data.long_stream import Stage
from zoomkv.export.artifact import read_artifact, read_router
from zoomkv.generation import Generator, load
from zoomkv.modules.router import Router, RouterShape
from zoomkv.spans.splitter import Splitter
from zoomkv.training.router_distill import (
    MemoryOptions,
    RouterDistill,
    RouterOptions,
    SplitOptions,
)


@pytest.fixture(scope="module")
def trained(base: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RouterDistill]:
    """The artifact of two steps of training, and what was trained."""
    folder = tmp_path_factory.mktemp("paper")
    module = RouterDistill(
        base,
        precision="fp32",
        router=RouterOptions(width=8, rank=8, threshold=0.9),
        splitter=SplitOptions("paper", alpha=1.25, min_span=4, max_span=12),
        memory=MemoryOptions(method="gram", rope="pre"),
        rows=8,
        far_window=64,
    )
    questions = NeedleQuestions(1, kinds=["single"], haystacks=["noise"])
    data = LongTextData([questions], [Stage(360)], steps=2, continuation=240)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=2,
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
    )
    trainer.fit(module, data)
    assert trainer.global_step == 2
    trainer.save_checkpoint(folder / "last.ckpt")
    assert main(["export", str(folder), str(folder / "artifact"), "--note", "a test"]) == 0
    return folder / "artifact", module


def test_what_decodes_is_what_was_trained(trained: tuple[Path, RouterDistill]) -> None:
    folder, module = trained
    model, tokenizer = load(str(folder))
    cache = make_cache("sekv", model)
    assert isinstance(cache._router, Router)
    state = cache._router.state_dict()
    assert state.keys() == module.router.state_dict().keys()
    for name, value in module.router.state_dict().items():
        assert torch.equal(state[name], value)
    fresh = Router(**module._shape, generator=torch.Generator().manual_seed(0))
    assert not torch.equal(state["threshold_logit"], fresh.threshold_logit)  # it has learnt
    assert cache._router.shape == module.router.shape
    assert cache._splitter == Splitter("paper", 4, 12, 1.25)
    factoriser = cache.layers[0]._factoriser
    assert factoriser.rotary is not None and factoriser.rank_gate is cache._router.rank_gate
    generator = Generator(model, tokenizer, "sekv", budget=0.5, alpha="auto")
    answer = generator.generate("Begin the ledger. " * 60, max_new_tokens=24)[0]
    assert answer.ids and generator.cache is not None
    told = generator.cache.trace()
    assert all(entry["offered"] for entry in told)
    assert any(any(entry["zoomed"]) for entry in told)


def test_commands_take_it(
    trained: tuple[Path, RouterDistill], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(trained[0])
    words = ["--prompt", "Begin the ledger. " * 40, "--max-new-tokens", "6", "--stats"]
    assert main(["generate", folder, "--policy", "sekv", "--budget", "0.4", *words]) == 0
    assert "moved to device" in capsys.readouterr().err
    assert main(["generate", folder, "--policy", "sekv", *words, "-o", "spans=fine"]) == 2
    told = capsys.readouterr().err
    assert "spans='fine': the router was trained with spans='paper'" in told
    assert main(["generate", folder, "--policy", "sekv", *words, "-o", "alpha=auto"]) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"splitter": None}, "it does not say its splitter"),
        ({"splitter": {"alpha": 1.0}}, "its splitter has no scheme"),
        ({"memory": "some"}, "it does not say its memory"),
        ({"rank": 0}, "rank=0"),
    ],
    ids=str,
)
def test_broken_manifests_are_refused(
    trained: tuple[Path, RouterDistill], tmp_path: Path, change: dict[str, object], message: str
) -> None:
    manifest = json.loads((trained[0] / "zoomkv.json").read_text())
    manifest["router"] |= change
    (tmp_path / "zoomkv.json").write_text(json.dumps(manifest))
    weights = (trained[0] / "router.safetensors").read_bytes()
    (tmp_path / "router.safetensors").write_bytes(weights)
    with pytest.raises(ValueError, match=message) as caught:
        read_router(tmp_path, read_artifact(tmp_path))
    assert "\n" not in str(caught.value)


ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs" / "fit"
SHIPPED = ROOT / "checkpoints" / "sekv-paper-smollm2-135m"


def test_the_router_that_we_ship_is_whole() -> None:
    artifact = read_artifact(SHIPPED)
    assert (artifact.method, artifact.base) == ("sekv", "smollm2-135m")
    router = read_router(SHIPPED, artifact)
    assert isinstance(router, Router)
    assert router.shape == RouterShape(30, 9, 3, 64, 32, 32, 0.05, normalise=True)
    config = yaml.safe_load((CONFIGS / "sekv_paper_fine_smollm2.yaml").read_text(encoding="utf-8"))
    options = config["model"]["init_args"]
    told = router.trained_with
    assert told["splitter"].items() >= options["splitter"].items()
    assert told["memory"] == options["memory"]
    assert artifact.training["steps"] == config["data"]["init_args"]["steps"]
    fresh = Router(
        30, 9, 3, 64, **options["router"], generator=torch.Generator().manual_seed(0)
    ).state_dict()
    for name, value in router.state_dict().items():
        assert value.isfinite().all() and not torch.equal(value, fresh[name]), name
    # Figures of the card are those that the log ends with.
    with (SHIPPED / "training-log.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for name in [name for name in rows[0] if "/" in name]:
        logged = [float(row[name]) for row in rows if row[name]]
        assert artifact.figures[name] == logged[-1], name


@pytest.mark.slow
def test_what_we_ship_generates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = tmp_path / "notes.txt"
    document.write_text("A span opens if its gate is above the threshold. " * 60, encoding="utf-8")
    words = ["--file", str(document), "--max-new-tokens", "8", "--stats"]
    assert main(["generate", str(SHIPPED), "--policy", "sekv", "--budget", "0.2", *words]) == 0
    told = capsys.readouterr()
    assert told.out.strip() and "moved to device" in told.err
