"""Calls as JSON objects with a name and arguments, in the formats of Hermes and Qwen, of Llama 3 and of Mistral. Pure.

Calls are in sections. A section has an opening marker, its calls and an end:

    hermes       <tool_call>                                                       one call per section, any number
                 {"name": "lookup", "arguments": {"city": "Paris"}}                of sections, each on a new line
                 </tool_call>
    llama3_json  <|python_tag|>{"name": "lookup", "parameters": {"city": "Paris"}}; {"name": ...}
                 without the marker only at the beginning of the content
    mistral      [TOOL_CALLS][{"name": "lookup", "arguments": {"city": "Paris"}}, {"name": ...}]

Grammars prescribe exactly this spacing, which is that of the templates and of training data. The parser accepts any
white space. Text that begins like a call of another tool, or of none, is content.
"""

import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from frontend.markers import marker_rule, up_to_marker
from frontend.tool_formats.calls import MAX_CALLS, ToolSpec, names_of, new_call_id
from frontend.tool_formats.scanning import CallSyntax
from frontend.tool_formats.sections import SectionReader, SectionSyntax

# The spacing of Python's json.dumps, as in templates and training data.
SPACING: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ID_CHARS: Final = string.ascii_letters + string.digits


@dataclass(frozen=True)
class JsonCallFormat:
    """One of the formats. `arguments` is the key of the arguments."""

    name: str
    arguments: str
    sections: SectionSyntax
    max_calls: int = MAX_CALLS
    id_chars: int = 0  # length of calls' ids, if templates require one

    @property
    def markers(self) -> tuple[str, ...]:
        """Tokens that the parser needs to see in the text."""
        return tuple(filter(None, (self.sections.opener, self.sections.closer)))

    def reader(self, tools: Sequence[ToolSpec]) -> SectionReader:
        """Return a fresh parser of an answer that may call `tools`."""
        return SectionReader(self.sections, CallSyntax.of_object(names_of(tools), self.arguments))

    def grammar(
        self, tools: Sequence[ToolSpec], *, must_call: bool, parallel: bool, markers: Mapping[str, int], text: str
    ) -> Sequence[str]:
        """Return Lark rules of content that calls `tools`."""
        sections = self.sections
        lines = ["call: " + " | ".join(self._call(tool, beside_json=bool(text)) for tool in tools)]
        lines.append(f"calls: {self._calls(markers, self.max_calls if parallel else 1)}")
        opener = marker_rule(sections.opener, markers)
        opened = f"{opener}? calls" if sections.opens_bare else f"{opener} calls"
        if must_call:
            return [*lines, f"content: {opened}"]
        if text:
            return [*lines, f"content: {text} | {opened}"]
        if not sections.opens_bare:
            return [*lines, *up_to_marker("head", sections.opener, markers), "content: TEXT | head calls"]
        lines.append(r'PLAIN: TEXT & ~/\s*\{\s*"name"\s*:(.|\n)*/')  # text that begins like a call is one
        lines += up_to_marker("head", sections.opener, markers, "PLAIN")
        return [*lines, "content: PLAIN | calls | head calls"]

    def call_id(self) -> str:
        """Return a new id of a call."""
        if self.id_chars:
            return "".join(secrets.choice(_ID_CHARS) for _ in range(self.id_chars))
        return new_call_id()

    def _call(self, tool: ToolSpec, *, beside_json: bool) -> str:
        """Return the Lark expression of a call."""
        head = ("{", '"name"', f': "{tool.name}", "{self.arguments}": ')
        # The lexer prefers the longest lexeme and never goes back. Beside text, a head must therefore be one lexeme;
        # beside other JSON, its lexemes must end where those of JSON end.
        if beside_json:
            lexemes = " ".join(map(json.dumps, head))
        elif self.sections.opens_bare:  # line breaks after the reasoning would begin text
            lexemes = "/" + r"\n{0,4}" + re.escape("".join(head)) + "/"
        else:
            lexemes = json.dumps("".join(head))
        # The schema is embedded separately, so that references within it still start at its root.
        return f'{lexemes} %json {tool.grammar_schema(SPACING)} "}}"'

    def _calls(self, markers: Mapping[str, int], max_calls: int) -> str:
        """Return the expression of all calls after the first opening marker."""
        sections = self.sections
        before, between, after = (
            json.dumps(text) if text else "" for text in (sections.before, sections.between, sections.after)
        )
        closer = marker_rule(sections.closer, markers) if sections.closer else ""
        if sections.between:
            further = f"({between} call){{0,{max_calls - 1}}}" if max_calls > 1 else ""
            return f"{before} call {further} {after} {closer}"
        section = f"{before} call {after} {closer}"
        opener = marker_rule(sections.opener, markers)
        return f'{section} ("\\n" {opener} {section}){{0,{max_calls - 1}}}' if max_calls > 1 else section


HERMES: Final = JsonCallFormat(
    "hermes", "arguments", SectionSyntax("<tool_call>", before="\n", after="\n", closer="</tool_call>")
)
LLAMA3_JSON: Final = JsonCallFormat(
    "llama3_json", "parameters", SectionSyntax("<|python_tag|>", between="; ", opens_bare=True)
)
MISTRAL: Final = JsonCallFormat(
    "mistral", "arguments", SectionSyntax("[TOOL_CALLS]", before="[", between=", ", after="]"), id_chars=9
)
