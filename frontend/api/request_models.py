"""Request bodies as pydantic models, with the fields' forms and JSON Schemas.

Types are strict: "16" is not a number.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)

from frontend.api.hints import CacheControl, Hints, NvExt
from frontend.api.request_base import MAX_PRIORITY, MAX_TOKEN_ID, RequestModel
from frontend.errors import InvalidRequest
from frontend.sessions import MAX_SESSION_CHARS

CLASS_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"  # name of a class of objectives
MAX_TOP: Final = 20  # limit on the number of likeliest tokens per token
_TOKEN_ID: Final = {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}


def _listed(value: Any) -> Any:
    # Not a union of types: pydantic's errors would name the union's members as if they were fields.
    return [value] if isinstance(value, str) else value


def _prompts(value: Any) -> list[str | list[int]]:
    """Return a completions prompt in any of OpenAI's four forms as a list. Raises ValueError."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError("must be a string, a list of token ids, or a list of either")
    if not value:
        raise ValueError("must not be empty")
    if all(type(item) is int for item in value):
        return [_token_ids(value)]
    if all(isinstance(item, str) for item in value):
        return list(value)
    if all(isinstance(item, list) for item in value):
        return [_token_ids(item) for item in value]
    raise ValueError("must be a string, a list of token ids, or a list of either, not a mixture")


def _token_ids(value: list[Any]) -> list[int]:
    for item in value:
        if type(item) is not int or not 0 <= item <= MAX_TOKEN_ID:
            raise ValueError(f"token ids must be integers in 0..{MAX_TOKEN_ID}, got {str(item)[:32]}")
    return value


def _biases(value: Any) -> dict[int, float]:
    """Return biases by token id; JSON's keys are strings. Raises ValueError."""
    if not isinstance(value, Mapping):
        raise ValueError("must be an object from token ids to biases")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) <= MAX_TOKEN_ID):
            raise ValueError(f"keys must be token ids as strings of digits, got {key[:32]!r}")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise ValueError(f"the bias of token {key} must be a number from -100 to 100")
        biases[int(key)] = float(bias)
    return biases


class EndlessWindow(RequestModel):
    """The tokens that an endless answer sees: the first `sinks` and the last `window` ones."""

    sinks: Annotated[int, Field(ge=0, le=2048)] | None = None
    window: Annotated[int, Field(ge=1, le=MAX_TOKEN_ID)]


def _endless(value: Any) -> Any:
    # Not a union of types, for the same reason as `_listed`.
    if value is None or isinstance(value, bool | EndlessWindow):
        return value or None
    if not isinstance(value, Mapping):
        raise ValueError("must be true, or an object with `window` and `sinks`")
    return EndlessWindow.model_validate(value)


Endless = Annotated[
    bool | EndlessWindow | None,
    PlainValidator(_endless),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, EndlessWindow.model_json_schema()]}),
]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
SessionId = Annotated[str, Field(max_length=MAX_SESSION_CHARS)]
SloClassName = Annotated[str, Field(pattern=CLASS_NAME)]
Priority = Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
CacheSalt = Annotated[str, Field(max_length=512)]
EXTENSIONS: Final = ("slo_class", "session_id", "parent_session_id", "priority", "hints", "cache_salt")
"""Fields of Moonpool that every generation API has."""
NumTop = Annotated[int, Field(ge=0, le=MAX_TOP)]
Stops = Annotated[
    list[str],  # the maximum number is configurable
    Field(fail_fast=True),
    BeforeValidator(_listed),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
# Validated by hand: pydantic would try all members of a union of lists and report an error per token.
Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
                {"type": "array", "items": _TOKEN_ID, "minItems": 1},
                {"type": "array", "items": {"type": "array", "items": _TOKEN_ID, "minItems": 1}, "minItems": 1},
            ]
        }
    ),
]
LogitBias = Annotated[
    dict[int, float],
    PlainValidator(_biases),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    ),
]


# A JSON Schema as an object or, from vLLM's older clients, as its text.
JsonSchema = Annotated[dict[str, Any] | str, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}]})]
Choices = Annotated[list[str], Field(min_length=1, max_length=1024, fail_fast=True)]


class JsonSchemaFormat(RequestModel):
    """Nested part of response_format. `strict` has no effect: answers always match the schema."""

    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(RequestModel):
    """OpenAI's response_format."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


def _none_if_empty(value: Any) -> Any:
    return None if value in ({}, []) else value


class StructuredOutputs(RequestModel):
    """vLLM's structured_outputs; exactly one field is set."""

    json_: Annotated[JsonSchema | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


Structured = Annotated[StructuredOutputs | None, BeforeValidator(_none_if_empty)]
GuidedChoice = Annotated[Choices | None, BeforeValidator(_none_if_empty)]


FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
MAX_TOOLS: Final = 512


class Function(RequestModel):
    """Function of a tool. `parameters` is the JSON Schema of an object.

    With `strict: true` a schema that cannot be enforced completely is refused; others are enforced as far as possible.
    """

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestModel):
    """Tool; only functions are supported."""

    type: Literal["function"]
    function: Function
    cache_control: CacheControl | None = None


class CalledFunction(RequestModel):
    """Name and arguments (JSON text) of a call."""

    name: str
    arguments: str


class ToolCall(RequestModel):
    """Tool call made by an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class NamedTool(RequestModel):
    """tool_choice that requires this function."""

    name: FunctionName


def _tool_choice(value: Any) -> str | NamedTool:
    """Return a tool_choice in any of OpenAI's four forms. Raises ValueError."""
    if value in ("none", "auto", "required"):
        return str(value)
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise ValueError('must be \'none\', \'auto\', \'required\' or {"type": "function", "function": {"name": NAME}}')
    return NamedTool.model_construct(name=name)


ToolChoice = Annotated[
    str | NamedTool,
    PlainValidator(_tool_choice),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["none", "auto", "required"]},
                {
                    "type": "object",
                    "properties": {
                        "type": {"const": "function"},
                        "function": {
                            "type": "object",
                            "properties": {"name": {"type": "string"}},
                            "required": ["name"],
                        },
                    },
                    "required": ["type", "function"],
                },
            ]
        }
    ),
]


def _as_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class StreamOptions(RequestModel):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(RequestModel):
    """Fields shared by completions and chats. Null means the default. `ID_PREFIX`: beginning of its requests' ids."""

    ID_PREFIX: ClassVar[str]

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
    return_receipt: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Structured = None
    guided_json: JsonSchema | None = None
    guided_regex: str | None = None
    guided_choice: GuidedChoice = None
    guided_grammar: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: CacheSalt | None = None
    slo_class: SloClassName | None = None
    session_id: SessionId | None = None
    parent_session_id: SessionId | None = None
    prompt_cache_key: SessionId | None = None
    priority: Priority | None = None
    hints: Hints | None = None
    nvext: NvExt | None = None
    cache_control: CacheControl | None = None
    endless: Endless = None
    add_special_tokens: bool | None = None

    def cache_controls(self) -> Iterator[CacheControl]:
        """Yield all cache_control objects of the body."""
        found = (self.cache_control, self.nvext.cache_control if self.nvext else None)
        return (control for control in found if control is not None)

    @property
    def num_choices(self) -> int:
        """Number of choices per prompt."""
        return self.n or 1

    @property
    def num_top(self) -> int | None:
        """Number of likeliest tokens returned per token; None without log-probabilities."""
        return None


class CompletionBody(GenerationBody):
    """Body of POST /v1/completions."""

    ID_PREFIX = "cmpl-"

    prompt: Prompts
    echo: bool | None = None
    logprobs: NumTop | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_TOKEN_ID)] | None = None

    @property
    def num_top(self) -> int | None:
        return self.logprobs


_OTHER_MEDIA: Final = ("image", "audio", "video", "file", "document")


def text_only(kind: Any) -> Any:
    """Return the type of a part of a content. Raises ValueError for one that is not text, which names what it is."""
    if isinstance(kind, str) and (medium := next((each for each in _OTHER_MEDIA if each in kind), None)):
        raise ValueError(f"{kind!r} is not supported: Moonpool serves text models, which cannot read {medium} input")
    return kind


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
    """Part of a message's content; only text is supported."""

    type: Annotated[Literal["text"], BeforeValidator(text_only)]
    text: str
    cache_control: CacheControl | None = None


class ChatMessage(RequestModel):
    """Message of a chat. Only an assistant's message with tool calls may omit the content."""

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
    reasoning_content: str | None = None
    cache_control: CacheControl | None = None
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
            raise ValueError("only messages of the assistant may have tool calls")
        return value

    @field_validator("content")
    @classmethod
    def _is_there(cls, value: list[ContentPart] | None, info: ValidationInfo) -> list[ContentPart] | None:
        if value is None and not info.data.get("tool_calls"):
            raise ValueError("must be a string or a list of text parts; null is allowed only with tool_calls")
        return value

    @property
    def text(self) -> str:
        """Content as one string."""
        return "\n".join(part.text for part in self.content or ())


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=16384, fail_fast=True)]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatRendering(RequestModel):
    """Fields that determine a chat's rendered prompt.

    `EFFORT_IS_HINT`: if the model's template cannot ask for the effort, the request is served all the same.
    """

    EFFORT_IS_HINT: ClassVar[bool] = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None
    tools: Tools | None = None


class ChatBody(GenerationBody, ChatRendering):
    """Body of POST /v1/chat/completions."""

    ID_PREFIX = "chatcmpl-"

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKEN_ID)] | None = None
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include_reasoning: bool | None = None

    def cache_controls(self) -> Iterator[CacheControl]:
        yield from super().cache_controls()
        for message in self.messages:
            for part in (message, *(message.content or ())):
                if part.cache_control is not None:
                    yield part.cache_control
        for tool in self.tools or ():
            if tool.cache_control is not None:
                yield tool.cache_control

    @property
    def num_top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeBody(ChatRendering):
    """Body of POST /tokenize: a text or a chat."""

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
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


Body = TypeVar("Body", bound=RequestModel)


def parse(model: type[Body], body: bytes) -> Body:
    """Parse `body`. Raises InvalidRequest naming the invalid field."""
    try:
        request = model.model_validate_json(body)
    except ValidationError as error:
        raise invalid(error) from error
    for part in request.parts():
        if (name := part.unsupported_field(part.model_extra or {})) is not None:
            raise InvalidRequest(f"{name} is not supported", param=name, code="unsupported_parameter")
    return request


def converted(model: type[Body], fields: Mapping[str, Any], names: Mapping[str, str]) -> Body:
    """Return the model of fields that were converted from another API's body. Raises InvalidRequest.

    `names`: the other API's names of fields, by those of the model.
    """
    with named_as_by_client(names):
        try:
            return model.model_validate(fields)
        except ValidationError as error:
            raise invalid(error) from error


@contextmanager
def named_as_by_client(names: Mapping[str, str]) -> Iterator[None]:
    """Name fields in InvalidRequest as the client did. Places inside a renamed field are left out, since they differ.

    `names`: the client's names of fields, by ours.
    """
    try:
        yield
    except InvalidRequest as error:
        error.param = names.get((error.param or "").partition(".")[0], error.param)
        raise


def invalid(error: ValidationError) -> InvalidRequest:
    """Return the error that a client gets for an invalid body: the first problem, with the field's path."""
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = ".".join(str(part) for part in problem["loc"]) or None
    message = problem["msg"].removeprefix("Value error, ")
    return InvalidRequest(f"{param}: {message}" if param else message, param=param)
