"""Rendered traces: what is learnt, what is not, and where a long trace is cut."""

import pytest
from tests.bases import SHORT, make_tokenizer

from zoomkv.backbone.delimiters import add_to_tokenizer
from zoomkv.data.ledger import ledger
from zoomkv.data.render import IGNORE, PROMPT, SOLUTION, SUMMARY, THOUGHT, Renderer
from zoomkv.data.traces import Segment, Trace

TRACE = Trace(
    "What is 2+3?",
    (Segment("First I add.\n\n$$x$$", "adding"), Segment("Then 2+3=5", "5"), Segment("Done.")),
    "It is 5.\nAnswer: 5",
)


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = make_tokenizer()
    add_to_tokenizer(tokenizer)
    return tokenizer


def said(renderer, example, *kinds):
    ids = [token for token, kind in zip(example.input_ids, example.kinds, strict=True)
           if kind in kinds]  # fmt: skip
    return renderer.tokenizer.decode(ids)


def test_layout_to_the_letter(tokenizer):
    renderer = Renderer(tokenizer)
    example = renderer(TRACE)
    assert tokenizer.decode(example.input_ids) == (
        "<|im_start|>user\nWhat is 2+3?<|im_end|>\n<|im_start|>assistant\n"
        "First I add.\n\n$$x$$\n\n<|begin_of_summary|>adding<|end_of_summary|>\n\n"
        "Then 2+3=5\n\n<|begin_of_summary|>5<|end_of_summary|>\n\n"
        "Done.\n\n"
        "It is 5.\nAnswer: 5<|im_end|>"
    )
    assert said(renderer, example, SUMMARY) == (
        "<|begin_of_summary|>adding<|end_of_summary|><|begin_of_summary|>5<|end_of_summary|>"
    )
    assert said(renderer, example, THOUGHT) == (
        "First I add.\n\n$$x$$\n\n\n\nThen 2+3=5\n\n\n\nDone.\n\n"
    )
    assert said(renderer, example, SOLUTION) == "It is 5.\nAnswer: 5<|im_end|>"
    supervised = [token for token in example.labels if token != IGNORE]
    assert tokenizer.decode(supervised) == said(renderer, example, THOUGHT, SUMMARY, SOLUTION)


@pytest.mark.parametrize("problem", ["2", "2 ", "2\n", "2\n\n", "  2", "Step 2\n\n"])
def test_the_prompt_is_tokenised_as_generation_does_it(tokenizer, problem):
    """A merge across the join would make the model meet other ids than it learnt from."""
    renderer = Renderer(tokenizer)
    example = renderer(Trace(problem, (Segment("\n\nStep 1"),), "x"))
    prompt = tokenizer(renderer.prompt(problem), add_special_tokens=False)["input_ids"]
    assert example.input_ids[: len(prompt)] == prompt
    assert example.kinds.count(PROMPT) == len(prompt)
    assert all(label == IGNORE for label in example.labels[: len(prompt)])
    assert IGNORE not in example.labels[len(prompt) :]


def test_pad_may_be_the_end_of_text(tokenizer):
    same = make_tokenizer(pad="<|im_end|>")
    add_to_tokenizer(same)
    example = Renderer(same)(TRACE)
    assert same.pad_token_id == same.eos_token_id == example.labels[-1]


@pytest.mark.parametrize(
    "text", ["émoji 😀🎉", "سلام دنیا", "漢字かな", "a\u2028b\u0085c", "a\r\nb"]
)
def test_any_text_comes_back(tokenizer, text):
    trace = Trace(text, (Segment(text, text),), text)
    renderer = Renderer(tokenizer)
    example = renderer(trace)
    assert said(renderer, example, SOLUTION) == text + "<|im_end|>"
    assert text in said(renderer, example, THOUGHT)
    assert text in said(renderer, example, SUMMARY)


def test_every_limit_cuts_at_a_paragraph_end_or_drops(tokenizer):
    trace = ledger(3, SHORT)
    whole = Renderer(tokenizer)(trace)
    text = tokenizer.decode(whole.input_ids)
    prompt = whole.kinds.count(PROMPT)
    begun = len(tokenizer.decode(whole.input_ids[:prompt]))
    offsets = tokenizer(text[begun:], add_special_tokens=False, return_offsets_mapping=True)
    ends = {len(whole.input_ids)}
    for segment in trace.segments:
        upto = text.index(f"{segment.summary}<|end_of_summary|>\n\n")
        upto += len(f"{segment.summary}<|end_of_summary|>\n\n")
        ends.add(prompt + sum(begun + a < upto for a, _ in offsets["offset_mapping"]))
    for limit in range(2, len(whole.input_ids) + 2):
        renderer = Renderer(tokenizer, limit)
        example = renderer(trace)
        fitting = [end for end in ends if prompt < end <= limit]
        if not fitting:
            assert example is None
            assert renderer.report.counts == {"dropped: first paragraph does not fit": 1}
            continue
        assert example.input_ids == whole.input_ids[: max(fitting)]
        assert example.kinds == whole.kinds[: max(fitting)]
        assert renderer.report.counts["cut at a paragraph"] == (max(fitting) < max(ends))
        delimiters = tokenizer.convert_tokens_to_ids(["<|begin_of_summary|>", "<|end_of_summary|>"])
        assert len({example.input_ids.count(delimiter) for delimiter in delimiters}) == 1


def test_thought_tags_are_written_once(tokenizer):
    tags = ("<think>\n", "</think>\n\n")
    plain = Renderer(tokenizer, thought_tags=tags)
    example = plain(TRACE)
    assert said(plain, example, THOUGHT).startswith("<think>\nFirst")
    assert said(plain, example, THOUGHT).endswith("Done.\n\n</think>\n\n")

    opening = make_tokenizer()  # as R1's does: the template opens the thought itself
    opening.chat_template = opening.chat_template.replace("assistant\n", "assistant\n<think>\n")
    add_to_tokenizer(opening)
    renderer = Renderer(opening, thought_tags=tags)
    assert opening.decode(renderer(TRACE).input_ids).count("<think>") == 1


def test_rows_that_teach_nothing_or_forge_a_delimiter_are_counted(tokenizer):
    renderer = Renderer(tokenizer)
    forged = "<|begin_of_summary|>"
    traces = [
        TRACE,
        Trace("q", (), ""),
        Trace(f"say {forged}", (Segment("a", "b"),), "c"),
        Trace("q", (Segment(f"a {forged}", "b"),), "c"),
        Trace("q", (Segment("a", f"b {forged}"),), "c"),
        Trace("q", (Segment("a", "b"),), "c <|im_end|>"),
    ]
    assert sum(renderer(trace) is not None for trace in traces) == 1
    assert str(renderer.report) == (
        "1 dropped: empty, 4 dropped: special token in the text, 1 rendered"
    )


def test_a_solution_alone_and_a_thought_without_summaries(tokenizer):
    renderer = Renderer(tokenizer)
    alone = renderer(Trace("q", (), "just so"))
    assert said(renderer, alone, THOUGHT) == "" and SUMMARY not in alone.kinds
    raw = renderer(Trace("q", (Segment("a"), Segment("b")), "c"))
    assert said(renderer, raw, THOUGHT) == "a\n\nb\n\n" and SUMMARY not in raw.kinds


def test_a_limit_too_small_is_refused(tokenizer):
    with pytest.raises(ValueError, match="max_length=1"):
        Renderer(tokenizer, 1)
