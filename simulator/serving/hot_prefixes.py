"""Simulated requests behind popular prefixes, as questions about shared documents; popularity is skewed or shifts."""

from dataclasses import dataclass

import numpy as np

from simulator.errors import BadSetting
from simulator.serving.clock import NS
from simulator.serving.requests import Arrival, SimulatedWorkload

_BLOCKS_OF_ONE = 1 << 40  # size of the block number range of one prefix or question


@dataclass(frozen=True, slots=True)
class HotPrefixes:
    """Prefixes, the popularity of which follows Zipf's law, each followed by a question that is asked once."""

    num_prefixes: int = 64
    prefix_tokens: int = 16384  # on average; uniform from half to one and a half of it
    question_tokens: int = 512  # on average; exponentially distributed
    answer_tokens: int = 64
    skew: float = 1.0  # exponent of Zipf's law; 0: all are equally popular
    shift_s: float = 0.0  # interval after which the ranks are drawn anew; 0: never

    def __post_init__(self) -> None:
        for name in ("num_prefixes", "prefix_tokens", "question_tokens", "answer_tokens"):
            if getattr(self, name) < 1:
                raise BadSetting(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("skew", "shift_s"):
            if not 0 <= getattr(self, name) < 1e6:
                raise BadSetting(f"{name} must be at least 0 and below 1e6, got {getattr(self, name)}")


def draw_hot_workload(
    hot: HotPrefixes, *, seed: int, rate_per_s: float, requests: int, block_tokens: int
) -> SimulatedWorkload:
    """Draw `requests` requests as a Poisson process of `rate_per_s` per second. Raises BadSetting.

    Each prefix is in one pool node at the start.
    """
    if not 0 < rate_per_s < 1e6 or requests < 1:
        raise BadSetting(
            f"the number of requests and the rate must be positive, got {requests} requests at {rate_per_s} per second"
        )
    rng = np.random.default_rng([seed, 0x407])
    weights = 1.0 / np.arange(1, hot.num_prefixes + 1) ** hot.skew
    lengths = (hot.prefix_tokens * rng.uniform(0.5, 1.5, hot.num_prefixes)).astype(int)
    shared = [
        tuple(range(prefix * _BLOCKS_OF_ONE, prefix * _BLOCKS_OF_ONE + tokens // block_tokens))
        for prefix, tokens in enumerate(lengths.tolist())
    ]
    arrivals_s = np.cumsum(rng.exponential(1 / rate_per_s, requests))
    ranks = rng.choice(hot.num_prefixes, size=requests, p=weights / weights.sum())
    questions = 1 + rng.exponential(hot.question_tokens, requests).astype(int)
    luck, sampled = rng.standard_normal(requests), rng.uniform(size=requests)
    prefix_of_rank, period = rng.permutation(hot.num_prefixes), 0
    jobs = []
    for index in range(requests):
        while hot.shift_s and arrivals_s[index] >= (period + 1) * hot.shift_s:
            prefix_of_rank, period = rng.permutation(hot.num_prefixes), period + 1
        prefix = int(prefix_of_rank[ranks[index]])
        prompt_tokens = int(lengths[prefix] + questions[index])
        own_from = (hot.num_prefixes + index) * _BLOCKS_OF_ONE
        own = prompt_tokens // block_tokens - len(shared[prefix])
        jobs.append(
            Arrival(
                index=index,
                arrival_ns=round(float(arrivals_s[index]) * NS),
                conversation=prefix,
                prompt_tokens=prompt_tokens,
                output_tokens=hot.answer_tokens,
                blocks=(*shared[prefix], *range(own_from, own_from + own)),
                luck=float(luck[index]),
                is_sampled=float(sampled[index]),
            )
        )
    return SimulatedWorkload(tuple(jobs), tuple(enumerate(shared)), block_tokens, rate_per_s, requests / rate_per_s)
