"""Calls of Mistral's newer models: a name and arguments between markers. Pure.

[TOOL_CALLS]lookup[ARGS]{"city": "Paris"}[TOOL_CALLS]lookup[ARGS]{"city": "Ulm"}
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from frontend.markers import marker_rule, up_to_marker
from frontend.tool_formats.calls import MAX_CALLS, ToolSpec, names_of
from frontend.tool_formats.json_calls import MISTRAL, SPACING
from frontend.tool_formats.scanning import SPACE, CallSyntax, OneOf
from frontend.tool_formats.sections import SectionReader, SectionSyntax

ARGS: Final = "[ARGS]"


@dataclass(frozen=True)
class NamedCallFormat:
    """Format of calls that begin with a name. It is a variant of the format `mistral`, by the template."""

    name: str = MISTRAL.name
    opener: str = MISTRAL.sections.opener

    @property
    def markers(self) -> tuple[str, ...]:
        """Tokens that the parser needs to see in the text."""
        return self.opener, ARGS

    def reader(self, tools: Sequence[ToolSpec]) -> SectionReader:
        """Return a fresh parser of an answer that may call `tools`."""
        syntax = CallSyntax((OneOf(names_of(tools)), ARGS, SPACE), ((),))
        return SectionReader(SectionSyntax(self.opener), syntax)

    def grammar(
        self, tools: Sequence[ToolSpec], *, must_call: bool, parallel: bool, markers: Mapping[str, int], text: str
    ) -> Sequence[str]:
        """Return Lark rules of content that calls `tools`."""
        opener, args = marker_rule(self.opener, markers), marker_rule(ARGS, markers)
        calls = [f"{json.dumps(tool.name)} {args} %json {tool.grammar_schema(SPACING)}" for tool in tools]
        lines = [f"call: {' | '.join(calls)}"]
        further = f"({opener} call){{0,{MAX_CALLS - 1}}}" if parallel else ""
        lines.append(f"calls: call {further}")
        if must_call or text:
            return [*lines, f"content: {'' if must_call else f'{text} | '}{opener} calls"]
        return [*lines, *up_to_marker("head", self.opener, markers), "content: TEXT | head calls"]

    def call_id(self) -> str:
        """Return a new id of a call."""
        return MISTRAL.call_id()


MISTRAL_NAMED: Final = NamedCallFormat()
