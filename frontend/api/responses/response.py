"""Responses of the Responses API as pydantic models, for the OpenAPI description."""

from typing import Any, Literal

from frontend.api.response_models import (
    AnyMoonpoolExtension,
    CachedTokens,
    CompletionTokens,
    Count,
    ResponseModel,
    TokenLogprob,
)

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(ResponseModel):
    """Text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class OutputMessage(ResponseModel):
    """Message of the assistant."""

    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningText(ResponseModel):
    """Reasoning as it was generated."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(ResponseModel):
    """Reasoning before the answer; there is no summary of it."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[Any]
    content: list[ReasoningText]


class OutputFunctionCall(ResponseModel):
    """Function call; `arguments` is JSON text."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class ResponsesUsage(ResponseModel):
    """Token counts."""

    input_tokens: Count
    input_tokens_details: CachedTokens
    output_tokens: Count
    output_tokens_details: CompletionTokens
    total_tokens: Count


class IncompleteDetails(ResponseModel):
    """Reason for an incomplete response."""

    reason: Literal["max_output_tokens"]


class ResponsesResponse(ResponseModel):
    """Answer of POST /v1/responses. Fields of the request are returned as they were applied."""

    id: str
    object: Literal["response"]
    created_at: Count
    completed_at: Count | None
    status: Literal["completed", "incomplete"]
    background: Literal[False]
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: Count | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | OutputReasoning | OutputFunctionCall]
    parallel_tool_calls: bool
    previous_response_id: None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: Count
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponsesUsage
    moonpool: AnyMoonpoolExtension
