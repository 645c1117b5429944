"""Base models by name: what is loaded, and what is refused in one line."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.bases import make_base

from zoomkv.backbone.families import check_supported
from zoomkv.backbone.load import load_base, load_tokenizer


def copy_of(base, folder):
    return Path(shutil.copytree(base, folder / "copy"))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_supported_families(tmp_path, family, tied):
    model, tokenizer = load_base(make_base(tmp_path, family, tied=tied))
    assert model.config.model_type == family and not model.training
    assert model.dtype == torch.float32
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    saved = load_file(tmp_path / "model.safetensors")
    for name, value in model.state_dict().items():
        if name in saved:
            assert torch.equal(value, saved[name])
    assert tokenizer.padding_side == "left"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "nf4", "int8"])
def test_every_precision_computes(base, precision):
    model, tokenizer = load_base(base, precision)
    reference, _ = load_base(base)
    ids = tokenizer("A ledger starts at 12.", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        ours, theirs = model(ids).logits.float(), reference(ids).logits
    difference = (ours - theirs).norm() / theirs.norm()
    assert difference < {"fp32": 1e-6, "bf16": 0.05, "nf4": 0.5, "int8": 0.2}[precision]
    if precision != "fp32":
        assert difference > 0
        assert model.get_input_embeddings().weight.dtype == torch.bfloat16


def test_no_progress_bar_off_a_terminal(base, capfd):
    load_base(base)
    assert capfd.readouterr().err == ""


def test_pad_defaults_to_the_end_of_text(base, tmp_path):
    folder = copy_of(base, tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["pad_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.pad_token == tokenizer.eos_token == "<|im_end|>"


def edit_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def break_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def lose_a_weight(folder):
    path = folder / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_weights, "can't be loaded"),
        (lose_a_weight, "1 weights are missing, first model.layers.1.mlp.up_proj.weight"),
        (lambda folder: (folder / "model.safetensors").unlink(), "can't be loaded"),
        (lambda folder: (folder / "config.json").write_text("{"), "no such hub id, folder or GGUF"),
        (lambda folder: (folder / "config.json").unlink(), "no such hub id, folder or GGUF"),
        (lambda folder: edit_config(folder, model_type="nonsense"), "no such hub id"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "its tokenizer can't be read"),
    ],
)
def test_a_broken_folder_is_one_line(base, tmp_path, damage, message):
    folder = copy_of(base, tmp_path)
    damage(folder)
    with pytest.raises(ValueError, match=message) as failed:
        load_base(str(folder))
    assert "\n" not in str(failed.value) and str(folder) in str(failed.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp8"}, "precision 'fp8': choose one of fp32, bf16, nf4, int8"),
        ({"device": "gpu"}, "device 'gpu': choose cpu"),
        ({"attention": "fast"}, "can't be loaded"),
    ],
)
def test_options_that_can_not_be_had(base, options, message):
    with pytest.raises(ValueError, match=message):
        load_base(base, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_cuda(base):
    with pytest.raises(ValueError, match="there is no CUDA device here"):
        load_base(base, device="cuda:0")


def test_names_that_are_not_there(tmp_path):
    with pytest.raises(ValueError, match="there is no such GGUF file"):
        load_base(str(tmp_path / "none.gguf"))
    (tmp_path / "bad.gguf").write_bytes(b"not a gguf" * 100)
    with pytest.raises(ValueError, match="not a GGUF file that transformers can read"):
        load_base(str(tmp_path / "bad.gguf"))


@pytest.mark.parametrize("name", ["smollm-135m", "SmolLM2-135M", "smollm2-135", "smolm2_135m"])
def test_a_misspelt_default_is_told_without_asking_the_hub(name, monkeypatch):
    monkeypatch.setattr("transformers.utils.has_file", None)
    with pytest.raises(ValueError, match=f"^model '{name}': did you mean smollm2-135m\\?$"):
        load_base(name)


def test_a_path_is_not_looked_for_on_the_hub(monkeypatch, tmp_path):
    monkeypatch.setattr("transformers.utils.has_file", None)
    for name in (str(tmp_path / "none"), "./none", "../none", "~/none-of-this"):
        with pytest.raises(ValueError, match="there is no such folder"):
            load_base(name)


def test_the_hub_is_asked_once_before_anything_is_fetched(monkeypatch):
    """Behind it are half a minute of attempts where there is no network."""
    from transformers import AutoConfig, AutoTokenizer

    asked = []
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *a, **k: asked.append("config"))
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *a, **k: asked.append("tokens"))
    monkeypatch.setattr("transformers.utils.has_file", lambda *what: asked.append(what))
    for load in (load_base, load_tokenizer):
        with pytest.raises(ValueError, match="^model 'some/model': .*hub can't be reached") as told:
            load("some/model")
        assert "\n" not in str(told.value)
    assert asked == [("some/model", "config.json")] * 2


def test_other_architectures_and_windows_are_refused_by_name():
    from transformers import Gemma3TextConfig, GPT2Config, MistralConfig, Qwen2Config

    with pytest.raises(ValueError, match="model 'x': architecture 'gpt2' is not supported; "):
        check_supported(GPT2Config(), "x")
    with pytest.raises(ValueError, match="gemma3_text"):
        check_supported(Gemma3TextConfig())
    with pytest.raises(ValueError, match="sliding window of 4096 tokens"):
        check_supported(MistralConfig(sliding_window=4096))
    check_supported(MistralConfig(sliding_window=None))
    windowed = Qwen2Config(use_sliding_window=True, sliding_window=8, max_window_layers=1)
    with pytest.raises(ValueError, match="sliding window of 8 tokens"):
        check_supported(windowed)
    check_supported(Qwen2Config(sliding_window=8))  # off by default
