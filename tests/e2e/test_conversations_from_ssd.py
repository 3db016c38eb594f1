"""Conversations that outgrow a pool's memory go on from its SSD, also after the pool node was killed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

Start = Callable[..., AbstractContextManager[Any]]
NUM_DIALOGUES = 8
# 12 KiB a block: 8 dialogues of 10 blocks and more take twice the pool's memory, and each worker's pages hold three.
FLAGS = ["--block-tokens", "16", "--pool-bytes", "512KiB", "--capacity-tokens", "512", "--pool-ssd-bytes", "64MiB"]
TOLERANCE = 1e-3


class Dialogue:
    """One conversation of token ids, judged turn by turn."""

    def __init__(self, cluster: Any, judge: Any, number: int) -> None:
        self._cluster, self._judge = cluster, judge
        self.history: list[int] = np.random.default_rng(number).integers(5, 2000, 130).tolist()
        self.computed = 0

    async def turn(self, session: aiohttp.ClientSession) -> Any:
        answer = await self._cluster.complete(
            session, self.history, max_tokens=21, ignore_eos=True, temperature=0.0, logprobs=1
        )
        assert self._judge.wrong_tokens(answer) == []
        told = answer.body["choices"][0]["logprobs"]["token_logprobs"][0]
        cold = self._judge.logprobs([*answer.prompt_ids, answer.token_ids[0]])[-2][answer.token_ids[0]]
        assert abs(told - cold) < TOLERANCE  # the same model, whether its KV was computed or found
        assert answer.cached_tokens in (0, self.computed) or answer.cached_tokens % 16 == 0
        self.computed = len(self.history) + 20
        self.history += [*answer.token_ids, 17, 18, 19]
        return answer


async def ssd_tokens(dialogues: list[Dialogue], session: aiohttp.ClientSession) -> int:
    """A turn of each, one after the other: prompt tokens that came from SSD."""
    answers = [await dialogue.turn(session) for dialogue in dialogues]
    tiers = [[answer.moonpool[f"cached_{tier}_tokens"] for tier in ("dram", "ssd", "remote")] for answer in answers]
    assert all(sum(found) <= answer.cached_tokens for found, answer in zip(tiers, answers, strict=True))
    return sum(ssd for _, ssd, _ in tiers)


async def test_turns_are_served_from_ssd_also_after_the_pool_node_was_killed(
    random_model: Path, start_cluster: Start, judge_of: Callable[[Path], Any], tmp_path: Path, session: Any
) -> None:
    with start_cluster(random_model, *FLAGS, "--pool-ssd-dir", str(tmp_path)) as cluster:
        dialogues = [Dialogue(cluster, judge_of(random_model), i) for i in range(NUM_DIALOGUES)]
        assert await ssd_tokens(dialogues, session) == 0
        assert await ssd_tokens(dialogues, session) > 0
        await cluster.validate()
        old = cluster.kill("pool-0")
        await cluster.wait_restarted("pool-0", old)
        assert await ssd_tokens(dialogues, session) > 0  # found again on the disk
        await cluster.validate()
