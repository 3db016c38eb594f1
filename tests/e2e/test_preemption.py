"""In a live cluster, answers of the batch class give their pages up to urgent requests; every token stays right."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from tests.long_cases import others_long

SLO = {"classes": {"chat": {}, "batch": {"priority": 10}}, "default_class": "chat"}
TOKENS = {"batch": 1500, "chat": 40}
CAPACITY = 3312  # tokens: two batch requests, of which each takes 1,580


@pytest.fixture(
    scope="module",
    params=others_long([("--decode-nodes", "1"), ("--aggregated", "1")], [("--decode-nodes", "1")]),
    ids=["decode", "aggregated"],
)
def cluster(
    request: pytest.FixtureRequest,
    start_cluster: Callable[..., AbstractContextManager[Any]],
    random_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Any]:
    slo = tmp_path_factory.mktemp("slo") / "slo.yaml"
    slo.write_text(json.dumps(SLO))
    with start_cluster(random_model, *request.param, "--slo-file", str(slo), "--capacity-tokens", str(CAPACITY)) as one:
        yield one


async def test_urgent_requests_preempt_batch_answers_which_go_on_with_the_right_tokens(
    cluster: Any, session: aiohttp.ClientSession, judge_of: Any
) -> None:
    rng = np.random.default_rng(3)
    ended: list[str] = []

    async def ask(name: str, slo_class: str, prompt_tokens: int, **sampling: Any) -> Any:
        prompt = rng.integers(4, 2000, prompt_tokens).tolist()
        options = {"max_tokens": TOKENS[slo_class], "ignore_eos": True, "slo_class": slo_class, **sampling}
        answer = await cluster.complete(session, prompt, **options)
        ended.append(name)
        return answer

    drawn = {"temperature": 0.9, "top_p": 0.9, "seed": 5}
    options = [drawn, {"temperature": 0.0}, {"temperature": 0.0}]
    batch = [asyncio.create_task(ask(f"batch-{i}", "batch", 80, **each)) for i, each in enumerate(options)]
    chats = [await ask("chat", "chat", 900, temperature=0.0) for _ in range(3)]
    answers = [await task for task in batch]
    assert ended[:3] == ["chat"] * 3, "none of them waited for a batch answer"
    assert all(len(answer.token_ids) == TOKENS["batch"] for answer in answers)
    assert sum(answer.moonpool["attempts"] for answer in answers) > len(answers)
    judge = judge_of(cluster.model)
    for answer, sampling in zip([*answers, *chats], [*options, *[{"temperature": 0.0}] * 3], strict=True):
        assert judge.wrong_tokens(answer, **sampling) == []
    await cluster.validate()
