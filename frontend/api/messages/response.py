"""Responses of the Messages API as pydantic models, for the OpenAPI description."""

from typing import Any, Literal

from frontend.api.response_models import AnyMoonpoolExtension, Count, ResponseModel


class ThinkingTokens(ResponseModel):
    """Number of generated tokens that are reasoning, its markers included."""

    thinking_tokens: Count


class MessageUsage(ResponseModel):
    """Token counts. `input_tokens` excludes those whose KV was reused, which `cache_read_input_tokens` counts."""

    input_tokens: Count
    cache_creation_input_tokens: Count
    cache_read_input_tokens: Count
    output_tokens: Count
    output_tokens_details: ThinkingTokens | None = None


class MessageText(ResponseModel):
    """Text of the answer."""

    type: Literal["text"]
    text: str


class MessageThinking(ResponseModel):
    """Reasoning before the answer. Its signature is empty."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class MessageToolUse(ResponseModel):
    """Tool call."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageResponse(ResponseModel):
    """Answer of POST /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageText | MessageThinking | MessageToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage
    moonpool: AnyMoonpoolExtension


class CountedTokens(ResponseModel):
    """Answer of POST /v1/messages/count_tokens."""

    input_tokens: Count


class AnthropicErrorDetail(ResponseModel):
    """Error in Anthropic's form, with OpenAI's `param` and `code`."""

    type: str
    message: str
    param: str | None
    code: str | None


class AnthropicError(ResponseModel):
    """Anthropic's error object."""

    type: Literal["error"]
    error: AnthropicErrorDetail
