"""Reasoning between <think> and </think>, as of DeepSeek-R1, QwQ and Qwen3. Pure.

    <think>                         may be in the prompt instead, if the chat template opens the reasoning
    The user asks for ...
    </think>

    The answer is ...

The tags and the line breaks next to them belong to the format: they are neither reasoning nor content.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from frontend.markers import marker_rule, partial_length, up_to_marker
from frontend.reasoning.formats import ParsedText, ReasoningStart

OPEN: Final = "<think>"
CLOSE: Final = "</think>"


@dataclass(frozen=True)
class ThinkTagFormat:
    """Format with <think> tags. `always_reasons`: an answer that does not open the reasoning begins within it."""

    name: str
    always_reasons: bool
    markers: tuple[str, ...] = (OPEN, CLOSE)

    def start_of(self, prompt_ending: str) -> ReasoningStart:
        """Return INSIDE or AFTER if the prompt ends with the opening or the closing tag."""
        ending = prompt_ending.rstrip()
        if ending.endswith(CLOSE):
            return ReasoningStart.AFTER
        return ReasoningStart.INSIDE if self.always_reasons or ending.endswith(OPEN) else ReasoningStart.BEFORE

    def start_in(self, continued: str) -> ReasoningStart:
        """Return INSIDE if the last tag is an opening one."""
        return ReasoningStart.INSIDE if continued.rfind(OPEN) > continued.rfind(CLOSE) else ReasoningStart.AFTER

    def parser(self, start: ReasoningStart) -> "ThinkTagParser":
        """Return a fresh parser."""
        return ThinkTagParser(start)

    def grammar(self, start: ReasoningStart, markers: Mapping[str, int], *, has_headers: bool) -> Sequence[str]:
        """Return rules that require the reasoning to be closed once it is open."""
        opened = marker_rule(OPEN, markers)
        inside = start is ReasoningStart.INSIDE
        begin = f"{opened}? thought BREAKS? content" if inside else f"({opened} thought BREAKS?)? content"
        return [f"start: {begin}", *up_to_marker("thought", CLOSE, markers), r"BREAKS: /\n{1,4}/"]


DEEPSEEK_R1: Final = ThinkTagFormat("deepseek_r1", always_reasons=True)
QWEN3: Final = ThinkTagFormat("qwen3", always_reasons=False)


class ThinkTagParser:
    """Incremental parser. It holds back only text that may be a tag or line breaks next to one."""

    def __init__(self, start: ReasoningStart) -> None:
        self._begins_inside = start is ReasoningStart.INSIDE
        self._state = self._read_content if start is ReasoningStart.AFTER else self._read_start
        self._buffer = ""
        self._reasoning: list[str] = []
        self._content: list[str] = []

    @property
    def in_reasoning(self) -> bool:
        if self._state == self._read_start:
            return self._begins_inside
        return self._state in (self._read_opening, self._read_reasoning)

    def feed(self, text: str, *, is_last: bool) -> ParsedText:
        self._buffer += text
        while self._state():
            pass
        if is_last:
            (self._reasoning if self.in_reasoning else self._content).append(self._buffer)
            self._buffer = ""
        parsed = ParsedText("".join(self._reasoning), "".join(self._content))
        self._reasoning, self._content = [], []
        return parsed

    # Each state consumes what it can from the buffer and returns True if the next state can continue.

    def _read_start(self) -> bool:
        text = self._buffer.lstrip()
        if text.startswith(OPEN):
            self._buffer, self._state = text[len(OPEN) :], self._read_opening
            return True
        if OPEN.startswith(text):  # also if it is empty
            return False
        self._state = self._read_opening if self._begins_inside else self._read_content
        return True

    def _read_opening(self) -> bool:
        self._buffer = self._buffer.lstrip("\n")
        if self._buffer:
            self._state = self._read_reasoning
        return bool(self._buffer)

    def _read_reasoning(self) -> bool:
        before, tag, after = self._buffer.partition(CLOSE)
        if tag:
            self._reasoning.append(before.rstrip("\n"))
            self._buffer, self._state = after, self._read_closing
            return True
        keep = len(self._buffer) - partial_length(self._buffer, CLOSE)
        whole = self._buffer[:keep].rstrip("\n")
        self._reasoning.append(whole)
        self._buffer = self._buffer[len(whole) :]
        return False

    def _read_closing(self) -> bool:
        self._buffer = self._buffer.lstrip("\n")
        if self._buffer:
            self._state = self._read_content
        return bool(self._buffer)

    def _read_content(self) -> bool:
        self._content.append(self._buffer)
        self._buffer = ""
        return False
