"""Bodies of Anthropic's Messages API, and the chats that they become.

A message's text blocks are the text of a chat message, its `thinking` the reasoning, its `tool_use` the tool calls;
each `tool_result` is a message of a tool.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, ConfigDict, Field, field_validator

from frontend.api.hints import CacheControl, Hints
from frontend.api.request_base import MAX_TOKEN_ID, RequestModel
from frontend.api.request_models import (
    EXTENSIONS,
    MAX_TOOLS,
    CacheSalt,
    ChatBody,
    FunctionName,
    Priority,
    SessionId,
    SloClassName,
    TokenizeBody,
    converted,
    text_only,
)
from frontend.errors import InvalidRequest


class AnthropicCacheControl(CacheControl):
    """The hint as Anthropic's clients send it; `scope` and other fields, which a hint does not need, are ignored."""

    model_config = ConfigDict(extra="ignore")


class TextBlock(RequestModel):
    """Text of a message, of the system prompt or of a tool's result."""

    type: Literal["text"]
    text: str
    cache_control: AnthropicCacheControl | None = None


class ThinkingBlock(RequestModel):
    """Reasoning of an earlier answer. Its `signature` is not checked."""

    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(RequestModel):
    """Tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: FunctionName
    input: dict[str, Any]
    cache_control: AnthropicCacheControl | None = None


def _as_blocks(value: Any) -> Any:
    """Return a content as a list of blocks. Raises ValueError for a block that is not supported."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    for block in value if isinstance(value, list) else ():
        kind = block.get("type") if isinstance(block, Mapping) else None
        if isinstance(kind, str) and kind not in _BLOCKS:
            text_only(kind)
            raise ValueError(f"blocks of type {kind!r} are not supported; supported are {', '.join(_BLOCKS)}")
    return value


Texts = Annotated[
    list[TextBlock],
    Field(fail_fast=True),
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock]),
]


class ToolResultBlock(RequestModel):
    """Result of a tool call. With `is_error` the model sees the same text."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool | None = None
    cache_control: AnthropicCacheControl | None = None


Block = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]
_BLOCKS: Final = ("text", "thinking", "tool_use", "tool_result")
_BLOCKS_OF: Final = {"user": ("text", "tool_result"), "assistant": ("text", "thinking", "tool_use")}


class AnthropicMessage(RequestModel):
    """One turn, of the user (with results of tools) or of the assistant (with its calls)."""

    role: Literal["user", "assistant"]
    content: Annotated[
        list[Block],
        Field(min_length=1, fail_fast=True),
        BeforeValidator(_as_blocks, json_schema_input_type=str | Annotated[list[Block], Field(min_length=1)]),
    ]

    def chat_messages(self, index: int) -> Iterator[dict[str, Any]]:
        """Yield the chat messages of this turn, message `index` of the body. Raises InvalidRequest."""
        for number, block in enumerate(self.content):
            if block.type not in _BLOCKS_OF[self.role]:
                param = f"messages.{index}.content.{number}"
                raise InvalidRequest(f"{param}: messages of the {self.role} cannot have {block.type}", param=param)
        for block in self.content:
            if isinstance(block, ToolResultBlock):
                parts = _parts(block.content or ()) or [{"type": "text", "text": ""}]
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": parts} | _cached(block)
        texts = _parts([block for block in self.content if isinstance(block, TextBlock)])
        if self.role == "user":
            if texts:
                yield {"role": "user", "content": texts}
            return
        thoughts = [block.thinking for block in self.content if isinstance(block, ThinkingBlock)]
        calls = [block for block in self.content if isinstance(block, ToolUseBlock)]
        message: dict[str, Any] = {"role": "assistant", "content": texts or None}
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
            message |= _cached(*calls)
        elif not texts:
            raise InvalidRequest(
                f"messages.{index}.content: messages of the assistant must have text or tool_use",
                param=f"messages.{index}.content",
            )
        yield message


class AnthropicTool(RequestModel):
    """Tool of the client. Anthropic's own tools, which have another type, are not supported.

    With `strict: true` a schema that cannot be enforced completely is refused.
    """

    name: FunctionName
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: AnthropicCacheControl | None = None

    @field_validator("type")
    @classmethod
    def _is_custom(cls, value: str | None) -> str | None:
        if value not in (None, "custom"):
            raise ValueError(f"{value!r} is a tool of Anthropic's servers, which is not supported; use 'custom' tools")
        return value


class AnthropicToolChoice(RequestModel):
    """Choice between calling tools or not; `name` belongs to the type "tool"."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(RequestModel):
    """Switch of the reasoning. `budget_tokens` is not enforced: `max_tokens` bounds reasoning and answer."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=1, le=MAX_TOKEN_ID)] | None = None


class OutputFormat(RequestModel):
    """JSON Schema that the answer's text matches."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(RequestModel):
    """How much the model reasons, and the format of its answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class MessagesTokenizeBody(TokenizeBody):
    """Body that a MessagesPrompt becomes."""

    EFFORT_IS_HINT = True  # as in MessagesChat


class MessagesPrompt(RequestModel):
    """Fields that determine the prompt; the body of POST /v1/messages/count_tokens."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "container": (),
        "context_management": ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
        "mcp_servers": ([],),
        "prefill": (),
    }
    CHAT_FIELDS: ClassVar[Mapping[str, str]] = {
        "messages": "messages",
        "reasoning_effort": "thinking",
        "response_format": "output_config.format",
        "stop": "stop_sequences",
    }
    """Names of its fields by those of the chat's."""
    model: str | None = None
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=16384, fail_fast=True)]
    system: Texts | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: AnthropicCacheControl | None = None

    def rendering(self) -> dict[str, Any]:
        """Return the fields of the chat that determine its prompt. Raises InvalidRequest."""
        chat: list[dict[str, Any]] = []
        if self.system:
            chat.append({"role": "system", "content": _parts(self.system)})
        for index, message in enumerate(self.messages):
            chat += message.chat_messages(index)
        fields: dict[str, Any] = {"model": self.model, "messages": chat}
        if self.messages[-1].role == "assistant":  # the answer continues it
            if chat[-1].get("tool_calls"):
                raise InvalidRequest(
                    "messages: the results of the last message's tool_use blocks must follow it", param="messages"
                )
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        if self.tools:
            fields["tools"] = [_tool(tool) for tool in self.tools]
        if (effort := self._effort()) is not None:
            fields["reasoning_effort"] = effort
        return fields

    def to_tokenize(self) -> TokenizeBody:
        """Return the body that counts the prompt's tokens. Raises InvalidRequest."""
        return converted(MessagesTokenizeBody, self.rendering(), self.CHAT_FIELDS)

    def _effort(self) -> str | None:
        if self.thinking is not None and self.thinking.type == "disabled":
            return "none"
        requested = self.output_config.effort if self.output_config is not None else None
        return requested or ("high" if self.thinking is not None and self.thinking.type == "enabled" else None)


class MessagesChat(ChatBody):
    """Chat that a MessagesBody becomes."""

    ID_PREFIX = "msg_"
    EFFORT_IS_HINT = True  # agents send it without knowing the model


class MessagesBody(MessagesPrompt):
    """Body of POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKEN_ID)]
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)] | None = None
    slo_class: SloClassName | None = None
    session_id: SessionId | None = None
    parent_session_id: SessionId | None = None
    priority: Priority | None = None
    hints: Hints | None = None
    cache_salt: CacheSalt | None = None

    def to_chat(self) -> MessagesChat:
        """Return the chat that the body asks for. Raises InvalidRequest."""
        fields = self.rendering() | {
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "stream": self.stream,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            **{name: getattr(self, name) for name in EXTENSIONS},
        }
        if self.cache_control is not None:
            fields["cache_control"] = self.cache_control.model_dump()
        if self.output_config is not None and (form := self.output_config.format) is not None:
            schema = {"name": "answer", "schema": form.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        if (choice := self.tool_choice) is not None:
            fields["tool_choice"] = _choice(choice)
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        return converted(MessagesChat, fields, self.CHAT_FIELDS)


def _parts(blocks: Sequence[TextBlock]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": block.text} | _cached(block) for block in blocks]


def _cached(*blocks: TextBlock | ToolUseBlock | ToolResultBlock | AnthropicTool) -> dict[str, Any]:
    """Return the chat's hint for the blocks: the one with the longest lifetime."""
    controls = [block.cache_control for block in blocks if block.cache_control is not None]
    if not controls:
        return {}
    return {"cache_control": max(controls, key=lambda control: control.lifetime_s).model_dump()}


def _call(block: ToolUseBlock) -> dict[str, Any]:
    # Spaced as grammars let models write arguments, so that the history equals what was generated.
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": {**function, "strict": tool.strict}} | _cached(tool)


def _choice(choice: AnthropicToolChoice) -> Any:
    if choice.type != "tool":
        return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    if choice.name is None:
        raise InvalidRequest("tool_choice: the type 'tool' requires a name", param="tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}
