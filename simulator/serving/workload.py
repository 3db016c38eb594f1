"""What arrives: conversations of a trace, drawn anew for every seed. One seed gives the same arrivals to any cluster.

A seed draws conversations (the trace's prefix families) with replacement, each with blocks of its own, and begins them
at uniformly random times: a Poisson stream of conversations. Within one, turns keep the trace's lengths and pauses.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from simulator.errors import BadSetting
from simulator.serving.clock import NS
from traces import Trace, TraceRow, family_keys

__all__ = ["Job", "Workload", "draw_workload"]

_HISTORY_S = 1200.0  # conversations that began so long before the run go on in it; what they said then is in the pool
_ANY = 1 << 40
_SHARED = 1 << 40  # blocks of one drawn conversation are numbered within this


@dataclass(frozen=True, slots=True)
class Job:
    """One request. `blocks`: of the prompt's whole blocks; equal number, equal prefix."""

    index: int
    arrival_ns: int
    conversation: int
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    luck: float  # standard normal: how far its prefill takes longer than expected
    is_sampled: float  # uniform in [0, 1): chooses the requests that are looked into

    @property
    def name(self) -> str:
        """Its request id."""
        return f"r{self.index}"


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs in order of arrival, and those whose KV was there before: (conversation, blocks)."""

    jobs: tuple[Job, ...]
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
) -> Workload:
    """About `requests` requests (a Poisson number), `rate_per_s` a second on average.

    `output_scale` stretches the answers, `longest_answer` cuts them off; prompts longer than `longest_prompt` are left
    out; 0: none is. Raises BadSetting.
    """
    if not 0 < rate_per_s < 1e6 or requests < 1:
        raise BadSetting(f"{requests} requests at {rate_per_s} a second; both must be positive")
    families = _families(trace, longest_prompt)
    rng = np.random.default_rng([seed, 0x5E2])
    duration_s = requests / rate_per_s
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
    luck, sampled = rng.standard_normal(len(jobs)).tolist(), rng.uniform(size=len(jobs)).tolist()
    return Workload(
        tuple(
            Job(
                index=index,
                arrival_ns=round(at_s * NS),
                conversation=number,
                prompt_tokens=row.input_length,
                output_tokens=max(1, min(round(row.output_length * output_scale), longest_answer or _ANY)),
                blocks=_blocks(row, number, trace.block_tokens),
                luck=luck[index],
                is_sampled=sampled[index],
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
    """The first block of a longer prompt (in the conversation trace: the system prompt) is everybody's."""
    whole = row.hash_ids[: row.full_blocks(block_tokens)]
    own = conversation * _SHARED
    return tuple(own + block + 1 if depth else block for depth, block in enumerate(whole))
