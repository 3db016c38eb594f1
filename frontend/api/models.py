"""The requests that clients send, as pydantic models. Types are strict: "16" is no number here."""

from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)

from frontend.api.fields import (
    CLASS_NAME,
    MAX_PRIORITY,
    MAX_TOKEN_ID,
    LogitBias,
    NumTop,
    Prompts,
    RequestModel,
    Stops,
    TokenId,
)
from frontend.api.structured import GuidedChoice, JsonSchema, ResponseFormat, Structured
from frontend.api.tool_models import Tool, ToolCall, ToolChoice
from frontend.api.unsupported import unsupported_field
from frontend.errors import InvalidRequest


def _as_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class StreamOptions(RequestModel):
    """What a stream carries beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(RequestModel):
    """Fields that completions and chats share. Null means the default."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_TOKEN_ID)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_TOKEN_ID)] | None = None
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKEN_ID)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    logit_bias: LogitBias | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Stops | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256, fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: NumTop | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Structured = None
    guided_json: JsonSchema | None = None
    guided_regex: str | None = None
    guided_choice: GuidedChoice = None
    guided_grammar: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(max_length=512)] | None = None
    slo_class: Annotated[str, Field(pattern=CLASS_NAME)] | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    endless: bool | None = None
    add_special_tokens: bool | None = None

    @property
    def num_choices(self) -> int:
        """Answers per prompt."""
        return self.n or 1

    @property
    def num_top(self) -> int | None:
        """How many of the likeliest tokens are told beside each token; None where no log-probability is asked for."""
        return None


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: NumTop | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_TOKEN_ID)] | None = None

    @property
    def num_top(self) -> int | None:
        return self.logprobs


_PARTS: Final = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
    },
}


class ContentPart(RequestModel):
    """A piece of a message's content. Only text is served."""

    type: Literal["text"]
    text: str


class ChatMessage(RequestModel):
    """One message of a chat. Only an assistant's with tool calls goes without content."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}},
                {
                    "required": ["tool_calls"],
                    "properties": {"role": {"const": "assistant"}, "tool_calls": {"type": "array", "minItems": 1}},
                },
            ]
        }
    )
    role: Literal["system", "developer", "user", "assistant", "tool"]
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=1024, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    content: Annotated[
        Annotated[list[ContentPart], Field(min_length=1, fail_fast=True)] | None,
        BeforeValidator(_as_parts),
        WithJsonSchema({"anyOf": [{"type": "string"}, _PARTS, {"type": "null"}]}),
        Field(validate_default=True),
    ] = None

    @field_validator("tool_calls")
    @classmethod
    def _made_by_assistants(cls, value: list[ToolCall] | None, info: ValidationInfo) -> list[ToolCall] | None:
        if value and info.data.get("role") not in ("assistant", None):
            raise ValueError("only a message of the assistant has tool calls")
        return value

    @field_validator("content")
    @classmethod
    def _is_there(cls, value: list[ContentPart] | None, info: ValidationInfo) -> list[ContentPart] | None:
        if value is None and not info.data.get("tool_calls"):
            raise ValueError("expected a text or a list of text parts; only with tool_calls it may be null")
        return value

    @property
    def text(self) -> str:
        """The content as one text."""
        return "\n".join(part.text for part in self.content or ())


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=16384, fail_fast=True)]
Tools = Annotated[list[Tool], Field(max_length=128, fail_fast=True)]


class ChatRendering(RequestModel):
    """What of a chat goes into its prompt."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None


class ChatBody(GenerationBody, ChatRendering):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKEN_ID)] | None = None
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None

    @property
    def num_top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeBody(ChatRendering):
    """POST /tokenize: a text or a chat."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": ["prompt"], "properties": {"prompt": {"type": "string"}, "messages": {"type": "null"}}},
                {"required": ["messages"], "properties": {"messages": {"type": "array"}, "prompt": {"type": "null"}}},
            ]
        }
    )
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(RequestModel):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


Body = TypeVar("Body", bound=RequestModel)


def parse(model: type[Body], body: bytes) -> Body:
    """The request in `body`. Raises InvalidRequest naming the field at fault."""
    try:
        request = model.model_validate_json(body)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = ".".join(str(part) for part in problem["loc"]) or None
        message = problem["msg"].removeprefix("Value error, ")
        raise InvalidRequest(f"{param}: {message}" if param else message, param=param) from error
    for part in request.parts():
        if (name := unsupported_field(part.model_extra or {})) is not None:
            raise InvalidRequest(f"{name} is not supported here", param=name, code="unsupported_parameter")
    return request
