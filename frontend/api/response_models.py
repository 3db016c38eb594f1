"""What is answered, as pydantic models: the OpenAPI description is made of them, and answers are checked against it."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]


class ResponseModel(BaseModel):
    """No answer has a field that is not here."""

    model_config = ConfigDict(extra="forbid")


class CachedTokens(ResponseModel):
    """Prompt tokens whose KV was reused."""

    cached_tokens: Count


class TokenUsage(ResponseModel):
    """Tokens of the whole request; a prompt counts once however many answers it has."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedTokens


class TtftParts(ResponseModel):
    """Where the time to the first token went; the parts sum to `whole_s`. What is left may be a hair below 0."""

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
    """The same of the time from the first token to the next, which another worker computed."""

    tail_s: Seconds
    join_s: Seconds
    step_s: Seconds
    delivery_s: float
    whole_s: float


class Timing(ResponseModel):
    """Where an answer's time went, for those who ask by x-moonpool-timing."""

    ttft: TtftParts | None
    handoff: HandoffParts | None


class MoonpoolExtension(ResponseModel):
    """How one answer came about."""

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
    dropped_messages: Count
    attempts: Count
    prefill_node: str
    decode_node: str
    seed: Count
    timing: Timing | None = None


AnyMoonpoolExtension = MoonpoolExtension | list[MoonpoolExtension]


class PromptToken(ResponseModel):
    """A token that could stand in a place of the prompt."""

    logprob: float
    rank: Count
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]


class CompletionLogprobs(ResponseModel):
    """Parallel lists; null for the first token of a prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Count]


class TopToken(ResponseModel):
    """A token that could stand in a place of the answer; `bytes` may be part of a character."""

    token: str
    logprob: float
    bytes: list[Annotated[int, Field(ge=0, le=255)]]


class TokenLogprob(TopToken):
    """A token of the answer."""

    top_logprobs: list[TopToken]


class ChatLogprobs(ResponseModel):
    """One entry per token."""

    content: list[TokenLogprob]
    refusal: None


class CompletionChoice(ResponseModel):
    """One answer, or a piece of it."""

    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None
    token_ids: list[Count] | None = None
    prompt_token_ids: list[Count] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionResponse(ResponseModel):
    """The answer of /v1/completions; in a stream each event is one, with `usage` and `moonpool` in the last."""

    id: str
    object: Literal["text_completion"]
    created: Count
    model: str
    choices: list[CompletionChoice]
    usage: TokenUsage | None = None
    moonpool: AnyMoonpoolExtension | None = None


class FunctionCall(ResponseModel):
    """What is called with which arguments, as JSON text."""

    name: str
    arguments: str


class ToolCallResponse(ResponseModel):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(ResponseModel):
    """An answer. Its content is null where there are only calls."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: list[ToolCallResponse] | None = None


FinishReason = Literal["stop", "length", "tool_calls"]


class ChatChoice(ResponseModel):
    """One answer."""

    index: Count
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    token_ids: list[Count] | None = None


class ChatCompletion(ResponseModel):
    """The answer of /v1/chat/completions."""

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
    """The name where a call begins, and more of its arguments."""

    name: str | None = None
    arguments: str


class ToolCallDelta(ResponseModel):
    """A piece of a call."""

    index: Count
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCallDelta


class ChatDelta(ResponseModel):
    """What an event adds to an answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(ResponseModel):
    """A piece of one answer."""

    index: Count
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[Count] | None = None


class ChatChunk(ResponseModel):
    """One event of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: Count
    model: str
    choices: list[ChatChunkChoice]
    usage: TokenUsage | None = None
    moonpool: AnyMoonpoolExtension | None = None
    prompt_token_ids: list[Count] | None = None


class ModelFacts(ResponseModel):
    """What the cluster's workers say of a model. `stand_ins`: what waits and computes nothing in its place, if any."""

    fingerprint: str | None
    block_tokens: Count
    stand_ins: list[str]


class ModelCard(ResponseModel):
    """A model under one of its names; `root` is the one that its aliases share."""

    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    root: str
    parent: None
    max_model_len: Count | None
    moonpool: ModelFacts


class ModelList(ResponseModel):
    """All models that are served."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(ResponseModel):
    """The ids of a text or chat."""

    count: Count
    max_model_len: Count
    tokens: list[Count]
    token_strs: list[str] | None


class Detokenized(ResponseModel):
    """The text of ids."""

    prompt: str


class Status(ResponseModel):
    """Of the process or the cluster; `reason` says why it is not ready."""

    status: str
    reason: str | None = None


class Version(ResponseModel):
    """Of the front door's package."""

    version: str


class SelfCheck(ResponseModel):
    """What the process holds."""

    ok: bool
    problems: list[str]
    counts: dict[str, Any]


class ErrorDetail(ResponseModel):
    """`param` names the field at fault, `code` is for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(ResponseModel):
    """OpenAI's shape of every error."""

    error: ErrorDetail
