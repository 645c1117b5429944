"""What a model reads of an asked document: exact lengths, the question never in the context."""

from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from zoomkv.data.asked import Asked, AskedText, LedgerQuestions, NeedleQuestions
from zoomkv.data.needles import NOISE
from zoomkv.data.turns import Turns
from zoomkv.evaluation.needle import split_prompt

QUESTIONS = {
    "needles": NeedleQuestions(1, haystacks=["noise", "needles"], needles=(2, 4)),
    "ledgers": LedgerQuestions(1),
}


@pytest.fixture(scope="module")
def sentencepiece():
    """Like Llama 2's and Mistral's: a space in front of every text, bytes, and a bos."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256))],
        show_progress=False,
        max_token_length=12,
    )
    asked = [QUESTIONS["needles"].asked(n, 200, _words) for n in range(20)]
    texts = [one.text + "".join(map("".join, one.turns)) for one in asked]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def _words(texts):
    return [len(text.split()) for text in texts]


@pytest.mark.parametrize("context", [400, 401, 750])
@pytest.mark.parametrize("kind", ["chat", "plain", "sentencepiece"])
@pytest.mark.parametrize("source", sorted(QUESTIONS))
def test_lengths_are_exact_and_questions_come_after(request, tokenizer, source, kind, context):
    if kind == "sentencepiece":
        tokenizer = request.getfixturevalue("sentencepiece")
    turns = Turns(tokenizer, chat=kind == "chat")
    assert turns.chat == (kind == "chat")
    for number in range(5):
        one = turns.framed(QUESTIONS[source], number, context, 300)
        assert len(one.context) == context and len(one.continuation) == 300
        asked = QUESTIONS[source].asked(number, context, turns.count)
        read, said = tokenizer.decode(one.context), tokenizer.decode(one.continuation)
        assert "What " not in read and asked.text[:40] in read
        # A tokenizer may have a token for the end of a sentence and of its line.
        assert said.lstrip("\n.").startswith("What ") and said.startswith(("\n", ".\n"))
        # Cut nowhere but in the filler at the end, the ids are the tokenizer's own.
        again = tokenizer(read, add_special_tokens=False)["input_ids"]
        assert kind == "sentencepiece" or again == one.context


def test_it_is_the_prompt_of_the_evaluation(tokenizer):
    """The same context, question and opening give the same tokens, cut in the same place."""
    for chat in (True, False):
        turns = Turns(tokenizer, chat)

        def render(prompt, chat=chat):
            if not chat:
                return prompt
            turn = [{"role": "user", "content": prompt}]
            return tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)

        generator = SimpleNamespace(render=render, chat=chat, tokenizer=tokenizer)
        for number in range(4):
            one = turns.framed(QUESTIONS["needles"], number, 500, 300)
            text = tokenizer.decode(one.context)[len(turns.head) :]
            said = tokenizer.decode(one.continuation)
            question, answer = said[1:].split(f"?{turns.tail}", 1)
            question += "?"
            opening = answer.partition(" is " if " is " in answer[:90] else " are ")[0]
            opening += " is" if " is " in answer[:90] else " are"
            needle = SimpleNamespace(
                prompt=f"{text}\n{question}", question=question, opening=opening
            )
            context, rest = split_prompt(generator, needle, opening=True)
            assert context == one.context and rest == one.continuation[: len(rest)]
            assert len(rest) > 40


def test_what_matters_are_questions_and_answers(tokenizer):
    for chat in (True, False):
        turns = Turns(tokenizer, chat)
        for number in range(6):
            asked = QUESTIONS["needles"].asked(number, 450, turns.count)
            one = turns.framed(QUESTIONS["needles"], number, 500, 2000)
            matters = tokenizer.decode(one.continuation[: one.supervised])
            expected = "\n" + turns.between.join(
                f"{question}{turns.tail}{answer}" for question, answer in asked.turns
            )
            assert len(asked.turns) == one.answered and matters == expected
            rest = tokenizer.decode(one.continuation[one.supervised :])
            assert rest.startswith(turns.between)
            noise = "\n".join(NOISE.sentences * 99)
            assert noise.startswith(rest[len(turns.between) :])
            # Less room: the same, cut.
            short = turns.framed(QUESTIONS["needles"], number, 500, 20)
            assert short.continuation == one.continuation[:20]
            assert short.supervised == 20 and short.answered == 0


def test_roles_alternate(tokenizer):
    turns = Turns(tokenizer)
    one = turns.framed(QUESTIONS["ledgers"], 0, 600, 900)
    asked = QUESTIONS["ledgers"].asked(0, 600, turns.count)
    text = tokenizer.decode([*one.context, *one.continuation[: one.supervised]])
    heads = [part.partition("\n")[0] for part in text.split("<|im_start|>")[1:]]
    assert heads == (["user", "assistant"] * 16)[: len(heads)] and len(heads) >= 8
    for question, answer in asked.turns[: one.answered]:
        assert f"{question}<|im_end|>\n<|im_start|>assistant\n{answer}" in text


class Fixed(AskedText):
    """One text, whatever length is asked for."""

    def __init__(self, text, solid):
        self.text, self.solid = text, solid

    def asked(self, number, length, count_tokens):
        return Asked(self.text, self.solid, (("Why?", "Because."),), "fixed")


def test_what_must_stay_is_not_cut(tokenizer):
    turns = Turns(tokenizer, chat=False)
    text = "abc " * 40
    size = len(turns.encode(text.strip()))
    assert turns.framed(Fixed(text.strip(), 100), 0, size, 9).context == turns.encode(text.strip())
    with pytest.raises(ValueError, match="fixed: with this tokenizer it does not come out at 20"):
        turns.framed(Fixed(text, 100), 0, 20, 9)
    with pytest.raises(ValueError, match="does not come out at 4000 tokens"):
        turns.framed(Fixed(text, 100), 0, 4000, 9)


def test_a_source_that_counts_badly_is_asked_again(tokenizer):
    """Lengths are met whatever pieces join to: counts that are off by half lead there too."""

    class Off(AskedText):
        def __init__(self, factor):
            self.factor, self.calls = factor, 0

        def asked(self, number, length, count_tokens):
            self.calls += 1
            return QUESTIONS["needles"].asked(
                number, length, lambda texts: [int(n * self.factor) for n in count_tokens(texts)]
            )

    for factor in (0.6, 1.0, 1.8):
        source = Off(factor)
        one = Turns(tokenizer).framed(source, 3, 900, 50)
        assert len(one.context) == 900 and (source.calls == 1) == (factor == 1)


def test_work_is_linear_in_the_length(tokenizer, monkeypatch):
    """A document costs about two tokenisations of its text: a thousand of 4K take half a minute."""
    read = []
    encode = type(tokenizer)._encode_plus

    def watched(self, text, *args, **options):
        read.append(len(text) if isinstance(text, str) else sum(map(len, text)))
        return encode(self, text, *args, **options)

    monkeypatch.setattr(type(tokenizer), "_encode_plus", watched)
    turns = Turns(tokenizer)
    for source in QUESTIONS.values():
        for number in range(3):
            read.clear()
            one = turns.framed(source, number, 4096, 256)
            text = len(tokenizer.decode([*one.context, *one.continuation]))
            assert text < sum(read) < 2.5 * text + 8000


def test_a_template_that_rewrites_is_refused(tokenizer, monkeypatch):
    upper = "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", upper)
    with pytest.raises(ValueError, match="rewrites what it is given.*set chat to false"):
        Turns(tokenizer)
    assert not Turns(tokenizer, chat=False).chat


def test_without_a_template_it_is_plain_text(sentencepiece):
    turns = Turns(sentencepiece, chat=True)
    assert not turns.chat and turns.prefix == [1]
    one = turns.framed(QUESTIONS["needles"], 0, 300, 60)
    assert one.context[0] == 1 and one.context.count(1) == 1
    assert 1 not in one.continuation


def test_a_tokenizer_without_a_bos_has_no_prefix(tokenizer):
    assert Turns(tokenizer).prefix == []


@pytest.mark.slow
def test_the_embedded_model(request):
    from zoomkv.backbone.load import load_tokenizer

    tokenizer = load_tokenizer("smollm2-135m")
    turns = Turns(tokenizer)
    assert turns.chat and turns.head.endswith("<|im_start|>user\n")
    source = NeedleQuestions(1, haystacks=["noise", "needles", "book"])
    for number in range(6):
        one = turns.framed(source, number, 1024, 256)
        text = tokenizer.decode([*one.context, *one.continuation])
        assert one.answered and len(one.context) == 1024
        assert (
            tokenizer(tokenizer.decode(one.context), add_special_tokens=False)["input_ids"]
            == one.context
        )
        assert text.count("What ") >= one.answered
