"""Tool calls: the grammar that an answer with tools is held to, and reading calls out of the answer's text. Pure.

A call is written in the form that Hermes, Qwen and others were trained on, with exactly this spacing:

    <tool_call>
    {"name": "lookup", "arguments": {"city": "Paris"}}
    </tool_call>

Calls follow each other on lines of their own; where the model chooses, text may stand before the first one.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
_MAX_CALLS: Final = 16  # of one answer: a model that repeats itself must come to an end
_HEAD: Final = re.compile(r'\n\{"name": "([^"]*)", "arguments": ')
# As Python writes JSON: what templates and training data have.
_SPACING: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NO_SPACE: Final = {"whitespace_flexible": False}  # as other answers in JSON


@dataclass(frozen=True)
class ToolSpec:
    """A tool's name (safe within JSON) and the JSON Schema of its arguments, an object's."""

    name: str
    parameters: dict[str, Any]


@dataclass(frozen=True)
class CallDelta:
    """A piece of a call: its number, the name where the call begins, and more of the arguments' JSON text."""

    index: int
    name: str | None
    arguments: str


@dataclass(frozen=True)
class ToolDelta:
    """What a piece of the answer brings."""

    content: str
    calls: tuple[CallDelta, ...]


def tools_grammar(
    tools: Sequence[ToolSpec], *, must_call: bool, parallel: bool, text_schema: Mapping[str, Any] | None = None
) -> str:
    """Lark for an answer with calls of `tools`; unless it `must_call`, for any other text or what matches the schema.

    `text_schema` is the JSON Schema of an answer that calls nothing.
    """
    lines, tail = ["%llguidance {}"], json.dumps("}\n" + CLOSE)
    for number, tool in enumerate(tools):
        head = json.dumps(f'\n{{"name": "{tool.name}", "arguments": ')
        # The schema by itself, so that references within it still begin at its root.
        lines.append(f"call_{number}: {head} %json {_spaced(tool.parameters, _SPACING)} {tail}")
    lines.append("call: " + " | ".join(f"call_{number}" for number in range(len(tools))))
    called = f'call ("\\n{OPEN}" call){{0,{_MAX_CALLS - 1}}}' if parallel else "call"
    if must_call:
        lines.append(f'start: "{OPEN}" {called}')
    elif text_schema is not None:
        lines += [f'start: answer | "{OPEN}" {called}', f"answer: %json {_spaced(text_schema, _NO_SPACE)}"]
    else:
        lines += [f"start: TEXT | head {called}", f'head[lazy]: TEXT "{OPEN}"', r"TEXT: /(.|\n)*/"]
    return "\n".join(lines)


def _spaced(schema: Mapping[str, Any], spacing: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": spacing})


class ToolReader:
    """Takes an answer apart as it comes. What it holds back may be the beginning of a call, and is never more."""

    def __init__(self) -> None:
        self._buffer = ""
        self._num_calls = 0
        self._state = self._read_text
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._content: list[str] = []
        self._calls: list[CallDelta] = []

    @property
    def is_complete(self) -> bool:
        """Whether there were calls, and the arguments of the last one have ended."""
        return self._num_calls > 0 and self._state != self._read_arguments

    def feed(self, text: str, *, is_last: bool) -> ToolDelta:
        """Take the next piece of the answer. With the last one what is held back of the text comes out."""
        self._buffer += text
        while self._state():
            pass
        if is_last and self._state == self._read_text:
            self._tell(self._buffer)
            self._buffer = ""
        delta = ToolDelta("".join(self._content), tuple(self._calls))
        self._content, self._calls = [], []
        return delta

    # Each state takes what it can from the buffer; True: the next one may go on.

    def _read_text(self) -> bool:
        before, tag, after = self._buffer.partition(OPEN)
        if tag:
            self._tell(before)
            self._buffer, self._state = after, self._read_head
            return True
        held = next((n for n in range(len(OPEN) - 1, 0, -1) if self._buffer.endswith(OPEN[:n])), 0)
        keep = len(self._buffer) - held
        self._tell(self._buffer[:keep])
        self._buffer = self._buffer[keep:]
        return False

    def _read_head(self) -> bool:
        if (head := _HEAD.match(self._buffer)) is None:
            return False
        self._calls.append(CallDelta(self._num_calls, head[1], ""))
        self._num_calls += 1
        self._buffer, self._state, self._depth = self._buffer[head.end() :], self._read_arguments, 0
        return True

    def _read_arguments(self) -> bool:
        for position, char in enumerate(self._buffer, start=1):
            if self._in_string:
                self._in_string = self._is_escaped or char != '"'
                self._is_escaped = char == "\\" and not self._is_escaped
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._argue(position)
                    self._state = self._read_tail
                    return True
        self._argue(len(self._buffer))
        return False

    def _read_tail(self) -> bool:
        _, tag, after = self._buffer.partition(CLOSE)
        if not tag:
            return False
        self._buffer, self._state = after, self._read_text
        return True

    def _tell(self, text: str) -> None:
        # Between calls there is nothing but the line's end.
        if self._num_calls == 0:
            self._content.append(text)

    def _argue(self, length: int) -> None:
        if length:
            self._calls.append(CallDelta(self._num_calls - 1, None, self._buffer[:length]))
            self._buffer = self._buffer[length:]
