"""The aggregated worker takes a controlled request from prompt to last token."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from engine.random_model import RandomModelSpec, write_random_model
from kvpool import chain_keys, chain_seed
from messenger import MessengerConfig
from moonpool_proto.v1.common_pb2 import ROLE_AGGREGATED, Grammar
from moonpool_proto.v1.worker_pb2 import FINISH_COMPLETE, FINISH_NONE, Submit, WorkerMessage
from settings.keys import assemble
from worker.aggregated import AggregatedService
from worker.config import WorkerConfig
from worker.node import WorkerNode
from worker.request import Request
from worker.streams import FrontendStream

BUNDLED = Path(__file__).parents[2] / "moonpool" / "data" / "model"
VOCAB, BLOCK = 2048, 8

Start = Callable[..., Awaitable[WorkerNode]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Start an aggregated worker of a random model, without a pool."""
    started: list[WorkerNode] = []
    folder = write_random_model(
        tmp_path / "model", RandomModelSpec(vocab=VOCAB, max_len=256, scale=3.0, seed=3), tokenizer=BUNDLED
    )

    async def node_of(**options: Any) -> WorkerNode:
        config = assemble(
            WorkerConfig,
            device="cpu",
            threads=1,
            node_id="both",
            listen=f"unix:{tmp_path}/both.sock",
            conductor_targets=(f"unix:{tmp_path}/nobody.sock",),
            pool_target="",
            model=folder,
            served_model_name=("m",),
            block_tokens=BLOCK,
            messenger=assemble(MessengerConfig, shm_dir=tmp_path),
            **{"capacity_tokens": 512} | options,
        )
        node = WorkerNode(config, ROLE_AGGREGATED)
        started.append(node)
        await node.start(config.listen.listen)
        return node

    yield node_of
    for node in started:
        await node.close()


def submit_of(name: str, ids: NDArray[np.int32], generated: int = 0) -> Submit:
    seed = chain_seed("", "test", BLOCK)
    submit = Submit(request_id=name, frontend_id="front", model="m", prompt_ids=ids.tobytes(), generated=generated)
    submit.chain, submit.chain_seed = chain_keys(seed, ids, BLOCK).tobytes(), seed
    return submit


def run(node: WorkerNode, submit: Submit) -> None:
    request = Request.from_proto(
        submit, vocab_size=node.model.config.vocab_size, max_model_len=node.max_model_len, block_tokens=BLOCK
    )
    node.jobs.run(request, AggregatedService(node).serve(request))


async def ends_of(stream: FrontendStream, count: int) -> WorkerMessage:
    """Return all that `count` requests sent until the last one ended."""
    told = WorkerMessage()
    async for message in stream.messages():
        told.MergeFrom(message)
        if len(told.failures) + sum(token.finish != FINISH_NONE for token in told.tokens) == count:
            break
    return told


@pytest.mark.parametrize("split", [0, 4])
async def test_a_request_with_grammar_penalties_and_scores_is_served(start: Start, split: int) -> None:
    """Also from where another worker left it."""
    node = await start()
    stream = node.streams.attach("front", 1)
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    before = tokenizer.encode('["a","b",', add_special_tokens=False).ids[:split]
    submit = submit_of("r", np.array([*range(5, 45), *before], np.int32), split)
    asked = submit.sampling
    asked.temperature, asked.top_p, asked.max_tokens, asked.frequency_penalty = 1.0, 1.0, 100, 0.5
    asked.logprobs, asked.prompt_logprobs = 2, 0
    schema = {"type": "array", "items": {"enum": ["a", "b", "c"]}, "minItems": 8, "maxItems": 8}
    asked.grammar.CopyFrom(Grammar(kind=Grammar.KIND_JSON_SCHEMA, source=json.dumps(schema)))
    run(node, submit)
    told = await ends_of(stream, 1)
    assert list(told.failures) == []
    assert told.tokens[-1].finish == FINISH_COMPLETE
    answer = json.loads(tokenizer.decode([*before, *(token.token_id for token in told.tokens)]))
    assert len(answer) == 8
    assert all(len(token.logprobs.top_ids) == 2 for token in told.tokens)
    assert [token.HasField("prompt_logprobs") for token in told.tokens[:2]] == [split == 0, False]


async def test_answers_that_reserve_what_is_expected_decode_together_and_grow(start: Start) -> None:
    """Each of four may need 15 of the node's 30 pages, so that reserving them would run two at a time."""
    node = await start(capacity_tokens=30 * BLOCK)
    stream = node.streams.attach("front", 1)
    prompts = {f"r{i}": np.arange(5 + i, 45 + i, dtype=np.int32) for i in range(4)}
    most, answers = [0, 0], list[dict[str, list[int]]]()
    for reserved, reserve_tokens in enumerate((0, 48)):
        for name, ids in prompts.items():
            submit = submit_of(name, ids)
            submit.sampling.top_p, submit.sampling.max_tokens = 1.0, 80
            submit.placement.reserve_tokens = reserve_tokens
            run(node, submit)
        told = WorkerMessage()
        async for message in stream.messages():
            told.MergeFrom(message)
            most[reserved] = max(most[reserved], node.engine.num_sequences)
            if sum(token.finish != FINISH_NONE for token in told.tokens) + len(told.failures) == len(prompts):
                break
        assert list(told.failures) == []
        answers.append({name: [t.token_id for t in told.tokens if t.request_id == name] for name in prompts})
        await node.jobs.wait_idle(10)
    assert most[0] <= 2 < most[1]
    assert answers[0] == answers[1]
    assert all(len(answer) == 80 for answer in answers[1].values())
    assert node.counters.snapshot()["kv_growth_waits"] > 0
    assert node.validate() == ([], dict.fromkeys(node.validate()[1], 0))
