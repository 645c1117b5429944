"""Settings are read, overridden and compared; every configuration is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zoomkv.cli.evaluate import read_settings
from zoomkv.evaluation.budgets import arms_of
from zoomkv.evaluation.settings import Settings, first_difference, tuned_labels

CONFIGS = Path(__file__).parents[2] / "configs" / "eval"
OURS = (
    *("needle", "offline", "offline_smoke"),
    *("findings_fidelity", "findings_prompts", "findings_reasoning", "findings_sweep"),
)


@pytest.mark.parametrize("name", OURS)
def test_every_configuration_can_be_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from zoomkv.evaluation.tasks.registry import options_of

    monkeypatch.chdir(CONFIGS.parents[1])
    settings = read_settings(str(CONFIGS / f"{name}.yaml"))
    assert arms_of(settings)
    for task in settings.tasks:
        assert set(task.options) <= set(options_of(task.task))
    again = Settings.of(
        {name: value for name, value in settings.to_dict().items() if value is not None}
    )
    assert again == settings


def test_the_whole_suite_holds_every_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    from zoomkv.caches.registry import names

    monkeypatch.chdir(CONFIGS.parents[1])
    settings = read_settings(str(CONFIGS / "offline.yaml"))
    assert {arm.policy for arm in settings.policies} == set(names())
    answering = {
        arm.label for task in settings.tasks for n in task.policies for arm in settings.named(n)
    }
    assert answering == {arm.label for arm in settings.policies}
    assert settings.budgets == (0.05, 0.1, 0.2, 0.4)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"polices": []}, "no setting 'polices': did you mean 'policies'"),
        ({"policies": "full"}, "policies: 'full': write a list"),
        ({"policies": []}, "policies: name at least one"),
        ({"policies": [3]}, "policies: 3: write NAME, or policy: NAME"),
        ({"policies": ["h2o", "h2o"]}, "'h2o' is there twice"),
        ({"policies": [{"policy": "h2o", "option": {}}]}, "h2o: no setting 'option'"),
        ({"policies": [{"policy": "h2o", "options": [1]}]}, "options: write NAME: VALUE"),
        ({"policies": [{"policy": "h2o", "budgets": [2.0]}]}, "h2o: budgets: 2.0: give a share"),
        ({"budgets": [0]}, "budgets: 0: give a share in"),
        ({"budgets": [True]}, "budgets: True: give a share in"),
        ({"n": 0}, "n: 0 is no whole number of at least 1"),
        ({"n": "many"}, "n: 'many' is no whole number"),
        ({"seeds": [-1]}, "seeds: -1 is no whole number of at least 0"),
        ({"lengths": [1.5]}, "lengths: 1.5 is no whole number"),
        ({"protocols": ["before"]}, "protocols: 'before': choose from inside, unknown"),
        ({"tasks": [{"task": "needle", "lengths": [0]}]}, "needle: lengths: 0 is no whole"),
        ({"tasks": [{"task": "needle", "policies": ["fll"]}]}, "no policy 'fll': did you mean"),
        ({"model": 3}, "model: 3 is no text"),
        ({"budgets": [float("nan")]}, "budgets: nan: give a share in"),
        ({"budgets": [float("inf")]}, "budgets: inf: give a share in"),
        ({"budgets": [0.1, 0.10]}, "budgets: 0.1 is there twice"),
        ({"seeds": [0, 0]}, "seeds: 0 is there twice"),
        ({"lengths": [512, 1024, 512]}, "lengths: 512 is there twice"),
        ({"protocols": ["inside", "inside"]}, "protocols: 'inside' is there twice"),
        ({"policies": [{"policy": "h2o", "budgets": []}]}, "h2o: budgets: name at least one"),
        ({"policies": [{"policy": "h2o", "match": [3]}]}, "h2o: match: 3 is no text"),
        ({"policies": [{"policy": "h2o", "options": {1: 2}}]}, "h2o 1=2: options: 1 is no text"),
        ({"tasks": [{"task": "needle", "lengths": []}]}, "needle: lengths: name at least one"),
        ({"tasks": [{"task": "ledger", "lengths": [None, None]}]}, "lengths: None is there twice"),
        ({"tasks": [{"task": "needle", "protocols": []}]}, "needle: protocols: name at least"),
        ({"tasks": [{"task": "needle", "policies": [3]}]}, "needle: policies: 3 is no text"),
        ({"tasks": [{"task": "needle", "options": {1: 2}}]}, "needle: options: 1 is no text"),
    ],
)
def test_bad_settings_are_refused_in_one_line(given: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named) as refused:
        Settings.of(given)
    assert "\n" not in str(refused.value)


def test_a_row_and_the_whole_are_two_budgets() -> None:
    assert Settings.of({"budgets": [1, 1.0]}).budgets == (1, 1.0)


def test_files_that_are_no_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    with pytest.raises(ValueError, match="no such file"):
        read_settings(str(path))
    for text, named in (("[1]", "write NAME: VALUE"), ("a: [", "can't be read")):
        path.write_text(text)
        with pytest.raises(ValueError, match=named):
            read_settings(str(path))
    path.write_text("")
    assert read_settings(str(path)) == Settings()


def test_policies_and_tasks_are_chosen_by_label_or_name() -> None:
    settings = Settings.of(
        {
            "policies": [
                "full",
                {"policy": "full", "label": "full (b)", "model": "b"},
                {"policy": "zoomr", "options": {"top_k": 1}},
                {"policy": "zoomr", "options": {"top_k": 2}},
            ],
            "tasks": [
                {"task": "needle", "policies": ["full"]},
                {"task": "ledger", "policies": ["full (b)", "zoomr"]},
            ],
        }
    )
    assert [arm.label for arm in settings.named("full")] == ["full"]
    chosen = settings.with_policies(["zoomr", "h2o"])
    assert [arm.label for arm in chosen.policies] == ["zoomr top_k=1", "zoomr top_k=2", "h2o"]
    assert [(task.name, task.policies) for task in chosen.tasks] == [("ledger", ("zoomr",))]
    assert [task.name for task in settings.with_tasks(["ledger", "needle"]).tasks] == [
        "ledger",
        "needle",
    ]
    assert {arm.model for arm in settings.with_model("c").policies} == {None}


def test_tuned_labels_are_those_of_the_arms() -> None:
    settings = Settings.of(
        {
            "policies": [
                {"policy": "h2o", "options": {"recent": 4}},
                {"policy": "tova", "label": "x"},
                {
                    "policy": "streaming_llm",
                    "label": "tova",
                    "match": ["h2o", "tova", "x", "snapkv"],
                },
                {"policy": "sumr", "match": ["h2o"]},
            ]
        }
    )
    tuned = {arm.label for arm in arms_of(settings) if arm.reference is not None}
    assert tuned_labels(settings.to_dict()) == tuned and len(tuned) == 5
    assert tuned_labels({}) == tuned_labels({"policies": None}) == frozenset()


def test_the_first_difference_is_named() -> None:
    old = {"a": 1, "b": [{"c": 2}], "d": None}
    assert first_difference(old, dict(old)) is None
    assert first_difference(old, {**old, "b": [{"c": 3}]}) == "b[0].c: 2 there, 3 now"
    assert first_difference(old, {**old, "e": 1}) == "e: None there, 1 now"
    assert first_difference(old, {**old, "b": []}) == "b: [{'c': 2}] there, [] now"
