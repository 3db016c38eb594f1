"""No wrong token: greedy and seeded, with reuse, chunking, two prefill and two decode nodes, over shm and over tcp."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "seed": 1234}
MODES: list[dict[str, Any]] = [{"temperature": 0.0}, SAMPLED]


def prompts(count: int, shared: int, own: int, seed: int) -> list[list[int]]:
    """Token-id prompts with a common prefix of `shared` tokens and `own` tokens of their own."""
    rng = np.random.default_rng(seed)
    head = rng.integers(5, 2000, shared).tolist()
    return [head + rng.integers(5, 2000, own + i).tolist() for i in range(count)]


async def check_says_what_one_process_would(cluster: Any, judge: Any, session: aiohttp.ClientSession) -> None:
    for mode in MODES:
        asked = prompts(12, shared=100, own=60, seed=3)
        first = await cluster.complete(session, asked[0], max_tokens=16, ignore_eos=True, **mode)
        rest = await asyncio.gather(
            *(cluster.complete(session, p, max_tokens=16, ignore_eos=True, **mode) for p in asked[1:])
        )
        again = await cluster.complete(session, asked[0], max_tokens=16, ignore_eos=True, **mode)
        for answer in [first, *rest, again]:
            assert len(answer.token_ids) == 16
            assert judge.wrong_tokens(answer, **mode) == []
        assert again.cached_tokens >= 152
        assert sum(a.cached_tokens > 0 for a in rest) >= 6
    await cluster.validate()


async def test_two_by_two_cluster_over_tcp_says_what_one_process_would(
    random_model: Path,
    start_cluster: Callable[..., Any],
    judge_of: Callable[[Path], Any],
    session: aiohttp.ClientSession,
) -> None:
    flags = ["--prefill-nodes", "2", "--decode-nodes", "2", "--pool-nodes", "2", "--transport", "tcp"]
    with start_cluster(random_model, *flags, "--block-tokens", "8", "--prefill-chunk-tokens", "48") as cluster:
        await check_says_what_one_process_would(cluster, judge_of(random_model), session)


@pytest.fixture(scope="module")
def smallest(
    random_model: Path, two_group_model: Path, windows_only_model: Path, start_cluster: Callable[..., Any]
) -> Iterator[Any]:
    """A node of each role, over shared memory; beside it two for each of two other models, and two aggregated ones."""
    flags = ["--transport", "shm", "--block-tokens", "8", "--prefill-chunk-tokens", "48"]
    flags += ["--add-model", f"two-groups={two_group_model},prefill_nodes=1,decode_nodes=1"]
    flags += ["--add-model", f"windows-only={windows_only_model},prefill_nodes=1,decode_nodes=1"]
    flags += ["--add-model", f"both-phases={random_model},aggregated=2"]
    with start_cluster(random_model, *flags) as cluster:
        yield cluster


async def test_a_two_group_model_over_the_cluster(
    smallest: Any, two_group_model: Path, judge_of: Callable[[Path], Any], session: aiohttp.ClientSession
) -> None:
    judge = judge_of(two_group_model)
    for mode in MODES:
        asked = {"model": "two-groups", "max_tokens": 24, "ignore_eos": True, **mode}
        for prompt in prompts(3, shared=90, own=40, seed=5):
            answer = await smallest.complete(session, prompt, **asked)
            assert judge.wrong_tokens(answer, **mode) == []
    assert answer.cached_tokens > 0
    await smallest.validate()


async def test_the_smallest_cluster_says_what_one_process_would(
    smallest: Any, random_model: Path, judge_of: Callable[[Path], Any], session: aiohttp.ClientSession
) -> None:
    await check_says_what_one_process_would(smallest, judge_of(random_model), session)


@pytest.mark.parametrize("model", ["", "windows-only"])
async def test_answers_are_reused_by_the_next_turn(
    smallest: Any,
    random_model: Path,
    windows_only_model: Path,
    judge_of: Callable[[Path], Any],
    session: aiohttp.ClientSession,
    model: str,
) -> None:
    judge = judge_of(windows_only_model if model else random_model)
    asked: dict[str, Any] = {"max_tokens": 33, "ignore_eos": True, "temperature": 0.0}
    asked |= {"model": model} if model else {}
    history = prompts(1, shared=70, own=10, seed=6)[0]
    for turn in range(4):
        answer = await smallest.complete(session, history, **asked)
        assert judge.wrong_tokens(answer) == []
        if turn:
            # All before this turn's six tokens, but the answer's last one, which was never fed back.
            assert answer.cached_tokens == len(history) - 7
        await smallest.validate()
        history = history + answer.token_ids + [17 + turn] * 6


async def test_equal_requests_get_equal_tokens_in_two_salts_without_sharing(
    smallest: Any, session: aiohttp.ClientSession
) -> None:
    prompt = prompts(1, shared=64, own=8, seed=11)[0]
    first = await smallest.complete(session, prompt, max_tokens=8, cache_salt="one", **SAMPLED)
    other = await smallest.complete(session, prompt, max_tokens=8, cache_salt="two", **SAMPLED)
    again = await smallest.complete(session, prompt, max_tokens=8, cache_salt="one", **SAMPLED)
    assert first.token_ids == other.token_ids == again.token_ids
    assert (first.cached_tokens, other.cached_tokens) == (0, 0)
    assert again.cached_tokens >= 64


async def test_aggregated_workers_answer_like_the_reference(
    smallest: Any, random_model: Path, judge_of: Callable[[Path], Any], session: aiohttp.ClientSession
) -> None:
    judge = judge_of(random_model)
    options = {"model": "both-phases", "max_tokens": 20, "ignore_eos": True, **SAMPLED}
    asked = prompts(8, shared=64, own=30, seed=9)
    answers = await asyncio.gather(*(smallest.complete(session, p, **options) for p in asked))
    for answer in answers:
        assert judge.wrong_tokens(answer, **SAMPLED) == []
        assert answer.moonpool["prefill_node"] == answer.moonpool["decode_node"]
    await smallest.validate()
