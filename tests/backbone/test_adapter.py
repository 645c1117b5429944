"""Adapters and delimiter rows: what is trained, saved, loaded and merged."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.bases import make_base

from zoomkv.backbone.adapter import add_adapter, load_adapter, load_trained, save_adapter
from zoomkv.backbone.delimiters import add_to_model, add_to_tokenizer
from zoomkv.backbone.load import load_base
from zoomkv.spans.thoughts import BEGIN_OF_SUMMARY


def trained(path, steps=3, **options):
    """A PEFT model after a few steps on random ids, the delimiters among them."""
    model, tokenizer = load_base(path, **options)
    adapted = add_adapter(model, tokenizer, r=4, alpha=8)
    ids = torch.randint(0, len(tokenizer), (2, 24), generator=torch.Generator().manual_seed(0))
    ids[:, ::4], ids[:, 1::4] = add_to_tokenizer(tokenizer)
    weights = [value for value in adapted.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=0.05, weight_decay=0.1)
    for _ in range(steps):
        adapted(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return adapted.eval(), tokenizer, ids


def logits(model, ids):
    with torch.inference_mode():
        return model(input_ids=ids).logits


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("spare", [0, 30])
def test_only_adapters_and_delimiter_rows_learn(tmp_path, tied, spare):
    path = make_base(tmp_path, tied=tied, spare=spare)
    before, _ = load_base(path)
    rows = before.get_input_embeddings().weight.shape[0]
    adapted, tokenizer, _ = trained(path)
    delimiters = add_to_tokenizer(tokenizer)
    names = [name for name, value in adapted.named_parameters() if value.requires_grad]
    assert all("lora_" in name or "trainable_tokens_delta" in name for name in names)
    assert sum("trainable_tokens_delta" in name for name in names) == (1 if tied else 2)
    assert len([name for name in names if "lora_A" in name]) == 2 * 7
    # Every base weight is bit-identical, but for rows that had no token.
    now = {
        name.removeprefix("base_model.model.").replace(wrapper, ""): value
        for name, value in adapted.named_parameters()
        for wrapper in [".token_adapter.base_layer" if "token_adapter" in name else ".base_layer"]
    }
    for name, value in before.named_parameters():
        kept = min(delimiters) if value.shape[0] >= rows else len(value)
        assert torch.equal(now[name][:kept], value[:kept])
    # And the model that comes out says so too: old rows of merged matrices are the old ones.
    merged = adapted.merge_and_unload()
    for ours, theirs in [
        (merged.get_input_embeddings(), before.get_input_embeddings()),
        (merged.get_output_embeddings(), before.get_output_embeddings()),
    ]:
        assert ours.weight.shape[0] == max(rows, max(delimiters) + 1)
        assert torch.equal(ours.weight[: min(delimiters)], theirs.weight[: min(delimiters)])
    assert (merged.lm_head.weight is merged.get_input_embeddings().weight) == tied


@pytest.mark.parametrize("tied", [True, False])
def test_delimiter_rows_begin_at_related_words_and_then_move(tmp_path, tied):
    path = make_base(tmp_path, tied=tied)
    model, tokenizer = load_base(path)
    words = tokenizer(" begin summary", add_special_tokens=False)["input_ids"]
    matrices = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    expected = [matrix[words].mean(0).clone() for matrix in matrices]
    [begin, _] = add_to_model(model, tokenizer)
    matrices = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    for matrix, row in zip(matrices, expected, strict=True):
        assert torch.equal(matrix[begin], row)
    merged = trained(path)[0].merge_and_unload()
    for matrix, row in zip([merged.get_input_embeddings(), merged.lm_head], expected, strict=True):
        assert (matrix.weight[begin] - row).abs().max() > 0.01


def test_a_base_that_knows_the_delimiters_keeps_their_rows(base, tmp_path):
    adapted, tokenizer, ids = trained(base)
    merged = adapted.merge_and_unload()
    merged.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, its_tokenizer = load_base(str(tmp_path))
    begin = its_tokenizer.get_vocab()[BEGIN_OF_SUMMARY]
    assert add_to_model(again, its_tokenizer)[0] == begin
    assert torch.equal(logits(again, ids), logits(merged, ids))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "nf4", "int8"])
def test_what_is_trained_is_fp32(base, precision):
    model, tokenizer = load_base(base, precision)
    adapted = add_adapter(model, tokenizer)
    types = {value.dtype for value in adapted.parameters() if value.requires_grad}
    assert types == {torch.float32}
    ids = torch.tensor([[5, *add_to_tokenizer(tokenizer)]])
    adapted(input_ids=ids, labels=ids).loss.backward()
    assert all(v.grad is not None for v in adapted.parameters() if v.requires_grad)


@pytest.mark.parametrize("tied", [True, False])
def test_saved_and_loaded_is_bit_equal_and_small(tmp_path, tied):
    path = make_base(tmp_path / "base", tied=tied)
    adapted, _, ids = trained(path)
    save_adapter(adapted, "owner/base", tmp_path / "adapter")
    assert sorted(file.name for file in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "owner/base"
    assert str(tmp_path) not in json.dumps(config)
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert max(len(value) for value in saved.values() if value.shape[-1] == 64) < 150
    loaded = load_adapter(*load_base(path), tmp_path / "adapter")
    assert torch.equal(logits(loaded, ids), logits(adapted, ids))
    assert not any(value.requires_grad for value in loaded.parameters())
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(logits(merged, ids), logits(adapted, ids), rtol=0, atol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    from transformers import AutoModelForCausalLM

    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(logits(again, ids), logits(merged, ids))


def edit(folder, change):
    path = folder / "adapter_model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path)


def first(weights, part):
    return next(name for name in sorted(weights) if part in name)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda w: w.pop(first(w, "lora_B")), "1 weights are missing, 0 are unknown"),
        (lambda w: w.pop(first(w, "embed_tokens")), "1 weights are missing, 0 are unknown"),
        (lambda w: w.update(odd=torch.zeros(1)), "0 weights are missing, 1 are unknown, first odd"),
        (lambda w: w.update({first(w, "lora_A"): torch.zeros(4, 7)}), r"is \(4, 7\), the base"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(base, tmp_path, damage, message):
    save_adapter(trained(base, steps=0)[0], "base", tmp_path)
    edit(tmp_path, damage)
    with pytest.raises(ValueError, match=message):
        load_adapter(*load_base(base), tmp_path)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]"])
def test_a_broken_file_is_refused(base, tmp_path, name, content):
    save_adapter(trained(base, steps=0)[0], "base", tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match="can't be read"):
        load_adapter(*load_base(base), tmp_path)


def test_trained_weights_must_be_all_of_them(base):
    adapted, _, _ = trained(base, steps=1)
    weights = {name: v.detach() for name, v in adapted.named_parameters() if v.requires_grad}
    fresh = trained(base, steps=0)[0]
    load_trained(fresh, weights)
    again = {name: v for name, v in fresh.named_parameters() if v.requires_grad}
    assert all(torch.equal(again[name], weights[name]) for name in weights)
    lost = first(weights, "lora_A")
    with pytest.raises(ValueError, match="1 weights are missing, 0 are unknown"):
        load_trained(fresh, {name: v for name, v in weights.items() if name != lost})
