"""The DataModule and its sources."""

import json

import pytest
from tests.training.conftest import Fit

from zoomkv.data.sources import FileSource, LedgerSource, TraceSource, WordProblemSource
from zoomkv.data.traces import Segment, Trace


@pytest.fixture
def fit(base, tmp_path):
    return Fit(base, tmp_path)


def set_up(fit, stage="fit", trainer=None, **options):
    """A DataModule as a trainer sets it up."""
    data = fit.data(**options)
    data.trainer = trainer or fit.trainer()
    data.trainer.strategy._lightning_module = fit.module()
    data.setup(stage)
    return data


def row(**fields):
    good = {"problem": "p", "segments": [{"text": "t", "summary": "s"}], "solution": "x"}
    return json.dumps(good | fields)


def test_mixed_rows_are_counted_with_their_lines(tmp_path, capsys):
    path = tmp_path / "mixed.jsonl"
    lines = [row(), row(problem=None), row(segments=[]), row(extra=1), "{", row(solution=" ")]
    path.write_text("\n".join(lines), encoding="utf-8")
    assert len(list(FileSource(str(path), skip_bad=True).traces(len))) == 2
    told = capsys.readouterr()
    assert told.out == "" and "2 rows read, 4 dropped" in told.err
    for number in (2, 3, 5, 6):
        assert f"{path}:{number}" in told.err
    with pytest.raises(ValueError, match=r"mixed\.jsonl:2: 'problem' is missing"):
        list(FileSource(str(path)).traces(len))


def test_a_part_of_a_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(row(id=str(n)) for n in range(10)), encoding="utf-8")

    def ids(**options):
        return [trace.id for trace in FileSource(str(path), **options).traces(len)]

    assert ids() == list("0123456789")
    assert ids(limit=3) == list("012") and ids(first=8) == list("89")
    assert ids(first=2, limit=2) == list("23")


@pytest.mark.parametrize("source", [LedgerSource(4, 1), WordProblemSource(2, 1)])
def test_a_source_repeats_itself_and_marks_its_own_answers(source):
    traces = list(source.traces(len))
    assert traces == list(source.traces(len))
    for trace in traces:
        assert source.is_right(trace, trace.solution)
        assert not source.is_right(trace, trace.solution.replace(trace.answer, "0, 0 1"))
        assert not source.is_right(trace, "")


@pytest.mark.parametrize(
    ("answer", "text", "right"),
    [
        ("5", "so\nAnswer: 5", True),
        ("5", "Answer: 4\nAnswer: 5.\nDone", True),
        ("5", "Answer: 55", False),
        ("5", "Answer:", False),
        ("5", r"thus $\boxed{5}$.", True),
        ("5", r"\boxed{5} or \boxed{6}", False),
        ("5", "5", False),
        (None, "Answer: 5", None),
    ],
)
def test_marking_any_trace(answer, text, right):
    class Plain(TraceSource):
        def traces(self, count_tokens):
            return iter(())

    trace = Trace("p", (Segment("t"),), "s", answer)
    assert Plain().is_right(trace, text) is right


def test_several_processes_render_the_same(fit, tmp_path, caplog):
    path = tmp_path / "rows.jsonl"
    rows = [row(solution=word) for word in ("one", "two", "<|im_end|>", "three", "four")]
    path.write_text("\n".join(rows), encoding="utf-8")
    found, told = [], []
    for processes in (1, 2, 9):
        caplog.clear()
        with caplog.at_level("INFO"):
            data = set_up(fit, train=[FileSource(str(path))], num_proc=processes)
        found.append([data._train[number] for number in range(len(data._train))])
        told += [line for line in caplog.text.splitlines() if "training:" in line]
    assert len(found[0]) == 4 and found[0] == found[1] == found[2]
    assert len(told) == 3 and all("1 dropped: special token in the text, 4 ren" in s for s in told)
    with pytest.raises(ValueError, match="data.num_proc=0"):
        fit.data(num_proc=0)


def test_what_was_cut_or_dropped_is_told(fit, caplog):
    with caplog.at_level("INFO"):
        set_up(fit, train=[LedgerSource(12, 1, (3, 12))], max_length=600)
    assert "training: " in caplog.text and "cut at a paragraph" in caplog.text


def test_nothing_to_learn_is_refused(fit):
    with pytest.raises(ValueError, match="training: no trace is left to learn from .6 dropped"):
        set_up(fit, train=[LedgerSource(6, 1)], max_length=20)
    with pytest.raises(ValueError, match="name at least one source"):
        fit.data(train=[])
    with pytest.raises(ValueError, match="batch_size=0"):
        fit.data(batch_size=0)


def test_lightnings_own_sampler_is_refused_among_processes(fit, monkeypatch):
    trainer = fit.trainer(use_distributed_sampler=True)
    monkeypatch.setattr(type(trainer), "world_size", 2)
    data = set_up(fit, trainer=trainer)
    with pytest.raises(ValueError, match=r"trainer\.use_distributed_sampler: switch it off"):
        data.train_dataloader()


def test_each_process_answers_its_share_and_all_equally_often(fit, monkeypatch):
    shares = []
    for rank in range(2):
        trainer = fit.trainer()
        monkeypatch.setattr(type(trainer), "world_size", 2)
        monkeypatch.setattr(type(trainer), "global_rank", rank)
        data = set_up(fit, trainer=trainer, val=LedgerSource(5, 2, (3, 3)), prompts=5)
        examples, prompts = data.val_dataloader()
        shares.append([mark for batch in prompts for mark in batch["marks"]])
        assert len(list(examples)) == 2  # five rows, two a batch, two processes
    assert [len(share) for share in shares] == [3, 3]
    assert sum(mark is not None for share in shares for mark in share) == 5


def test_validation_alone_reads_no_training_data(fit):
    train = FileSource("/no/such/file")
    data = set_up(fit, "validate", train=[train], val=LedgerSource(2, 2, (3, 3)), prompts=0)
    assert len(data.val_dataloader()) == 1
    with pytest.raises(ValueError, match="no such file"):
        set_up(fit, train=[train])


def test_without_validation_there_is_no_loader(fit):
    assert set_up(fit).val_dataloader() == []
