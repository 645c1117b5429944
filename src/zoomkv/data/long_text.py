"""Long documents: files, data sets, what installed packages bring, and procedures.

Every source gives the same two columns, ``text`` and ``id``. ``Windows`` cuts documents into token
windows of one length: a context, and what is written after it.
"""

from __future__ import annotations

import ast
import random
import sys
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor
from torch.utils.data import Dataset

from zoomkv.data.sources import TraceSource

CountTokens = Callable[[str], int]
Part = Literal["train", "evaluation"]

_BOOK = "data/in_the_year_2889.txt"
_TESTS = {"test", "tests", "idle_test"}


class Document(TypedDict):
    """One long text."""

    text: str
    id: str


class TextSource(ABC):
    """Gives the same documents, in the same order, each time that it is asked."""

    @abstractmethod
    def documents(self, count_tokens: CountTokens) -> Iterator[Document]:
        """The documents; ``count_tokens`` measures text where a length is to be met."""


class TextFiles(TextSource):
    """UTF-8 text files, each one a document.

    Args:
        path: A file, or a folder: all files below it in the order of their names, hidden ones
            (whose name begins with a dot) left out.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def documents(self, count_tokens: CountTokens) -> Iterator[Document]:
        """See ``TextSource``.

        Raises:
            ValueError: There is no such file, the folder holds none, or one is empty, binary or
                not UTF-8; the message names it.
        """
        path = Path(self.path)
        if path.is_file():
            yield Document(text=read_text(path), id=path.name)
            return
        if not path.is_dir():
            raise ValueError(f"{path}: there is no such file or folder")
        files = {file.relative_to(path): file for file in path.rglob("*") if file.is_file()}
        shown = sorted(name for name in files if not any(p.startswith(".") for p in name.parts))
        if not shown:
            raise ValueError(f"{path}: the folder holds no text file")
        for name in shown:
            yield Document(text=read_text(files[name]), id=name.as_posix())


class HubText(TextSource):
    """A column of a data set on the hub (or of a local folder that ``datasets`` reads), streamed.

    Args:
        name: Hub id, such as ``emozilla/pg19``, or a folder.
        config: Of the data set, where it has several.
        split: Of the data set.
        text: Column of the text.
        id: Column of the name; where a row has none, its number is used.
        first: Where to begin, counted from 0.
        limit: At most so many documents.
    """

    def __init__(
        self,
        name: str,
        config: str | None = None,
        split: str = "train",
        text: str = "text",
        id: str = "id",
        first: int = 0,
        limit: int | None = None,
    ) -> None:
        self.name, self.config, self.split = name, config, split
        self.text, self.id, self.first, self.limit = text, id, first, limit

    def documents(self, count_tokens: CountTokens) -> Iterator[Document]:
        """See ``TextSource``.

        Raises:
            ValueError: No such data set, or a row without text; the message names the row.
        """
        import datasets

        try:
            rows = datasets.load_dataset(
                self.name, self.config, split=self.split, streaming=True
            ).skip(self.first)
        except (OSError, ValueError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(f"{self.name}: not to be had as a data set ({reason})") from error
        for number, row in enumerate(islice(rows, self.limit), start=self.first):
            text, name = row.get(self.text), row.get(self.id)
            if not isinstance(text, str) or not text.strip():
                raise ValueError(f"{self.name}:row {number}: no text in column {self.text!r}")
            yield Document(text=text, id=str(number if name is None else name))


class BookText(TextSource):
    """A part of the public-domain book that ``reasoning-gym`` brings (Verne, *In the Year 2889*).

    Args:
        part: ``train``, its first two thirds, or ``evaluation``, the last third. No paragraph is in
            both.
    """

    def __init__(self, part: Part = "train") -> None:
        self.part: Part = part

    def documents(self, count_tokens: CountTokens) -> Iterator[Document]:
        """See ``TextSource``."""
        yield Document(text=book(self.part), id=f"in-the-year-2889/{self.part}")


class StdlibText(TextSource):
    """The documentation strings of Python's standard library, one document a module.

    Sources are parsed, never imported, so the text depends on the version of Python alone.

    Args:
        modules: Top-level modules; by default all that have documentation in their sources.

    Raises:
        ValueError: There is no such module.
    """

    def __init__(self, modules: Sequence[str] | None = None) -> None:
        for name in modules or ():
            if name not in sys.stdlib_module_names:
                raise ValueError(f"modules: {name!r} is not in Python's standard library")
        self.modules = sorted(sys.stdlib_module_names if modules is None else set(modules))

    def documents(self, count_tokens: CountTokens) -> Iterator[Document]:
        """See ``TextSource``."""
        for name in self.modules:
            found = [text for file in _module_files(name) for text in _docstrings(file)]
            if found:
                yield Document(text="\n\n".join(found), id=f"python/{name}")


class TraceText(TextSource):
    """Traces written out: the problem, the paragraphs without their summaries, the solution.

    Args:
        source: Of the traces, such as ``LedgerSource``.
    """

    def __init__(self, source: TraceSource) -> None:
        self.source = source

    def documents(self, count_tokens: CountTokens) -> Iterator[Document]:
        """See ``TextSource``."""
        for number, trace in enumerate(self.source.traces(count_tokens)):
            parts = [trace.problem, *(segment.text for segment in trace.segments), trace.solution]
            yield Document(text="\n\n".join(parts), id=trace.id or f"trace-{number}")


class Mixture(TextSource):
    """Several sources in one stream: each document is drawn from one of those not yet exhausted.

    Args:
        sources: What to mix.
        weights: How often each is drawn from, in proportion; by default all equally often.
        seed: Decides the order.

    Raises:
        ValueError: No source, or weights that don't go with the sources.
    """

    def __init__(
        self, sources: list[TextSource], weights: list[float] | None = None, seed: int = 0
    ) -> None:
        weights = [1.0] * len(sources) if weights is None else weights
        if not sources:
            raise ValueError("sources: name at least one source of documents")
        if len(weights) != len(sources) or min(weights) <= 0:
            raise ValueError(
                f"weights={weights}: give one above 0 for each of the {len(sources)} sources"
            )
        self.sources, self.weights, self.seed = sources, weights, seed

    def documents(self, count_tokens: CountTokens) -> Iterator[Document]:
        """See ``TextSource``."""
        rng = random.Random(f"mixture {self.seed}")
        streams = [source.documents(count_tokens) for source in self.sources]
        weights = list(self.weights)
        while streams:
            [drawn] = rng.choices(range(len(streams)), weights)
            document = next(streams[drawn], None)
            if document is None:
                del streams[drawn], weights[drawn]
            else:
                yield document


class Windows(Dataset[dict[str, Any]]):
    """Documents as windows of ``context + continuation`` tokens, side by side.

    A map-style data set: the same documents and lengths give the same windows under the same
    numbers, so whoever stopped at a number goes on from there. All token ids are in memory.

    Args:
        documents: What to cut, in order.
        encode: The token ids of a text.
        context: Tokens that are read first.
        continuation: Tokens that follow them.
        separator: An id that is put after each document; windows may then cross documents. Without
            it each window is of one document, and what is left at a document's end is dropped.
        limit: At most so many windows; no more documents are read than these need.

    Raises:
        ValueError: A length below 1, or no document fills a window.
    """

    def __init__(
        self,
        documents: Iterable[Document],
        encode: Callable[[str], list[int]],
        context: int,
        continuation: int,
        separator: int | None = None,
        limit: int | None = None,
    ) -> None:
        if min(context, continuation) < 1 or (limit is not None and limit < 1):
            raise ValueError(
                f"context={context}, continuation={continuation}, limit={limit}: choose at least 1"
            )
        self.context, size = context, context + continuation
        self.names: list[str] = []
        """For each window the id of the document that it ends in."""
        self.dropped = 0
        """Tokens that are in no window."""
        pieces = [torch.empty(0, size, dtype=torch.int32)]
        rest: list[int] = []
        longest = 0
        for document in documents:
            ids = rest + encode(document["text"])
            if separator is not None:
                ids.append(separator)
            longest = max(longest, len(ids))
            whole = len(ids) // size
            pieces.append(torch.tensor(ids[: whole * size], dtype=torch.int32).view(whole, size))
            self.names += [document["id"]] * whole
            rest = ids[whole * size :]
            if separator is None:
                self.dropped, rest = self.dropped + len(rest), []
            if limit is not None and len(self.names) >= limit:
                break
        if not self.names:
            raise ValueError(
                f"no document fills a window of {size} tokens, the longest has {longest}: choose "
                "shorter windows, or a separator so that they may cross documents"
            )
        self._windows = torch.cat(pieces)[:limit]  # [N, context + continuation]
        self.dropped += len(rest) + (len(self.names) - len(self._windows)) * size
        self.names = self.names[:limit]

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> dict[str, Tensor | str]:
        """``context`` and ``continuation``, int64 ``[tokens]``, and ``id``."""
        window = self._windows[index].long()
        context, continuation = window[: self.context], window[self.context :]
        return {"context": context, "continuation": continuation, "id": self.names[index]}


def read_text(path: Path) -> str:
    """The text of a UTF-8 file.

    Raises:
        ValueError: The file is empty, binary or not UTF-8.
    """
    data = path.read_bytes()
    if b"\0" in data:
        raise ValueError(f"{path}: binary or UTF-16; only UTF-8 text is read")
    try:
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 (byte {data[error.start]:#04x})") from None
    if not text.strip():
        raise ValueError(f"{path}: the file is empty")
    return text


def book(part: Part) -> str:
    """The book's first two thirds (``train``) or its last third (``evaluation``), by paragraphs.

    Raises:
        ValueError: ``reasoning-gym`` is not installed, or there is no such part.
    """
    if part not in ("train", "evaluation"):
        raise ValueError(f"part={part!r}: choose 'train' or 'evaluation'")
    package = find_spec("reasoning_gym")
    if package is None or not package.submodule_search_locations:
        raise ValueError("the book comes with reasoning-gym: install zoomkv[data]")
    text = read_text(Path(package.submodule_search_locations[0], _BOOK))
    _, _, body = text.partition("*** START OF THE PROJECT GUTENBERG")
    body = body.partition("***\n")[2].partition("*** END OF THE PROJECT GUTENBERG")[0]
    paragraphs = [paragraph.strip("\n") for paragraph in body.split("\n\n")]
    paragraphs = [
        paragraph
        for paragraph in paragraphs
        if paragraph.strip() and not paragraph.startswith(("Produced by", "End of Project"))
    ]
    total, before = sum(map(len, paragraphs)), 0
    parts: dict[str, list[str]] = {"train": [], "evaluation": []}
    for paragraph in paragraphs:
        parts["train" if 3 * before < 2 * total else "evaluation"].append(paragraph)
        before += len(paragraph)
    return "\n\n".join(parts[part])


def _module_files(name: str) -> list[Path]:
    library = Path(sysconfig.get_path("stdlib"))
    if (file := library / f"{name}.py").is_file():
        return [file]
    files = (library / name).rglob("*.py")
    return sorted(file for file in files if not _TESTS & set(file.relative_to(library).parts))


def _docstrings(file: Path) -> Iterator[str]:
    """The documentation strings of a source file in the order in which they stand there."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(file.read_bytes())) if isinstance(node, kinds)]
    for node in sorted(nodes, key=lambda node: getattr(node, "lineno", 0)):
        if text := ast.get_docstring(node):
            yield f"{getattr(node, 'name', file.stem)}\n{text}"
