"""The channels of gpt-oss ("harmony"): an answer is a sequence of messages, each with a header. Pure.

    <|channel|>analysis<|message|>The user asks ...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.lookup <|constrain|>json<|message|>{"city": "Paris"}<|call|>
    <|start|>assistant<|channel|>final<|message|>The answer is ...<|return|>

The channel `analysis` is reasoning; `commentary` and `final` are content. A message to a function is a call: it stays
in the content, with a header of one form, for the parser of tool calls.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from frontend.markers import marker_rule, partial_length
from frontend.reasoning.formats import ParsedText, ReasoningStart

START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
CONSTRAIN: Final = "<|constrain|>"
MESSAGE: Final = "<|message|>"
END: Final = "<|end|>"
CALL: Final = "<|call|>"
RETURN: Final = "<|return|>"
CALL_OPENING: Final = f"{CHANNEL}commentary to=functions."
_MAX_HEADER_CHARS: Final = 256  # a longer one is none
_CHANNEL_NAME: Final = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_FUNCTION: Final = re.compile(r"\bto=functions\.([a-zA-Z0-9_.-]+)")
_ENDS: Final = (END, CALL, RETURN, START)


@dataclass(frozen=True)
class HarmonyFormat:
    """Format with channels."""

    name: str = "openai_gptoss"
    markers: tuple[str, ...] = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)

    def start_of(self, prompt_ending: str) -> ReasoningStart:
        """Return BEFORE: prompts end before the first message's channel."""
        return ReasoningStart.BEFORE

    def start_in(self, continued: str) -> ReasoningStart:
        """Return WITHIN_CONTENT: a message that can be continued is content."""
        return ReasoningStart.WITHIN_CONTENT

    def parser(self, start: ReasoningStart) -> "HarmonyParser":
        """Return a fresh parser."""
        return HarmonyParser(start)

    def grammar(self, start: ReasoningStart, markers: Mapping[str, int], *, has_headers: bool) -> Sequence[str]:
        """Return rules that allow one message of analysis before the content."""
        if start is ReasoningStart.WITHIN_CONTENT:
            return [f"start: {'continued' if has_headers else 'content'}"]
        token = {marker: marker_rule(marker, markers) for marker in self.markers}
        analysis = f'{token[CHANNEL]} "analysis" {token[MESSAGE]} TEXT {token[END]} {token[START]} "assistant"'
        header = "" if has_headers else f'{token[CHANNEL]} "final" {token[MESSAGE]} '
        return [f"start: ({analysis})? {header}content"]


HARMONY: Final = HarmonyFormat()


class HarmonyParser:
    """Incremental parser. It holds back headers and text that may be a marker."""

    def __init__(self, start: ReasoningStart) -> None:
        continues = start is ReasoningStart.WITHIN_CONTENT
        self._buffer = ""
        self._state = self._read_body if continues else self._read_start
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._target = self._content  # of the current message
        self._closing = ""  # text that the end of the current message adds
        self._separator = ""  # before the next text of the current message
        self._kinds = {False} if continues else set()  # of messages so far: True for reasoning

    @property
    def in_reasoning(self) -> bool:
        return self._state == self._read_body and self._target is self._reasoning

    def feed(self, text: str, *, is_last: bool) -> ParsedText:
        self._buffer += text
        while self._state():
            pass
        if is_last and self._state == self._read_body:
            self._emit(self._buffer)
        elif is_last and self._state != self._read_header:  # a limit may cut the answer within a header
            self._content.append(self._buffer)
        parsed = ParsedText("".join(self._reasoning), "".join(self._content))
        self._reasoning.clear()
        self._content.clear()
        return parsed

    # Each state consumes what it can from the buffer and returns True if the next state can continue.

    def _read_start(self) -> bool:
        """Find out if a message follows."""
        text = self._buffer.lstrip()
        if text.startswith((START, CHANNEL)):
            self._buffer, self._state = text, self._read_header
            return True
        if any(marker.startswith(text) for marker in (START, CHANNEL)):
            return False
        self._state = self._read_rest
        return True

    def _read_header(self) -> bool:
        end = self._buffer.find(MESSAGE, 0, _MAX_HEADER_CHARS)
        if end < 0 and len(self._buffer) < _MAX_HEADER_CHARS:
            return False
        if end < 0:
            self._state = self._read_rest
            return True
        header = self._buffer[:end]
        self._buffer, self._state = self._buffer[end + len(MESSAGE) :], self._read_body
        channel, function = _CHANNEL_NAME.search(header), _FUNCTION.search(header)
        is_analysis = function is None and channel is not None and channel[1] == "analysis"
        self._target = self._reasoning if is_analysis else self._content
        self._separator = "\n" if is_analysis in self._kinds else ""
        self._closing = ""
        if function is not None:
            self._separator, self._closing = "", CALL
            self._content.append(f"{CALL_OPENING}{function[1]}{MESSAGE}")
        return True

    def _read_body(self) -> bool:
        ends = [(at, marker) for marker in _ENDS if (at := self._buffer.find(marker)) >= 0]
        if not ends:
            keep = len(self._buffer) - max(partial_length(self._buffer, marker) for marker in _ENDS)
            self._emit(self._buffer[:keep])
            self._buffer = self._buffer[keep:]
            return False
        at, marker = min(ends)
        self._emit(self._buffer[:at])
        self._target.append(self._closing)
        self._buffer = self._buffer[at + (0 if marker == START else len(marker)) :]
        self._state = self._read_start
        return True

    def _read_rest(self) -> bool:
        """Take everything as content: it is not in the format."""
        self._content.append(self._buffer)
        self._buffer = ""
        return False

    def _emit(self, text: str) -> None:
        if not text:
            return
        self._target.append(self._separator + text)
        self._separator = ""
        if not self._closing:
            self._kinds.add(self._target is self._reasoning)
