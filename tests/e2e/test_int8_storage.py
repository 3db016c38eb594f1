"""A cluster that keeps KV as int8: reuse works, is said to be approximate, and is as near as int8 can be."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from kvpool import KvSpec, PoolClient
from worker.kv_memory import quantised_spec

Start = Callable[..., AbstractContextManager[Any]]
NANO = Path(__file__).parents[1] / "data" / "nano-model"
NUM_PROMPTS = 4
# Each worker's pages hold two prompts, so that most of what is reused comes out of the pool, through int8.
FLAGS = ["--block-tokens", "8", "--capacity-tokens", "512", "--kv-storage", "int8"]
TOLERANCE = 0.05  # of a log-probability; with this model int8 was off by up to 0.01


async def pool_state(cluster: Any) -> dict[str, Any]:
    client = PoolClient(f"unix:{cluster.ready['run_dir']}/pool-0.sock", owner="test", owner_incarnation=1)
    try:
        return await client.state()
    finally:
        await client.close()


async def test_kv_in_int8_is_reused_told_and_near(
    start_cluster: Start, judge_of: Callable[[Path], Any], session: Any
) -> None:
    judge, prompts = (
        judge_of(NANO),
        [np.random.default_rng(number).integers(5, 900, 150).tolist() for number in range(NUM_PROMPTS)],
    )
    with start_cluster(NANO, *FLAGS) as cluster:
        ask = {"max_tokens": 4, "ignore_eos": True, "temperature": 0.0, "logprobs": 1}
        for prompt in prompts:
            cold = await cluster.complete(session, prompt, **ask)
            assert (cold.cached_tokens, cold.moonpool["approximate_tokens"]) == (0, 0)
            assert judge.wrong_tokens(cold) == []
        from_pool, errors = 0, []
        for prompt in prompts:
            warm = await cluster.complete(session, prompt, **ask)
            assert warm.moonpool["approximate_tokens"] == warm.cached_tokens >= 144
            from_pool += warm.moonpool["cached_dram_tokens"]
            told = warm.body["choices"][0]["logprobs"]["token_logprobs"][0]
            errors.append(abs(told - judge.logprobs([*prompt, warm.token_ids[0]])[-2][warm.token_ids[0]]))
        assert from_pool >= 144  # the more, the sooner workers gave back the pages of the request before
        assert 0 < max(errors) < TOLERANCE  # 0: nothing was rounded
        (namespace,) = (await pool_state(cluster))["namespaces"].values()
        spec = KvSpec.from_json(namespace["spec"])
        assert {group.dtype for group in spec.groups} == {"int8"}
        exact = KvSpec(tuple(_exact(group) for group in spec.groups), spec.block_tokens)
        assert quantised_spec(exact) == spec
        assert spec.bytes_per_token == 240 < exact.bytes_per_token == 768  # rows of 16 values and 2 scales
        await cluster.validate()


def _exact(group: Any) -> Any:
    return type(group)(group.kind, group.window, group.layers, group.kv_heads, group.head_dim, "float32")
