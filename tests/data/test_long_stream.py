"""The stream of windows against a plain loop: lengths that change, stops, and shared batches."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zoomkv.data.asked import NeedleQuestions
from zoomkv.data.long_stream import LongBatches, Passages, Stage, Steps, stage_ends
from zoomkv.data.long_text import TextSource
from zoomkv.data.turns import Turns


class Numbers:
    """In the place of ``Turns``: tokens are numbers between spaces."""

    def __init__(self, prefix=()):
        self.tokenizer, self.prefix = self, list(prefix)
        self.eos_token_id = -1
        self.encoded = []

    def encode(self, text):
        self.encoded.append(text)
        return [int(number) for number in text.split()]

    def count(self, texts):
        return [len(text.split()) for text in texts]


class Lengths(TextSource):
    """Documents whose tokens are all different: the number of the document and of the token."""

    def __init__(self, *lengths):
        self.lengths = lengths

    def documents(self, count_tokens):
        for n, length in enumerate(self.lengths):
            text = " ".join(str(1000 * n + token) for token in range(length))
            assert count_tokens(text) >= length
            yield {"text": text, "id": str(n)}


def slow(lengths, sizes, crossing):
    """Windows by a plain loop over all tokens, pass after pass, and documents left out."""
    at, token, left_out, windows = 0, 0, 0, []
    for size in sizes:
        window = []
        while len(window) < size:
            if at == len(lengths):
                at, token, window = 0, 0, []
            document = [1000 * at + n for n in range(lengths[at])] + [-1] * crossing
            if token == len(document) > 0:
                at, token = at + 1, 0
            elif not crossing and len(document) - token < size:
                left_out += token == 0
                at, token = at + 1, 0
            else:
                window.append(document[token])
                token += 1
                if not crossing:
                    rest = size - 1
                    window += document[token : token + rest]
                    token += rest
        windows.append(window)
    return windows, left_out


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(any),
    st.lists(st.integers(1, 12), min_size=1, max_size=25),
    st.booleans(),
)
@settings(max_examples=150)
def test_windows_of_changing_lengths(lengths, sizes, crossing):
    total = sum(lengths) + len(lengths) if crossing else max(lengths)
    sizes = [min(size, total) for size in sizes]
    reader = Passages(Lengths(*lengths), Numbers(), crossing)
    expected, left_out = slow(lengths, sizes, crossing)
    positions = []
    for size, window in zip(sizes, expected, strict=True):
        positions.append(reader.position)
        ids, name = reader.window(size)
        assert ids == window
        if window[0] >= 0:
            document, token = name.split("@")
            assert 1000 * int(document) + int(token) == window[0]
    assert reader.skipped == left_out
    # From any position the rest comes out again.
    for start in range(0, len(sizes), 4):
        other = Passages(Lengths(*lengths), Numbers(), crossing)
        other.seek(positions[start])
        rest = [other.window(size)[0] for size in sizes[start:]]
        assert rest == expected[start:] and other.position == reader.position


def test_longer_contexts_go_on_where_shorter_ones_stopped():
    reader = Passages(Lengths(12, 100), Numbers())
    assert [reader.window(4)[1] for _ in range(4)] == ["0@0", "0@4", "0@8", "1@0"]
    assert reader.window(40)[0][0] == 1004  # not the first document again
    assert reader.skipped == 0


def test_one_document_is_read_at_a_time():
    turns = Numbers()
    reader = Passages(Lengths(5, 5, 5, 5), turns)
    reader.window(5)
    assert len(turns.encoded) == 1
    reader.seek([0, 2, 0, 0])
    assert reader.window(5)[0][0] == 2000
    assert len(turns.encoded) == 2  # those passed over are not tokenised


def test_a_prefix_is_part_of_every_window():
    reader = Passages(Lengths(9), Numbers(prefix=[7]))
    assert [reader.window(4)[0] for _ in range(3)] == [[7, 0, 1, 2], [7, 3, 4, 5], [7, 6, 7, 8]]


@pytest.mark.parametrize("crossing", [False, True])
def test_windows_that_nothing_fills(crossing):
    reader = Passages(Lengths(5, 3), Numbers(), crossing, "data.train[2]")
    with pytest.raises(ValueError, match=r"data\.train\[2\]: no document fills a window of 11 tok"):
        reader.window(11)
    with pytest.raises(ValueError, match="the longest has 0"):
        Passages(Lengths(), Numbers(), crossing).window(1)


@given(
    st.lists(st.floats(0.01, 9), min_size=1, max_size=5),
    st.integers(1, 200),
)
def test_stages_share_the_steps(shares, steps):
    ends = stage_ends([Stage(1, share) for share in shares], steps)
    assert ends == sorted(ends) and ends[-1] == steps
    begins = [0, *ends[:-1]]
    for share, begin, end in zip(shares, begins, ends, strict=True):
        assert abs((end - begin) - steps * share / sum(shares)) <= 1


def test_equal_thirds():
    stages = [Stage(8), Stage(16), Stage(32)]
    batches = LongBatches([Lengths(900)], [1], Numbers(), stages, 9, 2, 1)
    assert [batches.context(step) for step in range(11)] == [8] * 3 + [16] * 3 + [32] * 5
    for step in range(11):
        assert batches[step]["context"].shape == (1, batches.context(step))


def make(world=1, rank=0, batch_size=6, **options):
    sources = [Lengths(90, 7, 50, 33), Lengths(400), Lengths(21, 20)]
    stages = [Stage(5), Stage(9, 2)]
    return LongBatches(
        sources, [3, 1, 2], Numbers(), stages, 9, 3, batch_size, 5, rank, world, **options
    )


def rows(batch):
    """The rows of a batch, with all that belongs to them."""
    parts = (batch[name].tolist() for name in ("context", "continuation", "supervised"))
    return list(zip(*parts, batch["id"], strict=True))


def test_batches_are_what_they_are_in_any_order():
    inorder = make()
    whole = [rows(inorder[step]) for step in range(14)]
    assert all(rows(make()[step]) == whole[step] for step in range(14))
    jumping = make()
    for step in (3, 9, 2, 2, 13, 0, 7, 8):
        assert rows(jumping[step]) == whole[step]
    first = inorder[0]
    assert first["context"].dtype == first["continuation"].dtype == torch.int64
    assert first["supervised"].dtype == torch.bool and first["supervised"].all()
    for context, continuation, *_ in whole[4]:
        ids = context + continuation
        assert ids == list(range(ids[0], ids[0] + 12))


def test_a_batch_begins_where_it_is_known_to(monkeypatch):
    whole = make()
    expected = [rows(whole[step]) for step in range(12)]
    resumed = make()
    resumed.remember(*make_until(8)["next"])
    walked = []
    walk = resumed._rows
    monkeypatch.setattr(
        resumed, "_rows", lambda step, build=True: walked.append(step) or walk(step, build)
    )
    assert rows(resumed[10]) == expected[10] and walked == [8, 9, 10]
    assert rows(resumed[3]) == expected[3] and walked[3:] == [0, 1, 2, 3]


def make_until(steps):
    batches = make()
    return [batches[step] for step in range(steps)][-1]


def test_positions_are_not_kept_for_ever(monkeypatch):
    monkeypatch.setattr("zoomkv.data.long_stream._REMEMBERED", 4)
    batches = make()
    for step in range(12):
        batches.remember(*batches[step]["next"])
    assert sorted(batches.positions) == [0, 10, 11, 12]


def test_sources_are_drawn_by_weight():
    source = [Lengths(999), NoDocument()]
    batches = LongBatches(source, [9, 1], Numbers(), [Stage(1)], 1, 1, 2000)
    share = sum(name.startswith("0@") for name in batches[0]["id"]) / 2000
    assert 0.87 < share < 0.93


class NoDocument(TextSource):
    def documents(self, count_tokens):
        yield {"text": " ".join(["5"] * 999), "id": "other"}


@pytest.mark.parametrize("world", [2, 3])
def test_processes_share_the_rows_of_one(world):
    one = make()
    for step in (0, 1, 4, 11):
        shares = [rows(make(world, rank, 6 // world)[step]) for rank in range(world)]
        together = [row for meeting in zip(*shares, strict=True) for row in meeting]
        assert together == rows(one[step])


def test_processes_share_asked_documents_too(tokenizer):
    def batches(world, rank, **options):
        sources = [NeedleQuestions(1, haystacks=("noise",), needles=(2, 3)), Lengths(900)]
        return LongBatches(
            sources, [2, 1], Turns(tokenizer), [Stage(500)], 2, 300, 4 // world, 0, rank, world
        )

    one = [rows(batches(1, 0)[step]) for step in range(2)]
    shares = [[rows(batches(2, rank)[step]) for step in range(2)] for rank in range(2)]
    for step in range(2):
        assert one[step][0::2] == shares[0][step] and one[step][1::2] == shares[1][step]
    names = [name for batch in one for *_, name in batch if name.startswith("needles")]
    assert len(set(names)) == len(names) > 2


def test_an_order_starts_anywhere_once():
    steps = Steps(5)
    assert list(steps) == [0, 1, 2, 3, 4] and len(steps) == 5
    steps.set_epoch(2)
    steps.skip = 3
    assert list(steps) == [13, 14] and list(steps) == [10, 11, 12, 13, 14]
