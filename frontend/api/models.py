"""The requests that clients send, as pydantic models. Types are strict: "16" is no number here."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError

from frontend.api.unsupported import unsupported_field
from frontend.errors import InvalidRequest

_MAX_TOKEN_ID = 2**31 - 1


def _listed(value: Any) -> Any:
    # Not a union of types: pydantic's errors would name the union's members as if they were fields.
    return [value] if isinstance(value, str) else value


def _as_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _as_prompts(value: Any) -> list[str | list[int]]:
    """A completions prompt in any of OpenAI's four forms as a list. Raises ValueError."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError("expected a string, a list of token ids, or a list of either")
    if not value:
        raise ValueError("the prompt is empty")
    if all(type(item) is int for item in value):
        return [_token_ids(value)]
    if all(isinstance(item, str) for item in value):
        return list(value)
    if all(isinstance(item, list) for item in value):
        return [_token_ids(item) for item in value]
    raise ValueError("expected a string, a list of token ids, or a list of either, not a mixture")


def _token_ids(value: list[Any]) -> list[int]:
    for item in value:
        if type(item) is not int or not 0 <= item <= _MAX_TOKEN_ID:
            raise ValueError("a token id is an integer that is not negative")
    return value


TokenId = Annotated[int, Field(ge=0, le=_MAX_TOKEN_ID)]


class RequestModel(BaseModel):
    """What all bodies have in common."""

    # Unknown fields are kept, to be looked up among those refused by name.
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    def parts(self) -> Iterable["RequestModel"]:
        """The model itself and the models directly inside it."""
        yield self
        for value in self.__dict__.values():
            for item in value if isinstance(value, list) else (value,):
                if isinstance(item, RequestModel):
                    yield item


class StreamOptions(RequestModel):
    """What a stream carries beside the text."""

    include_usage: bool | None = None


class GenerationBody(RequestModel):
    """Fields that completions and chats share. Null means the default."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1, le=_MAX_TOKEN_ID)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_MAX_TOKEN_ID)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Annotated[list[str], Field(max_length=1024, fail_fast=True), BeforeValidator(_listed)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(max_length=512)] | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    # By hand: pydantic would try a union of lists in every way, and report an error per token.
    prompt: Annotated[list[str | list[int]], PlainValidator(_as_prompts)]


class ContentPart(RequestModel):
    """A piece of a message's content. Only text is served."""

    type: Literal["text"]
    text: str


class ChatMessage(RequestModel):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[ContentPart], Field(min_length=1, fail_fast=True), BeforeValidator(_as_parts)]
    name: str | None = None

    @property
    def text(self) -> str:
        """The content as one text."""
        return "\n".join(part.text for part in self.content)


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=16384, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=_MAX_TOKEN_ID)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeBody(RequestModel):
    """POST /tokenize: a text or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=16384, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


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
