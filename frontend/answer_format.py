"""Format of a model's chat answers: how they mark reasoning and tool calls, by the chat template or by settings.

A chat template names the markers of its model's answers, because it renders earlier answers with them. Where it names
none, answers have no reasoning, and calls have the format of Hermes, which is also that of the system text by which
models are told of tools if their template does not do it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from frontend.chat_rendering import ChatTemplate
from frontend.errors import FrontendConfigError
from frontend.reasoning import DEEPSEEK_R1, HARMONY, QWEN3, ReasoningFormat, ReasoningStart, think_tags
from frontend.reasoning.harmony import CHANNEL
from frontend.request import ReasoningOptions
from frontend.tokenizer import Tokenizer
from frontend.tool_formats import ARGS, HERMES, LLAMA3_JSON, MISTRAL, MISTRAL_NAMED, OPENAI, QWEN3_CODER, ToolFormat

_REASONING: Final[Mapping[str, ReasoningFormat]] = {form.name: form for form in (DEEPSEEK_R1, QWEN3, HARMONY)}
_TOOLS: Final[Mapping[str, ToolFormat]] = {
    form.name: form for form in (HERMES, QWEN3_CODER, LLAMA3_JSON, MISTRAL, OPENAI)
}
_LLAMA3: Final = '{"name": function name, "parameters": dictionary of argument name and its value}'
_ONE_CALL: Final = "only supports single tool-calls"  # error of Llama 3's template for further calls


@dataclass(frozen=True)
class AnswerFormat:
    """Formats of reasoning (None: answers are not parsed for it) and of tool calls, and the ids of their markers."""

    reasoning: ReasoningFormat | None = None
    tools: ToolFormat = HERMES
    markers: Mapping[str, int] = field(default_factory=dict)  # those that are tokens of their own

    def start_of(self, prompt_ending: str, continued: str | None) -> ReasoningOptions | None:
        """Return the state in which a prompt leaves its answer's reasoning; None if the answer has none.

        `continued` is the text of a message that the answer continues.
        """
        if self.reasoning is None:
            return None
        start = self.reasoning.start_of(prompt_ending) if continued is None else self.reasoning.start_in(continued)
        return None if start is ReasoningStart.AFTER else ReasoningOptions(self.reasoning, start)

    def shown_ids(self, *, reasoning: bool, calls: bool) -> frozenset[int]:
        """Return the markers' ids that must be seen to parse an answer for reasoning or for calls."""
        parsed: tuple[ReasoningFormat | ToolFormat | None, ...] = (
            self.reasoning if reasoning else None,
            self.tools if calls else None,
        )
        seen = [marker for form in parsed if form is not None for marker in form.markers]
        return frozenset(self.markers[marker] for marker in seen if marker in self.markers)


PLAIN_ANSWERS: Final = AnswerFormat()


def answer_format(tokenizer: Tokenizer, reasoning_parser: str, tool_call_parser: str, *, model: str) -> AnswerFormat:
    """Return the format of a model's answers. The parsers are values of the settings with these names.

    Raises FrontendConfigError for a parser of tool calls that does not suit the template.
    """
    template = tokenizer.chat_template
    is_auto = reasoning_parser == "auto"
    reasoning = _reasoning_of(template) if is_auto else _REASONING.get(reasoning_parser)  # None for "off"
    tools = _tools_of(template, reasoning) if tool_call_parser == "auto" else _TOOLS[tool_call_parser]
    if tools is MISTRAL and template is not None:
        tools = _mistral_of(template)
    if tools is not HERMES and not (template is not None and template.takes_tools):
        raise FrontendConfigError(
            f"tool_call_parser of the model {model!r} must be auto or hermes, since its chat template does not use "
            f"tools, got {tool_call_parser!r}"
        )
    if tools is OPENAI and reasoning is not HARMONY:
        raise FrontendConfigError(
            f"tool_call_parser {OPENAI.name!r} of the model {model!r} requires reasoning_parser {HARMONY.name!r}, got "
            f"{reasoning_parser!r}"
        )
    markers = {*tools.markers, *(reasoning.markers if reasoning is not None else ())}
    return AnswerFormat(reasoning, tools, tokenizer.added_ids(sorted(markers)))


def _reasoning_of(template: ChatTemplate | None) -> ReasoningFormat | None:
    if template is None:
        return None
    if CHANNEL in template.source and "analysis" in template.source:
        return HARMONY
    return QWEN3 if think_tags.CLOSE in template.source else None


def _mistral_of(template: ChatTemplate) -> ToolFormat:
    """Return the variant of the format that a template uses."""
    if ARGS in template.source:
        return MISTRAL_NAMED
    has_space = f"{MISTRAL.sections.opener} [" in template.source
    return replace(MISTRAL, sections=replace(MISTRAL.sections, before=" [")) if has_space else MISTRAL


def _tools_of(template: ChatTemplate | None, reasoning: ReasoningFormat | None) -> ToolFormat:
    if template is None or not template.takes_tools:
        return HERMES
    source = template.source
    if reasoning is HARMONY:
        return OPENAI
    if MISTRAL.sections.opener in source:
        return MISTRAL
    if "<function=" in source and "<parameter=" in source:
        return QWEN3_CODER
    if _LLAMA3 in source:
        return replace(LLAMA3_JSON, max_calls=1) if _ONE_CALL in source else LLAMA3_JSON
    return HERMES
