"""Incremental parser of answers in which calls are in sections between markers. Pure."""

from dataclasses import dataclass

from frontend.markers import partial_length
from frontend.tool_formats.call_states import CallStates
from frontend.tool_formats.scanning import MORE, SPACE, CallSyntax, ObjectScanner, match_parts


@dataclass(frozen=True)
class SectionSyntax:
    """Syntax of a section: its opening marker, its calls, its end."""

    opener: str
    before: str = ""  # between the opening marker and the first call
    between: str = ""  # between the calls of a section; "": it has one call
    after: str = ""  # text of the section's end, which may be followed by `closer`
    closer: str = ""  # marker that ends a section
    opens_bare: bool = False  # the content may begin with a call without the opening marker


class SectionReader(CallStates):
    """Incremental parser of an answer with calls. It holds back only text that may be part of a call's syntax."""

    def __init__(self, sections: SectionSyntax, call: CallSyntax) -> None:
        super().__init__()
        self._sections = sections
        self._call = call
        self._before_call = ""  # text between `_syntax` and the call
        self._state = self._read_start if sections.opens_bare else self._read_text
        self._arguments = ObjectScanner()

    @property
    def is_complete(self) -> bool:
        return self._num_calls > 0 and self._state != self._read_arguments

    def _release(self) -> None:
        if self._state in (self._read_start, self._read_text, self._read_head):
            self._emit_text(self._syntax + self._buffer)

    def _read_start(self) -> bool:
        if not self._buffer.strip():
            return False
        self._state = self._read_head
        return True

    def _read_text(self) -> bool:
        before, opener, after = self._buffer.partition(self._sections.opener)
        if opener:
            self._emit_text(before)
            self._buffer, self._state = after, self._read_head
            self._syntax, self._before_call = opener, self._sections.before.strip()
            return True
        keep = len(self._buffer) - partial_length(self._buffer, self._sections.opener)
        self._emit_text(self._buffer[:keep])
        self._buffer = self._buffer[keep:]
        return False

    def _read_head(self) -> bool:
        found = self._call.head(self._buffer, self._before_call)
        if found is MORE:
            return False
        if found is None:
            self._no_call()
            return True
        self._begin_call(found.name, found.end)
        self._arguments, self._state = ObjectScanner(), self._read_arguments
        return True

    def _read_arguments(self) -> bool:
        length = self._arguments.feed(self._buffer)
        if length:
            self._emit_arguments(self._buffer[:length])
            self._buffer = self._buffer[length:]
        if self._arguments.is_complete:
            self._state = self._read_end
        return self._arguments.is_complete

    def _read_end(self) -> bool:
        found = self._call.tail(self._buffer)
        if found is MORE:
            return False
        if found is not None:
            self._buffer = self._buffer[found.end :]
        self._state, self._follows_call = self._read_after, True
        return True

    def _read_after(self) -> bool:
        """Find the next call of the section, or the section's end."""
        sections = self._sections
        if sections.between:
            found = match_parts(self._buffer, (SPACE, sections.between.strip()))
            if found is MORE:
                return False
            if found is not None:
                self._syntax, self._before_call = self._buffer[: found.end], ""
                self._buffer, self._state = self._buffer[found.end :], self._read_head
                return True
        if sections.after or sections.closer:
            found = match_parts(self._buffer, (SPACE, sections.after.strip(), SPACE, sections.closer))
            if found is MORE:
                return False
            if found is not None:
                self._buffer = self._buffer[found.end :]
        self._state = self._read_text
        return True
