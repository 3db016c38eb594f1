"""Lines reached in a target's modules, by a trace function that stops looking at code whose lines were all seen."""

import inspect
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tools.fuzz.target import ROOT


class LineCoverage:
    """Coverage of the Python files in `places`, files or folders below the root. Compiled kernels are not seen.

    `start` and `stop` may be called around any part of the work; threads started in between are traced, too.
    """

    def __init__(self, places: Sequence[str]) -> None:
        self._files = frozenset(str(path) for place in places for path in _sources(ROOT / place))
        self._left: dict[CodeType, set[int]] = {}
        self.num_seen = 0

    def start(self) -> None:
        """Trace this thread, and threads that are started later."""
        threading.settrace(self._call)
        sys.settrace(self._call)

    def stop(self) -> None:
        """Stop tracing; threads that are traced stay so."""
        sys.settrace(None)
        threading.settrace(None)

    def num_lines(self) -> int:
        """Return the number of lines with code in all files, functions that were never called included."""
        return sum(len(lines) for path in self._files for lines in _functions(Path(path)))

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if code.co_filename not in self._files or not code.co_flags & inspect.CO_NEWLOCALS:
            return None
        left = self._left.get(code)
        if left is None:
            left = self._left[code] = _lines(code)
        if not left:
            return None

        def line(frame: FrameType, event: str, arg: Any) -> Any:
            if frame.f_lineno in left:
                left.discard(frame.f_lineno)
                self.num_seen += 1
            return line if left else None

        return line(frame, event, arg)


def _sources(place: Path) -> Iterator[Path]:
    yield from [place] if place.is_file() else place.rglob("*.py")


def _functions(path: Path) -> Iterator[set[int]]:
    """Yield the lines of each function in a file; those of modules and class bodies run at import."""
    pending = [compile(path.read_text(encoding="utf-8"), str(path), "exec")]
    while pending:
        code = pending.pop()
        pending += [each for each in code.co_consts if isinstance(each, CodeType)]
        if code.co_flags & inspect.CO_NEWLOCALS:
            yield _lines(code)


def _lines(code: CodeType) -> set[int]:
    return {line for _, _, line in code.co_lines() if line}
