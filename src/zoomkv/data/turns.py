"""The tokens of a document and of the questions that follow it, as a model reads them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from operator import itemgetter
from typing import Any, NamedTuple

from zoomkv.data.asked import AskedText
from zoomkv.data.needles import NOISE

_TRIES = 6
_START, _STOP = itemgetter(0), itemgetter(1)


class Framed(NamedTuple):
    """Tokens of one asked document."""

    context: list[int]
    continuation: list[int]
    supervised: int
    """Tokens of the continuation that are of questions and answers; what follows is only there to
    make up the length."""
    answered: int
    """Questions whose answers stand in the continuation as a whole."""
    id: str


class Turns:
    """Puts documents and questions into the turns of a chat template, or into plain text.

    Context and first question share a user turn; the model's turn holds the answer; every further
    question is a turn of its own. The context ends where ``evaluation.needle.split_prompt`` cuts:
    a token that holds the end of the context and the beginning of the question goes with the
    question.

    Args:
        tokenizer: The model's own; one that tells where its tokens stand.
        chat: Use the tokenizer's chat template, if it has one.

    Raises:
        ValueError: The chat template rewrites what it is given.
    """

    def __init__(self, tokenizer: Any, chat: bool = True) -> None:
        self.tokenizer = tokenizer
        self.chat = chat and tokenizer.chat_template is not None
        self.head, self.tail, self.between = _turns(tokenizer) if self.chat else ("", " ", "\n")
        text = NOISE.sentences[0]
        plain, special = self.encode(text), tokenizer(text)["input_ids"]
        self.prefix: list[int] = special[: special.index(plain[0])]
        """What the tokenizer puts before every text."""
        self._noise_tokens = len(plain)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special ones around it."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def count(self, texts: list[str]) -> list[int]:
        """Tokens of each text, without special ones."""
        return [len(ids) for ids in self.tokenizer(texts, add_special_tokens=False)["input_ids"]]

    def framed(self, source: AskedText, number: int, context: int, continuation: int) -> Framed:
        """One document of a source, its questions and answers, and noise up to the length.

        Both parts are what the tokenizer makes of the whole text, but for the end of the document's
        filler, which is cut off where the context is full.

        Args:
            source: Of the document.
            number: Which one.
            context: Tokens of the context, the template's included; met exactly.
            continuation: Tokens that follow it.

        Raises:
            ValueError: The source has nothing as short as that.
        """
        [room] = self.count([self.head])
        room = context - room
        for _ in range(_TRIES):
            asked = source.asked(number, room, self.count)
            text, end = self.head + asked.text, len(self.head) + len(asked.text)
            between, answered = "\n", []
            for question, answer in asked.turns:
                text = f"{text}{between}{question}{self.tail}{answer}"
                answered.append(len(text))
                between = self.between
            noise = "\n".join(NOISE.sentences * (continuation // self._noise_tokens + 2))
            encoded = self.tokenizer(
                f"{text}{between}{noise}",
                add_special_tokens=not self.chat,
                return_offsets_mapping=True,
            )
            ids, places = encoded["input_ids"], encoded["offset_mapping"]
            # A token that reaches into the question goes with it.
            first = bisect_right(places, end, key=_STOP)
            least = bisect_left(places, len(self.head) + asked.solid, key=_START)
            if least <= context <= first:
                break
            room = room * context // (least if least > context else first)
        else:
            raise ValueError(
                f"{asked.id}: with this tokenizer it does not come out at {context} tokens; choose "
                "another length"
            )
        ends = [bisect_left(places, stop, key=_START) - first for stop in answered]
        return Framed(
            context=ids[:context],
            continuation=ids[first : first + continuation],
            supervised=min(ends[-1], continuation),
            answered=sum(stop <= continuation for stop in ends),
            id=asked.id,
        )


def _turns(tokenizer: Any) -> tuple[str, str, str]:
    """What stands before a user's words, between them and the model's, and before the next ones."""
    first, answer, second = "the-first-question", "the-answer", "the-second-question"
    turns = [
        {"role": "user", "content": first},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": second},
    ]
    head, found, tail = _rendered(tokenizer, turns[:1]).partition(first)
    rest, again, _ = _rendered(tokenizer, turns).partition(answer)[2].partition(second)
    if not (found and again):
        raise ValueError(
            "the chat template rewrites what it is given, so questions can't be told apart: set "
            "chat to false"
        )
    return head, tail, rest


def _rendered(tokenizer: Any, turns: list[dict[str, str]]) -> str:
    return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
