"""Calls of gpt-oss, as messages to functions in the channel `commentary`. Pure.

The parser of the channels leaves them in the content, with the header

    <|channel|>commentary to=functions.NAME<|message|>
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from frontend.markers import marker_rule
from frontend.reasoning.harmony import CALL, CALL_OPENING, CHANNEL, CONSTRAIN, END, HARMONY, MESSAGE, START
from frontend.tool_formats.calls import ToolSpec, names_of, new_call_id
from frontend.tool_formats.scanning import SPACE, CallSyntax, OneOf
from frontend.tool_formats.sections import SectionReader, SectionSyntax

_NO_SPACE: Final = {"whitespace_flexible": False}


@dataclass(frozen=True)
class HarmonyCallFormat:
    """Format of calls in channels. An answer ends with its call: there is one."""

    name: str = "openai"
    markers: tuple[str, ...] = HARMONY.markers

    def reader(self, tools: Sequence[ToolSpec]) -> SectionReader:
        """Return a fresh parser of content that may call `tools`."""
        syntax = CallSyntax((OneOf(names_of(tools)), MESSAGE, SPACE), ((SPACE, CALL),))
        return SectionReader(SectionSyntax(CALL_OPENING), syntax)

    def grammar(
        self, tools: Sequence[ToolSpec], *, must_call: bool, parallel: bool, markers: Mapping[str, int], text: str
    ) -> Sequence[str]:
        """Return Lark rules of the messages after the analysis, and of those after the beginning of a final one."""
        token = {marker: marker_rule(marker, markers) for marker in self.markers}
        calls = []
        for tool in tools:
            recipient = json.dumps(f"commentary to=functions.{tool.name} ")
            schema = tool.grammar_schema(_NO_SPACE)
            calls.append(f'{token[CHANNEL]} {recipient} {token[CONSTRAIN]} "json" {token[MESSAGE]} %json {schema}')
        call = f"call: {' | '.join(calls)}"
        next_message = f'{token[END]} {token[START]} "assistant"'
        if must_call:
            return [call, "content: call", f"continued: TEXT {next_message} call"]
        preamble = f'{token[CHANNEL]} "commentary" {token[MESSAGE]} TEXT {next_message}'
        final = f'{token[CHANNEL]} "final" {token[MESSAGE]} {text or "TEXT"}'
        return [
            call,
            f"content: {final} | ({preamble})? call",
            f"continued: {text or 'TEXT'} | TEXT {next_message} call",
        ]

    def call_id(self) -> str:
        """Return a new id of a call."""
        return new_call_id()


OPENAI: Final = HarmonyCallFormat()
