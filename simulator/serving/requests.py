"""Simulated requests: the workload, drawn from a trace's conversations for each seed, and the state of each request.

Conversations (the trace's prefix families) are drawn with replacement, each with distinct blocks, and start at
uniformly random times, as a Poisson process. Within a conversation, turns keep the trace's lengths and pauses. The
arrivals of a seed are the same for all clusters.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from conductor.policy.decisions import Holder, SiblingChoice
from kvpool.policy.eviction import RetainRequest
from simulator.errors import BadSetting
from simulator.serving.clock import NS
from traces import Trace, TraceRow, family_keys, previous_turns
from worker.policy.scheduling_order import ALWAYS_NEXT, QueueEntry, RequestKey

_HISTORY_S = 1200.0  # conversations start up to this long before the run; their earlier turns' KV is in the pools
_ANY = 1 << 40
CONVERSATION_BLOCKS = 1 << 40  # size of the block number range of one drawn conversation


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of the workload. `blocks`: the prompt's full blocks; equal numbers mean equal prefixes."""

    index: int
    arrival_ns: int
    conversation: int
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    luck: float  # standard normal noise of its prefill time
    is_sampled: float  # uniform in [0, 1): selects the requests whose rejection is evaluated
    previous_tokens: int = 0  # length of the previous answer in the conversation; 0: there is none
    tenant: str = ""
    priority: int = 0  # among its tenant's requests; lower values first
    retain: RetainRequest | None = None  # hint that its prompt will be used again

    @property
    def name(self) -> str:
        """Request id."""
        return f"r{self.index}"


@dataclass(frozen=True, slots=True)
class SimulatedWorkload:
    """Requests in order of arrival, and earlier ones whose KV may be stored: (conversation, blocks)."""

    jobs: tuple[Arrival, ...]
    before: tuple[tuple[int, tuple[int, ...]], ...]
    block_tokens: int
    rate_per_s: float
    duration_s: float


def draw_workload(
    trace: Trace,
    *,
    seed: int,
    rate_per_s: float,
    requests: int,
    output_scale: float = 1.0,
    longest_prompt: int = 0,
    longest_answer: int = 0,
) -> SimulatedWorkload:
    """Draw about `requests` requests (Poisson-distributed), `rate_per_s` per second on average.

    `output_scale` scales the answers, `longest_answer` truncates them; prompts longer than `longest_prompt` are left
    out (0: no limit). Raises BadSetting.
    """
    if not 0 < rate_per_s < 1e6 or requests < 1:
        raise BadSetting(
            f"the number of requests and the rate must be positive, got {requests} requests at {rate_per_s} per second"
        )
    families = _families(trace, longest_prompt)
    rng = np.random.default_rng([seed, 0x5E2])
    duration_s = requests / rate_per_s
    previous = previous_turns(trace)
    per_family = sum(map(len, families)) / len(families)
    count = int(rng.poisson((duration_s + _HISTORY_S) * rate_per_s / per_family))
    chosen, begins_s = rng.integers(len(families), size=count), rng.uniform(-_HISTORY_S, duration_s, count)
    turns: list[tuple[float, int, TraceRow]] = []
    for number in range(count):
        rows = families[chosen[number]]
        first_ms = rows[0].timestamp_ms
        turns += [(float(begins_s[number]) + (row.timestamp_ms - first_ms) / 1000, number, row) for row in rows]
    turns.sort(key=lambda turn: (turn[0], turn[1], turn[2].index))
    before = tuple((number, _blocks(row, number, trace.block_tokens)) for at_s, number, row in turns if at_s < 0)
    jobs = [(at_s, number, row) for at_s, number, row in turns if 0 <= at_s < duration_s]

    def answer_tokens(row: TraceRow) -> int:
        return max(1, min(round(row.output_length * output_scale), longest_answer or _ANY))

    luck, sampled = rng.standard_normal(len(jobs)).tolist(), rng.uniform(size=len(jobs)).tolist()
    return SimulatedWorkload(
        tuple(
            Arrival(
                index=index,
                arrival_ns=round(at_s * NS),
                conversation=number,
                prompt_tokens=row.input_length,
                output_tokens=answer_tokens(row),
                blocks=_blocks(row, number, trace.block_tokens),
                luck=luck[index],
                is_sampled=sampled[index],
                previous_tokens=answer_tokens(previous[row.index]) if row.index in previous else 0,
            )
            for index, (at_s, number, row) in enumerate(jobs)
        ),
        before,
        trace.block_tokens,
        rate_per_s,
        duration_s,
    )


def _families(trace: Trace, longest_prompt: int) -> list[list[TraceRow]]:
    found: dict[object, list[TraceRow]] = defaultdict(list)
    for row, key in zip(trace, family_keys(trace), strict=True):
        if not longest_prompt or row.input_length <= longest_prompt:
            found[key].append(row)
    if not found:
        raise BadSetting(f"no prompt of {trace.source} has at most {longest_prompt} tokens")
    return list(found.values())


def _blocks(row: TraceRow, conversation: int, block_tokens: int) -> tuple[int, ...]:
    """Return a prompt's full blocks. The first block (in the conversation trace: the system prompt) is shared."""
    whole = row.hash_ids[: row.full_blocks(block_tokens)]
    own = conversation * CONVERSATION_BLOCKS
    return tuple(own + block + 1 if depth else block for depth, block in enumerate(whole))


class RequestEnd(StrEnum):
    """How a request ended."""

    FINISHED = "finished"
    REJECTED = "rejected"  # at arrival
    WITHHELD = "withheld"  # rejected after its prefill; the first token was not delivered


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """State of a request. Times are virtual nanoseconds; 0: not yet."""

    job: Arrival
    queue_entry: QueueEntry = ALWAYS_NEXT
    prefill_node: str = ""
    decode_node: str = ""
    holders: tuple[Holder, ...] = ()
    helpers: tuple[str, ...] = ()  # prefill nodes that may compute some of its chunks
    named_helpers: tuple[str, ...] = ()  # `helpers` as decided; they may turn out not to be needed
    predicted_ttft_s: float = 0.0
    predicted_tbt_s: float = 0.0
    reused_tokens: int = 0
    sibling: SiblingChoice | None = None  # as decided; its KV follows the reused tokens
    sibling_tokens: int = 0  # of which it provided KV
    computed: int = 0  # prompt tokens whose KV exists, including reused ones
    prefill_s: float = 0.0  # computation time so far
    generated: int = 0
    committed_tokens: int = 0
    loaded: bool = False
    reserved: bool = False
    keeps_fetched: bool = False  # the prefill node stores blocks from other hosts' pools in its own, too
    asks_again: bool = False  # the first token is withheld until the conductor admits the request to decoding
    first_token_ns: int = 0
    sent_ns: int = 0  # time at which all KV has arrived at the decode node
    last_token_ns: int = 0
    end: RequestEnd | None = None
    end_ns: int = 0
    reason: str = ""  # why it was rejected
    intervals: list[tuple[int, int]] = field(default_factory=list)  # (ns between tokens, number of repetitions)

    @property
    def key(self) -> RequestKey:
        """Key in the wait queue."""
        return self.job.name, 0

    @property
    def ttft_s(self) -> float:
        return (self.first_token_ns - self.job.arrival_ns) / NS

    @property
    def mean_tbt_s(self) -> float:
        count = sum(times for _, times in self.intervals)
        return sum(ns * times for ns, times in self.intervals) / count / NS if count else 0.0

    @property
    def tbt_s(self) -> float:
        """TBT as defined by the objectives; 0 for answers of one token."""
        return slowest_tenth_s(self.intervals)

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were computed and not reused."""
        return self.computed - self.reused_tokens - self.sibling_tokens if self.computed else 0


def slowest_tenth_s(intervals: list[tuple[int, int]]) -> float:
    """Return the mean of the longest tenth (rounded up) of (ns, count) intervals, in seconds.

    This is the TBT of a request in the evaluation of the Mooncake paper.
    """
    count = sum(times for _, times in intervals)
    if not count:
        return 0.0
    wanted = left = -(-count // 10)
    total = 0
    for ns, times in sorted(intervals, reverse=True):
        taken = min(times, left)
        total, left = total + ns * taken, left - taken
        if not left:
            break
    return total / wanted / NS
