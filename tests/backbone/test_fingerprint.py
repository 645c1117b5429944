"""What tells one base from another, however it was loaded."""

import pytest
import torch
from tests.bases import make_base

from zoomkv.backbone.fingerprint import describe_mismatch, fingerprint
from zoomkv.backbone.load import load_base


@pytest.mark.parametrize("precision", ["bf16", "nf4", "int8"])
def test_the_same_base_in_another_precision(base, precision):
    expected = fingerprint(load_base(base)[0])
    found = fingerprint(load_base(base, precision)[0])
    assert describe_mismatch(expected, found) is None
    assert found["embeddings"] == expected["embeddings"]
    assert (found["linear"] is None) == (precision in ("nf4", "int8"))


def test_other_bases_differ(base, tmp_path):
    expected = fingerprint(load_base(base)[0])
    other_seed = fingerprint(load_base(make_base(tmp_path / "a", seed=9))[0])
    assert "embeddings: expected" in describe_mismatch(expected, other_seed)
    deeper = fingerprint(load_base(make_base(tmp_path / "b", intermediate_size=96))[0])
    assert describe_mismatch(expected, deeper) is not None
    family = fingerprint(load_base(make_base(tmp_path / "c", "mistral"))[0])
    assert "architecture: expected llama" in describe_mismatch(expected, family)


@pytest.mark.parametrize("part", ["embed_tokens", "layers.1.mlp.down_proj", "norm"])
def test_a_change_of_one_part_shows(base, part):
    model, _ = load_base(base)
    expected = fingerprint(model)
    weight = model.get_decoder().get_submodule(part).weight
    with torch.no_grad():
        weight[0] += 1
    assert describe_mismatch(expected, fingerprint(model)) is not None
