"""Load of the live comparison of admission modes: cost profile, requests, and the nodes' capacity for them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from loadtest.plan import scaled_prompt_tokens
from traces import BLOCK_TOKENS, TraceRow, load_trace
from worker.paced.profiles import profile_of
from worker.policy.cost_profile import MOONCAKE, CostProfile, DecodeCost, PrefillCost, Range, load_profile

TOKENS_PER_BLOCK = 32
MAX_LEN = 2048
TTFT_S, TBT_S = 20.0, 0.6
MAX_BATCH = 16
_SHORTEST, _LONGEST = 24, 96  # tokens of an answer; in shorter ones the hand-over would dominate the slowest tenth
_ANSWERS_TIMES = 2  # factor on the trace's output lengths, so that prefill and decode are about equally scarce
_SEED = 1
_SCALE = BLOCK_TOKENS // TOKENS_PER_BLOCK  # tokens of the trace per token of the replay


@dataclass(frozen=True)
class OverloadLoad:
    """Requests as rows of a trace, and the nodes' total capacity for such requests per second."""

    rows: Sequence[TraceRow]
    prefill_rps: float  # with the reuse of an infinite pool
    decode_rps: float  # with every node at its TBT objective

    @property
    def capacity_rps(self) -> float:
        """Capacity of the scarcer of the two kinds of nodes."""
        return min(self.prefill_rps, self.decode_rps)


def write_rows(rows: Sequence[TraceRow], path: Path) -> None:
    """Write a trace file in Mooncake's format."""
    lines = [
        json.dumps(
            {
                "timestamp": row.timestamp_ms,
                "input_length": row.input_length,
                "output_length": row.output_length,
                "hash_ids": row.hash_ids,
            }
        )
        for row in rows
    ]
    path.write_text("\n".join(lines) + "\n")


def poisson_rows(rows: Sequence[TraceRow], rate: float) -> list[TraceRow]:
    """Return the trace's requests as a Poisson stream of `rate` per second, with scaled and limited answers."""
    rng, at_s = random.Random(_SEED), 0.0
    made: list[TraceRow] = []
    for row in rows:
        made.append(replace(row, timestamp_ms=round(1e3 * at_s), output_length=_answer(row) * _SCALE))
        at_s += rng.expovariate(rate)
    return made


def slow_profile() -> CostProfile:
    """Return a profile slow enough for one small machine to simulate many nodes in real time.

    A prompt of the trace takes about 2.5 s, and steps reach their objective at about 10 sequences.
    """
    instant, prompts, contexts = profile_of("instant"), Range(1, MAX_LEN), Range(1, MAX_BATCH * MAX_LEN)
    prefill = PrefillCost(0.05, 0.0045, 0.0, new_tokens=prompts, prompt_tokens=prompts)
    decode = DecodeCost(0.15, 0.0425, 0.0, batch=Range(1, MAX_BATCH), context_tokens=contexts)
    return replace(instant, name="overload", prefill=prefill, decode=decode)


def scaled_profile(scale: int, *, max_len: int, max_batch: int, slower: float = 1.0) -> CostProfile:
    """Return the bundled 70B profile for contexts with a `scale`-th of the tokens, `slower` times as slow.

    A token of a context takes `scale` times as long; a step of decode and a prefill keep their own time.
    """
    found = load_profile(MOONCAKE)
    prefill, decode = found.prefill, found.decode
    return replace(
        profile_of("instant"),
        name="scaled",
        prefill=PrefillCost(
            fixed_s=slower * prefill.fixed_s,
            per_token_s=slower * scale * prefill.per_token_s,
            per_pair_s=slower * scale**2 * prefill.per_pair_s,
            new_tokens=Range(1, max_len),
            prompt_tokens=Range(1, max_len),
        ),
        decode=DecodeCost(
            fixed_s=slower * decode.fixed_s,
            per_sequence_s=slower * decode.per_sequence_s,
            per_token_s=slower * scale * decode.per_token_s,
            batch=Range(1, max_batch),
            context_tokens=Range(1, max_batch * max_len),
        ),
    )


def overload_load(times: float, nodes: int, profile: CostProfile, seconds: float) -> OverloadLoad:
    """Return the conversation trace's requests at `times` the capacity of `nodes` prefill and `nodes` decode nodes.

    They are a Poisson stream of about `seconds`; answers are scaled and limited so that decode is as scarce as prefill.
    """
    trace = load_trace("conversation")
    count, found = 200, _load(trace.rows, 200, nodes, profile, 1.0)
    for _ in range(3):  # iterate, because reuse and so the capacity depend on the number of requests
        count = round(times * found.capacity_rps * seconds)
        found = _load(trace.rows, count, nodes, profile, times * found.capacity_rps)
    return found


def _load(rows: Sequence[TraceRow], count: int, nodes: int, profile: CostProfile, rate: float) -> OverloadLoad:
    made = poisson_rows(rows[:count], rate)
    batch = (TBT_S - profile.decode.fixed_s) / profile.decode.per_sequence_s
    tokens_per_s = nodes * min(batch, MAX_BATCH) / TBT_S
    return OverloadLoad(made, nodes / _mean_prefill_s(made, profile), tokens_per_s / fmean(map(_answer, rows[:count])))


def _answer(row: TraceRow) -> int:
    """Return the number of tokens of the request's answer."""
    return min(max(round(_ANSWERS_TIMES * row.output_length / _SCALE), _SHORTEST), _LONGEST)


def _mean_prefill_s(rows: Sequence[TraceRow], profile: CostProfile) -> float:
    seen: set[int] = set()
    taken: list[float] = []
    for row in rows:
        prompt = min(scaled_prompt_tokens(row.input_length, BLOCK_TOKENS, TOKENS_PER_BLOCK), MAX_LEN - _LONGEST)
        reused = 0
        for block in row.hash_ids[: (prompt - 1) // TOKENS_PER_BLOCK]:
            if block not in seen:
                break
            reused += TOKENS_PER_BLOCK
        seen.update(row.hash_ids)
        taken.append(profile.prefill_s(prompt - reused, reused))
    return fmean(taken)
