"""Moonpool's sampler as a logits processor of vLLM: the same choice as the native engine's, in any batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

from engine import SamplingRow, sample
from moonpool_proto.v1.common_pb2 import Sampling
from vllm_worker.keyed_sampler import KeyedSampler
from vllm_worker.requests import EXTRA

VOCABULARY = 300
CONFIG = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: VOCABULARY))
ROWS = st.tuples(
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from([1.0, 0.9, 0.5]),
    st.sampled_from([0, 1, 7]),
    st.integers(0, 2**64 - 1),
    st.integers(0, 40),
)


def params(sampling: Sampling, generated: int = 0, replayed: list[int] | None = None) -> SamplingParams:
    entry = {"sampling": sampling.SerializeToString(), "generated": generated, "replayed": replayed or []}
    return SamplingParams(temperature=0.0, extra_args={EXTRA: entry})


def processor() -> KeyedSampler:
    return KeyedSampler(CONFIG, torch.device("cpu"), False)


def update(sampler: KeyedSampler, size: int, **changes: Any) -> None:
    sampler.update_state(BatchUpdate(size, *(changes.get(name, []) for name in ("removed", "added", "moved"))))


@given(rows=st.lists(ROWS, min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_it_chooses_as_the_native_engine(rows: list[tuple[float, float, int, int, int]], seed: int) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (len(rows), VOCABULARY)).astype(np.float32))
    expected = sample(logits, [SamplingRow(t, p, k, s, 0, index) for t, p, k, s, index in rows])
    sampler = processor()
    added = []
    for i, (t, p, k, s, index) in enumerate(rows):
        asked = Sampling(temperature=t, top_p=p, top_k=k, seed=s, max_tokens=100)
        added.append((i, params(asked, generated=index // 2), [1, 2, 3], [5] * (index - index // 2)))
    update(sampler, len(rows), added=added)
    assert sampler.apply(logits.clone()).argmax(dim=1).tolist() == expected.tolist()


def test_rows_follow_their_requests_through_moves_swaps_and_removals() -> None:
    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 1, (1, VOCABULARY)).astype(np.float32)).repeat(4, 1)
    alone = [int(sample(logits[:1], [SamplingRow(1.0, 1.0, 0, seed, 0, 0)])[0]) for seed in range(4)]
    assert len(set(alone)) == 4
    sampler = processor()
    asked = [params(Sampling(temperature=1.0, top_p=1.0, seed=seed, max_tokens=9)) for seed in range(4)]
    update(sampler, 4, added=[(i, asked[i], [1], []) for i in range(4)])
    assert sampler.apply(logits.clone()).argmax(dim=1).tolist() == alone
    update(sampler, 4, moved=[(0, 3, MoveDirectionality.SWAP)])
    assert sampler.apply(logits.clone()).argmax(dim=1).tolist() == [alone[3], alone[1], alone[2], alone[0]]
    update(sampler, 3, removed=[1], moved=[(3, 1, MoveDirectionality.UNIDIRECTIONAL)])
    assert sampler.apply(logits[:3].clone()).argmax(dim=1).tolist() == [alone[3], alone[0], alone[2]]


def test_rows_without_an_entry_are_left_to_vllm() -> None:
    logits = torch.zeros(2, VOCABULARY)
    logits[:, 17] = 1.0
    sampler = processor()
    update(sampler, 2, added=[(0, SamplingParams(), [1], [])])
    assert torch.equal(sampler.apply(logits.clone()), logits)


def test_replayed_tokens_come_first_whatever_the_logits_are() -> None:
    output: list[int] = []
    sampler = processor()
    asked = Sampling(temperature=0.0, top_p=1.0, max_tokens=9)
    update(sampler, 1, added=[(0, params(asked, replayed=[7, 8]), [1], output)])
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 17] = 5.0
    for expected in (7, 8, 17):
        output.append(int(sampler.apply(logits.clone()).argmax()))
        assert output[-1] == expected


def test_end_tokens_are_excluded_before_the_minimum_length_unless_the_grammar_allows_nothing_else() -> None:
    asked = Sampling(temperature=0.0, top_p=1.0, max_tokens=9, min_tokens=3, stop_token_ids=[17])
    asked.grammar.source = 'start: "a"'
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 17], logits[0, 18] = 5.0, 4.0
    sampler = processor()
    update(sampler, 1, added=[(0, params(asked), [1], [])])
    assert int(sampler.apply(logits.clone()).argmax()) == 18
    only_end = torch.full((1, VOCABULARY), -torch.inf)
    only_end[0, 17] = 1.0
    assert int(sampler.apply(only_end).argmax()) == 17
