"""Conversations of several turns: what a broken-off turn leaves, and whose stats a turn gives."""

import pytest
import torch
from tests.bases import make_base
from transformers import StoppingCriteria

from zoomkv.backbone.delimiters import add_to_model
from zoomkv.generation import Generator, load

PROMPTS = ["Step 1\n3+4=7", "What is the total?"]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    model, tokenizer = load(make_base(tmp_path_factory.mktemp("base")))
    add_to_model(model, tokenizer)
    return model, tokenizer


class StopsAfter(StoppingCriteria):
    def __init__(self, columns):
        self.columns = columns

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.columns)


def test_a_turn_that_breaks_off_ends_the_conversation(loaded, monkeypatch):
    """Its half would else be taken for the beginning of the next turn."""
    make = Generator(*loaded)
    make.generate(PROMPTS[0], 8)
    stream = make.stream("And then?", 50, follow=True, eos_token_id=[])
    next(stream)
    stream.close()
    assert make.stats is None
    with pytest.raises(ValueError, match="its last turn broke off"):
        make.generate("Why?", 8, follow=True)
    assert make.generate(PROMPTS[0], 8)[0].ids  # a first turn starts anew


def test_a_turn_that_is_refused_does_not(loaded):
    make, other = Generator(*loaded), Generator(*loaded)
    for each in (make, other):
        each.generate(PROMPTS, 8)
    for settings in ({"num_beams": 3}, {"no_such_setting": 1}):
        with pytest.raises(ValueError):
            make.generate(["And then?", "Why?"], 8, follow=True, **settings)
    with pytest.raises(ValueError, match="the prompt is empty"):
        make.generate(["And then?", ""], 8, follow=True)
    with pytest.raises(ValueError, match="1 prompts can't follow 2 conversations"):
        make.generate("Why?", 8, follow=True)
    second = make.generate(["And then?", "Why?"], 8, follow=True)
    assert second == other.generate(["And then?", "Why?"], 8, follow=True)


def test_agreeability_is_of_this_turn(loaded, monkeypatch):
    make = Generator(*loaded, "zoomr", window=8)
    make.generate(PROMPTS[0], 8)
    seen = make.cache.seen
    entries = [
        {"column": seen, "agreeability": 0.25},
        {"column": seen + 20, "agreeability": 0.75},
        {"column": seen + 21, "agreeability": None},
    ]
    monkeypatch.setattr(make.cache, "trace", lambda: entries)
    make.generate("And then?", 8, follow=True)
    assert make.stats.agreeability == 0.75


def test_a_callers_own_stopping_criteria_count_too(loaded):
    make = Generator(*loaded)
    prompt = len(loaded[1](make.render(PROMPTS[0]))["input_ids"])
    [answer] = make.generate(PROMPTS[0], 30, stopping_criteria=[StopsAfter(prompt + 5)])
    assert len(answer.ids) <= 5 and make.stats.tokens == len(answer.ids)


def test_a_stream_ends_at_the_callers_end_token(loaded):
    make = Generator(*loaded)
    [answer] = make.generate(PROMPTS[0], 20)
    end = answer.ids[4]
    at = answer.ids.index(end)
    text = "".join(make.stream(PROMPTS[0], 20, eos_token_id=end))
    assert text == loaded[1].decode(answer.ids[:at])


def test_a_system_prompt_needs_a_chat_template(loaded):
    for options in ({"system": "Be brief."}, {"textual_summaries": True}):
        with pytest.raises(ValueError, match="chat=False leaves no place"):
            Generator(*loaded, chat=False, **options)


def test_a_base_that_moved_needs_an_artifact(tmp_path):
    base = make_base(tmp_path / "base")
    with pytest.raises(ValueError, match="goes with an artifact"):
        load(base, base=base)
