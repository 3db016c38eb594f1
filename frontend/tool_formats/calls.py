"""Interface of the formats of tool calls: a parser of answers with calls, and the grammar of such answers."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from frontend.tool_formats.schemas import grammar_schema

MAX_CALLS: Final = 16  # per answer: a model that repeats itself must stop


@dataclass(frozen=True)
class ToolSpec:
    """Tool's name (needs no JSON escaping) and the JSON Schema of its arguments, which describes an object.

    `is_strict`: the schema must be enforced completely.
    """

    name: str
    parameters: dict[str, Any]
    is_strict: bool = False

    def grammar_schema(self, spacing: Mapping[str, Any]) -> str:
        """Return the schema for a grammar whose JSON has this spacing."""
        return grammar_schema(self.parameters, is_strict=self.is_strict, spacing=spacing)


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


def names_of(tools: Sequence[ToolSpec]) -> frozenset[str]:
    """Return the names of the tools."""
    return frozenset(tool.name for tool in tools)


def new_call_id() -> str:
    """Return a new id of a call, in OpenAI's form."""
    return f"call_{uuid.uuid4().hex[:24]}"


class ToolReader(Protocol):
    """Incremental parser of one answer. The result does not depend on how the text is split into pieces.

    What does not become a call is content.
    """

    @property
    def is_complete(self) -> bool:
        """True if there was a call and the last one's arguments are complete."""

    def feed(self, text: str, *, is_last: bool) -> ToolDelta:
        """Parse the next piece of the answer. With the last piece, held-back text is returned as well."""


class ToolFormat(Protocol):
    """Format in which a model family calls tools."""

    @property
    def name(self) -> str:
        """Value of the setting `tool_call_parser`, vLLM's name of the parser."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Tokens that the parser needs to see in the text, also if the tokenizer calls them special."""

    def reader(self, tools: Sequence[ToolSpec]) -> ToolReader:
        """Return a fresh parser of an answer that may call `tools`."""

    def grammar(
        self, tools: Sequence[ToolSpec], *, must_call: bool, parallel: bool, markers: Mapping[str, int], text: str
    ) -> Sequence[str]:
        """Return Lark rules of content that calls `tools`, with the rule `content` among them. They may use TEXT.

        Unless `must_call` is set, the content may also match the rule `text`, or be any text if `text` is empty.
        `markers` holds the ids of those markers that are tokens of their own.
        """

    def call_id(self) -> str:
        """Return a new id of a call."""
