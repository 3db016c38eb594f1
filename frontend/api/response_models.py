"""Responses as pydantic models, for the OpenAPI description, against which tests check the responses."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]


class ResponseModel(BaseModel):
    """Base of all responses; a response has no other fields than those of its model."""

    model_config = ConfigDict(extra="forbid")


class CachedTokens(ResponseModel):
    """Number of prompt tokens whose KV was reused."""

    cached_tokens: Count


class CompletionTokens(ResponseModel):
    """Number of generated tokens that are reasoning, its markers included."""

    reasoning_tokens: Count


class TokenUsage(ResponseModel):
    """Token counts of the whole request; a prompt counts once, regardless of its number of choices."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionTokens | None = None


class TtftParts(ResponseModel):
    """Breakdown of the time to first token; the parts sum to `whole_s`. Parts without a bound may be slightly
    negative.
    """

    tokenize_s: Seconds
    sibling_s: float
    schedule_s: Seconds
    lost_s: Seconds
    queue_s: float
    load_s: Seconds
    prefill_s: Seconds
    delivery_s: float
    whole_s: Seconds


class HandoffParts(ResponseModel):
    """Breakdown of the time from the first token to the next one, which another worker generates."""

    tail_s: Seconds
    join_s: Seconds
    step_s: Seconds
    delivery_s: float
    whole_s: float


class Timing(ResponseModel):
    """Time breakdown of a choice, requested by x-moonpool-timing."""

    ttft: TtftParts | None
    handoff: HandoffParts | None


class ReceiptKv(ResponseModel):
    """Sources of the KV of an attempt's prompt: all fields but `recomputed_blocks` add up to the prompt's tokens."""

    computed_tokens: Count
    cached_own_tokens: Count
    cached_dram_tokens: Count
    cached_ssd_tokens: Count
    cached_remote_tokens: Count
    recomputed_blocks: Count
    sibling_tokens: Count = 0  # earlier receipts do not have it


class ReceiptAttempt(ResponseModel):
    """One placement of a request: the decision, its nodes and predictions, and how the attempt ended.

    `decision` is the place of the decision in the event log, RUN-NUMBER; null if the conductor keeps none. `kv` is null
    if the attempt ended before its first token.
    """

    attempt: Count
    decision: str | None
    objectives_version: Count
    prefill_node: str
    decode_node: str
    helpers: list[str]
    reuse_blocks: Count
    predicted_ttft_s: Seconds
    predicted_tbt_s: Seconds
    tokens_before: Count
    outcome: Literal["finished", "retry"]
    kv: ReceiptKv | None


class Receipt(ResponseModel):
    """Receipt of one answer, requested by return_receipt; `moonpool decisions verify` checks it against the log."""

    version: Annotated[int, Field(ge=1, le=1)]  # not a Literal, which also accepts true
    request_id: str
    model: str
    prompt_tokens: Count
    generated_tokens: Count
    ttft_s: Seconds
    tbt_s: Seconds
    attempts: list[ReceiptAttempt]


class MoonpoolExtension(ResponseModel):
    """Moonpool's extension of one choice: nodes, timing and cache statistics."""

    request_id: str
    tokenize_s: Seconds
    schedule_s: Seconds
    queue_s: Seconds
    load_s: Seconds
    prefill_s: Seconds
    ttft_s: Seconds
    cached_tokens: Count
    cached_dram_tokens: Count
    cached_ssd_tokens: Count
    cached_remote_tokens: Count
    approximate_tokens: Count
    sibling_tokens: Count
    dropped_messages: Count
    attempts: Count
    prefill_node: str
    decode_node: str
    seed: Count
    timing: Timing | None = None
    receipt: Receipt | None = None


AnyMoonpoolExtension = MoonpoolExtension | list[MoonpoolExtension]


class PromptToken(ResponseModel):
    """Candidate token at a position of the prompt."""

    logprob: float
    rank: Count
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]


class CompletionLogprobs(ResponseModel):
    """Log-probabilities as parallel lists; null for the first token of a prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Count]


class TopToken(ResponseModel):
    """Candidate token at a position of the answer; `bytes` may be part of a character."""

    token: str
    logprob: float
    bytes: list[Annotated[int, Field(ge=0, le=255)]]


class TokenLogprob(TopToken):
    """Token of the answer with its likeliest candidates."""

    top_logprobs: list[TopToken]


class ChatLogprobs(ResponseModel):
    """Log-probabilities of a chat, one entry per token."""

    content: list[TokenLogprob]
    refusal: None


class CompletionChoice(ResponseModel):
    """Choice of a completion, or a piece of it in a stream."""

    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None
    token_ids: list[Count] | None = None
    prompt_token_ids: list[Count] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionResponse(ResponseModel):
    """Response of /v1/completions; in a stream, each event is one, with `usage` and `moonpool` in the last."""

    id: str
    object: Literal["text_completion"]
    created: Count
    model: str
    choices: list[CompletionChoice]
    usage: TokenUsage | None = None
    moonpool: AnyMoonpoolExtension | None = None


class FunctionCall(ResponseModel):
    """Name and arguments (JSON text) of a called function."""

    name: str
    arguments: str


class ToolCallResponse(ResponseModel):
    """Call of a tool."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(ResponseModel):
    """Message of the assistant. `content` is null if there are only calls or only reasoning."""

    role: Literal["assistant"]
    reasoning_content: str | None = None
    content: str | None
    tool_calls: list[ToolCallResponse] | None = None


FinishReason = Literal["stop", "length", "tool_calls"]


class ChatChoice(ResponseModel):
    """Choice of a chat."""

    index: Count
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    token_ids: list[Count] | None = None


class ChatCompletion(ResponseModel):
    """Response of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: Count
    model: str
    choices: list[ChatChoice]
    usage: TokenUsage
    moonpool: AnyMoonpoolExtension
    prompt_token_ids: list[Count] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class FunctionCallDelta(ResponseModel):
    """Piece of a called function: the name in the first piece, and the next part of the arguments."""

    name: str | None = None
    arguments: str


class ToolCallDelta(ResponseModel):
    """Piece of a tool call."""

    index: Count
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCallDelta


class ChatDelta(ResponseModel):
    """Delta of a chat's choice in one event."""

    role: Literal["assistant"] | None = None
    reasoning_content: str | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(ResponseModel):
    """Piece of a chat's choice."""

    index: Count
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[Count] | None = None


class ChatChunk(ResponseModel):
    """Event of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: Count
    model: str
    choices: list[ChatChunkChoice]
    usage: TokenUsage | None = None
    moonpool: AnyMoonpoolExtension | None = None
    prompt_token_ids: list[Count] | None = None


class ModelFacts(ResponseModel):
    """Model data reported by the cluster's workers.

    `kv_scale_group`: values of KV in int8 that share a scale, 0 for other KV. `stand_ins`: engines that only simulate
    the model, if any.
    """

    fingerprint: str | None
    block_tokens: Count
    kv_scale_group: Count
    stand_ins: list[str]


class ModelCard(ResponseModel):
    """Card of a model under one of its names; `root` is its main name."""

    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    root: str
    parent: None
    max_model_len: Count | None
    moonpool: ModelFacts


class ModelList(ResponseModel):
    """List of the served models."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(ResponseModel):
    """Token ids of a text or chat."""

    count: Count
    max_model_len: Count
    tokens: list[Count]
    token_strs: list[str] | None


class Detokenized(ResponseModel):
    """Text of token ids."""

    prompt: str


class Status(ResponseModel):
    """Status of the process or the cluster; `reason` explains why it is not ready."""

    status: str
    reason: str | None = None


class Version(ResponseModel):
    """Version of the frontend's package."""

    version: str


class SelfCheck(ResponseModel):
    """Resources that the process holds."""

    ok: bool
    problems: list[str]
    counts: dict[str, Any]


class ErrorDetail(ResponseModel):
    """Error; `param` names the invalid field, `code` identifies the error for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(ResponseModel):
    """OpenAI's error object."""

    error: ErrorDetail
