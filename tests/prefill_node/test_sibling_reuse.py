"""A sibling's KV is reused with the layers between computed from its hidden states, and never passed on as exact."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import LayerSpan, Model, load_model
from engine.random_model import RandomModelSpec, write_random_model
from kvpool import kv_namespace
from moonpool_proto.v1.worker_pb2 import Submit
from tests.worker.node_pair import BLOCK, Pair, Start
from tests.worker.sibling_reference import own_wrong_tokens, write_profile, wrong_tokens
from worker.errors import StartupError
from worker.hidden_memory import hidden_parts, hidden_spec
from worker.slot_memory import spec_of

LAYERS = 4
SPANS = [LayerSpan(1, 2), LayerSpan(0, 1), LayerSpan(2, 3), LayerSpan(3, 3)]
PROMPT = 70
ANSWER = 12


@dataclass(frozen=True)
class Siblings:
    """Two models of one shape, and the profile of their reuse."""

    sender_path: Path
    receiver_path: Path
    sender: Model
    receiver: Model
    profile: Path


@pytest.fixture(scope="module")
def siblings(tmp_path_factory: pytest.TempPathFactory) -> Siblings:
    folder = tmp_path_factory.mktemp("siblings")
    paths = [
        write_random_model(folder / name, RandomModelSpec(layers=LAYERS, vocab=256, max_len=512, scale=3.0, seed=seed))
        for name, seed in (("sender", 3), ("receiver", 4))
    ]
    sender, receiver = (load_model(path, threads=1) for path in paths)
    return Siblings(*paths, sender, receiver, write_profile(folder / "reuse.json", sender, receiver, SPANS))


def ids_of(length: int = PROMPT, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def wrong(siblings: Siblings, ids: list[int], answer: list[int], blocks: range, span: LayerSpan) -> list[int]:
    return wrong_tokens((siblings.sender, siblings.receiver), ids, answer, blocks, span, BLOCK)


def reusing(pair: Pair, siblings: Siblings, ids: list[int], name: str, span: LayerSpan, **options: Any) -> Submit:
    submit = pair.submit(ids, name, max_tokens=ANSWER, **options)
    sibling = submit.placement.sibling
    sibling.sender_fingerprint = siblings.sender.fingerprint
    sibling.first_layer, sibling.last_layer, sibling.num_blocks = span.first, span.last, len(ids) // BLOCK
    return submit


async def ask(pair: Pair, submit: Submit) -> Any:
    request = await pair.frontend.submit(submit)
    await request.ended.wait()
    assert request.failures == []
    await pair.at_rest()
    return request


async def start_both(start_pair: Start, siblings: Siblings, **options: Any) -> tuple[Pair, Pair]:
    """Return the sender's and the receiver's pair, which share a pool node."""
    given = {"reuse_profile": (str(siblings.profile),), **options}
    sends = await start_pair(path=siblings.sender_path, pool=True, prefix="s-", prefill_options=given, **given)
    receives = await start_pair(
        path=siblings.receiver_path, pool=sends.pool, prefix="r-", prefill_options=given, **given
    )
    return sends, receives


def flip(pair: Pair, namespace: bytes, key: bytes) -> None:
    """Flip a bit in the first layer of a block in the pool."""
    assert pair.pool is not None
    found = [b for b in pair.pool.core.store.index if (b.kv_namespace, b.key[16:]) == (namespace, key)]
    assert len(found) == 1
    pair.pool.region.array[found[0].offsets[0] + 5] ^= 16


@pytest.mark.parametrize("span", SPANS, ids=str)
async def test_the_answer_is_that_of_the_mixed_kv(start_pair: Start, siblings: Siblings, span: LayerSpan) -> None:
    sends, receives = await start_both(start_pair, siblings)
    ids = ids_of()
    await sends.ask(ids, "context")
    request = await ask(receives, reusing(receives, siblings, ids, "reuse", span))
    blocks = range(PROMPT // BLOCK)
    assert wrong(siblings, ids, request.token_ids, blocks, span) == []
    timing = request.messages[0].timing
    assert (timing.sibling_tokens, timing.cached_tokens, timing.approximate_tokens) == (64, 0, 64)
    # Three layers' states for each of 1,024 tokens, in host memory.
    assert sends.prefill.node.hidden_nbytes == 3 * 1024 * siblings.sender.config.hidden_size * 4
    # Nothing of it is reused as the receiver's own.
    again = await receives.ask(ids, "exact")
    assert again.cached_tokens == 0
    assert own_wrong_tokens(siblings.receiver, ids, again.token_ids) == []


async def test_exact_kv_comes_first_and_the_rest_from_the_sibling(start_pair: Start, siblings: Siblings) -> None:
    sends, receives = await start_both(start_pair, siblings)
    ids = ids_of()
    await sends.ask(ids, "context")
    await receives.ask(ids[:30], "head", max_tokens=1)
    receives.forget()
    request = await ask(receives, reusing(receives, siblings, ids, "reuse", SPANS[0]))
    timing = request.messages[0].timing
    assert (timing.cached_tokens, timing.sibling_tokens) == (24, 40)
    assert wrong(siblings, ids, request.token_ids, range(3, 8), SPANS[0]) == []


async def test_an_own_partial_block_is_given_up_before_a_siblings_is_tried(
    start_pair: Start, siblings: Siblings
) -> None:
    sends, receives = await start_both(start_pair, siblings)
    ids = ids_of()
    await sends.ask(ids, "context")
    await receives.ask(ids[:30], "head", max_tokens=1)
    receives.forget()
    kv = kv_namespace(siblings.sender.fingerprint, spec_of(siblings.sender.kv_groups, BLOCK))
    flip(sends, kv, sends.submit(ids, "x").chain[3 * 16 : 4 * 16])
    request = await ask(receives, reusing(receives, siblings, ids, "reuse", SPANS[0]))
    timing = request.messages[0].timing
    assert (timing.cached_tokens, timing.sibling_tokens) == (24, 0)
    assert own_wrong_tokens(siblings.receiver, ids, request.token_ids) == []


async def test_the_senders_answer_is_context_up_to_its_whole_blocks(start_pair: Start, siblings: Siblings) -> None:
    sends, receives = await start_both(start_pair, siblings)
    ids = ids_of(64)
    answer = await sends.ask(ids, "context", max_tokens=25)
    ids += answer.token_ids[:24] + ids_of(5, seed=1)
    request = await ask(receives, reusing(receives, siblings, ids, "reuse", SPANS[0]))
    assert request.messages[0].timing.sibling_tokens == 88
    assert wrong(siblings, ids, request.token_ids, range(11), SPANS[0]) == []


@pytest.mark.parametrize("what", ["kv", "inputs"])
async def test_flipped_bits_are_found_and_the_rest_is_computed(
    start_pair: Start, siblings: Siblings, what: str
) -> None:
    sends, receives = await start_both(start_pair, siblings)
    ids, span = ids_of(), SPANS[0]
    await sends.ask(ids, "context")
    spec = spec_of(siblings.sender.kv_groups, BLOCK)
    hidden = hidden_spec([1], siblings.sender.config.hidden_size, "float32", BLOCK)
    namespaces = {
        "kv": kv_namespace(siblings.sender.fingerprint, spec),
        "inputs": hidden_parts(siblings.sender.fingerprint, hidden, 1).kv_namespace,
    }
    flip(sends, namespaces[what], sends.submit(ids, "x").chain[3 * 16 : 4 * 16])
    request = await ask(receives, reusing(receives, siblings, ids, "reuse", span))
    assert request.messages[0].timing.sibling_tokens == 24
    assert wrong(siblings, ids, request.token_ids, range(3), span) == []
    assert receives.prefill.node.counters.snapshot()["digest_mismatches"] == 1


async def test_without_a_profile_nothing_is_stored_or_reused(start_pair: Start, siblings: Siblings) -> None:
    sends, receives = await start_both(start_pair, siblings, reuse_profile=())
    ids = ids_of()
    await sends.ask(ids, "context")
    request = await ask(receives, reusing(receives, siblings, ids, "reuse", SPANS[0]))
    assert request.messages[0].timing.sibling_tokens == 0
    assert own_wrong_tokens(siblings.receiver, ids, request.token_ids) == []


async def test_a_point_that_the_profile_does_not_have_is_not_used(start_pair: Start, siblings: Siblings) -> None:
    sends, receives = await start_both(start_pair, siblings)
    ids = ids_of()
    await sends.ask(ids, "context")
    request = await ask(receives, reusing(receives, siblings, ids, "reuse", LayerSpan(0, 2)))
    assert request.messages[0].timing.sibling_tokens == 0
    assert own_wrong_tokens(siblings.receiver, ids, request.token_ids) == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"receiver": "m", "receiver_fingerprint": "f" * 32}, "receiver_fingerprint is f"),
        ({"num_layers": 5}, "num_layers is 5"),
        ({"hidden_size": 62}, "hidden_size is 62"),
        ({"dtype": "bfloat16"}, "dtype is bfloat16"),
    ],
)
async def test_an_unsuitable_profile_is_refused_by_the_field(
    start_pair: Start, siblings: Siblings, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    profile = write_profile(tmp_path / "other.json", siblings.sender, siblings.receiver, SPANS, **changed)
    with pytest.raises(StartupError, match=message):
        await start_pair(path=siblings.sender_path, reuse_profile=(str(profile),))
