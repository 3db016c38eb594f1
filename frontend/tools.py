"""Tool calls: the tools an answer may call, the grammar of such an answer, and the parser of its calls. Pure.

A call has the format that Hermes, Qwen and others were trained on, with exactly this spacing:

    <tool_call>
    {"name": "lookup", "arguments": {"city": "Paris"}}
    </tool_call>

Each further call begins on a new line. If the model may choose, text may precede the first call.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from frontend.api.request_models import ChatBody, Function, NamedTool
from frontend.errors import InvalidRequest

_NO_PARAMETERS: Final = {"type": "object", "properties": {}, "additionalProperties": False}


OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
_MAX_CALLS: Final = 16  # per answer: a model that repeats itself must stop
_HEAD: Final = re.compile(r'\n\{"name": "([^"]*)", "arguments": ')
# The spacing of Python's json.dumps, as in templates and training data.
_SPACING: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NO_SPACE: Final = {"whitespace_flexible": False}  # as for other JSON answers


@dataclass(frozen=True)
class ToolSpec:
    """Tool's name (needs no JSON escaping) and the JSON Schema of its arguments, which describes an object."""

    name: str
    parameters: dict[str, Any]


@dataclass(frozen=True)
class CallDelta:
    """Piece of a call: its index, the name in the first piece, and the next part of the arguments' JSON text."""

    index: int
    name: str | None
    arguments: str


@dataclass(frozen=True)
class ToolDelta:
    """Content and pieces of calls found in a piece of the answer."""

    content: str
    calls: tuple[CallDelta, ...]


def tools_grammar(
    tools: Sequence[ToolSpec], *, must_call: bool, parallel: bool, text_schema: Mapping[str, Any] | None = None
) -> str:
    """Return a Lark grammar for an answer that calls `tools`.

    Unless `must_call` is set, the answer may also be any text, or, with `text_schema`, JSON that matches this schema.
    """
    lines, tail = ["%llguidance {}"], json.dumps("}\n" + CLOSE)
    for number, tool in enumerate(tools):
        head = json.dumps(f'\n{{"name": "{tool.name}", "arguments": ')
        # The schema is embedded separately, so that references within it still start at its root.
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
    """Incremental parser of an answer with calls. It holds back only text that may be the beginning of a call."""

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
        """True if there was a call and the last one's arguments are complete."""
        return self._num_calls > 0 and self._state != self._read_arguments

    def feed(self, text: str, *, is_last: bool) -> ToolDelta:
        """Parse the next piece of the answer. With the last piece, held-back text is returned as well."""
        self._buffer += text
        while self._state():
            pass
        if is_last and self._state == self._read_text:
            self._emit_text(self._buffer)
            self._buffer = ""
        delta = ToolDelta("".join(self._content), tuple(self._calls))
        self._content, self._calls = [], []
        return delta

    # Each state consumes what it can from the buffer and returns True if the next state can continue.

    def _read_text(self) -> bool:
        before, tag, after = self._buffer.partition(OPEN)
        if tag:
            self._emit_text(before)
            self._buffer, self._state = after, self._read_head
            return True
        held = next((n for n in range(len(OPEN) - 1, 0, -1) if self._buffer.endswith(OPEN[:n])), 0)
        keep = len(self._buffer) - held
        self._emit_text(self._buffer[:keep])
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
                    self._emit_arguments(position)
                    self._state = self._read_tail
                    return True
        self._emit_arguments(len(self._buffer))
        return False

    def _read_tail(self) -> bool:
        _, tag, after = self._buffer.partition(CLOSE)
        if not tag:
            return False
        self._buffer, self._state = after, self._read_text
        return True

    def _emit_text(self, text: str) -> None:
        # Between calls there is only a line break, which is dropped.
        if self._num_calls == 0:
            self._content.append(text)

    def _emit_arguments(self, length: int) -> None:
        if length:
            self._calls.append(CallDelta(self._num_calls - 1, None, self._buffer[:length]))
            self._buffer = self._buffer[length:]


@dataclass(frozen=True)
class ToolPlan:
    """Callable tools. `must_call`: the answer consists only of calls; `parallel`: it may contain several."""

    specs: tuple[ToolSpec, ...]
    must_call: bool
    parallel: bool


def reads_calls(body: ChatBody) -> bool:
    """Return True if the answer's text is parsed for calls."""
    return bool(body.tools) and body.tool_choice != "none"


def tools_of(body: ChatBody) -> ToolPlan | None:
    """Return the body's tools; None if the answer may call none. Raises InvalidRequest."""
    functions = [tool.function for tool in body.tools or ()]
    names = [function.name for function in functions]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InvalidRequest(f"tools must have unique names, got {twice[0]!r} twice", param="tools")
    specs = [ToolSpec(function.name, _parameters(function)) for function in functions]
    choice = body.tool_choice
    if not specs and choice not in (None, "none", "auto"):
        raise InvalidRequest("tool_choice requires a call, but no tools are given", param="tool_choice")
    if not reads_calls(body):
        return None
    parallel = body.parallel_tool_calls is not False
    if not isinstance(choice, NamedTool):
        return ToolPlan(tuple(specs), choice == "required", parallel)
    named = tuple(spec for spec in specs if spec.name == choice.name)
    if not named:
        known = ", ".join(map(repr, names))
        raise InvalidRequest(
            f"tool_choice must name one of the tools ({known}), got {choice.name!r}", param="tool_choice"
        )
    return ToolPlan(named, must_call=True, parallel=False)


def _parameters(function: Function) -> dict[str, Any]:
    if function.parameters is None:
        return dict(_NO_PARAMETERS)
    if function.parameters.get("type", "object") != "object":
        raise InvalidRequest(
            f"tools: the parameters of {function.name!r} must be a JSON Schema of type object", param="tools"
        )
    return {**function.parameters, "type": "object"}
