"""Workers with vLLM on a GPU: KV is handed over by layers and comes from the pool, and the tokens are the model's."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import pytest

from settings.worker import BUNDLED_MODEL
from tests.e2e.conftest import metric
from tests.vllm_worker.test_cluster import prompts

# Two engines share the GPU. Their KV has a fixed size, so that neither measures memory while the other starts; it is
# too small for all prompts, so that they are loaded again.
VLLM_ARGUMENTS = "--gpu-memory-utilization 0.3 --kv-cache-memory-bytes 1073741824 --num-gpu-blocks-override 257"
FLAGS = ["--engine", "vllm", "--prefill-nodes", "1", "--decode-nodes", "1", "--block-tokens", "32"]


def without_vllm() -> str:
    """Return why workers with vLLM cannot be started here; empty if it may be possible."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed: install the extra `vllm` into this environment"
    return ""


@pytest.fixture(scope="module")
def pair(start_cluster: Callable[..., Any]) -> Iterator[Any]:
    missing = without_vllm()
    if missing:
        pytest.skip(f"NOT PROVEN here: {missing}")
    device = ["--device", "cuda:0", "--vllm-args", VLLM_ARGUMENTS]
    with start_cluster(BUNDLED_MODEL, *FLAGS, *device, "--capacity-tokens", "8192") as running:
        yield running


async def test_prompts_that_are_handed_over_or_come_from_the_pool_get_the_models_tokens(
    pair: Any, judge_of: Callable[..., Any], session: aiohttp.ClientSession
) -> None:
    """One request at a time. Half precision may decide near ties otherwise than the reference: one answer in ten."""
    asked, options = prompts(40, seed=41, longest=900), {"max_tokens": 8, "ignore_eos": True, "temperature": 0.0}
    first = [await pair.complete(session, prompt, **options) for prompt in asked]
    again = [await pair.complete(session, prompt, **options) for prompt in asked]  # after 40 others: from the pool
    judge = judge_of(BUNDLED_MODEL)
    for answers in (first, again):
        assert sum(bool(judge.wrong_tokens(answer)) for answer in answers) <= len(asked) // 10
    assert sum(one.token_ids != two.token_ids for one, two in zip(first, again, strict=True)) <= len(asked) // 10
    assert sum(answer.moonpool["cached_dram_tokens"] for answer in again) > 0
    assert await metric(session, pair.url, "moonpool:recomputed_blocks_total") == 0
    await pair.validate()
