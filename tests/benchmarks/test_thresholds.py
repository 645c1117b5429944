"""The benchmark of thresholds changes nothing but the length, and sets what it says."""

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.bases import make_base

from zoomkv.backbone.fingerprint import fingerprint
from zoomkv.backbone.load import load_base
from zoomkv.caches.base import ModelShape
from zoomkv.export.artifact import Artifact, save_router, write_artifact
from zoomkv.modules.router import Router
from zoomkv.modules.sketch import Sketch
from zoomkv.training.router_distill import MemoryOptions, SplitOptions

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def thresholds() -> Iterator[ModuleType]:
    """The script as a module."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("thresholds")
    finally:
        sys.path.remove(str(FOLDER))


@pytest.fixture
def artifact(base: str, tmp_path: Path) -> Path:
    """A router of the tiny base whose thresholds no gate passes."""
    model, _ = load_base(base)
    shape = ModelShape.of(model)
    router = Router(shape.layers, shape.heads, shape.kv_heads, shape.head_dim, 8, 8)
    torch.nn.init.constant_(router.threshold_logit, 100.0)
    told = {"splitter": {**asdict(SplitOptions("fine", min_span=4, max_span=8)), "sinks": 4}}
    write_artifact(
        tmp_path / "router",
        Artifact(
            "sekv",
            base,
            fingerprint(model),
            {},
            {"form": "paper", **asdict(router.shape), **told, "memory": asdict(MemoryOptions())},
        ),
        lambda folder: save_router(router, folder),
    )
    return tmp_path / "router"


def test_all_lengths_are_validated_with_both_thresholds(
    thresholds: ModuleType, artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "figures.json"
    words = ["--quick", "--checkpoint", str(artifact), "--precision", "fp32", "--out", str(out)]
    assert thresholds.main(words) == 0
    assert "AUROC" in capsys.readouterr().out
    content = json.loads(out.read_text())
    [table] = content["tables"]
    kinds = ["as learnt", "set at 96"]
    cells = [(text, n, kind) for text in ("book", "reference") for n in (96, 160) for kind in kinds]
    assert [(row[0], int(row[1]), row[3]) for row in table["rows"]] == cells
    for text, length, kind in cells:
        for one in content["details"][f"{text} {length} {kind}"]:
            assert 0 < one["needed"] < 1 and one["kl"] > 0 and 0 <= one["auroc"] <= 1
            assert (one["opened"] == 0) == (one["f1"] == 0) == (kind == "as learnt")
    # Thresholds decide what opens, not what is needed.
    for text, length, _ in cells:
        ours, theirs = (content["details"][f"{text} {length} {kind}"] for kind in kinds)
        assert [one["needed"] for one in ours] == [one["needed"] for one in theirs]


def test_routers_without_thresholds_or_of_another_base_are_refused(
    thresholds: ModuleType, artifact: Path, tmp_path: Path
) -> None:
    other = make_base(tmp_path / "other", seed=5)
    manifest = artifact / "zoomkv.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"base": other}))
    with pytest.raises(SystemExit, match="trained on another base"):
        thresholds.main(["--quick", "--checkpoint", str(artifact)])
    sketch = Sketch(2, 4, 2, 16, 4)
    write_artifact(
        tmp_path / "sketch",
        Artifact("sekv", other, {"linear": ""}, {}, {"form": "sketch", **asdict(sketch.shape)}),
        lambda folder: save_router(sketch, folder),
    )
    with pytest.raises(SystemExit, match="its router has no thresholds"):
        thresholds.main(["--quick", "--checkpoint", str(tmp_path / "sketch")])


@given(
    st.lists(st.integers(0, 90), min_size=1, max_size=4),
    st.integers(1, 20),
    st.integers(1, 9),
    st.integers(1, 12),
)
def test_texts_do_not_overlap_and_have_room_before_them(
    thresholds: ModuleType, sizes: list[int], longest: int, size: int, n: int
) -> None:
    ends = torch.tensor(sizes).cumsum(0).tolist()
    documents = [list(range(end - count, end)) for end, count in zip(ends, sizes, strict=True)]
    found = thresholds.texts(documents, longest, size, n)
    room = sum(max(0, count - longest) // size for count in sizes)
    assert len(found) == min(n, room)
    told = [token for text in found for token in text.continuation]
    assert len(set(told)) == len(told) == size * len(found)
    for text in found:
        assert text.before + text.continuation in [
            ids[at : at + longest + size] for ids in documents for at in range(len(ids))
        ]
        for length in (1, longest):
            batch = text.batch(length)
            assert batch["context"][0].tolist() == text.before[len(text.before) - length :]
            assert batch["continuation"][0].tolist() == text.continuation
            assert batch["supervised"].all()


@given(st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 12))
def test_each_head_opens_as_many_as_it_needs(
    thresholds: ModuleType, seed: int, heads: int, count: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randperm(heads * count, generator=draw).view(heads, count).float()
    needed = torch.rand(heads, count, generator=draw) < torch.rand(heads, 1, generator=draw)
    found = thresholds.even_thresholds(logits, needed)
    for head in range(heads):
        opened = sum(gate > found[head] for gate in logits[head])
        assert int(opened) == int(needed[head].sum())
