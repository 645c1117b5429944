"""Tasks by name: what is listed can be made, and what is mistyped is met with the nearest name."""

import subprocess
import sys

import pytest

from zoomkv.evaluation.tasks.base import Measure
from zoomkv.evaluation.tasks.registry import TASKS, names, options_of, task

CODE = """
import sys
from zoomkv.evaluation.tasks.registry import names
names()
heavy = ("torch", "transformers", "lightning", "lm_eval", "datasets", "reasoning_gym")
print([name for name in heavy if name in sys.modules])
"""


def test_listing_imports_nothing_heavy():
    found = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
    assert names() == sorted(TASKS)


@pytest.mark.parametrize("name", ["common_words", "frequent_words", "ledger", "needle"])
def test_every_option_has_a_default_and_may_be_given(name):
    made = task(name, **options_of(name))
    assert callable(made.questions) and not isinstance(made, Measure)


def test_fidelity_measures():
    assert isinstance(task("fidelity"), Measure)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("needel", {}, "unknown task 'needel': did you mean 'needle'"),
        ("qqq", {}, "unknown task 'qqq'; there are: "),
        ("needle", {"depth": 1}, "task 'needle' has no option 'depth': did you mean 'depths'"),
        ("needle", {"kinds": ["double"]}, "^task 'needle': needle kind='double': choose one of"),
        ("needle", {"kinds": "single"}, "kinds='single': give a list"),
        ("needle", {"kinds": []}, "give a list of at least one"),
        ("needle", {"depths": [20, 101]}, r"needle depths=\(101.0,\): give 1 from 0 to 100"),
        ("needle", {"haystack": "/nowhere"}, "there is no such file"),
        ("needle", {"depths": 5}, "^task 'needle': depths=5: one is of the wrong kind"),
        ("ledger", {"steps": 5}, "^task 'ledger': steps=5: one is of the wrong kind"),
        ("ledger", {"asked": 4}, "^task 'ledger': ledger asked=4"),
        ("variable_tracking", {"hops": 0}, "^task 'variable_tracking': variable tracking chains"),
        ("common_words", {"repeats": (3, 3)}, "must come more often"),
        ("frequent_words", {"alpha": 0.5}, "alpha=0.5"),
        ("fidelity", {"tokens": 0}, "tokens=0, width=16: choose at least 1"),
        ("fidelity", {"texts": "fidelity"}, "texts='fidelity': choose another"),
        ("fidelity", {"texts": "/nowhere"}, "there is no such file"),
    ],
)
def test_bad_input(name, options, message):
    with pytest.raises(ValueError, match=message):
        task(name, **options)
