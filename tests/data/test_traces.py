"""Reading and writing traces: every layout, every encoding, and every way a row can be bad."""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zoomkv.data.traces import ReadReport, Segment, Trace, read_traces, write_traces

GOOD = {"problem": "p", "segments": [{"text": "t", "summary": "s"}], "solution": "x"}


def write_lines(path, *rows, newline="\n", encoding="utf-8"):
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_bytes(newline.join(lines).encode(encoding))
    return path


def stratos(reply, **others):
    turns = [{"from": "user", "value": "p"}, {"from": "assistant", "value": reply}]
    return {"system": "Think first.", "conversations": turns, **others}


STRATOS_REPLY = (
    "<|begin_of_thought|>\n\nFirst {0}.\n\nThen {0}.\n\n<|end_of_thought|>\n\n"
    "<|begin_of_solution|>\n\nIt is \\boxed{{4}}.\n\n<|end_of_solution|>"
).format("word " * 40)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)
SEGMENTS = st.lists(st.builds(Segment, TEXT, st.none() | TEXT), min_size=1, max_size=4)
TRACES = st.builds(
    Trace, TEXT, SEGMENTS.map(tuple), TEXT, answer=st.none() | TEXT, id=st.none() | TEXT
)


@given(traces=st.lists(TRACES, max_size=5))
@settings(max_examples=50, deadline=None)
def test_what_is_written_is_read_back(tmp_path_factory, traces):
    path = tmp_path_factory.mktemp("traces") / "t.jsonl"
    write_traces(path, traces)
    assert list(read_traces(path)) == traces
    assert len(path.read_text(encoding="utf-8").splitlines()) == len(traces)  # any line reader


@pytest.mark.parametrize(
    "row",
    [
        {"problem": "p", "thought": "First " + "w " * 90 + "\n\n\n\tThen " + "w " * 90},
        {"problem": "p", "thought": "First " + "w " * 90 + "\r\n\r\n\tThen " + "w " * 90 + "\n\n"},
    ],
)
def test_a_thought_is_cut_into_paragraphs(tmp_path, row):
    [trace] = read_traces(write_lines(tmp_path / "t.jsonl", row | {"solution": "x"}))
    assert [segment.summary for segment in trace.segments] == [None, None]
    assert [segment.text for segment in trace.segments] == [
        ("First " + "w " * 90).rstrip(),
        ("\tThen " + "w " * 90).rstrip(),
    ]


def test_given_segments_are_kept_as_they_are(tmp_path):
    segments = [{"text": " a\n\nb ", "summary": " s "}, {"text": "c"}, {"text": "d", "summary": ""}]
    row = {"problem": "p", "segments": segments, "solution": "x", "answer": 7, "id": 3, "more": []}
    [trace] = read_traces(write_lines(tmp_path / "t.jsonl", row))
    expected = (Segment(" a\n\nb ", " s "), Segment("c"), Segment("d"))
    assert trace == Trace("p", expected, "x", answer="7", id="3")


def test_stratos_layout(tmp_path):
    [trace] = read_traces(write_lines(tmp_path / "t.jsonl", stratos(STRATOS_REPLY)))
    assert (trace.problem, trace.solution) == ("p", "It is \\boxed{4}.")
    assert [segment.text.split()[0] for segment in trace.segments] == ["First", "Then"]
    assert "<|" not in "".join(segment.text for segment in trace.segments)


def test_stratos_thought_may_quote_the_tags(tmp_path):
    reply = STRATOS_REPLY.replace("Then", "After <|end_of_thought|> comes")
    [trace] = read_traces(write_lines(tmp_path / "t.jsonl", stratos(reply)))
    assert "<|end_of_thought|>" in trace.segments[1].text


def test_local_copy_in_parquet_and_in_a_folder(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    folder = tmp_path / "copy" / "data"
    folder.mkdir(parents=True)
    rows = [stratos(STRATOS_REPLY), stratos("no tags")]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train-0.parquet")
    write_lines(folder / "more.jsonl", GOOD)
    report = ReadReport()
    traces = list(read_traces(tmp_path / "copy", on_bad="skip", report=report))
    assert [trace.solution for trace in traces] == ["x", "It is \\boxed{4}."]
    assert report.dropped.total() == 1
    assert list(report.first.values()) == [f"{folder / 'train-0.parquet'}:row 2"]


def test_hub_rows_come_from_the_train_split(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def load_dataset(name, split):
        assert (name, split) == ("owner/name", "train")
        return [stratos(STRATOS_REPLY), stratos("no tags")]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    traces = read_traces("owner/name")
    assert next(traces).problem == "p"
    with pytest.raises(ValueError, match="^owner/name:row 2: the reply has no tagged thought"):
        next(traces)


BAD_ROWS = {
    "not valid JSON": '{"problem": ',
    "not a JSON object": "[1]",
    "'problem' is missing": {**GOOD, "problem": None},
    "'problem' is empty": {**GOOD, "problem": " \n"},
    "'solution' is not a string": {**GOOD, "solution": ["x"]},
    "'thought' is missing": {"problem": "p", "solution": "x"},
    "'thought' is empty": {"problem": "p", "thought": "", "solution": "x"},
    "'segments' is empty": {**GOOD, "segments": []},
    "'segments' is not a list of objects": {**GOOD, "segments": ["t"]},
    "'text' is missing": {**GOOD, "segments": [{"summary": "only a summary"}]},
    "'summary' is neither a string nor a number": {
        **GOOD,
        "segments": [{"text": "t", "summary": {}}],
    },
    "'answer' is neither a string nor a number": {**GOOD, "answer": True},
    "'conversations' is not one question and one reply": {"conversations": [{"from": "user"}]},
    "the reply has no tagged thought followed by a tagged solution": stratos("just words"),
    "'problem' holds half a character (a lone surrogate)": (
        '{"problem": "\\ud83d", "thought": "t", "solution": "x"}'
    ),
}


@pytest.mark.parametrize("reason", BAD_ROWS)
def test_a_bad_row_stops_with_file_and_line(tmp_path, reason):
    path = write_lines(tmp_path / "t.jsonl", GOOD, "", BAD_ROWS[reason], GOOD)
    traces = read_traces(path)
    next(traces)
    with pytest.raises(ValueError) as caught:
        next(traces)
    assert str(caught.value) == f"{path}:3: {reason}"


def test_bad_rows_are_skipped_and_counted(tmp_path):
    path = write_lines(tmp_path / "t.jsonl", *[row for b in BAD_ROWS.values() for row in (b, GOOD)])
    report = ReadReport()
    assert len(list(read_traces(path, on_bad="skip", report=report))) == len(BAD_ROWS)
    assert report.read == len(BAD_ROWS)
    assert report.dropped == Counter(dict.fromkeys(BAD_ROWS, 1))
    assert report.first == {
        reason: f"{path}:{2 * index + 1}" for index, reason in enumerate(BAD_ROWS)
    }
    assert f"{len(BAD_ROWS)} rows read, {len(BAD_ROWS)} dropped" in str(report)


ODD = [{**GOOD, "problem": text} for text in ("🙂", "سلام", "漢字", "a\u2028b\u2029c\x85d", "p")]


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\n\n", "\r\n \r\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("end", ["", "\n"])
def test_line_endings_and_byte_order_mark(tmp_path, newline, encoding, end):
    path = write_lines(tmp_path / "t.jsonl", *ODD, end, newline=newline, encoding=encoding)
    assert [trace.problem for trace in read_traces(path)] == [row["problem"] for row in ODD]


def test_carriage_returns_inside_a_string_stay(tmp_path):
    path = write_lines(tmp_path / "t.jsonl", {**GOOD, "solution": "a\r\nb"}, newline="\r\n")
    assert next(read_traces(path)).solution == "a\r\nb"


def test_an_invalid_byte_is_one_bad_row(tmp_path):
    path = tmp_path / "t.jsonl"
    line = json.dumps(GOOD).encode()
    path.write_bytes(b"\n".join([line, line.replace(b'"p"', b'"\xff"'), line]))
    report = ReadReport()
    assert len(list(read_traces(path, on_bad="skip", report=report))) == 2
    assert report.first == {"not UTF-8 (byte 0xff)": f"{path}:2"}


def test_the_locale_does_not_matter(tmp_path):
    source, target = write_lines(tmp_path / "t.jsonl", *ODD), tmp_path / "copy.jsonl"
    code = (
        "import sys; from zoomkv.data.traces import read_traces, write_traces;"
        "write_traces(sys.argv[2], read_traces(sys.argv[1]))"
    )
    environment = {**os.environ, "PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code, source, target], check=True, env=environment)
    assert list(read_traces(target)) == list(read_traces(source))


@pytest.mark.parametrize("source", ["no/such/file.jsonl", "nothing.jsonl", "owner/name.parquet"])
def test_a_missing_source_is_named(source):
    with pytest.raises(ValueError, match=f"^{source}: no such file or folder"):
        list(read_traces(source))


def test_other_sources_that_cannot_be_read(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="holds no .jsonl or .parquet"):
        list(read_traces(tmp_path))
    broken = tmp_path / "t.parquet"
    broken.write_bytes(b"PAR1 but not really")
    with pytest.raises(ValueError, match="not a readable Parquet file"):
        list(read_traces(broken))
    with pytest.raises(ValueError, match="choose 'error' or 'skip'"):
        list(read_traces(broken, on_bad="keep"))

    datasets = pytest.importorskip("datasets")

    def offline(name, split):
        raise ConnectionError(f"Couldn't reach {name!r}")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(ValueError, match="^owner/name: no such file, and not to be had"):
        list(read_traces("owner/name"))


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "t.jsonl"
    trace = Trace("p", (Segment("t"),), "x")
    write_traces(path, [trace])

    def broken():
        yield trace
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_traces(path, broken())
    assert list(read_traces(path)) == [trace]
    assert os.listdir(tmp_path) == ["t.jsonl"]
