"""Calls of Qwen3-Coder: a function and its parameters between tags, strings without quotes. Pure.

    <tool_call>
    <function=lookup>
    <parameter=city>
    Paris
    </parameter>
    <parameter=days>
    3
    </parameter>
    </function>
    </tool_call>

The parser returns the arguments as JSON, one parameter at a time. Whether a value is a string follows from the tool's
schema; a value that is not the JSON of the type that the schema requires is returned as a string. A value ends where
the grammar ends it, which every answer with tools follows: at the first closing tag on a line of its own. Any other
closing tag is part of the value.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from frontend.markers import marker_rule, partial_length, up_to_marker
from frontend.tool_formats.call_states import CallStates
from frontend.tool_formats.calls import MAX_CALLS, ToolSpec, new_call_id
from frontend.tool_formats.json_calls import HERMES
from frontend.tool_formats.scanning import MORE, SPACE, OneOf, match_parts
from frontend.tool_formats.schemas import grammar_schema

_OPEN, _CLOSE = HERMES.sections.opener, HERMES.sections.closer
_END_OF_VALUE: Final = "\n</parameter>\n"
_END_OF_CALL: Final = "</function>"
_NO_SPACE: Final = {"whitespace_flexible": False}


@dataclass(frozen=True)
class XmlCallFormat:
    """Format of calls between tags."""

    name: str = "qwen3_coder"
    markers: tuple[str, ...] = (_OPEN, _CLOSE)

    def reader(self, tools: Sequence[ToolSpec]) -> "XmlCallReader":
        """Return a fresh parser of an answer that may call `tools`."""
        return XmlCallReader(tools)

    def grammar(
        self, tools: Sequence[ToolSpec], *, must_call: bool, parallel: bool, markers: Mapping[str, int], text: str
    ) -> Sequence[str]:
        """Return Lark rules of content that calls `tools`, with the parameters that their schemas name, in order."""
        lines = [f"call: {' | '.join(map(_call, tools))}"]
        lines += up_to_marker("value", _END_OF_VALUE, {})
        opener, closer = marker_rule(_OPEN, markers), marker_rule(_CLOSE, markers)
        section = f'"\\n" call "\\n" {closer}'
        further = f'("\\n" {opener} {section}){{0,{MAX_CALLS - 1}}}' if parallel else ""
        lines.append(f"calls: {section} {further}")
        if must_call or text:
            return [*lines, f"content: {'' if must_call else f'{text} | '}{opener} calls"]
        return [*lines, *up_to_marker("head", _OPEN, markers), "content: TEXT | head calls"]

    def call_id(self) -> str:
        """Return a new id of a call."""
        return new_call_id()


QWEN3_CODER: Final = XmlCallFormat()


def _call(tool: ToolSpec) -> str:
    """Return the Lark expression of a call."""
    required = tool.parameters.get("required")
    required = required if isinstance(required, list) else []
    definitions = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    parts, end = [json.dumps(f"<function={tool.name}>\n")], json.dumps(_END_OF_VALUE)
    for name, schema in _properties(tool).items():
        if not _is_text(schema):
            embedded = {**(schema if isinstance(schema, dict) else {}), **definitions}
            value = f"%json {grammar_schema(embedded, is_strict=tool.is_strict, spacing=_NO_SPACE)} {end}"
        elif (texts := _fixed(schema)) is not None:
            value = "(" + " | ".join(map(json.dumps, texts)) + f") {end}"
        else:
            value = "value"
        parameter = f"{json.dumps(f'<parameter={name}>' + chr(10))} {value}"
        parts.append(parameter if name in required else f"({parameter})?")
    return " ".join([*parts, json.dumps(_END_OF_CALL)])


def _properties(tool: ToolSpec) -> Mapping[str, Any]:
    properties = tool.parameters.get("properties")
    return properties if isinstance(properties, dict) else {}


def _is_text(schema: Any) -> bool:
    """Return True if values of the schema are strings, which have no quotes."""
    if not isinstance(schema, dict):
        return False
    fixed = _fixed(schema)
    if fixed is None:
        return schema.get("type") == "string"
    return bool(fixed) and all(isinstance(value, str) for value in fixed)


def _fixed(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that the schema lists; None if it lists none."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return values if isinstance(values, list) else None


class XmlCallReader(CallStates):
    """Incremental parser of an answer with calls. It holds back a parameter until its value is complete."""

    def __init__(self, tools: Sequence[ToolSpec]) -> None:
        super().__init__()
        self._properties = {tool.name: _properties(tool) for tool in tools}
        self._state = self._read_text
        self._tool = ""  # of the current call
        self._parameter = ""  # name of the current parameter
        self._value: list[str] = []  # its value so far
        self._num_parameters = 0

    @property
    def is_complete(self) -> bool:
        within = (self._read_parameter, self._read_line_break, self._read_value)
        return self._num_calls > 0 and self._state not in within

    def _release(self) -> None:
        if self._state in (self._read_line_break, self._read_value):
            self._value.append(self._buffer)
            self._emit_value(is_whole=False)
        elif self._state in (self._read_text, self._read_head):
            self._emit_text(self._syntax + self._buffer)

    def _read_text(self) -> bool:
        before, opener, after = self._buffer.partition(_OPEN)
        if opener:
            self._emit_text(before)
            self._buffer, self._state, self._syntax = after, self._read_head, opener
            return True
        keep = len(self._buffer) - partial_length(self._buffer, _OPEN)
        self._emit_text(self._buffer[:keep])
        self._buffer = self._buffer[keep:]
        return False

    def _read_head(self) -> bool:
        found = match_parts(self._buffer, (SPACE, "<function=", OneOf(frozenset(self._properties)), ">"))
        if found is MORE:
            return False
        if found is None:
            self._no_call()
            return True
        self._begin_call(found.name, found.end)
        self._tool, self._num_parameters, self._state = found.name, 0, self._read_parameter
        self._emit_arguments("{")
        return True

    def _read_parameter(self) -> bool:
        """Find the next parameter, or the end of the call."""
        names = OneOf(frozenset(self._properties[self._tool]))
        found = match_parts(self._buffer, (SPACE, "<parameter=", names, ">")) if names.names else None
        if found is not None and found is not MORE:
            self._parameter = found.name
            self._buffer, self._state = self._buffer[found.end :], self._read_line_break
            return True
        end = match_parts(self._buffer, (SPACE, _END_OF_CALL))
        if found is MORE or end is MORE:
            return False
        if end is not None:
            self._buffer = self._buffer[end.end :]
        self._emit_arguments("}")
        self._state, self._follows_call = self._read_after, True
        return True

    def _read_line_break(self) -> bool:
        """Skip the line break before a value, which cannot be part of its end."""
        if not self._buffer:
            return False
        self._buffer, self._state = self._buffer.removeprefix("\n"), self._read_value
        return True

    def _read_value(self) -> bool:
        # Only the new text and the tail that may be part of the end are searched: values may be whole files.
        value, end, after = self._buffer.partition(_END_OF_VALUE)
        if end:
            self._value.append(value)
            self._emit_value(is_whole=True)
            self._buffer, self._state = after, self._read_parameter
            return True
        keep = len(self._buffer) - partial_length(self._buffer, _END_OF_VALUE)
        self._value.append(self._buffer[:keep])
        self._buffer = self._buffer[keep:]
        return False

    def _read_after(self) -> bool:
        found = match_parts(self._buffer, (SPACE, _CLOSE))
        if found is MORE:
            return False
        if found is not None:
            self._buffer = self._buffer[found.end :]
        self._state = self._read_text
        return True

    def _emit_value(self, *, is_whole: bool) -> None:
        """Return a parameter as a member of a JSON object. The value of an answer that was cut is not closed."""
        text = "".join(self._value)
        self._value.clear()
        if _is_text(self._properties[self._tool][self._parameter]) or (is_whole and not _is_json(text)):
            text = json.dumps(text, ensure_ascii=False)
            text = text if is_whole else text[:-1]
        separator = ", " if self._num_parameters else ""
        self._num_parameters += 1
        self._emit_arguments(f"{separator}{json.dumps(self._parameter)}: {text}")


def _is_json(text: str) -> bool:
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)  # JSON has no NaN
    except (ValueError, RecursionError):
        return False
    return True
