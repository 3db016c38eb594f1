"""Parts of which workloads are drawn: block ids, times of arrival, popularity, conversations."""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from simulator.cache import ChainedTrace, chained
from traces import Trace, TraceRow

BLOCK_TOKENS = 512


class DrawnPrompt(NamedTuple):
    """One prompt. `partial`: the last block is half full, so that it is replaced when the prompt grows."""

    when_s: float
    blocks: list[int]
    partial: bool = False


class BlockIds:
    """Generator of unused block ids."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, count: int) -> list[int]:
        self._next += count
        return list(range(self._next - count, self._next))


Generator = Callable[[random.Random, BlockIds], Iterable[DrawnPrompt]]


@dataclass(frozen=True)
class EvictionWorkload:
    """A generator and the capacities at which it is measured, as shares of its distinct blocks."""

    generate: Generator
    capacities: tuple[float, ...] = (0.02, 0.08, 0.25)


def build(name: str, workload: EvictionWorkload, seed: int) -> ChainedTrace:
    """Return the workload's requests in order of time."""
    requests = sorted(workload.generate(random.Random(seed), BlockIds()), key=lambda request: request.when_s)
    rows = (
        TraceRow(
            number,
            int(request.when_s * 1000),
            BLOCK_TOKENS * len(request.blocks) - (BLOCK_TOKENS // 2 if request.partial else 0),
            1,
            tuple(request.blocks),
        )
        for number, request in enumerate(requests)
    )
    return chained(Trace(name, tuple(rows)))


def arrivals(rng: random.Random, per_s: float, until_s: float, since_s: float = 0.0) -> Iterator[float]:
    """Yield the times of a Poisson process."""
    when = since_s + rng.expovariate(per_s)
    while when < until_s:
        yield when
        when += rng.expovariate(per_s)


def waves(rng: random.Random, per_s: float, until_s: float, period_s: float, phase: float = 0.0) -> Iterator[float]:
    """Yield the times of a Poisson process whose rate is `per_s` at most and follows a squared sine of `period_s`."""
    for when in arrivals(rng, per_s, until_s):
        if rng.random() < math.sin(math.pi * (when / period_s + phase)) ** 2:
            yield when


def zipf(count: int, exponent: float) -> Sequence[float]:
    """Return cumulative weights of `count` ranks by Zipf's law, for `random.choices`."""
    return list(accumulate((rank + 1) ** -exponent for rank in range(count)))


@dataclass(frozen=True)
class ChatKind:
    """A kind of conversation. `pause_s`: median of the pause between turns, log-normal with `sigma`."""

    turns: float
    pause_s: float
    sigma: float = 0.8
    opening: tuple[int, int] = (1, 8)
    growth: tuple[int, int] = (1, 3)
    partial: bool = False


def chat(
    rng: random.Random, ids: BlockIds, when: float, prefix: Sequence[int], kind: ChatKind
) -> Iterator[DrawnPrompt]:
    """Yield the turns of one conversation that begins with `prefix`; the number of turns is geometric."""
    prompt = [*prefix, *ids.take(rng.randint(*kind.opening))]
    for _ in range(1 + int(rng.expovariate(1 / kind.turns))):
        tail = ids.take(1) if kind.partial else []
        yield DrawnPrompt(when, prompt + tail, kind.partial)
        prompt = prompt + ids.take(rng.randint(*kind.growth))
        when += rng.lognormvariate(0, kind.sigma) * kind.pause_s
