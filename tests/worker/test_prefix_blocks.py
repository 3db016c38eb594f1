"""Blocks saved from a sequence, and the partial block that a prompt finds again."""

from __future__ import annotations

import numpy as np
import pytest

from kvpool import Tail, chain_keys, chain_seed, tail_key
from moonpool_proto.v1.worker_pb2 import Submit
from worker.errors import RequestRefused
from worker.prefix_blocks import PrefixSave, find_tail, names_of_tails
from worker.request import EngineSequence, Request

BLOCK = 4
SEED = chain_seed("", "test", BLOCK)


def request_of(ids: list[int]) -> Request:
    tokens = np.array(ids, np.int32)
    submit = Submit(request_id="r", prompt_ids=tokens.tobytes(), chain_seed=SEED)
    submit.chain = chain_keys(SEED, tokens, BLOCK).tobytes()
    submit.sampling.max_tokens, submit.sampling.top_p = 20, 1.0
    return Request.from_proto(submit, vocab_size=100, max_model_len=100, block_tokens=BLOCK)


def kept_of(prompt: list[int], answer: list[int]) -> PrefixSave:
    """Return the saved prefix of an answer that has ended: its last token was not fed back."""
    sequence = EngineSequence.of(request_of(prompt), [0] * 10, num_computed=0, prefill_only=False)
    for token in answer:
        sequence.append(token)
    sequence.num_computed = len(prompt) + len(answer) - 1
    return PrefixSave.of(sequence, BLOCK)


def tail(ids: list[int], parent: bytes | None = None) -> Tail:
    tokens = np.array(ids, np.int32)
    return Tail(tail_key(SEED, parent, tokens), len(ids), np.zeros(1, np.int64), [np.zeros(2, np.uint64)])


def key_of(ids: list[int]) -> bytes:
    """Return the key of the last of the whole blocks."""
    return chain_keys(SEED, np.array(ids, np.int32), BLOCK)[-1].tobytes()


@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("num_answer", [1, 2, 4, 5, 9])
def test_an_answers_blocks_are_found_by_a_prompt_that_goes_on(num_prompt: int, num_answer: int) -> None:
    ids = list(range(num_prompt + num_answer))
    kept = kept_of(ids[:num_prompt], ids[num_prompt:])
    computed = len(ids) - 1
    following = request_of([*ids, 50, 51])
    assert kept.keys == following.keys[: computed // BLOCK]
    assert kept.tail_tokens == computed % BLOCK
    if kept.tail_tokens:
        assert kept.tail_key == tail(ids[:computed][-kept.tail_tokens :], kept.keys[-1] if kept.keys else None).key


def test_a_kept_sequence_names_its_blocks_with_their_parents() -> None:
    kept = kept_of(list(range(9)), [9, 10])
    assert kept.num_blocks == 3
    assert kept.names(0) == ([*kept.keys, kept.tail_key], [bytes(16), *kept.keys], [0, 0, 2])
    assert kept.names(2) == ([kept.tail_key], [kept.keys[1]], [2])
    assert kept.whole().names(1) == ([kept.keys[1]], [kept.keys[0]], [0])
    assert kept.names(1, alone=True) == ([kept.keys[1], kept.tail_key], [bytes(16), kept.keys[1]], [0, 2])
    assert kept_of(list(range(8)), [8]).num_blocks == 2


def test_the_longest_tail_of_the_prompts_own_tokens_is_taken() -> None:
    parent = key_of([0, 1, 2, 3])
    offered = [tail([4], parent), tail([4, 5, 6], parent), tail([4, 5], parent), tail([4, 5, 7], parent)]
    found = find_tail(request_of([0, 1, 2, 3, 4, 5, 6, 7, 8]), 1, offered, BLOCK)
    assert found == (offered[1], 3)


@pytest.mark.parametrize(
    ("ids", "parent"),
    [([4, 9], [0, 1, 2, 3]), ([4, 5], [9, 1, 2, 3]), ([4, 5], None), ([5, 6], [0, 1, 2, 3])],
    ids=["another token", "another past", "no past", "another place"],
)
def test_a_tail_of_other_tokens_is_never_taken(ids: list[int], parent: list[int] | None) -> None:
    offered = [tail(ids, key_of(parent) if parent else None)]
    assert find_tail(request_of([0, 1, 2, 3, 4, 5, 6]), 1, offered, BLOCK) is None


def test_the_last_prompt_token_is_computed_even_where_a_tail_has_it() -> None:
    offered = [tail([4, 5, 6], key_of([0, 1, 2, 3]))]
    assert find_tail(request_of([0, 1, 2, 3, 4, 5, 6]), 1, offered, BLOCK) == (offered[0], 2)
    offered = [tail([4], key_of([0, 1, 2, 3]))]
    assert find_tail(request_of([0, 1, 2, 3, 4]), 1, offered, BLOCK) is None


def test_a_prompt_names_its_tails_longest_first() -> None:
    ids = [0, 1, 2, 3, 4, 5, 6, 7, 8]
    parent = key_of([0, 1, 2, 3])
    names = b"".join(tail(ids[4:end], parent).key for end in (7, 6, 5))
    assert names_of_tails(request_of(ids), 1, BLOCK) == names
    assert names_of_tails(request_of(ids), 2, BLOCK) == tail([8], key_of(ids[:8])).key


def test_a_tail_that_goes_beyond_the_prompt_is_not_taken() -> None:
    assert find_tail(request_of([0, 1, 2, 3, 4, 5]), 1, [tail([4, 5, 6], key_of([0, 1, 2, 3]))], BLOCK) is None


def test_a_prompt_shorter_than_a_block_finds_its_tail() -> None:
    offered = [tail([0, 1])]
    assert find_tail(request_of([0, 1, 2]), 0, offered, BLOCK) == (offered[0], 2)


def test_a_request_without_the_seed_of_its_chain_is_refused() -> None:
    submit = Submit(request_id="r", prompt_ids=np.zeros(3, np.int32).tobytes(), chain_seed=b"short")
    with pytest.raises(RequestRefused, match="chain_seed must have 16 bytes, got 5"):
        Request.from_proto(submit, vocab_size=100, max_model_len=100, block_tokens=BLOCK)


@pytest.mark.parametrize(("reuse_blocks", "new_tokens"), [(0, 10), (1, 6), (2, 2), (3, 1)])
def test_the_tokens_that_remain_are_those_that_the_conductor_expects_to_be_computed(reuse_blocks, new_tokens):
    request = request_of(list(range(10)))
    request.placement.reuse_blocks = reuse_blocks
    assert request.expected_new_tokens(BLOCK) == new_tokens
