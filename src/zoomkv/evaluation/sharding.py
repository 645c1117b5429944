"""One run by several processes: who answers what, and how the parts become one file.

Units of work (a question under all policies, or a batch under one) go round by their numbers. Each
process writes a part of its own, which it can go on with; the parts are then strung together in the
order in which one process would have written them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from glob import escape
from pathlib import Path
from typing import Any

from zoomkv.evaluation.results import key_of, timing_path, whole_lines
from zoomkv.evaluation.writing import write_whole

Line = dict[str, Any]


@dataclass(frozen=True)
class Share:
    """The place of a process among all of a run."""

    rank: int = 0
    world: int = 1
    agree: Callable[[Any], Any] = lambda value: value
    """Gives everyone what the first process has."""
    wait: Callable[[], None] = lambda: None
    """Returns when everyone has come so far."""

    def has(self, number: int) -> bool:
        """Whether a unit is this process's."""
        return number % self.world == self.rank


ALONE = Share()


def launch(devices: int, num_nodes: int, accelerator: str = "auto") -> tuple[Share, str]:
    """Starts the processes of this machine, or joins those that torchrun or SLURM has started.

    Args:
        devices: Processes of each machine, one for each device.
        num_nodes: Machines.
        accelerator: ``auto``, ``cpu`` or ``cuda``.

    Returns:
        This process's share, and its device.
    """
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    # Only words are exchanged, and some processes may be done days before others.
    strategy = DDPStrategy(process_group_backend="gloo", timeout=timedelta(days=30))
    fabric = Fabric(
        accelerator=accelerator, devices=devices, num_nodes=num_nodes, strategy=strategy
    )
    fabric.launch()
    share = Share(fabric.global_rank, fabric.world_size, fabric.broadcast, fabric.barrier)
    return share, str(fabric.device)


def part_path(out: Path, share: Share) -> Path:
    """Where a process writes."""
    if share.world == 1:
        return out
    return out.with_name(f"{out.stem}.part-{share.rank + 1}-of-{share.world}.jsonl")


def refuse_other_parts(out: Path, share: Share) -> None:
    """Refuses to begin a run beside parts of itself that other processes would go on with.

    Raises:
        ValueError: Says with how many processes it was begun.
    """
    pattern = f"{escape(out.stem)}.part-*-of-*.jsonl"
    others = {
        path.stem.rpartition("-")[2]
        for path in out.parent.glob(pattern)
        if not path.name.endswith(".timing.jsonl")
    } - {str(share.world)}
    if others:
        raise ValueError(
            f"{out}: {sorted(others)[0]} processes began this run: let as many go on with it, "
            f"or remove {pattern}"
        )
    if share.world > 1 and out.exists():
        raise ValueError(
            f"{out}: one process wrote it, or it is done: go on without --devices and --num-nodes, "
            "or name another --out"
        )


def merge(out: Path, share: Share) -> None:
    """Writes the results and timings of all parts in the order of one process; the parts go."""
    paths = [part_path(out, Share(rank, share.world)) for rank in range(share.world)]
    first: list[Line] = []
    units: dict[int, list[Line]] = {}
    timings: dict[tuple[str, ...], Line] = {}
    for path in paths:
        lines = first
        for line in whole_lines(path.read_bytes(), path)[0]:
            if line["kind"] == "unit":
                lines = units.setdefault(line["number"], [])
            elif path is paths[0] or line["kind"] == "answer":
                lines.append(line)
        for line in whole_lines(timing_path(path).read_bytes(), timing_path(path))[0]:
            timings[key_of(line)] = line
    answers = [line for number in sorted(units) for line in units[number]]
    known = [timings[key_of(line)] for line in answers if key_of(line) in timings]
    write_whole(timing_path(out), known)
    write_whole(out, first + answers)
    for path in paths:
        path.unlink()
        timing_path(path).unlink()
