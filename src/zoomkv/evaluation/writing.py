"""Lines that are on the disk or not there at all, however a run ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from errno import ENOSPC
from pathlib import Path
from types import TracebackType
from typing import Any

from zoomkv.evaluation.results import Line, dump, whole_lines


class LineFile:
    """A file of JSON lines that a run goes on with where another has stopped.

    Whole lines are kept; what a killed run left torn behind them is cut off.

    Args:
        path: Made, with its folder, if it is not there.

    Raises:
        ValueError: It holds something else, or another run is writing it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115
        try:
            self._lock()
            self._file.seek(0)
            data = self._file.read()
            self.lines, self._size = whole_lines(data, path)
            if self._size < len(data):
                os.ftruncate(self._file.fileno(), self._size)
        except BaseException:
            self._file.close()
            raise

    def append(self, lines: Sequence[Line]) -> None:
        """Writes lines and waits until they are on the disk.

        Raises:
            OSError: No space is left; nothing of these lines is in the file then.
        """
        data = b"".join(map(dump, lines))
        try:
            at = 0
            while at < len(data):
                at += self._file.write(data[at:])
            os.fsync(self._file.fileno())
        except OSError as error:
            os.ftruncate(self._file.fileno(), self._size)
            if error.errno != ENOSPC:
                raise
            raise OSError(
                f"{self.path}: no space left on the disk; the results so far are whole: make room "
                "and run the same command again to go on"
            ) from None
        self._size += len(data)

    def keep(self, count: int) -> None:
        """Forgets all lines but the first."""
        self.lines = self.lines[:count]
        self._size = sum(len(dump(line)) for line in self.lines)
        os.ftruncate(self._file.fileno(), self._size)

    def _lock(self) -> None:
        """Until it is closed: two runs would cut off each other's lines."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{self.path}: another run is writing it: wait for it, or name another --out"
            ) from None
        except OSError:
            pass  # a disk that has no locks

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> LineFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()


def write_whole(path: Path, lines: Sequence[Any]) -> None:
    """A file of lines under its name only when all of it is on the disk."""
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "wb") as file:
        file.writelines(map(dump, lines))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
