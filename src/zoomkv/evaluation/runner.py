"""Policies, budgets, tasks, lengths and seeds in one run, which goes on where it was stopped."""

from __future__ import annotations

import gc
import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zoomkv import __version__
from zoomkv.backbone.fingerprint import fingerprint
from zoomkv.caches.registry import make_cache
from zoomkv.evaluation.budgets import Arm, arms_of
from zoomkv.evaluation.cells import Cell, Unit
from zoomkv.evaluation.checks import check_arms, check_full
from zoomkv.evaluation.results import FORMAT, check_fields, header_of, timing_path
from zoomkv.evaluation.settings import Settings, TaskSettings, first_difference
from zoomkv.evaluation.sharding import ALONE, Share, merge, part_path, refuse_other_parts
from zoomkv.evaluation.tasks.registry import task as make_task
from zoomkv.evaluation.writing import LineFile
from zoomkv.export.artifact import is_artifact, read_artifact
from zoomkv.generation import load

Line = dict[str, Any]
Loader = Callable[[str], tuple[Any, Any]]
Watch = Callable[[str, int], None]
"""Called with what is being done, and how many answers have come in since the last call."""


class CheckFailed(Exception):
    """A check did not hold, so there are no figures; the message says which one."""


@dataclass
class Models:
    """One model at a time, loaded when it is asked for."""

    loader: Loader
    _name: str | None = None
    _loaded: Any = None

    def get(self, name: str) -> tuple[Any, Any]:
        """``(model, tokenizer)``; the model before goes."""
        if self._name != name:
            self._loaded = self._name = None
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self._loaded, self._name = self.loader(name), name
        return self._loaded

    def fingerprint(self, name: str) -> dict[str, Any]:
        """What identifies a model: its base, and what was trained on it."""
        if not is_artifact(name):
            return fingerprint(self.get(name)[0])
        sha = hashlib.sha256()
        for path in sorted(Path(name).rglob("*.safetensors")):
            sha.update(path.read_bytes())
        return {**read_artifact(name).fingerprint, "trained": sha.hexdigest()[:32]}


def evaluate(
    settings: Settings,
    out: Path,
    device: str = "auto",
    share: Share = ALONE,
    watch: Watch = lambda what, answers: None,
    loader: Loader | None = None,
) -> None:
    """Answers everything that a results file lacks.

    Args:
        settings: What is compared with what on what.
        out: The results file; several processes write parts beside it first, which are merged.
        device: Of the models.
        share: Which part of the work is this process's.
        watch: Sees the progress.
        loader: Gives model and tokenizer by name, if not ``zoomkv.load``.

    Raises:
        ValueError: Bad settings, or a file that holds a run with others.
        CheckFailed: See there. The results file holds the checks.
        OSError: The disk is full.
    """
    arms = [
        arm
        for arm in arms_of(settings)
        if any(_answers(arm, given, settings) for given in settings.tasks)
    ]
    if not arms:
        raise ValueError("policies: none of them answers any of the tasks")
    tasks = [(given, make_task(given.task, **given.options)) for given in settings.tasks]
    precision: Any = settings.precision  # load says which there are
    models = Models(loader or (lambda name: load(name, precision, device)))
    names = list(dict.fromkeys(arm.model for arm in arms))
    header: Line = {
        "kind": "header",
        "format": FORMAT,
        "zoomkv": __version__,
        "model": settings.model,
        # Backwards, so that the model that is loaded last is the one that is needed first.
        "fingerprint": {name: models.fingerprint(name) for name in reversed(names)},
        "settings": settings.to_dict(),
    }
    refuse_other_parts(out, share)
    path = part_path(out, share)
    with LineFile(path) as file, LineFile(timing_path(path)) as timings:
        _begin(file, header)
        run = _Run(settings, arms, tasks, models, names, watch)
        standing = deque(run.check(file, share))
        for number, unit in enumerate(run.units()):
            if share.has(number):
                _answer(unit, number if share.world > 1 else None, standing, file, timings, run)
        if standing:
            raise ValueError(f"{path}: it holds answers that this run does not ask for")
    share.wait()
    if share.world > 1 and share.rank == 0:
        merge(out, share)
    share.wait()


def _begin(file: LineFile, header: Line) -> None:
    """Writes the header, or compares it with the one that stands before answers."""
    if file.lines:
        there = header_of(file.lines, file.path)
        check_fields(file.lines, file.path)
        if any(line["kind"] != "check" for line in file.lines[1:]):
            compare_headers(there, header, file.path)
            return
        file.keep(0)  # settings that were refused, or failed a check, bind nobody
    file.append([header])
    file.lines = [header]


def compare_headers(there: Line, now: Line, path: Path) -> None:
    """Refuses to mix runs.

    Raises:
        ValueError: Names the first setting that differs.
    """
    for part in ("zoomkv", "settings", "model", "fingerprint"):
        name = "" if part == "settings" else part
        if difference := first_difference(there.get(part), now[part], name):
            raise ValueError(
                f"{path}: holds a run with other settings ({difference}): name another --out"
            )


@dataclass
class _Run:
    settings: Settings
    arms: Sequence[Arm]
    tasks: Sequence[tuple[TaskSettings, Any]]
    models: Models
    names: Sequence[str]
    watch: Watch
    cell: Cell | None = None

    def check(self, file: LineFile, share: Share) -> list[Line]:
        """Checks what has not been checked; gives the lines that stand behind the checks.

        Checks count only with an answer, or a unit of answers, behind them: a run that was stopped
        in their midst makes them anew, and so does one that is run again after one has failed.
        """
        behind = [line for line in file.lines[1:] if line["kind"] != "check"]
        failed = None
        if share.rank == 0 and not behind:
            file.keep(1)
            checks = list(self._checks())
            file.append(checks)
            failed = next((check for check in checks if not check["ok"]), None)
        failed = share.agree(failed)
        if failed is not None:
            raise CheckFailed(
                f"a check failed, so there are no figures: {failed['policy']}: {failed['what']}: "
                f"not so ({failed['detail']})"
            )
        return behind

    def _checks(self) -> Iterator[Line]:
        for name in self.names:
            model, tokenizer = self.models.get(name)
            self.watch(f"checks of {name}", 0)
            arms = [arm for arm in self.arms if arm.model == name]
            for arm in arms:  # options that can't be had are told before anything is answered
                if arm.reference is None:
                    for budget in arm.budgets:
                        self._probe(arm, budget, model, tokenizer)
            cells = sorted(self._cells(name), key=lambda cell: cell.length or 0)
            for cell in cells:
                cell.try_one()
            ids = torch.tensor([cells[0].first_ids()], device=model.device)
            yield check_full(model, tokenizer, ids)
            yield from check_arms(model, tokenizer, [a for a in arms if a.reference is None], ids)

    def _probe(self, arm: Arm, budget: Any, model: Any, tokenizer: Any) -> None:
        try:
            make_cache(arm.policy, model, tokenizer, **arm.at(budget))
        except ValueError as error:
            raise ValueError(f"policies: {arm.label}: {error}") from error

    def units(self) -> Iterator[Unit]:
        """All units, in the order of the results."""
        for name in self.names:
            for cell in self._cells(name):
                self.cell = cell
                yield from cell.units()

    def _cells(self, name: str) -> Iterator[Cell]:
        model, tokenizer = self.models.get(name)
        for given, task in self.tasks:
            arms = [
                arm
                for arm in self.arms
                if arm.model == name and _answers(arm, given, self.settings)
            ]
            lengths = self.settings.lengths if given.lengths is None else given.lengths
            for length in lengths if arms else ():
                for seed in self.settings.seeds:
                    yield Cell(
                        given=given,
                        task=task,
                        length=length,
                        seed=seed,
                        n=given.n or self.settings.n,
                        batch_size=given.batch_size or self.settings.batch_size,
                        protocols=given.protocols or self.settings.protocols,
                        arms=arms,
                        model=model,
                        tokenizer=tokenizer,
                    )


def _answers(arm: Arm, task: TaskSettings, settings: Settings) -> bool:
    """Whether an arm answers a task; one that is tuned goes with its reference."""
    own = arm.label if arm.reference is None else arm.reference
    named = [known.label for name in task.policies for known in settings.named(name)]
    return not task.policies or own in named


def _answer(
    unit: Unit,
    number: int | None,
    standing: deque[Line],
    file: LineFile,
    timings: LineFile,
    run: _Run,
) -> None:
    """Answers what is missing of a unit.

    Args:
        unit: What to answer.
        number: Of the unit, where parts are to be merged.
        standing: Lines that are there and have not been looked at yet; those of the unit go.
        file: Where answers go.
        timings: Where timings go.
        run: Whose unit it is.
    """
    if number is not None:
        if not standing:
            file.append([{"kind": "unit", "number": number}])
        elif standing.popleft() != {"kind": "unit", "number": number}:
            raise ValueError(f"{file.path}: it holds answers that this run does not ask for")
    assert run.cell is not None
    done = 0
    for key in unit.keys:
        if not standing or standing[0]["kind"] != "answer":
            break
        line = standing.popleft()
        if any(repr(line.get(name)) != repr(value) for name, value in key.items()):
            raise ValueError(
                f"{file.path}: it holds an answer of {line.get('label')} to {line.get('id')} where "
                f"this run has one of {key['label']} to {key['id']}: name another --out"
            )
        run.cell.remember(line)
        done += 1
    run.watch(run.cell.name, done)
    if done == len(unit.keys):
        return
    for answered in unit.answers(done):
        file.append([line for line, _ in answered])
        timings.append([timing for _, timing in answered])
        run.watch(run.cell.name, len(answered))
