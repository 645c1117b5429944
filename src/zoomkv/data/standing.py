"""Where a training stands in its data, read off the trainer."""

from __future__ import annotations

from typing import Any

from lightning import Trainer


def standing(trainer: Trainer) -> dict[str, int]:
    """The ``epoch``, and how many of its batches to ``skip`` because they were learnt.

    What counts is what went into an optimizer step, not what workers have fetched.
    """
    loop: Any = trainer.fit_loop
    learnt = loop.epoch_loop.batch_progress.current.processed
    if learnt >= trainer.num_training_batches:
        return {"epoch": loop.epoch_progress.current.started, "skip": 0}
    skip = learnt - learnt % trainer.accumulate_grad_batches
    return {"epoch": loop.epoch_progress.current.started - 1, "skip": skip}


def check_sampler(trainer: Trainer) -> None:
    """Refuses Lightning's own sampler.

    Raises:
        ValueError: It is on, with several processes.
    """
    if trainer.world_size > 1 and trainer._accelerator_connector.use_distributed_sampler:
        raise ValueError(
            "trainer.use_distributed_sampler: switch it off; batches are shared out by our own "
            "sampler"
        )
