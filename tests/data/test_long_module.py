"""The DataModule of long contexts: batches, stops, processes, and what it refuses."""

from pathlib import Path

import pytest
import torch
from lightning import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser

from zoomkv.data.asked import LedgerQuestions, NeedleQuestions
from zoomkv.data.long_module import LongTextData
from zoomkv.data.long_stream import Stage
from zoomkv.data.long_text import HubText, Mixture, TextFiles, TextSource, TraceText
from zoomkv.data.sources import LedgerSource
from zoomkv.training.checkpointing import rewind_to_step


class Plain(LightningModule):
    """Learns one number from the ids of a batch, so that every batch leaves its trace."""

    def __init__(self, tokenizer):
        super().__init__()
        self.tokenizer = tokenizer
        self.value = torch.nn.Parameter(torch.zeros(()))
        self.seen, self.measured = [], []

    def training_step(self, batch, batch_idx):
        self.seen.append(plain(batch))
        return self.value * batch["context"].float().mean()

    def validation_step(self, batch, batch_idx):
        self.measured.append(plain(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def on_save_checkpoint(self, checkpoint):
        rewind_to_step(checkpoint, self.trainer.accumulate_grad_batches)


class Stop(Callback):
    """Saves after a number of batches, and ends there as a killed run would."""

    def __init__(self, after, path):
        self.after, self.path = after, path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.fit_loop.total_batch_idx + 1 == self.after:
            trainer.save_checkpoint(self.path)
            raise KeyboardInterrupt


def plain(batch):
    assert set(batch) == {"context", "continuation", "supervised", "id"}
    return {name: part if name == "id" else part.tolist() for name, part in batch.items()}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """A folder of numbered texts of several lengths; the fourth is short."""
    folder = tmp_path_factory.mktemp("texts")
    for name, lines in enumerate((150, 60, 220, 3)):
        text = "\n".join(f"{name} has line {n}, worth {n * n % 97}" for n in range(lines))
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def texts(written) -> str:
    """The path of the texts."""
    return str(written)


def make(texts, **options) -> LongTextData:
    settings = {
        "train": [
            TextFiles(texts),
            NeedleQuestions(1, haystacks=["noise"], needles=(2, 3)),
            LedgerQuestions(2),
        ],
        "weights": [2.0, 1.0, 1.0],
        "stages": [Stage(300), Stage(360), Stage(430)],
        "steps": 7,
        "continuation": 280,
        "batch_size": 2,
        "seed": 4,
    }
    return LongTextData(**(settings | options))


def make_trainer(folder, *callbacks, **options) -> Trainer:
    settings = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
        "default_root_dir": folder,
    }
    return Trainer(callbacks=list(callbacks), **(settings | options))


def set_up(data, tokenizer, stage="fit", trainer=None) -> LongTextData:
    """A DataModule as a trainer sets it up."""
    data.trainer = trainer or make_trainer(None)
    data.trainer.strategy._lightning_module = Plain(tokenizer)
    data.setup(stage)
    return data


def fit(tokenizer, data, folder, *callbacks, resume=None, **options):
    module = Plain(tokenizer)
    trainer = make_trainer(folder, *callbacks, **options)
    trainer.fit(module, data, ckpt_path=resume)
    return module


def test_a_curriculum_of_batches(tokenizer, texts):
    data = set_up(make(texts), tokenizer)
    batches = [plain(batch) for batch in data.train_dataloader()]
    lengths = [len(batch["context"][0]) for batch in batches]
    assert lengths == [300] * 2 + [360] * 3 + [430] * 2
    kinds = set()
    for batch in batches:
        assert len(batch["context"]) == len(batch["id"]) == 2
        for number, name in enumerate(batch["id"]):
            context, said, matters = (
                batch[part][number] for part in ("context", "continuation", "supervised")
            )
            assert len(said) == len(matters) == 280 and matters[0]
            kinds.add(name.split("-")[0] if "-" in name else "text")
            if "-" not in name:
                file, token = name.split("@")
                whole = Path(texts, file).read_text(encoding="utf-8")
                ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
                begin = int(token)
                assert context + said == ids[begin : begin + len(context) + 280] and all(matters)
            else:
                assert "What " not in tokenizer.decode(context)
                assert tokenizer.decode(said).startswith("\nWhat ")
    assert kinds == {"text", "needles", "ledgers"}
    names = [name for batch in batches for name in batch["id"]]
    assert len(set(names)) == len(names)  # a longer context does not begin with the first document
    assert [plain(batch) for batch in set_up(make(texts), tokenizer).train_dataloader()] == batches
    other = set_up(make(texts, seed=5), tokenizer).train_dataloader()
    assert [plain(batch) for batch in other] != batches


def test_documents_that_are_too_short_are_counted(tokenizer, texts, caplog):
    data = set_up(make(texts, train=[TextFiles(texts)], weights=None), tokenizer)
    passes = 0
    for batch in data.train_dataloader():
        passes += sum(name == "0.txt@0" for name in batch["id"])
    # The last file stands at the end of each pass; the first is only read when it has been met.
    assert data.left_out == passes - 1 > 0
    with caplog.at_level("INFO"):
        data.teardown("fit")
    assert f"training: {data.left_out} times a document was left out" in caplog.text


@pytest.mark.parametrize(
    ("stop", "accumulate", "learnt", "workers"),
    [
        (1, 1, 1, 0),
        (3, 1, 3, 0),
        (3, 1, 3, 2),
        (7, 1, 7, 0),  # the last batch of the first epoch
        (9, 1, 9, 0),  # in the second epoch
        (9, 1, 9, 1),
        (5, 2, 4, 0),  # inside a window of accumulation
        (11, 3, 10, 2),  # the second window of the second epoch ends before it
    ],
)
def test_the_same_as_without_a_stop(
    tokenizer, texts, tmp_path, whole_run, stop, accumulate, learnt, workers
):
    options = {"max_epochs": 2, "accumulate_grad_batches": accumulate}
    path = tmp_path / "stopped.ckpt"
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(tokenizer, make(texts, num_workers=workers), tmp_path, Stop(stop, path), **options)
    data = make(texts, num_workers=workers)
    resumed = fit(tokenizer, data, tmp_path, resume=path, **options)
    assert len(whole_run) == 14
    assert resumed.seen == whole_run[learnt:]


@pytest.fixture(scope="module")
def whole_run(tokenizer, written):
    """Two epochs without a stop."""
    seen = fit(tokenizer, make(str(written)), written.parent, max_epochs=2).seen
    names = [name for batch in seen for name in batch["id"] if "-" in name]
    assert len(set(names)) == len(names)  # the second epoch does not repeat the first
    return seen


def test_a_resumed_run_tokenises_nothing_twice(tokenizer, texts, tmp_path):
    """It begins where the readers stood, though a pass over all before would do."""
    path = tmp_path / "5.ckpt"
    options = {"train": [TextFiles(texts)], "weights": None}
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(tokenizer, make(texts, **options), tmp_path, Stop(5, path))
    state = torch.load(path, weights_only=True)["LongTextData"]
    assert state["skip"] == state["readers"]["step"] == 5
    [[passes, document, token, left_out]] = state["readers"]["positions"].values()
    data = set_up(make(texts, **options), tokenizer)
    for _, _batch in zip(range(5), data.train_dataloader(), strict=False):
        pass
    assert data._train.positions[5] == {0: [passes, document, token, left_out]}
    # Without the readers' positions the same batches come, by reading past all before.
    state["readers"] = {"step": 0, "positions": {0: [0, 0, 0, 0]}}
    slow, quick = (set_up(make(texts, **options), tokenizer) for _ in range(2))
    slow.load_state_dict(state)
    quick.load_state_dict(torch.load(path, weights_only=True)["LongTextData"])
    rest = [plain(batch) for batch in quick.train_dataloader()]
    assert len(rest) == 2 and rest == [plain(batch) for batch in slow.train_dataloader()]


@pytest.mark.parametrize(
    "changed",
    [
        {"seed": 9},
        {"batch_size": 1},
        {"steps": 8},
        {"continuation": 281},
        {"chat": False},
        {"cross_documents": True},
        {"weights": [1.0, 1.0, 1.0]},
        {"stages": [Stage(300), Stage(360, 2), Stage(430)]},
        {"train": [LedgerQuestions(3)], "weights": None},
    ],
)
def test_a_resumed_run_with_other_data_is_refused(tokenizer, texts, changed):
    data = set_up(make(texts), tokenizer)
    state = {"plan": data.plan, "epoch": 0, "skip": 1, "readers": {"step": 0, "positions": {}}}
    other = set_up(make(texts, **changed), tokenizer)
    with pytest.raises(ValueError, match="data: the sources, stages, steps, lengths, batch size"):
        other.load_state_dict(state)
    data.load_state_dict(state)


def test_the_plan_tells_sources_apart():
    def plan(source):
        data = LongTextData([source], [Stage(9)], 1)
        data.trainer = make_trainer(None)
        return data.plan

    sources = [
        TextFiles("a"),
        TextFiles("b"),
        HubText("a", limit=1),
        HubText("a", limit=2),
        NeedleQuestions(1),
        NeedleQuestions(1, ["single"]),
        LedgerQuestions(1),
        LedgerQuestions(1, operations=3),
        TraceText(LedgerSource(1)),
        TraceText(LedgerSource(1, steps=(3, 4))),
        Mixture([TextFiles("a")]),
        Mixture([TextFiles("b")]),
    ]
    assert len({plan(source) for source in sources}) == len(sources)
    assert plan(Mixture([TextFiles("a")])) == plan(Mixture([TextFiles("a")]))
    read = NeedleQuestions(1, haystacks=["noise"])
    before = plan(read)
    read.asked(0, 400, lambda texts: [len(text.split()) for text in texts])
    assert plan(read) == before  # what has been read does not matter


def among(monkeypatch, trainer, rank, world):
    monkeypatch.setattr(type(trainer), "world_size", world)
    monkeypatch.setattr(type(trainer), "global_rank", rank)
    return trainer


def test_processes_share_the_batches_of_one(tokenizer, texts, monkeypatch):
    options = {"val": NeedleQuestions(9, haystacks=["noise"], needles=(2, 2)), "val_batches": 2}
    one = set_up(make(texts, **options), tokenizer)
    train, val = list(one.train_dataloader()), list(one.val_dataloader()[0])
    shares = []
    for rank in range(2):
        trainer = among(monkeypatch, make_trainer(None), rank, 2)
        data = set_up(make(texts, **options, batch_size=1), tokenizer, trainer=trainer)
        shares.append((list(data.train_dataloader()), list(data.val_dataloader()[0])))
    for rank, (own_train, own_val) in enumerate(shares):
        assert len(own_train) == 7 and len(own_val) == 2
        for whole, own in zip([*train, *val], [*own_train, *own_val], strict=True):
            whole, own = plain(whole), plain(own)
            assert own == {name: part[rank::2] for name, part in whole.items()}


def test_lightnings_own_sampler_is_refused_among_processes(tokenizer, texts, monkeypatch):
    trainer = among(monkeypatch, make_trainer(None, use_distributed_sampler=True), 0, 2)
    with pytest.raises(ValueError, match=r"trainer\.use_distributed_sampler: switch it off"):
        set_up(make(texts), tokenizer, trainer=trainer)


def test_validation_is_the_same_each_time(tokenizer, texts, tmp_path):
    source = NeedleQuestions(1, haystacks=["noise"], needles=(2, 3))  # as one of training
    data = make(texts, val=source, val_context=333, val_batches=3)
    module = fit(tokenizer, data, tmp_path, max_epochs=2, limit_train_batches=2)
    assert len(module.measured) == 6 and module.measured[:3] == module.measured[3:]
    assert all(len(batch["context"][0]) == 333 for batch in module.measured)
    trained = {name for batch in module.seen for name in batch["id"]}
    assert not trained & {name for batch in module.measured for name in batch["id"]}


def test_validation_alone_reads_no_training_data(tokenizer, texts):
    data = make(texts, train=[TextFiles("/no/such")], weights=None, val=TextFiles(texts))
    data.val_batches = 2
    set_up(data, tokenizer, "validate")
    assert len(list(data.val_dataloader()[0])) == 2
    with pytest.raises(ValueError, match="no such file or folder"):
        set_up(data, tokenizer)
    assert set_up(make(texts), tokenizer).val_dataloader() == []


def test_too_few_validation_documents_are_told(tokenizer, texts):
    data = make(texts, val=TextFiles(f"{texts}/1.txt"), val_batches=2)
    with pytest.raises(ValueError, match="data.val: its documents give no more than 0 batches"):
        set_up(data, tokenizer)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "is empty"), (b"\0\1", "binary"), ("Grüße".encode("latin-1"), "not UTF-8")],
)
def test_a_file_that_is_no_text_is_named(tokenizer, tmp_path, content, reason):
    Path(tmp_path, "0.bad").write_bytes(content)
    with pytest.raises(ValueError, match=rf"0\.bad: .*{reason}"):
        set_up(make(str(tmp_path)), tokenizer)


def test_what_cannot_be_had_is_told_before_the_training(tokenizer, texts):
    with pytest.raises(ValueError, match=r"train\[0\]: no document fills a window of 9280 tokens"):
        set_up(make(texts, stages=[Stage(300), Stage(9000)]), tokenizer)
    # Together they do.
    crossing = {"stages": [Stage(300), Stage(5000)], "cross_documents": True}
    set_up(make(texts, **crossing), tokenizer)
    with pytest.raises(ValueError, match=r"continuation=20: no room for a question and its answer"):
        set_up(make(texts, continuation=20), tokenizer)
    with pytest.raises(ValueError, match="leaves no room"):
        set_up(make(texts, stages=[Stage(20), Stage(300)]), tokenizer)


class Counted(TextSource):
    """Endless documents, of which it counts those that were read."""

    def __init__(self):
        self.read = 0

    def documents(self, count_tokens):
        while True:
            self.read += 1
            yield {"text": "a line of text, and one more line of it\n" * 100, "id": str(self.read)}


def test_sources_are_never_held_as_a_whole(tokenizer):
    source = Counted()
    data = set_up(LongTextData([source], [Stage(900)], 4, continuation=100), tokenizer)
    loader = iter(data.train_dataloader())
    next(loader)
    assert source.read <= 2  # one to try it out
    next(loader)
    assert source.read <= 3


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"train": []}, "data.train: name at least one"),
        ({"weights": [1.0]}, "data.weights="),
        ({"weights": [1.0, 0.0, 1.0]}, "data.weights="),
        ({"stages": []}, "data.stages"),
        ({"stages": [Stage(0)]}, "data.stages"),
        ({"stages": [Stage(8, 0.0)]}, "data.stages"),
        ({"steps": 0}, "data.steps=0"),
        ({"val_context": 0}, "data.val_context=0"),
        ({"val_batches": 0}, "data.val_batches=0"),
        ({"continuation": 0}, "data.continuation=0"),
        ({"batch_size": 0}, "data.batch_size=0"),
    ],
)
def test_options_that_cannot_be_are_refused(options, named):
    with pytest.raises(ValueError, match=named):
        make("", **options)


def test_a_configuration_is_parsed():
    parser = LightningArgumentParser()
    parser.add_subclass_arguments(LightningDataModule, "data")
    at = "zoomkv.data."
    config = {
        "class_path": f"{at}long_module.LongTextData",
        "init_args": {
            "train": [
                {"class_path": f"{at}long_text.BookText", "init_args": {"part": "train"}},
                {
                    "class_path": f"{at}asked.NeedleQuestions",
                    "init_args": {"seed": 1, "kinds": ["single"], "needles": [4, 8]},
                },
                {"class_path": f"{at}asked.LedgerQuestions", "init_args": {"steps": [3, 9]}},
            ],
            "weights": [1, 2, 3],
            "stages": [{"context": 1024, "share": 1}, {"context": 2048}],
            "steps": 30,
            "val": {"class_path": f"{at}asked.NeedleQuestions", "init_args": {"seed": 2}},
        },
    }
    data = parser.instantiate(parser.parse_object({"data": config})).data
    assert data.stages == [Stage(1024, 1.0), Stage(2048, 1.0)]
    assert data.sources[1].kinds == ("single",) and data.sources[1].needles == (4, 8)
    assert data.sources[2].shape.steps == (3, 9) and data.val_source.seed == 2
