"""Interface of reasoning formats: a parser of answers, and the grammar of the reasoning before constrained content."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class ReasoningStart(Enum):
    """State in which the prompt leaves an answer."""

    INSIDE = "inside"  # the prompt has opened the reasoning
    BEFORE = "before"  # the answer may open it
    AFTER = "after"  # the prompt has closed it: the answer is content only
    WITHIN_CONTENT = "within_content"  # the answer continues a message of content; further messages may follow


@dataclass(frozen=True, slots=True)
class ParsedText:
    """Reasoning and content found in a piece of an answer; in the answer, the reasoning comes first."""

    reasoning: str
    content: str


class ReasoningParser(Protocol):
    """Incremental parser of one answer. The result does not depend on how the text is split into pieces."""

    @property
    def in_reasoning(self) -> bool:
        """True if the text so far ends within the reasoning."""

    def feed(self, text: str, *, is_last: bool) -> ParsedText:
        """Parse the next piece of the answer. With the last piece, held-back text is returned as well."""


class ReasoningFormat(Protocol):
    """Format of the reasoning of a model family."""

    @property
    def name(self) -> str:
        """Value of the setting `reasoning_parser`, vLLM's name of the parser."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Tokens that the parser needs to see in the text, also if the tokenizer calls them special."""

    def start_of(self, prompt_ending: str) -> ReasoningStart:
        """Return the state in which a prompt leaves the answer, from the end of the prompt's text."""

    def start_in(self, continued: str) -> ReasoningStart:
        """Return the state after the text of a message that the answer continues."""

    def parser(self, start: ReasoningStart) -> ReasoningParser:
        """Return a fresh parser of an answer."""

    def grammar(self, start: ReasoningStart, markers: Mapping[str, int], *, has_headers: bool) -> Sequence[str]:
        """Return Lark rules of an answer whose content matches the rule `content`, `start` among them.

        `markers` holds the ids of those markers that are tokens of their own. `has_headers`: the tool
        format has rules of messages with headers, `content` and `continued` (the rest of a message and those after
        it). The rules may use TEXT.
        """
