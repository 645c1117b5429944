"""Asked documents: every answer is read off the text again, and lengths are met piece by piece."""

import re
from importlib.util import find_spec

import pytest

from zoomkv.data.asked import AskedText, LedgerQuestions, NeedleQuestions
from zoomkv.data.long_text import StdlibText
from zoomkv.data.needles import NOISE, haystack

FACT = re.compile(r"One of the special magic (\w+) for (\S+) is: (\S+)\.")
KINDS = ("single", "multi-key", "multi-value", "multi-query")
needs_book = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="no reasoning-gym")


def words(texts):
    return [len(text.split()) for text in texts]


@pytest.fixture
def story(tmp_path):
    """A file whose sentences are numbered."""
    path = tmp_path / "story.txt"
    path.write_text("\n".join(f"Sentence {n} ends here." for n in range(50)), encoding="utf-8")
    return str(path)


def needles_of(text):
    """Values by key, in the order of the text."""
    found = {}
    for _, key, value in FACT.findall(text):
        found.setdefault(key, []).append(value)
    return found


def asked_keys(question):
    subject = re.search(r" for (.*) mentioned in the provided text\?$", question)[1]
    return subject.replace(", and ", ", ").split(", ")


@pytest.mark.parametrize("among", ["noise", "needles", "story"])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_the_text(kind, among, story):
    source = NeedleQuestions(3, [kind], [story if among == "story" else among], (4, 9))
    for number in range(12):
        one = source.asked(number, 700, words)
        solid = one.text[: one.solid]
        found = needles_of(solid)
        assert needles_of(one.text) == found  # what may be cut off is no needle
        values = [value for of_key in found.values() for value in of_key]
        assert len(set(values)) == len(values)
        every = []
        for question, answer in one.turns:
            keys = asked_keys(question)
            expected = [value for key in keys for value in found[key]]
            opening, _, given = answer.rpartition(" is " if len(expected) == 1 else " are ")
            assert given.rstrip(".").replace(", and ", ", ").split(", ") == expected
            assert opening[1:] in question and opening.startswith("The special magic number")
            assert question not in one.text and answer not in one.text
            every += expected
            counts = {"single": (1, 1), "multi-key": (1, 1), "multi-value": (1, 0)}
            keys_asked, values_asked = counts.get(kind, (len(expected), 0))
            assert len(keys) == keys_asked and len(set(keys)) == len(keys)
            assert len(expected) == values_asked or 2 <= len(expected) <= 4
        assert len(set(every)) == len(every)
        hidden = {"single": range(1, 2)}.get(kind, range(3, 10))  # one may be left over
        assert len(every) in hidden
        if among != "needles":
            assert sorted(every) == sorted(values)
        plural = kind in ("multi-value", "multi-query")
        assert one.text.startswith("Some special" if plural else "A special")


def test_the_haystack_goes_on_around_the_needles(story):
    sentences = haystack(story).sentences
    for number in range(6):
        one = NeedleQuestions(1, haystacks=[story]).asked(number, 500, words)
        body = FACT.sub("", one.text.partition("\n")[2])
        found = re.findall(r"Sentence \d+ ends here\.", body)
        start = sentences.index(found[0])
        turned = (sentences[start:] + sentences[:start]) * 9
        assert " ".join(body.split()) == " ".join(turned[: len(found)])


@pytest.mark.parametrize("length", [200, 201, 350, 3000])
@pytest.mark.parametrize("source", [NeedleQuestions(2, haystacks=["noise", "needles"])])
def test_lengths_are_met(source, length):
    for number in range(8):
        one = source.asked(number, length, words)
        [solid, whole] = words([one.text[: one.solid], one.text])
        # The next piece would not have gone in: the longest is a line of noise.
        assert length - len(NOISE.sentences[0].split()) < solid <= length < length + 32 < whole


def test_needles_take_no_more_than_half():
    source = NeedleQuestions(2, ["multi-key"], ["noise"], (16, 16))
    assert len(source.asked(0, 1000, words).turns) == 16
    turns = source.asked(0, 150, words).turns
    assert 3 <= len(turns) <= 7  # eleven words each
    with pytest.raises(ValueError, match="context of 20 tokens leaves no room for needles, which"):
        source.asked(0, 20, words)


def test_every_depth_is_equally_likely():
    source = NeedleQuestions(5, ["multi-key"], ["noise"], (4, 4))
    places = []
    for number in range(150):
        one = source.asked(number, 1500, words)
        lines = [line for line in one.text[: one.solid].split("\n")[1:]]
        total, before = len(lines) - 4, 0
        for line in lines:
            if FACT.match(line):
                places.append(before / total)
            else:
                before += 1
    counts = [
        sum(fifth <= 5 * place < fifth + 1 + (fifth == 4) for place in places) for fifth in range(5)
    ]
    assert sum(counts) == len(places) == 600
    assert min(counts) > 85 and max(counts) < 160  # 120 each, give or take 3.5 deviations


def test_haystacks_and_kinds_are_mixed():
    source = NeedleQuestions(7, haystacks=["noise", "needles"])
    found = [source.asked(number, 600, words) for number in range(60)]
    noisy = sum(NOISE.sentences[0] in one.text[: one.solid] for one in found)
    plural = sum(one.text.startswith("Some") for one in found)
    assert 15 < noisy < 45 and 15 < plural < 45
    assert {len(one.turns) for one in found} > {1, 2, 4, 8}


@needs_book
def test_the_book_is_that_of_training():
    one = NeedleQuestions(haystacks=["book"]).asked(0, 500, words)
    train, evaluation = haystack("book", "train"), haystack("book", "evaluation")
    assert sum(sentence in one.text for sentence in train.sentences) > 10
    assert not [s for s in evaluation.sentences if len(s) > 40 and s in one.text]


def test_documentation_is_a_haystack(monkeypatch):
    monkeypatch.setattr("zoomkv.data.needles.StdlibText", lambda: StdlibText(["textwrap"]))
    one = NeedleQuestions(haystacks=["stdlib"]).asked(0, 500, words)
    sentences = haystack("stdlib").sentences
    assert sum(sentence in one.text for sentence in sentences) > 10
    assert "textwrap Text wrapping and filling." in sentences and max(map(len, sentences)) < 800


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: NeedleQuestions(seed, haystacks=["noise"]),
        lambda seed: LedgerQuestions(seed),
    ],
)
def test_numbers_and_seeds_repeat_and_do_not_meet(make):
    source: AskedText = make(1)
    first = source.asked(4, 800, words)
    assert first == make(1).asked(4, 800, words)
    others = [source.asked(number, 800, words) for number in (5, -5, 0)]
    others += [make(2).asked(4, 800, words)]
    assert len({one.turns for one in [first, *others]}) == 5
    assert len({one.id for one in [first, *others]}) == 5


def read_ledgers(text):
    """Totals by ledger, step and operation, counted from 1."""
    totals, ledger, step = {}, "", ""
    for line in text.splitlines():
        if line.startswith("Ledger "):
            ledger = line.removeprefix("Ledger ")
        elif line.startswith("Step "):
            step = line.removeprefix("Step ")
        elif found := re.fullmatch(r"(-?\d+)([+-]\d+)=(-?\d+)", line):
            assert int(found[1]) + int(found[2]) == int(found[3])
            of_step = [key for key in totals if key[:2] == (ledger, step)]
            totals[ledger, step, len(of_step) + 1] = int(found[3])
    return totals


@pytest.mark.parametrize("length", [60, 400, 2000])
def test_ledgers_are_asked_for_totals_that_they_have(length):
    source = LedgerQuestions(4, steps=(3, 6), operations=3, questions=7)
    for number in range(6):
        one = source.asked(number, length, words)
        totals = read_ledgers(one.text[: one.solid])
        headings = one.text[: one.solid].count("Ledger ")
        assert len({key[0] for key in totals}) == headings  # no two are called the same
        assert len(set(one.turns)) == len(one.turns) == 7
        for question, answer in one.turns:
            operation, step, ledger = re.fullmatch(
                r"What is the total after operation (\d) of step (\w+) in ledger (\S+)\?", question
            ).groups()
            total = totals[ledger, step, int(operation)]
            assert answer == f"T{question[9:-1]} is {total}."
        [solid, whole] = words([one.text[: one.solid], one.text])
        assert length - 8 < solid <= length and whole > length + 48


def test_all_totals_are_asked_for_alike():
    source = LedgerQuestions(1, steps=(3, 3), operations=4, questions=99)
    one = source.asked(0, 60, words)
    assert len(one.turns) == 4 * one.text[: one.solid].count("Step ")
    with pytest.raises(ValueError, match="context of 14 tokens leaves no room for a step"):
        source.asked(0, 14, words)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: NeedleQuestions(kinds=[]), r"needle kinds=\[\]"),
        (lambda: NeedleQuestions(kinds=["single", "double"]), "needle kinds=double"),
        (lambda: NeedleQuestions(keys="letters"), "needle keys=letters"),
        (lambda: NeedleQuestions(values="letters"), "needle values=letters"),
        (lambda: NeedleQuestions(haystacks=[]), "haystacks: name at least one"),
        (lambda: NeedleQuestions(needles=(1, 4)), r"needles=\(1, 4\)"),
        (lambda: NeedleQuestions(needles=(5, 4)), r"needles=\(5, 4\)"),
        (lambda: LedgerQuestions(operations=1), "operations=1"),
        (lambda: LedgerQuestions(questions=0), "questions=0"),
        (lambda: LedgerQuestions(steps=(2, 9)), r"ledger steps \(2, 9\)"),
    ],
)
def test_what_cannot_be_is_refused(make, named):
    with pytest.raises(ValueError, match=named):
        make()
