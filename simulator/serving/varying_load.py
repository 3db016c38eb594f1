"""Workloads whose rate varies over time: conversations of a workload at the highest rate, thinned by a load curve.

Turns keep the pauses of their conversation, so that the load follows the curve with the conversations' delay.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import cos, pi

import numpy as np

from simulator.errors import BadSetting
from simulator.serving.clock import NS
from simulator.serving.requests import CONVERSATION_BLOCKS, Arrival, SimulatedWorkload

LoadCurve = Callable[[float], float]
"""Share of the highest rate, from 0 to 1, at a time in seconds."""


def diurnal(period_s: float, least: float) -> LoadCurve:
    """Return a cosine from `least` at time 0 up to 1 after half a period. Raises BadSetting."""
    if not (period_s > 0 and 0 <= least <= 1):
        raise BadSetting(f"the period must be above 0 and the least load from 0 to 1, got {period_s} s and {least}")
    return lambda time_s: least + (1 - least) * (1 - cos(2 * pi * time_s / period_s)) / 2


def alternating(phase_s: float, *, is_first: bool, low: float = 0.0) -> LoadCurve:
    """Return a curve of phases of `phase_s` with 1 and `low` in turn, which begins with 1 if `is_first`.

    Raises BadSetting.
    """
    if not (phase_s > 0 and 0 <= low <= 1):
        raise BadSetting(f"the phase must be above 0 and the low load from 0 to 1, got {phase_s} s and {low}")
    return lambda time_s: 1.0 if (time_s // phase_s % 2 == 0) == is_first else low


def thinned(workload: SimulatedWorkload, curve: LoadCurve, seed: int) -> SimulatedWorkload:
    """Return the workload with each conversation kept with the probability that `curve` gives for its first turn."""
    begins_s: dict[int, float] = {}
    for job in workload.jobs:
        begins_s.setdefault(job.conversation, job.arrival_ns / NS)
    for conversation, _ in workload.before:
        begins_s[conversation] = 0.0
    rolls = np.random.default_rng([seed, 0x7417]).uniform(size=len(begins_s)).tolist()
    kept = {name for (name, at_s), roll in zip(sorted(begins_s.items()), rolls, strict=True) if roll < curve(at_s)}
    jobs = [job for job in workload.jobs if job.conversation in kept]
    return replace(
        workload,
        jobs=tuple(replace(job, index=index) for index, job in enumerate(jobs)),
        before=tuple((name, blocks) for name, blocks in workload.before if name in kept),
        rate_per_s=len(jobs) / workload.duration_s,
    )


def merged(workloads: Sequence[SimulatedWorkload]) -> SimulatedWorkload:
    """Return the requests of all workloads, of equal duration and block size, as one; conversations stay apart.

    Raises BadSetting.
    """
    if len({(each.block_tokens, each.duration_s) for each in workloads}) != 1:
        raise BadSetting("workloads to merge must have the same duration and block size")
    offset, jobs, before = 0, list[Arrival](), list[tuple[int, tuple[int, ...]]]()
    for each in workloads:
        names = [job.conversation for job in each.jobs] + [name for name, _ in each.before]
        jobs += [
            replace(job, conversation=job.conversation + offset, blocks=_shifted(job.blocks, offset))
            for job in each.jobs
        ]
        before += [(name + offset, _shifted(blocks, offset)) for name, blocks in each.before]
        offset += max(names, default=-1) + 1
    jobs.sort(key=lambda job: (job.arrival_ns, job.conversation))
    first = workloads[0]
    return replace(
        first,
        jobs=tuple(replace(job, index=index) for index, job in enumerate(jobs)),
        before=tuple(before),
        rate_per_s=len(jobs) / first.duration_s,
    )


def _shifted(blocks: tuple[int, ...], offset: int) -> tuple[int, ...]:
    """Return the blocks of a conversation under a number that is larger by `offset`; the first block is shared."""
    return tuple(block + offset * CONVERSATION_BLOCKS if depth else block for depth, block in enumerate(blocks))
