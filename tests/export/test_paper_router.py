"""A router of the paper's form: fitted, exported, loaded and decoded with."""

import json
from pathlib import Path

import pytest
import torch
from lightning import Trainer

from zoomkv.caches.registry import make_cache
from zoomkv.cli import main
from zoomkv.data.asked import NeedleQuestions
from zoomkv.data.long_module import LongTextData
from zoomkv.data.long_stream import Stage
from zoomkv.export.artifact import read_artifact, read_router
from zoomkv.generation import Generator, load
from zoomkv.modules.router import Router
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
