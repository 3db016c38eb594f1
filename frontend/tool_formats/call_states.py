"""Common base of incremental parsers of calls: a buffer that states consume, and the calls and content found so far."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from frontend.tool_formats.calls import CallDelta, ToolDelta


class CallStates(ABC):
    """Base of parsers. Each state consumes what it can and returns True if the next state can continue."""

    _state: Callable[[], bool]

    def __init__(self) -> None:
        self._buffer = ""
        self._syntax = ""  # consumed text that becomes content unless a call follows
        self._num_calls = 0
        self._follows_call = False
        self._content: list[str] = []
        self._calls: list[CallDelta] = []

    def feed(self, text: str, *, is_last: bool) -> ToolDelta:
        """As `ToolReader.feed`."""
        self._buffer += text
        while self._state():
            pass
        if is_last:
            self._release()
            self._buffer = self._syntax = ""
        delta = ToolDelta("".join(self._content), tuple(self._calls))
        self._content, self._calls = [], []
        return delta

    @abstractmethod
    def _read_text(self) -> bool:
        """Read content up to a call's opening marker."""

    @abstractmethod
    def _release(self) -> None:
        """Return held-back text: the answer has ended."""

    def _begin_call(self, name: str, end: int) -> None:
        """Report a call whose head ends at `end` of the buffer."""
        self._calls.append(CallDelta(self._num_calls, name, ""))
        self._num_calls += 1
        self._syntax, self._buffer = "", self._buffer[end:]

    def _emit_arguments(self, text: str) -> None:
        self._calls.append(CallDelta(self._num_calls - 1, None, text))

    def _no_call(self) -> None:
        """Return to the content: what looked like the beginning of a call belongs to it."""
        self._emit_text(self._syntax)
        self._syntax, self._state = "", self._read_text

    def _emit_text(self, text: str) -> None:
        if self._follows_call:  # white space between calls belongs to the format
            text = text.lstrip()
        if text:
            self._follows_call = False
            self._content.append(text)
