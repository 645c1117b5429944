"""Two CPU processes learn what one with the doubled batch does."""

import os
import socket
from multiprocessing import get_context

import pytest
import torch
from tests.training.conftest import Fit, trained_weights

from zoomkv.data.sources import LedgerSource
from zoomkv.training.summary_sft import SummarySFT


def train(base, folder, rank, port):
    """One of two processes, as ``torchrun`` would start it."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "test",
    }
    torch.set_num_threads(1)
    steps = watched()
    module, trainer, seen = Fit(base, folder)(
        strategy="ddp", devices=2, data=DATA | {"batch_size": 1}, **OPTIONS
    )
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    torch.save((trained_weights(module), metrics, seen.batches, steps), folder / f"{rank}.pt")


def watched():
    """The gradients that each optimizer step will use."""
    steps = []

    class Kept(SummarySFT):
        def configure_gradient_clipping(self, *args, **options):
            steps.append({n: v.grad.clone() for n, v in self.named_parameters() if v.requires_grad})
            super().configure_gradient_clipping(*args, **options)

    Fit.kind = Kept
    return steps


DATA = {
    "train": [LedgerSource(5, 1, (3, 3)), LedgerSource(5, 2, (10, 12))],
    "max_length": 2000,
    "val": LedgerSource(5, 4, (3, 4)),
    "prompts": 3,
}
OPTIONS = {"accumulate_grad_batches": 2, "max_epochs": 1, "gradient_clip_val": 1.0}


def test_two_processes_are_one(base, tmp_path, monkeypatch):
    monkeypatch.setattr(Fit, "kind", SummarySFT)  # undone in the end
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)  # ranks would draw from it again
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = get_context("fork")
    workers = [context.Process(target=train, args=(base, tmp_path, r, port)) for r in range(2)]
    for worker in workers:
        worker.start()
    steps = watched()
    module, trainer, seen = Fit(base, tmp_path)(data=DATA | {"batch_size": 2}, **OPTIONS)
    for worker in workers:
        worker.join(600)
        assert worker.exitcode == 0
    (first, metrics, met, shared), (second, others, also_met, _) = (
        torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)
    )
    assert len(met) == len(also_met) == len(seen.batches) == 5
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert len(shared) == len(steps) == 3
    for name, value in steps[0].items():
        torch.testing.assert_close(shared[0][name], value, rtol=1e-4, atol=1e-5)
    # Adam makes a whole step of the sign of almost nothing: weights agree but for a few digits.
    for name, value in trained_weights(module).items():
        assert (first[name] - value).abs().mean() < 1e-3
    for name in metrics.keys() - {"train/loss"}:
        assert metrics[name] == others[name]
        assert metrics[name] == pytest.approx(float(trainer.callback_metrics[name]), rel=1e-2)
    assert {"val/perplexity_thought", "val/well_formed", "val/right"} <= metrics.keys()
