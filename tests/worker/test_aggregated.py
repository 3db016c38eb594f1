"""The aggregated worker takes a controlled request from prompt to last token."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from engine.random_model import RandomModelSpec, write_random_model
from kvpool import chain_keys, chain_seed
from messenger import MessengerConfig
from moonpool_proto.v1.common_pb2 import ROLE_AGGREGATED, Grammar
from moonpool_proto.v1.worker_pb2 import FINISH_COMPLETE, Submit, WorkerMessage
from settings.keys import assemble
from worker.aggregated import AggregatedService
from worker.config import WorkerConfig
from worker.node import WorkerNode
from worker.request import Request

BUNDLED = Path(__file__).parents[2] / "moonpool" / "data" / "model"
VOCAB, BLOCK = 2048, 8


@pytest.mark.parametrize("split", [0, 4])
async def test_a_request_with_grammar_penalties_and_scores_is_served(tmp_path: Path, split: int) -> None:
    """Also from where another worker left it."""
    folder = write_random_model(
        tmp_path / "model", RandomModelSpec(vocab=VOCAB, max_len=256, scale=3.0, seed=3), tokenizer=BUNDLED
    )
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
        capacity_tokens=512,
        messenger=assemble(MessengerConfig, shm_dir=tmp_path),
    )
    node = WorkerNode(config, ROLE_AGGREGATED)
    try:
        await node.start(config.listen.listen)
        stream = node.streams.attach("front", 1)
        tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
        before = tokenizer.encode('["a","b",', add_special_tokens=False).ids[:split]
        ids = np.array([*range(5, 45), *before], np.int32)
        seed = chain_seed("", "test", BLOCK)
        submit = Submit(request_id="r", frontend_id="front", model="m", prompt_ids=ids.tobytes(), generated=split)
        submit.chain, submit.chain_seed = chain_keys(seed, ids, BLOCK).tobytes(), seed
        asked = submit.sampling
        asked.temperature, asked.top_p, asked.max_tokens, asked.frequency_penalty = 1.0, 1.0, 100, 0.5
        asked.logprobs, asked.prompt_logprobs = 2, 0
        schema = {"type": "array", "items": {"enum": ["a", "b", "c"]}, "minItems": 8, "maxItems": 8}
        asked.grammar.CopyFrom(Grammar(kind=Grammar.KIND_JSON_SCHEMA, source=json.dumps(schema)))
        request = Request.from_proto(
            submit, vocab_size=node.model.config.vocab_size, max_model_len=node.max_model_len, block_tokens=BLOCK
        )
        node.jobs.run(request, AggregatedService(node).serve(request))
        told = WorkerMessage()
        async for message in stream.messages():
            told.MergeFrom(message)
            if told.failures or told.tokens[-1].finish:
                break
        assert list(told.failures) == []
        assert told.tokens[-1].finish == FINISH_COMPLETE
        answer = json.loads(tokenizer.decode([*before, *(token.token_id for token in told.tokens)]))
        assert len(answer) == 8
        assert all(len(token.logprobs.top_ids) == 2 for token in told.tokens)
        assert [token.HasField("prompt_logprobs") for token in told.tokens[:2]] == [split == 0, False]
    finally:
        await node.close()
