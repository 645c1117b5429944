"""A tiny model on disk that lm-eval's own class can load as well as ours."""

from pathlib import Path

from tests.conftest import make_tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from zoomkv.spans.thoughts import BEGIN_OF_SUMMARY, END_OF_SUMMARY

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def letters(summaries: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer of single characters, with the two summary tokens if asked for."""
    # 128 tokens in all, as many as the model knows.
    tokens = ["<pad>", "<end>", "<unk>", "\n", *map(chr, [*range(32, 127), *range(0xC0, 0xDB)])]
    if not summaries:
        tokens += ["\xde", "\xdf"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    raw.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<unk>",
        padding_side="left",
        chat_template=TEMPLATE,
    )
    if summaries:
        tokenizer.add_tokens([BEGIN_OF_SUMMARY, END_OF_SUMMARY], special_tokens=True)
    return tokenizer


def save(folder: Path, summaries: bool = False, **options) -> str:
    """Writes model and tokenizer; options as for ``make_tiny``."""
    model = make_tiny("llama", **{"eos_token_id": 1, **options})
    model.generation_config.eos_token_id = 1
    model.save_pretrained(folder)
    letters(summaries).save_pretrained(folder)
    return str(folder)
