"""A request on a worker: the parsed Submit, and the engine's sequence."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.errors import InvalidBatch
from engine.rolling import DEFAULT_SINKS, RollingWindow
from moonpool_proto.v1 import conductor_pb2
from moonpool_proto.v1.conductor_pb2 import Placement
from moonpool_proto.v1.worker_pb2 import FINISH_LENGTH, FINISH_NONE, FINISH_STOP, Finish, Submit
from rpc.control import check_target
from rpc.errors import InvalidArgument
from settings.frontend import MOST_ENDLESS_TOKENS
from worker.errors import RequestRefused, WorkerError, sequence_error
from worker.grammar_matching import GrammarMatcher
from worker.layer_gate import LayerGate
from worker.logprobs import PromptLogprobs
from worker.policy import WindowHold
from worker.policy.scheduling_order import ALWAYS_NEXT, QueueEntry, RequestKey
from worker.sampling import ValidatedSamplingParams
from worker.steering import Steering

KEY_NBYTES = 16
_TOKENS_AHEAD = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One attempt of a request, validated.

    `prompt` is int32 [n]: the client's prompt and the tokens generated so far.
    """

    request_id: str
    attempt: int
    frontend_id: str
    prompt: NDArray[np.int32]
    generated: int
    keys: tuple[bytes, ...]  # chain key per full block of the prompt
    head_blocks: int  # of what precedes the chat's first message of a user, at most those of the prompt; 0: unknown
    chain_seed: bytes
    sampling: ValidatedSamplingParams
    max_tokens: int  # over all attempts
    vocab_size: int
    placement: Placement
    submitted: float  # time.monotonic() instants
    deadline: float
    rolling: RollingWindow | None  # what an endless request sees; None: everything
    idle_s: float  # > 0: endless request; each token extends the deadline by this
    proto: Submit
    queue_entry: QueueEntry

    @classmethod
    def from_proto(
        cls,
        submit: Submit,
        *,
        vocab_size: int,
        max_model_len: int,
        block_tokens: int,
        default_sinks: int = DEFAULT_SINKS,
    ) -> Request:
        """Parse and validate a Submit. Raises RequestRefused, which names the field, its value and the expected one."""
        if len(submit.prompt_ids) % 4:
            raise RequestRefused(
                "bad_prompt", f"prompt_ids must hold whole int32 values, got {len(submit.prompt_ids)} bytes"
            )
        prompt = np.frombuffer(submit.prompt_ids, dtype="<i4")
        if len(prompt) == 0:
            raise RequestRefused("bad_prompt", "the prompt must not be empty")
        if int(prompt.min()) < 0 or int(prompt.max()) >= vocab_size:
            raise RequestRefused(
                "bad_prompt", f"prompt token ids must be in 0..{vocab_size - 1}, got {prompt.min()}..{prompt.max()}"
            )
        rolling = _rolling(submit, max_model_len, block_tokens, default_sinks)
        if rolling is None and len(prompt) >= max_model_len:
            raise RequestRefused(
                "too_long",
                f"the prompt must have at most {max_model_len - 1} tokens, to leave room for an answer, "
                f"got {len(prompt)}",
            )
        if len(submit.chain) != KEY_NBYTES * (len(prompt) // block_tokens):
            raise RequestRefused(
                "bad_chain",
                f"{len(submit.chain)} bytes of chain keys for {len(prompt)} tokens in blocks of {block_tokens}: "
                "frontend and worker disagree about block_tokens",
            )
        if len(submit.chain_seed) != KEY_NBYTES:
            raise RequestRefused("bad_chain", f"chain_seed must have {KEY_NBYTES} bytes, got {len(submit.chain_seed)}")
        if submit.generated >= len(prompt):
            raise RequestRefused(
                "bad_prompt",
                f"generated must be less than the number of ids ({len(prompt)}), got {submit.generated}",
            )
        if submit.sampling.max_tokens <= submit.generated:
            raise RequestRefused("bad_sampling", "max_tokens must exceed the number of tokens generated so far")
        _check_times(submit)
        _check_placement(submit.placement)
        now = time.monotonic()
        room = MOST_ENDLESS_TOKENS if rolling is not None else max_model_len
        keys = tuple(submit.chain[i : i + KEY_NBYTES] for i in range(0, len(submit.chain), KEY_NBYTES))
        return cls(
            request_id=submit.request_id,
            attempt=submit.attempt,
            frontend_id=submit.frontend_id,
            prompt=prompt,
            generated=submit.generated,
            keys=keys,
            head_blocks=min(submit.head_tokens // block_tokens, len(keys)),
            chain_seed=submit.chain_seed,
            sampling=ValidatedSamplingParams.from_proto(submit.sampling, vocab_size=vocab_size),
            max_tokens=min(submit.sampling.max_tokens, submit.generated + room - len(prompt)),
            vocab_size=vocab_size,
            placement=submit.placement,
            submitted=now,
            deadline=now + (submit.timeout_s or 600.0),
            rolling=rolling,
            idle_s=submit.idle_s,
            proto=submit,
            queue_entry=queue_entry_from_proto(submit.placement.turn, now),
        )

    @property
    def key(self) -> RequestKey:
        """Key of this attempt in the wait queue."""
        return self.request_id, self.attempt

    @property
    def is_preemptible(self) -> bool:
        """True if its frontend has it placed again after a preemption, and its KV can be saved."""
        return self.proto.preemptible and self.rolling is None and not self.reuses_sibling

    @property
    def traceparent(self) -> str:
        """W3C traceparent of the sender's span; empty if the request is not traced."""
        return self.proto.traceparent

    @property
    def log_fields(self) -> dict[str, str | int]:
        """Fields for log records that are written outside the request's own task."""
        return {"request_id": self.request_id, "attempt": self.attempt}

    @property
    def span_attributes(self) -> dict[str, str | int]:
        """Attributes of the request's spans."""
        return {"request_id": self.request_id, "attempt": self.attempt, "prompt_tokens": len(self.prompt)}

    @property
    def peak_tokens(self) -> int:
        """Largest number of tokens whose KV this attempt may hold; the last generated token is never an input."""
        return len(self.prompt) + self.max_tokens - self.generated - 1

    def rolling_up_to(self, tokens: int) -> RollingWindow | None:
        """Return the request's rolling window if it slides before the KV of `tokens` tokens is computed."""
        return self.rolling if self.rolling is not None and tokens > self.rolling.window else None

    def num_slots(self, tokens: int, block_tokens: int) -> int:
        """Return the slots that a node needs which computes or decodes up to `tokens` tokens."""
        rolling = self.rolling_up_to(tokens)
        return -(-(tokens if rolling is None else rolling.capacity) // block_tokens)

    def first_slots(self, most: int, block_tokens: int) -> int:
        """Return the slots with which an answer begins that may need up to `most`.

        Enough for the prompt and one token, and for the expected answer if the placement says how long that is;
        otherwise for all of it.
        """
        expected = self.placement.reserve_tokens
        return min(most, -(-max(expected, len(self.prompt) + 1) // block_tokens)) if expected else most

    def most_held(self, tokens: int) -> int:
        """Return the tokens whose KV a node holds at most, of `tokens`."""
        return tokens if self.rolling is None else min(tokens, self.rolling.capacity)

    @property
    def reuses_sibling(self) -> bool:
        """True if KV of another model is to be reused: what follows from it is stored nowhere and lent to nobody."""
        return self.placement.HasField("sibling")

    @property
    def time_left_s(self) -> float:
        """Seconds until the deadline; negative after it."""
        return self.deadline - time.monotonic()

    @property
    def generated_ids(self) -> NDArray[np.int32]:
        """Ids that earlier attempts generated."""
        return self.prompt[len(self.prompt) - self.generated :]

    def expected_new_tokens(self, block_tokens: int) -> int:
        """Return the prompt tokens to compute if the blocks that the conductor expects to be reused are still there."""
        reused_tokens = 0 if self.scores_prompt else self.placement.reuse_blocks * block_tokens
        return len(self.prompt) - min(reused_tokens, len(self.prompt) - 1)

    @property
    def scores_prompt(self) -> bool:
        """True if log-probabilities of the whole prompt are still to be sent; none of it is reused then."""
        return self.sampling.prompt_logprobs is not None and self.generated == 0


def _rolling(submit: Submit, max_model_len: int, block_tokens: int, default_sinks: int) -> RollingWindow | None:
    """Return the rolling window of an endless request. Raises RequestRefused."""
    if not submit.HasField("rolling"):
        return None
    asked = submit.rolling
    try:
        sinks = asked.sinks if asked.HasField("sinks") else default_sinks
        rolling = RollingWindow(sinks, asked.window, asked.slide, block_tokens)
    except InvalidBatch as error:
        raise RequestRefused("bad_endless", f"endless: {error}") from error
    if rolling.capacity > max_model_len:
        raise RequestRefused(
            "bad_endless",
            f"endless: window must be at most {max_model_len - block_tokens} tokens, a block less than max_model_len "
            f"({max_model_len}), got {rolling.window}",
        )
    return rolling


def _check_placement(placement: Placement) -> None:
    """Raise RequestRefused if a node of the placement cannot be called."""
    nodes = [placement.decode] if placement.HasField("decode") else []
    for node in (*nodes, *placement.helpers):
        try:
            check_target(node.target)
        except InvalidArgument as error:
            raise RequestRefused("bad_placement", f"node {node.node_id!r} cannot be called: {error}") from error


def _check_times(submit: Submit) -> None:
    for name, seconds in (("timeout_s", submit.timeout_s), ("idle_s", submit.idle_s)):
        if not math.isfinite(seconds):
            raise RequestRefused("bad_times", f"{name} must be a finite number of seconds, got {seconds}")


class GroupChunks(Protocol):
    """The chunks of a prompt that this node computes as a member of a prefill group: the engine loop's view.

    Implemented by `prefill_node.group_member.MemberChunks`. All methods are called on the engine thread.
    """

    @property
    def gate(self) -> LayerGate:
        """The gate before each layer of the next chunk."""

    @property
    def next_span(self) -> tuple[int, int] | None:
        """Prompt tokens [start, end) of the next chunk; None when this member has computed all of its chunks."""

    def layer_computed(self, layer: int) -> None:
        """Record one layer of the next chunk as computed."""

    def chunk_computed(self) -> None:
        """Record that all layers of the next chunk are computed."""


@dataclass(slots=True, eq=False)
class EngineSequence:
    """The engine's working state of one request. Written by the engine thread while the sequence is in the loop."""

    request: Request
    slots: list[int]
    tokens: NDArray[np.int32]  # capacity for all tokens, prompt first
    num_tokens: int
    num_computed: int
    prefill_only: bool  # leaves the loop with its first token
    steering: Steering | None = None  # None: logits are sampled unchanged
    prompt_scores: PromptLogprobs | None = None
    window: WindowHold | None = None  # slots of windowed groups, if the model has any
    rolling: RollingWindow | None = None
    """If set, `slots` are used in turn by the blocks, except the last one, which is the sinks'."""
    slid: int = 0  # first token in the window for which the sinks' slot was prepared; 0: no slide yet
    has_sinks: bool = False  # the sinks' slot holds the first tokens' KV
    table: NDArray[np.int32] = field(init=False)
    error: WorkerError | None = None  # set if the sequence failed by itself
    finish: Finish.ValueType = FINISH_NONE
    cancelled: bool = False
    preempted: bool = False  # cancelled for a more urgent request
    group_chunks: GroupChunks | None = None  # set while a prefill group computes the prompt
    loading: LayerGate | None = None  # set while layers of reused KV are on their way
    waited_s: float = 0.0  # part of its steps in which it waited for such layers
    compute_s: float = 0.0  # its share of the duration of the steps that computed its prompt
    computed_tokens: int = 0  # prompt tokens computed here
    is_beside_decodes: bool = False  # other sequences decoded in some of those steps
    reused_tokens: int = field(init=False)  # prompt tokens
    engine_state: object = None  # private to the engine
    kept_tokens: int | None = None  # tokens to save for the next turn; None: all computed ones
    queue_entry: QueueEntry = ALWAYS_NEXT  # order among the prompts being computed
    first_step_at: float = 0.0  # time.monotonic() instants
    first_token_at: float = 0.0  # first token generated here
    committed_at: float = 0.0  # handed over by a prefill node
    joined_at: float = 0.0  # began the first step after that

    def __post_init__(self) -> None:
        self.table = np.array(self.slots, dtype=np.int32)
        self.reused_tokens = self.num_computed

    @classmethod
    def of(
        cls,
        request: Request,
        slots: list[int],
        *,
        num_computed: int,
        prefill_only: bool,
        matcher: GrammarMatcher | None = None,
        window: WindowHold | None = None,
        rolling: RollingWindow | None = None,
    ) -> EngineSequence:
        """Create the sequence of a request. `matcher` has been advanced by the request's generated ids; None without a
        grammar. With `rolling`, the sinks' slot holds their KV if more tokens are computed than the window has."""
        n = len(request.prompt)
        room = request.max_tokens - request.generated
        tokens = np.zeros(n + (room if request.rolling is None else min(room, _TOKENS_AHEAD)), dtype=np.int32)
        tokens[:n] = request.prompt
        sequence = cls(request, slots, tokens, n, num_computed, prefill_only, window=window, rolling=rolling)
        sequence.has_sinks = rolling is not None and num_computed > rolling.window
        if Steering.is_wanted(request.sampling):
            sequence.steering = Steering(
                request.sampling,
                request.prompt,
                request.generated,
                capacity=n + room,
                vocab_size=request.vocab_size,
                matcher=matcher,
            )
        if request.scores_prompt and num_computed == 0:
            sequence.prompt_scores = PromptLogprobs(request.prompt, request.sampling.prompt_logprobs or 0)
        return sequence

    def restart(self, num_computed: int) -> None:
        """Forget the steps so far, none of which is complete; the first `num_computed` tokens have their KV."""
        self.num_computed = self.reused_tokens = num_computed
        self.loading = self.error = self.engine_state = None
        self.first_step_at = self.waited_s = 0.0
        if self.window is not None:
            self.window.restart()

    def extend(self, slots: list[int]) -> None:
        """Append further slots."""
        self.slots.extend(slots)
        self.table = np.array(self.slots, dtype=np.int32)

    def has_room(self, block_tokens: int) -> bool:
        """Return True if there is a slot for the last token."""
        return self.rolling is not None or self.num_tokens <= len(self.table) * block_tokens

    def table_of(self, start: int, end: int, block_tokens: int) -> NDArray[np.int32]:
        """Return the slots that a chunk of tokens [start, end) reads and writes, as `engine.SequenceChunk` has them."""
        rolling = self.rolling
        if rolling is None:
            return self.table[: -(-end // block_tokens)]
        first = rolling.start(start)
        blocks = np.arange(first // block_tokens, -(-end // block_tokens))
        slots = self.table[blocks % (len(self.table) - 1)]
        return np.concatenate([self.table[-1:], slots]) if first else slots

    @property
    def gate(self) -> LayerGate | None:
        """Gate before each layer of the next chunk; None if nothing has to arrive first."""
        return self.group_chunks.gate if self.group_chunks is not None else self.loading

    @property
    def prompt_len(self) -> int:
        """Number of prompt tokens, those of earlier attempts included."""
        return len(self.request.prompt)

    @property
    def visible_tokens(self) -> int:
        """Number of computed tokens that the next one sees."""
        if self.rolling is None:
            return self.num_computed
        start = self.rolling.start(self.num_computed)
        return self.num_computed - start + (self.rolling.sinks if start else 0)

    @property
    def chunk_end(self) -> int:
        """End of the longest next chunk of the prompt: it does not go beyond the place where a window slides."""
        if self.rolling is None:
            return self.prompt_len
        return min(self.prompt_len, self.rolling.end(self.num_computed))

    @property
    def token_s(self) -> float:
        """Seconds that computing one prompt token took here; 0 if none was computed."""
        return self.compute_s / self.computed_tokens if self.computed_tokens else 0.0

    @property
    def next_index(self) -> int:
        """Index of the next token to be generated, over all attempts."""
        return self.request.generated + self.num_tokens - self.prompt_len

    @property
    def remaining(self) -> int:
        """Number of tokens that may still be generated."""
        return self.request.max_tokens - self.next_index

    @property
    def has_ended(self) -> bool:
        """True if nothing more is generated: finished, or failed by an error of its own."""
        return bool(self.finish) or self.error is not None

    @property
    def is_preemptible(self) -> bool:
        """True if another node could go on with the answer from its KV, and this one has generated some of it."""
        generates = self.num_computed > self.prompt_len and not self.cancelled and not self.has_ended
        return generates and self.request.is_preemptible

    @property
    def has_yielded(self) -> bool:
        """True if it was preempted before it ended."""
        return self.preempted and not self.has_ended

    @property
    def waits_for_grammar(self) -> bool:
        """True while the grammar's mask for the next token is being computed."""
        return self.steering is not None and not self.steering.is_ready()

    def try_append(self, token: int) -> bool:
        """Append a generated token. Returns False and sets `error` if the sequence cannot continue with it."""
        try:
            self.append(token)
        except Exception as error:
            self.error = sequence_error(error)
        return self.error is None

    def append(self, token: int) -> None:
        """Append a generated token and set `finish` if it ends the request. Raises GrammarError."""
        if self.num_tokens == len(self.tokens) and self.request.rolling is not None:
            self.tokens = np.concatenate([self.tokens, np.zeros(_TOKENS_AHEAD, np.int32)])
        self.tokens[self.num_tokens] = token
        self.num_tokens += 1
        if self.steering is not None:
            self.steering.take(token)
        if token in self.request.sampling.stop_ids:
            self.finish = FINISH_STOP
        elif self.steering is not None and (finish := self.steering.finish):
            self.finish = finish
        elif self.remaining <= 0:
            self.finish = FINISH_LENGTH


def queue_entry_from_proto(message: conductor_pb2.Turn, now_s: float) -> QueueEntry:
    """Convert a message received at `now_s`. An empty message yields the entry of a request that has just arrived.

    Times on the wire are relative, since the clocks of two hosts are unrelated. Values that are not finite become 0,
    since they could not be ordered.
    """
    waited_s, due_in_s, ages_in_s = (
        seconds if math.isfinite(seconds) else 0.0
        for seconds in (message.waited_s, message.due_in_s, message.ages_in_s)
    )
    return QueueEntry(
        arrived_s=now_s - waited_s,
        due_s=now_s + due_in_s,
        ages_s=now_s + ages_in_s,
        level=message.level,
        account=message.account,
        start_ns=message.start_ns,
        priority=message.priority,
    )


def queue_entry_to_proto(turn: QueueEntry, now_s: float) -> conductor_pb2.Turn:
    """Convert an entry to a message that is sent at `now_s`."""
    return conductor_pb2.Turn(
        level=turn.level,
        account=turn.account,
        start_ns=turn.start_ns,
        priority=turn.priority,
        waited_s=now_s - turn.arrived_s,
        due_in_s=turn.due_s - now_s,
        ages_in_s=turn.ages_s - now_s,
    )
