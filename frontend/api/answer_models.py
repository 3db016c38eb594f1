"""What is answered, as pydantic models: the OpenAPI description is made of them, and answers are checked against it."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]


class AnswerModel(BaseModel):
    """No answer has a field that is not here."""

    model_config = ConfigDict(extra="forbid")


class CachedTokens(AnswerModel):
    """Prompt tokens whose KV was reused."""

    cached_tokens: Count


class Usage(AnswerModel):
    """Tokens of the whole request; a prompt counts once however many answers it has."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedTokens


class TtftParts(AnswerModel):
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


class HandoffParts(AnswerModel):
    """The same of the time from the first token to the next, which another worker computed."""

    tail_s: Seconds
    join_s: Seconds
    step_s: Seconds
    delivery_s: float
    whole_s: float


class Timing(AnswerModel):
    """Where an answer's time went, for those who ask by x-moonpool-timing."""

    ttft: TtftParts | None
    handoff: HandoffParts | None


class Facts(AnswerModel):
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


FactsOfAll = Facts | list[Facts]


class PromptToken(AnswerModel):
    """A token that could stand in a place of the prompt."""

    logprob: float
    rank: Count
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]


class CompletionLogprobs(AnswerModel):
    """Parallel lists; null for the first token of a prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Count]


class TopToken(AnswerModel):
    """A token that could stand in a place of the answer; `bytes` may be part of a character."""

    token: str
    logprob: float
    bytes: list[Annotated[int, Field(ge=0, le=255)]]


class TokenLogprob(TopToken):
    """A token of the answer."""

    top_logprobs: list[TopToken]


class ChatLogprobs(AnswerModel):
    """One entry per token."""

    content: list[TokenLogprob]
    refusal: None


class CompletionChoice(AnswerModel):
    """One answer, or a piece of it."""

    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None
    token_ids: list[Count] | None = None
    prompt_token_ids: list[Count] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(AnswerModel):
    """The answer of /v1/completions; in a stream each event is one, with `usage` and `moonpool` in the last."""

    id: str
    object: Literal["text_completion"]
    created: Count
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    moonpool: FactsOfAll | None = None


class CalledName(AnswerModel):
    """What is called with which arguments, as JSON text."""

    name: str
    arguments: str


class Call(AnswerModel):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledName


class AnswerMessage(AnswerModel):
    """An answer. Its content is null where there are only calls."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: list[Call] | None = None


FinishReason = Literal["stop", "length", "tool_calls"]


class ChatChoice(AnswerModel):
    """One answer."""

    index: Count
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    token_ids: list[Count] | None = None


class ChatCompletion(AnswerModel):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: Count
    model: str
    choices: list[ChatChoice]
    usage: Usage
    moonpool: FactsOfAll
    prompt_token_ids: list[Count] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CalledPiece(AnswerModel):
    """The name where a call begins, and more of its arguments."""

    name: str | None = None
    arguments: str


class CallPiece(AnswerModel):
    """A piece of a call."""

    index: Count
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledPiece


class Delta(AnswerModel):
    """What an event adds to an answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[CallPiece] | None = None


class ChatChunkChoice(AnswerModel):
    """A piece of one answer."""

    index: Count
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[Count] | None = None


class ChatChunk(AnswerModel):
    """One event of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: Count
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    moonpool: FactsOfAll | None = None
    prompt_token_ids: list[Count] | None = None


class ModelFacts(AnswerModel):
    """What the cluster's workers say of a model. `stand_ins`: what waits and computes nothing in its place, if any."""

    fingerprint: str | None
    block_tokens: Count
    stand_ins: list[str]


class ModelCard(AnswerModel):
    """A model under one of its names; `root` is the one that its aliases share."""

    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    root: str
    parent: None
    max_model_len: Count | None
    moonpool: ModelFacts


class ModelList(AnswerModel):
    """All models that are served."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(AnswerModel):
    """The ids of a text or chat."""

    count: Count
    max_model_len: Count
    tokens: list[Count]
    token_strs: list[str] | None


class Detokenized(AnswerModel):
    """The text of ids."""

    prompt: str


class Status(AnswerModel):
    """Of the process or the cluster; `reason` says why it is not ready."""

    status: str
    reason: str | None = None


class Version(AnswerModel):
    """Of the front door's package."""

    version: str


class SelfCheck(AnswerModel):
    """What the process holds."""

    ok: bool
    problems: list[str]
    counts: dict[str, Any]


class ErrorDetail(AnswerModel):
    """`param` names the field at fault, `code` is for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(AnswerModel):
    """OpenAI's shape of every error."""

    error: ErrorDetail
