"""What an evaluation is to do: settings from YAML, overridden by options. Imports nothing heavy."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, TypeVar, get_args

Protocol = Literal["inside", "unknown"]
T = TypeVar("T")


def _check_count(name: str, value: Any, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}: {value!r} is no whole number of at least {least}")


def _check_budgets(name: str, budgets: Sequence[Any]) -> None:
    for budget in budgets:
        number = isinstance(budget, int | float) and not isinstance(budget, bool)
        if not number or not (budget > 0 and (isinstance(budget, int) or budget <= 1)):  # NaN too
            raise ValueError(f"{name}: {budget!r}: give a share in (0, 1], or rows")
    _check_once(name, budgets)


def _check_protocols(name: str, protocols: Sequence[Any]) -> None:
    for protocol in protocols:
        if protocol not in get_args(Protocol):
            known = ", ".join(get_args(Protocol))
            raise ValueError(f"{name}: {protocol!r}: choose from {known}")
    _check_once(name, protocols)


def _check_once(name: str, values: Sequence[Any]) -> None:
    """The same answer twice would count twice. 1 row is not 1.0, the whole."""
    told = [repr(value) for value in values]
    twice = next((each for each in told if told.count(each) > 1), None)
    if twice is not None:
        raise ValueError(f"{name}: {twice} is there twice: name each once")


def _check_given(name: str, values: Sequence[Any] | None) -> None:
    if values is not None and not values:
        raise ValueError(f"{name}: name at least one, or leave it out")


def _check_texts(name: str, values: Sequence[Any]) -> None:
    for value in values:
        if not isinstance(value, str):
            raise ValueError(f"{name}: {_short(value)} is no text")


def _check_distinct(name: str, labels: list[str], which: str) -> None:
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise ValueError(f"{name}: {twice!r} is there twice: give one of them another {which}")


@dataclass(frozen=True)
class ArmSettings:
    """One policy of a comparison."""

    policy: str
    """Its registered name."""
    options: dict[str, Any] = field(default_factory=dict)
    """Where they differ from the defaults; for an artifact's own policy, from the artifact's."""
    label: str = ""
    """How tables name it; by default the policy and its options."""
    model: str | None = None
    """An artifact or base of its own, if not the run's."""
    budgets: tuple[int | float, ...] | None = None
    """Instead of the run's."""
    match: tuple[str, ...] = ()
    """Policies that also run at this arm's bytes, on its model."""

    def __post_init__(self) -> None:
        if not self.label:
            told = [f"{name}={value}" for name, value in self.options.items()]
            object.__setattr__(self, "label", " ".join([self.policy, *told]))
        where = f"policies: {self.label}"
        _check_given(f"{where}: budgets", self.budgets)
        _check_budgets(f"{where}: budgets", self.budgets or ())
        _check_texts(f"{where}: match", self.match)
        _check_texts(f"{where}: options", list(self.options))


@dataclass(frozen=True)
class TaskSettings:
    """One task of a comparison."""

    task: str
    """Its registered name."""
    options: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    """How results name it; by default the task's own name."""
    n: int | None = None
    """Questions, instead of the run's."""
    lengths: tuple[int | None, ...] | None = None
    """Instead of the run's; ``[null]`` for a task that has no length."""
    batch_size: int | None = None
    """Instead of the run's."""
    protocols: tuple[Protocol, ...] | None = None
    """Instead of the run's."""
    max_new_tokens: int | None = None
    """Longest answer, instead of the task's own."""
    policies: tuple[str, ...] = ()
    """Labels or policies that answer it; all, if none are named."""

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", self.task)
        where = f"tasks: {self.name}"
        for name in ("n", "batch_size", "max_new_tokens"):
            if getattr(self, name) is not None:
                _check_count(f"{where}: {name}", getattr(self, name))
        for name in ("lengths", "protocols"):
            _check_given(f"{where}: {name}", getattr(self, name))
        for length in self.lengths or ():
            if length is not None:
                _check_count(f"{where}: lengths", length)
        _check_once(f"{where}: lengths", self.lengths or ())
        _check_protocols(f"{where}: protocols", self.protocols or ())
        _check_texts(f"{where}: policies", self.policies)
        _check_texts(f"{where}: options", list(self.options))


@dataclass(frozen=True)
class Settings:
    """All that decides the figures of an evaluation."""

    model: str = "smollm2-135m"
    """An artifact or a base model."""
    precision: str = "fp32"
    """Of the base."""
    policies: tuple[ArmSettings, ...] = (ArmSettings("full"),)
    budgets: tuple[int | float, ...] = (0.1,)
    """Shares of full KV, or rows, for each policy that has a budget."""
    tasks: tuple[TaskSettings, ...] = (TaskSettings("needle"),)
    lengths: tuple[int, ...] = (1024,)
    """Tokens of prompts."""
    protocols: tuple[Protocol, ...] = ("unknown", "inside")
    """When the question comes, where a prompt is a text and then a question."""
    n: int = 10
    """Questions for each task, length and seed."""
    seeds: tuple[int, ...] = (0,)
    batch_size: int = 8
    """Of tasks whose answers are longer than their prompts. Long prompts are read once, for all
    policies, and answered one by one; so is every task whose ``batch_size`` is 1."""

    def __post_init__(self) -> None:
        for name in ("policies", "tasks", "lengths", "protocols", "seeds"):
            if not getattr(self, name):
                raise ValueError(f"{name}: name at least one")
        for name in ("n", "batch_size"):
            _check_count(name, getattr(self, name))
        for length in self.lengths:
            _check_count("lengths", length)
        for seed in self.seeds:
            _check_count("seeds", seed, least=0)
        for name in ("lengths", "seeds"):
            _check_once(name, getattr(self, name))
        _check_protocols("protocols", self.protocols)
        _check_budgets("budgets", self.budgets)
        _check_distinct("policies", [arm.label for arm in self.policies], "label")
        _check_distinct("tasks", [task.name for task in self.tasks], "name")
        self._check_named()

    @classmethod
    def of(cls, given: Mapping[str, Any], where: str = "settings") -> Settings:
        """Settings from what a YAML file holds.

        Policies and tasks may be plain names.

        Raises:
            ValueError: An unknown setting, or a value of another kind.
        """
        found = dict(given)
        _check_names(cls, found, where)
        for name, kind, first in (
            ("policies", ArmSettings, "policy"),
            ("tasks", TaskSettings, "task"),
        ):
            if name in found:
                found[name] = tuple(
                    _part(kind, first, each, f"{where}: {name}")
                    for each in _listed(found[name], f"{where}: {name}")
                )
        return _made(cls, found, where)

    def named(self, name: str) -> list[ArmSettings]:
        """The policy of that label, or else all of that registered name."""
        labelled = [arm for arm in self.policies if arm.label == name]
        return labelled or [arm for arm in self.policies if arm.policy == name]

    def with_policies(self, names: Sequence[str | ArmSettings]) -> Settings:
        """Only these policies: the arms of that label or policy, or the policy with its defaults.

        What is an arm already stays as it is.

        Tasks that name policies keep those that are left; tasks with none left are dropped.
        """
        arms: list[ArmSettings] = []
        for name in names:
            if isinstance(name, ArmSettings):
                known = [name]
            else:
                known = self.named(name) or [ArmSettings(name)]
            arms += [arm for arm in known if arm not in arms]
        tasks = []
        for task in self.tasks:
            kept = tuple(n for n in task.policies if any(arm in arms for arm in self.named(n)))
            if kept or not task.policies:
                tasks.append(replace(task, policies=kept))
        return replace(self, policies=tuple(arms), tasks=tuple(tasks))

    def with_tasks(self, names: Sequence[str]) -> Settings:
        """Only these tasks: those of that name, or the task with its defaults."""
        tasks: list[TaskSettings] = []
        for name in names:
            known = [task for task in self.tasks if name in (task.name, task.task)]
            tasks += [task for task in known or [TaskSettings(name)] if task not in tasks]
        return replace(self, tasks=tuple(tasks))

    def with_model(self, model: str) -> Settings:
        """Everything on this model, also what has one of its own."""
        arms = tuple(replace(arm, model=None) for arm in self.policies)
        return replace(self, model=model, policies=arms)

    def with_budgets(self, budgets: Sequence[int | float]) -> Settings:
        """These budgets, also for what has some of its own."""
        arms = tuple(
            arm if arm.budgets is None else replace(arm, budgets=tuple(budgets))
            for arm in self.policies
        )
        return replace(self, budgets=tuple(budgets), policies=arms)

    def with_lengths(self, lengths: Sequence[int]) -> Settings:
        """These lengths, for every task that has any."""
        tasks = tuple(
            task if task.lengths and None in task.lengths else replace(task, lengths=None)
            for task in self.tasks
        )
        return replace(self, lengths=tuple(lengths), tasks=tasks)

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, as JSON gives them back."""
        return _plain(asdict(self))

    def _check_named(self) -> None:
        known = list(dict.fromkeys(w for arm in self.policies for w in (arm.label, arm.policy)))
        for task in self.tasks:
            for wanted in task.policies:
                if not self.named(wanted):
                    raise ValueError(
                        f"tasks: {task.name}: no policy {wanted!r}{hint(wanted, known)}"
                    )


def tuned_label(label: str, reference: str) -> str:
    """How tables name an arm that is tuned to another's bytes."""
    return f"{label} at {reference}'s bytes"


def tuned_labels(settings: Mapping[str, Any]) -> frozenset[str]:
    """The labels of all arms that are tuned to another's bytes, from what ``to_dict`` gives."""
    arms = settings.get("policies") or ()
    found = set()
    for reference in arms:
        for policy in reference.get("match") or ():
            labelled = [arm["label"] for arm in arms if arm["label"] == policy]
            named = labelled or [arm["label"] for arm in arms if arm["policy"] == policy]
            found.add(tuned_label((named or [policy])[0], reference["label"]))
    return frozenset(found)


def first_difference(old: Any, new: Any, name: str = "") -> str | None:
    """One line that names the first setting in which two dictionaries differ, or None."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            inner = f"{name}.{key}" if name else str(key)
            if found := first_difference(old.get(key), new.get(key), inner):
                return found
        return None
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for at, (one, other) in enumerate(zip(old, new, strict=True)):
            if found := first_difference(one, other, f"{name}[{at}]"):
                return found
        return None
    return None if old == new else f"{name}: {_short(old)} there, {_short(new)} now"


def hint(name: str, known: Sequence[str]) -> str:
    """What may have been meant, to end an error with."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    listed = f"there are: {', '.join(known)}"
    return f": did you mean {near[0]!r}? ({listed})" if near else f"; {listed}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _part(kind: type[T], first: str, given: Any, where: str) -> T:
    if isinstance(given, str):
        given = {first: given}
    if not isinstance(given, dict) or not isinstance(given.get(first), str):
        raise ValueError(f"{where}: {_short(given)}: write NAME, or {first}: NAME and more")
    where = f"{where}: {given[first]}"
    _check_names(kind, given, where)
    if not isinstance(given.get("options", {}), dict):
        raise ValueError(f"{where}: options: write NAME: VALUE pairs")
    return _made(kind, dict(given), where)


def _made(kind: type[T], given: dict[str, Any], where: str) -> T:
    """An instance whose lists are tuples, after a check of what each field may be."""
    for each in fields(kind):  # type: ignore[arg-type]
        if each.name not in given:
            continue
        value, wanted = given[each.name], str(each.type)
        if value is None and "None" in wanted:
            continue
        if wanted.startswith("tuple"):
            given[each.name] = tuple(_listed(value, f"{where}: {each.name}"))
        elif wanted.startswith("str") and not isinstance(value, str):
            raise ValueError(f"{where}: {each.name}: {_short(value)} is no text")
    return kind(**given)


def _listed(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where}: {_short(value)}: write a list")
    return list(value)


def _check_names(kind: type, given: Mapping[str, Any], where: str) -> None:
    known = [each.name for each in fields(kind)]
    for name in given:
        if name not in known:
            raise ValueError(f"{where}: no setting {name!r}{hint(str(name), known)}")
