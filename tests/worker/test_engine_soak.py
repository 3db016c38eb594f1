"""Requests with every sampling option, of three classes, some cancelled, on nodes with too few pages and too little
memory: every token is right, every request ends, nothing is held at the end, and memory does not grow."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from numpy.typing import NDArray

from engine import FlatBatch, Model, SamplingRow, load_model, noisy_scores
from engine.random_model import RandomModelSpec, write_random_model
from moonpool_proto.v1.common_pb2 import Grammar
from moonpool_proto.v1.common_pb2 import Sampling as SamplingProto
from moonpool_proto.v1.worker_pb2 import FINISH_COMPLETE, FINISH_LENGTH, FINISH_STOP
from tests.worker.node_pair import Pair

BUNDLED = Path(__file__).parents[2] / "moonpool" / "data" / "model"
VOCAB, BLOCK, PAGES, CLIENTS = 2048, 8, 40, 6
TOLERANCE = 2e-3
SCHEMA = {"type": "array", "items": {"enum": ["a", "b", "c"]}, "minItems": 4, "maxItems": 8}


def draw_sampling(rng: np.random.Generator) -> SamplingProto:
    """Draw sampling parameters; of each option, one request in a few has it."""
    asked = SamplingProto(top_p=1.0, max_tokens=int(rng.integers(1, 90)), seed=int(rng.integers(1 << 40)))
    if rng.random() < 0.6:
        asked.temperature = float(rng.choice([0.3, 0.8, 1.5]))
    if rng.random() < 0.3:
        asked.top_p = float(rng.uniform(0.5, 0.99))
    if rng.random() < 0.2:
        asked.top_k = int(rng.integers(1, 60))
    if rng.random() < 0.2:
        asked.min_p = float(rng.uniform(0.01, 0.3))
    if rng.random() < 0.2:
        asked.logprobs = int(rng.integers(0, 5))
    if rng.random() < 0.1:
        asked.prompt_logprobs = 2
    if rng.random() < 0.2:
        asked.stop_token_ids.extend(rng.integers(0, VOCAB, 40).tolist())
    if rng.random() < 0.3:  # what changes logits
        asked.repetition_penalty = float(rng.uniform(0.8, 1.5))
        asked.frequency_penalty, asked.presence_penalty = rng.uniform(-1, 1, 2).tolist()
        asked.min_tokens = min(3, asked.max_tokens) if asked.stop_token_ids else 0
        asked.logit_bias[int(rng.integers(VOCAB))] = 5.0
    if rng.random() < 0.1:
        asked.max_tokens = 120
        asked.grammar.CopyFrom(Grammar(kind=Grammar.KIND_JSON_SCHEMA, source=json.dumps(SCHEMA)))
    return asked


def changes_logits(asked: SamplingProto) -> bool:
    return asked.HasField("repetition_penalty") or asked.HasField("grammar") or bool(asked.min_tokens)


class Clients:
    """Clients that ask one request after another, go on after failures as a frontend does, and verify the answers."""

    def __init__(self, pair: Pair, reference: Model, seed: int) -> None:
        self._pair = pair
        self._reference = reference
        self._rng = np.random.default_rng(seed)
        self._number = 0
        self.seen: Counter[str] = Counter()

    async def run(self, until_s: float) -> None:
        while time.monotonic() < until_s:
            self._number += 1
            await self._ask(f"r{self._number}")

    async def _ask(self, name: str) -> None:
        rng = self._rng
        prompt = rng.integers(5, VOCAB, int(rng.integers(2, 120))).tolist()
        if rng.random() < 0.3:
            prompt[:40] = range(100, 100 + len(prompt[:40]))  # a prefix that others have
        asked, level = draw_sampling(rng), int(rng.integers(3))
        cancel_at = int(rng.integers(1, 40)) if rng.random() < 0.15 else 0
        tokens: list[int] = []
        for attempt in range(1, 60):
            submit = self._pair.submit([*prompt, *tokens], name, attempt=attempt, generated=len(tokens))
            submit.sampling.CopyFrom(asked)
            submit.preemptible = True
            submit.placement.reserve_tokens = int(rng.choice([0, 1, 60]))
            submit.placement.turn.level, submit.placement.turn.ages_in_s = level, 60.0
            request = await self._pair.frontend.submit(submit)
            if cancel_at > len(tokens):
                reached = asyncio.ensure_future(request.reaches(cancel_at - len(tokens)))
                ended = asyncio.ensure_future(request.ended.wait())
                await asyncio.wait((reached, ended), return_when=asyncio.FIRST_COMPLETED)
                is_cancelled = not ended.done()
                reached.cancel(), ended.cancel()
                if is_cancelled:
                    for node in ("prefill", "decode"):
                        await self._pair.frontend.cancel(node, name, attempt)
                    self.seen["cancelled"] += 1
                    self._pair.frontend.forget(name, attempt)
                    return
            await request.ended.wait()
            tokens += [request.tokens[i] for i in sorted(request.tokens)]
            finish = request.messages[max(request.messages)].finish if request.messages else 0
            self._pair.frontend.forget(name, attempt)
            if not request.failures:
                self._check(prompt, tokens, asked, finish)
                return
            failure = request.failures[-1]
            assert failure.retryable, failure
            self.seen[failure.code] += 1
        raise AssertionError(f"{name} did not end")

    def _check(self, prompt: list[int], tokens: list[int], asked: SamplingProto, finish: int) -> None:
        self.seen["ended"] += 1
        assert finish in (FINISH_STOP, FINISH_LENGTH, FINISH_COMPLETE)
        assert (len(tokens) == asked.max_tokens) or finish != FINISH_LENGTH
        if changes_logits(asked):
            return
        logits: NDArray[np.float32] = self._reference.score(np.array([*prompt, *tokens], np.int32))
        for index, token in enumerate(tokens):
            row = SamplingRow(asked.temperature, asked.top_p, asked.top_k, asked.seed, asked.choice, index, asked.min_p)
            at = logits[len(prompt) - 1 + index]
            mine = noisy_scores(at, row, slack=TOLERANCE)[token]
            assert mine >= noisy_scores(at, row, slack=-TOLERANCE).max() - TOLERANCE, (index, token, row)
        self.seen["verified tokens"] += len(tokens)


def plant_lack_of_memory(model: Model, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let larger steps of a node fail now and then for want of memory."""
    real = model.run

    def run(plan: FlatBatch, *arguments: Any) -> torch.Tensor:
        if len(plan.token_ids) > 2 * BLOCK and rng.random() < 0.05:
            raise MemoryError("planted")
        return real(plan, *arguments)

    monkeypatch.setattr(model, "run", run)


@pytest.fixture
async def pair(start_pair: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    path = write_random_model(
        tmp_path / "soaked", RandomModelSpec(vocab=VOCAB, max_len=512, scale=3.0, seed=3), tokenizer=BUNDLED
    )
    started: Pair = await start_pair(pool={"pool_bytes": 8 << 20}, path=path, capacity_tokens=PAGES * BLOCK)
    steps: Any = started.decode.node.engine._steps
    steps._goes_ahead = True
    for number, node in enumerate((started.prefill.node, started.decode.node)):
        plant_lack_of_memory(node.model.model, np.random.default_rng(number), monkeypatch)
    return started


@pytest.mark.parametrize("seconds", [6.0, pytest.param(1800.0, marks=[pytest.mark.nightly, pytest.mark.timeout(2400)])])
async def test_every_option_under_preemption_cancellation_and_lack_of_memory(
    pair: Pair, seconds: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "worker.jobs")  # records of thousands of preemptions would be kept
    reference = load_model(pair.decode.node.config.model.path, threads=1)
    clients = Clients(pair, reference, seed=7)
    process, began_s = psutil.Process(), time.monotonic()

    async def soak(share: float) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(CLIENTS):
                tasks.create_task(clients.run(began_s + share * seconds))

    await soak(0.3)
    warm_nbytes = process.memory_info().rss
    await soak(1.0)
    grown_nbytes = process.memory_info().rss - warm_nbytes
    await pair.at_rest()
    counts = pair.decode.node.counters.snapshot()
    print(dict(clients.seen), {name: counts.get(name) for name in ("preemptions", "divided_steps")}, grown_nbytes)
    assert clients.seen["ended"] > 5 * seconds / 6
    assert clients.seen["cancelled"]
    assert 0 < clients.seen["preempted"] <= counts["preemptions"]
    assert pair.prefill.node.counters.snapshot()["divided_steps"] > 0
    assert grown_nbytes < 64 << 20
