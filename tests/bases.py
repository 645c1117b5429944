"""Tiny base models on disk, with a real tokenizer, as ``backbone.load`` reads them."""

from pathlib import Path

import hypothesis
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from zoomkv.data.ledger import LedgerShape

# A busy machine must not fail a test.
hypothesis.settings.register_profile("unhurried", deadline=None)
hypothesis.settings.load_profile("unhurried")

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = [
    f"Step {n}\n{n * 7 % 90}+{n % 9}={n * 7 % 90 + n % 9}\n\nWhat is the total after operation {n}"
    " and the final total? The ledger starts here, each step applies its summary in order. Begin"
    for n in range(300)
]
SHORT = LedgerShape(steps=(3, 4))


def make_tokenizer(pad: str | None = "<|endoftext|>") -> PreTrainedTokenizerFast:
    """A byte-level BPE of 360 tokens that merges digits, words and line ends."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    assert tokenizer.get_vocab_size() == 360
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token=pad,
        additional_special_tokens=["<|im_start|>"],
        chat_template=TEMPLATE,
    )


def make_base(
    folder: Path, family: str = "llama", *, tied: bool = True, seed: int = 0, spare: int = 0, **more
) -> str:
    """Writes a base of 2 layers, hidden 64, 4 query and 2 KV heads, and gives its path.

    ``spare`` rows of the embeddings have no token; ``more`` goes to the config.
    """
    tokenizer = make_tokenizer()
    settings = {
        "vocab_size": len(tokenizer) + spare,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "sliding_window": None,
    }
    config = AutoConfig.for_model(family, **(settings | more))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for value in model.parameters():
            if value.dim() == 2:
                value.mul_(4)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tokenizer():
    """The tokenizer of the tiny bases."""
    return make_tokenizer()


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> str:
    """A tiny tied Llama on disk."""
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def untied_base(tmp_path_factory) -> str:
    """A tiny untied Qwen2 on disk."""
    return make_base(tmp_path_factory.mktemp("untied"), "qwen2", tied=False, seed=1)
