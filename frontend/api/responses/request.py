"""Body of OpenAI's Responses API, and the chat that it becomes.

Each item of `input` is a message of the chat; but reasoning, text and function calls of one turn of the assistant are
items of their own and together one message. Nothing is stored: a client sends the whole history.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema, field_validator

from frontend.api.hints import Hints
from frontend.api.request_base import MAX_TOKEN_ID, RequestModel
from frontend.api.request_models import (
    EXTENSIONS,
    MAX_TOOLS,
    CacheSalt,
    ChatBody,
    FunctionName,
    NumTop,
    Priority,
    ReasoningEffort,
    SessionId,
    SloClassName,
    converted,
    text_only,
)

_LOGPROBS: Final = "message.output_text.logprobs"
_ANY_CONTENT: Final = WithJsonSchema(
    {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object", "required": ["type", "text"]}}]}
)


class ResponsesText(RequestModel):
    """Text of an item."""

    type: Annotated[Literal["input_text", "output_text", "text", "reasoning_text"], BeforeValidator(text_only)]
    text: str


def _as_texts(value: Any) -> Any:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


ItemTexts = Annotated[list[ResponsesText], Field(fail_fast=True), BeforeValidator(_as_texts), _ANY_CONTENT]


class MessageItem(RequestModel):
    """Message of the user, the system or the assistant."""

    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[ItemTexts, Field(min_length=1)]


class ReasoningItem(RequestModel):
    """Reasoning of an earlier response. Its `summary` and `encrypted_content` have no effect."""

    type: Literal["reasoning"]
    content: ItemTexts | None = None


class FunctionCallItem(RequestModel):
    """Function call of an earlier response; `arguments` is JSON text."""

    type: Literal["function_call"]
    call_id: str
    name: FunctionName
    arguments: str


class FunctionOutputItem(RequestModel):
    """Result of a function call."""

    type: Literal["function_call_output"]
    call_id: str
    output: ItemTexts


Item = Annotated[MessageItem | ReasoningItem | FunctionCallItem | FunctionOutputItem, Field(discriminator="type")]
_ITEMS: Final = ("message", "reasoning", "function_call", "function_call_output")


def _as_items(value: Any) -> Any:
    """Return an input as a list of items. Raises ValueError for an item that is not supported."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        return value
    items: list[Any] = []
    for number, item in enumerate(value):
        if isinstance(item, Mapping) and "type" not in item and "role" in item:
            item = {**item, "type": "message"}
        kind = item.get("type") if isinstance(item, Mapping) else None
        if kind == "item_reference":
            raise ValueError(f"item {number} refers to a stored item, but nothing is stored: send the item itself")
        if isinstance(kind, str) and kind not in _ITEMS:
            raise ValueError(f"item {number} has the type {kind!r}, which is not supported; use {', '.join(_ITEMS)}")
        items.append(item)
    return items


class FunctionTool(RequestModel):
    """Tool of the client; OpenAI's own tools, which have another type, are not supported."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("type", mode="before")
    @classmethod
    def _is_function(cls, value: Any) -> Any:
        if isinstance(value, str) and value != "function":
            raise ValueError(f"{value!r} is a tool of OpenAI's servers, which is not supported; use functions")
        return value


def _tool_choice(value: Any) -> Any:
    """Check a tool_choice. Raises ValueError."""
    if value in (None, "none", "auto", "required"):
        return value
    if isinstance(value, Mapping) and value.get("type") == "function" and isinstance(value.get("name"), str):
        return {"type": "function", "name": value["name"]}
    raise ValueError("must be 'none', 'auto', 'required' or {\"type\": \"function\", \"name\": NAME}")


class TextFormat(RequestModel):
    """Format of the answer's text; `name`, `schema` and `strict` belong to json_schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class TextConfig(RequestModel):
    """Configuration of the answer's text."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {"verbosity": ("medium",)}
    format: TextFormat | None = None


class ReasoningConfig(RequestModel):
    """Configuration of the reasoning, which is returned as it is: there are no summaries of it."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "summary": ("auto",),
        "generate_summary": ("auto",),
    }
    effort: ReasoningEffort | None = None


class ResponsesStreamOptions(RequestModel):
    """Options of a stream. Obfuscation is never added."""

    include_obfuscation: bool | None = None


class ResponsesChat(ChatBody):
    """Chat that a ResponsesBody becomes."""

    ID_PREFIX = "resp_"


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16, fail_fast=True),
]


class ResponsesBody(RequestModel):
    """Body of POST /v1/responses. `store` must not be true, since nothing is stored."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "image": ({},),
        "moderation": (),
        "previous_response_id": ("",),
        "prompt": (),
        "store": (False,),
    }
    CHAT_FIELDS: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
    }
    """Names of its fields by those of the chat's."""
    model: str | None = None
    input: Annotated[
        list[Item],
        Field(min_length=1, max_length=16384, fail_fast=True),
        BeforeValidator(_as_items),
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": {"type": "object"}}]}),
    ]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_TOKEN_ID)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_logprobs: NumTop | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Annotated[
        Any, PlainValidator(_tool_choice), WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]})
    ] = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Metadata | None = None
    prompt_cache_key: SessionId | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    slo_class: SloClassName | None = None
    session_id: SessionId | None = None
    parent_session_id: SessionId | None = None
    priority: Priority | None = None
    hints: Hints | None = None
    cache_salt: CacheSalt | None = None

    @property
    def wants_logprobs(self) -> bool:
        """True if the response includes the log-probabilities of the answer's text."""
        return _LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def to_chat(self) -> ResponsesChat:
        """Return the chat that the body asks for. Raises InvalidRequest."""
        chat = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        form = self.text.format if self.text is not None else None
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": [*chat, *_messages(self.input)],
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "tools": [_tool(tool) for tool in self.tools or ()] or None,
            "parallel_tool_calls": self.parallel_tool_calls,
            "truncation": self.truncation,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning_effort": self.reasoning.effort if self.reasoning is not None else None,
            "stream": self.stream,
            **{name: getattr(self, name) for name in EXTENSIONS},
        }
        if self.wants_logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        if self.tool_choice is not None:
            choice = self.tool_choice
            named = isinstance(choice, dict)
            fields["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}} if named else choice
        if form is not None:
            fields["response_format"] = {"type": form.type}
            if form.type == "json_schema":
                fields["response_format"]["json_schema"] = {"name": form.name, "schema": form.schema_}
        return converted(ResponsesChat, fields, self.CHAT_FIELDS)


def _messages(items: Sequence[Item]) -> Iterator[dict[str, Any]]:
    """Yield the chat's messages. Reasoning, text and calls that follow each other are one message."""
    turn: dict[str, Any] = {}  # of the assistant, so far
    for item in items:
        if turn and not _belongs(item, turn):
            yield _closed(turn)
            turn = {}
        if isinstance(item, ReasoningItem):
            turn = turn or {"role": "assistant"}
            if item.content:
                turn["reasoning_content"] = "\n".join(part.text for part in item.content)
        elif isinstance(item, FunctionCallItem):
            turn = turn or {"role": "assistant"}
            function = {"name": item.name, "arguments": item.arguments}
            turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
        elif isinstance(item, FunctionOutputItem):
            yield {"role": "tool", "tool_call_id": item.call_id, "content": _texts(item.output)}
        elif item.role == "assistant":
            turn = (turn or {"role": "assistant"}) | {"content": _texts(item.content)}
        else:
            yield {"role": item.role, "content": _texts(item.content)}
    if turn:
        yield _closed(turn)


def _belongs(item: Item, turn: Mapping[str, Any]) -> bool:
    """Return True if the item continues the assistant's turn, whose order is reasoning, text, calls."""
    if isinstance(item, ReasoningItem):
        return False
    if isinstance(item, MessageItem):
        return item.role == "assistant" and "content" not in turn and "tool_calls" not in turn
    return isinstance(item, FunctionCallItem)


def _closed(turn: dict[str, Any]) -> dict[str, Any]:
    # A turn that was cut off within its reasoning has neither text nor calls.
    return turn if "content" in turn or "tool_calls" in turn else turn | {"content": ""}


def _texts(parts: Sequence[ResponsesText]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": part.text} for part in parts] or [{"type": "text", "text": ""}]


def _tool(tool: FunctionTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": {**function, "strict": tool.strict}}
