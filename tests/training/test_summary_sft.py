"""SummarySFT: what it learns, weighs, measures and leaves alone."""

import pytest
import torch
import torch.nn.functional as F
from lightning import Callback
from tests.bases import make_base
from tests.training.conftest import Fit, trained_weights

from zoomkv.backbone.attach import attach
from zoomkv.backbone.load import load_base
from zoomkv.caches.registry import make_cache, names
from zoomkv.data.collate import collate
from zoomkv.data.render import KINDS, SOLUTION, SUMMARY, THOUGHT, Renderer
from zoomkv.data.sources import LedgerSource, TraceSource
from zoomkv.spans.thoughts import Delimiters
from zoomkv.training.partial_module import OptimizerOptions
from zoomkv.training.schedules import cosine_with_warmup
from zoomkv.training.summary_sft import (
    LoraOptions,
    SummarySFT,
    is_well_formed,
)


def test_only_adapters_and_delimiter_rows_change(fit, base):
    module, _, _ = fit(max_steps=3, max_epochs=-1)
    fresh, _ = load_base(base)
    rows = len(fresh.get_input_embeddings().weight)
    now = {
        name.removeprefix("base_model.model.")
        .replace(".token_adapter", "")
        .replace(".base_layer", ""): value
        for name, value in module.model.named_parameters()
    }
    for name, value in fresh.named_parameters():
        assert torch.equal(now[name][:rows] if "embed" in name else now[name], value)
    fit_again = fit.module()
    fit_again.configure_model()
    begun, ended = trained_weights(fit_again), trained_weights(module)
    moved = {name for name in ended if not torch.equal(ended[name], begun[name])}
    assert {n for n in ended if "trainable_tokens" in n or "lora_B" in n} <= moved


def test_an_untied_head_learns_too(untied_base, tmp_path):
    module, _, _ = Fit(untied_base, tmp_path)(max_steps=3, max_epochs=-1)
    fresh = Fit(untied_base, tmp_path).module()
    fresh.configure_model()
    begun, ended = trained_weights(fresh), trained_weights(module)
    rows = [name for name in ended if "trainable_tokens" in name]
    assert len(rows) == 2
    assert all((ended[name] - begun[name]).abs().max() > 1e-3 for name in rows)


def test_the_loss_goes_down(fit):
    _, _, seen = fit(max_epochs=6)
    assert sum(seen.losses[-7:]) < 0.9 * sum(seen.losses[:7])


def test_everything_trains_in_training_mode_before_and_after_validation(fit):
    _, _, seen = fit(
        module={"lora": LoraOptions(r=4, alpha=8, dropout=0.5)},
        data={"val": LedgerSource(2, 5, (3, 3)), "prompts": 1},
        val_check_interval=1,
        max_steps=3,
        max_epochs=-1,
    )
    assert seen.modes == [True] * 3


@pytest.fixture
def stepped(monkeypatch):
    """The gradients that each optimizer step uses."""
    steps = []

    def keep(self, optimizer, *args, **options):
        steps.append({n: v.grad.clone() for n, v in self.named_parameters() if v.requires_grad})

    monkeypatch.setattr(SummarySFT, "configure_gradient_clipping", keep)
    return steps


def same(ours, theirs, tolerance=1e-5):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=tolerance)


@pytest.mark.parametrize("packing", [False, True])
def test_accumulated_batches_weigh_tokens_like_one_large_batch(fit, stepped, packing):
    """Ledgers of 3 and of 24 steps: the mean of their means would be another gradient."""
    sources = [LedgerSource(2, 1, (3, 3)), LedgerSource(2, 2, (20, 24))]
    data = {"train": sources, "max_length": 1500, "packing": packing}
    _, trainer, seen = fit(data=data | {"batch_size": 1}, accumulate_grad_batches=100)
    rows = len(seen.batches)
    assert trainer.global_step == 1 and (rows == 4 or packing)
    fit(data=data | {"batch_size": rows})
    same(stepped[0], stepped[1])


def test_the_step_is_that_of_the_mean_over_all_tokens(fit, stepped):
    """Against transformers' own loss over the labelled tokens of the batch."""
    _, _, seen = fit(max_steps=1, max_epochs=-1, data={"batch_size": 3})
    fresh = fit.module()
    fresh.configure_model()
    renderer = Renderer(fresh.tokenizer)
    examples = {
        tuple(example.input_ids): example
        for trace in LedgerSource(14, 1, (3, 4)).traces(len)
        if (example := renderer(trace))
    }
    [batch] = seen.batches
    pad = fresh.tokenizer.pad_token_id
    labels = []
    for row in batch:
        told = next(len(ids) for ids in examples if list(ids) == row[: len(ids)])
        labels.append(examples[tuple(row[:told])].labels + [-100] * (len(row) - told))
        assert set(row[told:]) <= {pad}
    ids = torch.tensor(batch)
    fresh.model(input_ids=ids, labels=torch.tensor(labels), use_cache=False).loss.backward()
    same(stepped[0], {n: v.grad for n, v in fresh.named_parameters() if v.requires_grad})


def test_gradient_checkpointing_changes_no_gradient(fit, stepped):
    fit(max_steps=1, max_epochs=-1)
    saving, _, seen = fit(
        module={"gradient_checkpointing": True},
        data={"val": LedgerSource(1, 5, (3, 3)), "prompts": 1},
        max_steps=1,
        max_epochs=-1,
        limit_train_batches=1,
    )
    assert saving.model.is_gradient_checkpointing and saving.model.config.use_cache
    same(stepped[1], stepped[0])


def test_perplexity_of_each_kind_is_the_plain_one(fit):
    # Five examples in batches of two: none may count twice.
    val = LedgerSource(5, 5, (3, 5))
    module, trainer, _ = fit(max_steps=1, max_epochs=-1, data={"val": val, "prompts": 0},
                             limit_train_batches=1, check_val_every_n_epoch=1)  # fmt: skip
    renderer = Renderer(module.tokenizer)
    nats = {kind: [] for kind in (THOUGHT, SUMMARY, SOLUTION)}
    module.model.eval()
    for trace in val.traces(len):
        example = renderer(trace)
        with torch.inference_mode():
            logits = module.model(input_ids=torch.tensor([example.input_ids])).logits[0]
        logp = F.log_softmax(logits, -1)
        for at in range(1, len(example.input_ids)):
            if example.kinds[at] in nats:
                nats[example.kinds[at]].append(-float(logp[at - 1, example.input_ids[at]]))
    for kind, values in nats.items():
        wanted = torch.tensor(values).mean().exp()
        found = trainer.callback_metrics[f"val/perplexity_{KINDS[kind]}"]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=0)


class Echo(TraceSource):
    """Says what it was asked to mark."""

    heard: list[str] = []

    def traces(self, count_tokens):
        return LedgerSource(3, 8, (3, 3)).traces(count_tokens)

    def is_right(self, trace, text):
        self.heard.append(text)
        return [True, False, None][int(trace.id[-1])]


def test_answers_are_generated_and_marked(fit):
    Echo.heard.clear()
    module, trainer, _ = fit(
        max_steps=1, max_epochs=-1, limit_train_batches=1, data={"val": Echo(), "prompts": 3}
    )
    # One right, one wrong, one that can't be told: half.
    assert trainer.callback_metrics["val/right"] == 0.5
    assert trainer.callback_metrics["val/well_formed"] == 0
    module.model.eval()
    for trace, heard in zip(Echo().traces(len), Echo.heard, strict=True):
        text = Renderer(module.tokenizer).prompt(trace.problem)
        ids = module.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        output = module.model.generate(input_ids=ids, max_new_tokens=12, do_sample=False)
        alone = module.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
        assert heard == alone


@pytest.mark.parametrize(
    ("ids", "well"),
    [
        ([5, 1, 6, 2, 7], True),
        ([5, 1, 6, 2, 7, 1, 8, 2, 3, 3], True),
        ([5, 6], False),
        ([5, 1, 6], False),
        ([5, 6, 2], False),
        ([5, 1, 1, 6, 2], False),
        ([5, 1, 6, 2, 2], False),
        ([5, 1, 6, 3, 2], False),
    ],
)
def test_well_formed(ids, well):
    assert is_well_formed(ids, Delimiters((1,), (2,), abort=(3,))) == well


def test_a_batch_that_teaches_nothing_is_no_nan(fit):
    module, trainer, _ = fit(max_steps=1, max_epochs=-1)
    batch = collate([[{"input_ids": [4, 5, 6], "kinds": [0] * 3, "looks_up": [-1] * 3}]], 0)
    loss = module.training_step(batch, 0)
    assert loss == 0 and loss.requires_grad


def test_the_schedule():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = cosine_with_warmup(optimizer, 20, 0.2, 0.1)
    rates = []
    for _ in range(22):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and max(rates) == 1.0
    assert rates[20] == pytest.approx(0.1) and rates[21] == pytest.approx(0.1)
    assert rates[12] == pytest.approx(0.55)


class EveryCache(Callback):
    """Generates with each of our caches whenever validation ends."""

    texts: dict[str, list[int]] = {}

    def on_validation_end(self, trainer, pl_module):
        model, tokenizer = pl_module.model.eval(), pl_module.tokenizer
        ids = tokenizer("Step 1\n3+4=7\n\nStep 2", return_tensors="pt")["input_ids"]
        with attach(model, tokenizer), torch.inference_mode():
            for name in names():
                cache = make_cache(name, model, tokenizer, **({"budget": 512} if name not in
                    ("full", "full_offloaded", "sumr", "zoomr") else {}))  # fmt: skip
                output = model.generate(
                    input_ids=ids, cache=cache, max_new_tokens=6, do_sample=False, eos_token_id=None
                )
                self.texts[name] = output[0].tolist()
        pl_module.model.train()


def test_a_quantised_base_trains_generates_and_goes_on(fit, tmp_path):
    EveryCache.texts.clear()
    module, trainer, seen = fit(
        EveryCache(),
        module={"precision": "nf4", "optimizer": OptimizerOptions(lr=0.01, eight_bit=True)},
        data={"val": LedgerSource(1, 5, (3, 3)), "prompts": 1},
        val_check_interval=1,
        max_steps=2,
        max_epochs=-1,
    )
    assert type(trainer.optimizers[0]).__name__ == "AdamW8bit"
    assert len(seen.losses) == 2 and all(loss == loss for loss in seen.losses)
    assert set(EveryCache.texts) == set(names())
    assert len({tuple(ids) for ids in EveryCache.texts.values()}) == 1  # nothing binds
    assert seen.modes == [True, True]
    # Saved, and read again on the same and on an unquantised base.
    from zoomkv.export.from_checkpoint import export_checkpoint
    from zoomkv.generation import load

    trainer.save_checkpoint(tmp_path / "q.ckpt")
    export_checkpoint(tmp_path / "q.ckpt", tmp_path / "artifact")
    ids = torch.tensor([[5, 9, 40, 41, 42]])
    module.model.eval()
    for precision, tolerance in (("nf4", 0.05), ("fp32", 0.6)):
        model, _ = load(str(tmp_path / "artifact"), precision)
        with torch.inference_mode():
            theirs, ours = module.model(ids).logits.float(), model(ids).logits.float()
        assert (ours - theirs).norm() < tolerance * theirs.norm()


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral"])
def test_every_family_trains(tmp_path, family):
    fit = Fit(make_base(tmp_path / "base", family, tied=family != "mistral"), tmp_path)
    _, _, seen = fit(max_epochs=4)
    assert sum(seen.losses[-7:]) < sum(seen.losses[:7])
