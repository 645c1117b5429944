"""Long documents: every source and what it refuses, and windows against a plain loop."""

import inspect
import json
import sys
from collections import Counter
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zoomkv.data.ledger import LedgerShape, ledger
from zoomkv.data.long_text import (
    BookText,
    HubText,
    Mixture,
    StdlibText,
    TextFiles,
    TextSource,
    TraceText,
    Windows,
    book,
)
from zoomkv.data.sources import LedgerSource

needs_book = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="no reasoning-gym")


def documents(source):
    found = list(source.documents(len))
    assert found == list(source.documents(len)), "a source repeats itself"
    assert all(set(document) == {"text", "id"} for document in found)
    return found


def test_a_file_and_a_folder(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_bytes("\ufeffzwölf\r\nBoxkämpfer".encode())
    (tmp_path / "a.md").write_text("first", encoding="utf-8")
    (tmp_path / "sub/c.txt").write_text("third", encoding="utf-8")
    (tmp_path / ".hidden").write_bytes(b"\0")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/x.txt").write_bytes(b"")
    assert documents(TextFiles(str(tmp_path))) == [
        {"text": "first", "id": "a.md"},
        {"text": "zwölf\nBoxkämpfer", "id": "b.txt"},
        {"text": "third", "id": "sub/c.txt"},
    ]
    [one] = documents(TextFiles(str(tmp_path / "a.md")))
    assert one == {"text": "first", "id": "a.md"}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is empty"),
        (b" \n\t\r\n", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"PK\x03\x04\0\0", "binary"),
        ("text".encode("utf-16"), "binary"),
        ("Grüße".encode("latin-1"), r"not UTF-8 \(byte 0xfc\)"),
    ],
)
def test_a_file_that_is_no_text_is_named(tmp_path, data, reason):
    (tmp_path / "a.txt").write_text("good", encoding="utf-8")
    (tmp_path / "bad.txt").write_bytes(data)
    for path in (tmp_path, tmp_path / "bad.txt"):
        with pytest.raises(ValueError, match=rf"bad\.txt: .*{reason}"):
            list(TextFiles(str(path)).documents(len))


def test_no_file_at_all(tmp_path):
    with pytest.raises(ValueError, match="nothing: there is no such file or folder"):
        list(TextFiles(str(tmp_path / "nothing")).documents(len))
    with pytest.raises(ValueError, match="holds no text file"):
        list(TextFiles(str(tmp_path)).documents(len))


def rows(path: Path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path.parent)


def test_a_data_set_is_streamed(tmp_path):
    folder = rows(tmp_path / "train.jsonl", *({"body": f"t{n}", "key": f"k{n}"} for n in range(5)))
    columns = {"text": "body", "id": "key"}
    assert documents(HubText(folder, **columns)) == [
        {"text": f"t{n}", "id": f"k{n}"} for n in range(5)
    ]
    part = documents(HubText(folder, text="body", first=1, limit=2))
    assert part == [{"text": "t1", "id": "1"}, {"text": "t2", "id": "2"}]
    with pytest.raises(ValueError, match="row 0: no text in column 'text'"):
        list(HubText(folder).documents(len))


def test_a_data_set_that_is_none(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path}: not to be had as a data set"):
        list(HubText(str(tmp_path)).documents(len))


@needs_book
def test_the_parts_of_the_book_do_not_overlap():
    [train], [evaluation] = documents(BookText("train")), documents(BookText("evaluation"))
    assert train["id"] != evaluation["id"]
    first, last = train["text"], evaluation["text"]
    assert 0.62 < len(first) / (len(first) + len(last)) < 0.70
    for size in (5, 9):  # runs of words: what is said in both is said twice in the book
        runs = [
            {tuple(words[n : n + size]) for n in range(len(words) - size)}
            for words in (first.split(), last.split())
        ]
        assert len(runs[0] & runs[1]) <= (3 if size == 5 else 0)
    assert "Gutenberg" not in first + last and "Norm Wolcott" not in first + last
    # Together they are the file's own text, in its order, with nothing between them.
    path = Path(find_spec("reasoning_gym").submodule_search_locations[0])
    whole = (path / "data/in_the_year_2889.txt").read_text(encoding="utf-8-sig")
    assert " ".join(f"{first} {last}".split()) in " ".join(whole.split())
    assert first.startswith("IN THE YEAR 2889") and last.endswith("Jules Verne.")


@needs_book
def test_the_book_has_two_parts_only():
    with pytest.raises(ValueError, match="part='test': choose"):
        book("test")  # type: ignore[arg-type]


def test_documentation_strings_are_read_without_an_import():
    import json.decoder
    import textwrap

    assert "turtle" not in sys.modules
    found = documents(StdlibText(["turtle", "textwrap", "json"]))
    assert [document["id"] for document in found] == [
        "python/json",
        "python/textwrap",
        "python/turtle",
    ]
    assert "turtle" not in sys.modules
    said = found[0]["text"]
    for thing in (json, json.dumps, json.JSONDecoder, json.decoder.JSONDecodeError):
        assert inspect.getdoc(thing) in said
    wrapped = found[1]["text"]
    places = [
        wrapped.index(f"{thing.__name__}\n{inspect.getdoc(thing)}")
        for thing in (textwrap, textwrap.TextWrapper, textwrap.wrap, textwrap.dedent)
    ]
    assert places == sorted(places) and places[0] == 0


def test_documentation_strings_of_all_modules():
    names = StdlibText().modules
    assert names == sorted(sys.stdlib_module_names)
    assert next(StdlibText().documents(len))["id"] == "python/__future__"
    with pytest.raises(ValueError, match="'torch' is not in Python's standard library"):
        StdlibText(["torch"])


def test_traces_are_written_out():
    shape = LedgerShape(steps=(3, 4))
    found = documents(TraceText(LedgerSource(2, 1, steps=(3, 4))))
    for document, seed in zip(found, (1_000_000, 1_000_001), strict=True):
        trace = ledger(seed, shape)
        parts = document["text"].split("\n\n")
        assert parts == [trace.problem, *(s.text for s in trace.segments), trace.solution]
        assert document["id"] == trace.id


class Numbered(TextSource):
    def __init__(self, name, count):
        self.name, self.count = name, count

    def documents(self, count_tokens):
        for number in range(self.count):
            yield {"text": f"{self.name} {number}", "id": f"{self.name}{number}"}


def test_a_mixture_has_everything_once_and_keeps_each_order():
    sources = [Numbered("a", 50), Numbered("b", 5), Numbered("c", 20)]
    mixed = [document["id"] for document in documents(Mixture(sources, seed=3))]
    for source in sources:
        own = [document["id"] for document in source.documents(len)]
        assert [id for id in mixed if id[0] == source.name] == own
    assert len(mixed) == 75 and mixed[:55] != sorted(mixed[:55])
    other = [document["id"] for document in documents(Mixture(sources, seed=4))]
    assert sorted(other) == sorted(mixed) and other != mixed


def test_weights_decide_how_often():
    sources = [Numbered("a", 5000), Numbered("b", 5000)]
    drawn = islice(Mixture(sources, [9, 1]).documents(len), 2000)
    assert 0.87 < Counter(document["id"][0] for document in drawn)["a"] / 2000 < 0.93


@pytest.mark.parametrize(
    ("sources", "weights", "named"),
    [(0, None, "sources"), (2, [1.0], "weights"), (2, [1, 0], "weights"), (1, [-1], "weights")],
)
def test_a_mixture_that_cannot_be_is_refused(sources, weights, named):
    with pytest.raises(ValueError, match=named):
        Mixture([Numbered("a", 1)] * sources, weights)


def ids_of(text: str) -> list[int]:
    return [int(number) for number in text.split()]


TEXTS = st.lists(st.integers(0, 40), min_size=1, max_size=8)


def texts(lengths):
    """Documents whose tokens are all different: the number of the document and of the token."""
    return [
        {"text": " ".join(str(1000 * n + token) for token in range(length)), "id": str(n)}
        for n, length in enumerate(lengths)
    ]


@given(TEXTS, st.integers(1, 9), st.integers(1, 9))
@settings(max_examples=60)
def test_windows_stay_within_their_documents(lengths, context, continuation):
    size, expected, dropped = context + continuation, [], 0
    for n, length in enumerate(lengths):
        start = 0
        while start + size <= length:
            expected.append((str(n), [1000 * n + token for token in range(start, start + size)]))
            start += size
        dropped += length - start
    if not expected:
        with pytest.raises(ValueError, match=f"no document fills a window of {size} tokens"):
            Windows(texts(lengths), ids_of, context, continuation)
        return
    windows = Windows(texts(lengths), ids_of, context, continuation)
    assert len(windows) == len(expected) and windows.dropped == dropped
    for index, (name, ids) in enumerate(expected):
        window = windows[index]
        assert window["context"].tolist() == ids[:context] and window["id"] == name
        assert window["continuation"].tolist() == ids[context:]


@given(TEXTS, st.integers(1, 9), st.integers(1, 9))
@settings(max_examples=60)
def test_windows_may_cross_documents(lengths, context, continuation):
    stream, owner = [], []
    for n, length in enumerate(lengths):
        stream += [1000 * n + token for token in range(length)] + [-1]
        owner += [str(n)] * (length + 1)
    size = context + continuation
    if len(stream) < size:
        return
    windows = Windows(texts(lengths), ids_of, context, continuation, separator=-1)
    assert len(windows) == len(stream) // size and windows.dropped == len(stream) % size
    for index in range(len(windows)):
        window, end = windows[index], (index + 1) * size
        ids = window["context"].tolist() + window["continuation"].tolist()
        assert ids == stream[end - size : end] and window["id"] == owner[end - 1]


def test_a_limit_reads_no_more_than_it_needs():
    read = []

    def watched():
        for document in texts([10, 10, 10, 10]):
            read.append(document["id"])
            yield document

    windows = Windows(watched(), ids_of, 2, 2, limit=3)
    assert read == ["0", "1"] and len(windows) == len(windows.names) == 3
    assert windows.dropped == 2 + 2 + 4
    with pytest.raises(IndexError):
        windows[3]


def test_a_data_loader_goes_on_at_any_window():
    from torch.utils.data import DataLoader, Subset

    windows = Windows(texts([40, 7, 33]), ids_of, 4, 3)
    whole = [batch["context"].tolist() for batch in DataLoader(windows, batch_size=2)]
    rest = DataLoader(Subset(windows, range(4, len(windows))), batch_size=2)
    assert [batch["context"].tolist() for batch in rest] == whole[2:]


@pytest.mark.parametrize("lengths", [{"context": 0}, {"continuation": 0}, {"limit": 0}])
def test_lengths_below_one_are_refused(lengths):
    with pytest.raises(ValueError, match=f"{next(iter(lengths))}=0"):
        Windows(texts([9]), ids_of, **({"context": 1, "continuation": 1} | lengths))
