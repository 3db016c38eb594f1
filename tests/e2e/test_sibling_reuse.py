"""A tuned model on a cluster reuses its sibling's KV: the mixed KV's tokens, whatever dies, and exact ones else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from engine import LayerSpan, Model, load_model
from engine.random_model import RandomModelSpec, write_random_model
from tests.e2e.conftest import TOKENIZER, Answer
from tests.e2e.damage import flip_bits
from tests.worker.sibling_reference import own_wrong_tokens, write_profile, wrong_tokens

pytestmark = pytest.mark.long

BLOCK = 16
SPAN = LayerSpan(1, 2)
CONTEXT = 600
LAYERS = 6


@dataclass(frozen=True)
class Siblings:
    """Two models of one shape, their folders, and the profile of their reuse."""

    folders: tuple[Path, Path]
    models: tuple[Model, Model]
    profile: Path


@pytest.fixture(scope="module")
def siblings(tmp_path_factory: pytest.TempPathFactory) -> Siblings:
    folder = tmp_path_factory.mktemp("siblings")

    def written(name: str, seed: int) -> Path:
        spec = RandomModelSpec(layers=LAYERS, hidden=128, vocab=2048, max_len=2048, scale=3.0, seed=seed)
        return write_random_model(folder / name, spec, tokenizer=TOKENIZER)

    folders = written("sender", 5), written("receiver", 6)
    models = load_model(folders[0], threads=1), load_model(folders[1], threads=1)
    return Siblings(folders, models, write_profile(folder / "reuse.json", *models, [SPAN]))


@pytest.fixture(scope="module")
def cluster(siblings: Siblings, start_cluster: Callable[..., Any]) -> Any:
    tuned = f"receiver={siblings.folders[1]},prefill_nodes=2,decode_nodes=2"
    flags = ["--add-model", tuned, "--reuse-profile", str(siblings.profile), "--block-tokens", str(BLOCK)]
    with start_cluster(siblings.folders[0], "--prefill-nodes", "1", "--decode-nodes", "1", *flags) as running:
        yield running


def ids_of(seed: int, length: int = CONTEXT) -> list[int]:
    return np.random.default_rng(seed).integers(5, 2000, length).tolist()


async def receive(session: aiohttp.ClientSession, cluster: Any, seed: int, **options: Any) -> Answer:
    """The answer of the receiver to a context that the sender has just computed, and 20 more tokens."""
    context = ids_of(seed)
    await cluster.complete(session, context, max_tokens=1)
    await cluster.validate()  # everything is stored
    asked = {"model": "receiver", "temperature": 0.0, "ignore_eos": True, **options}
    answer: Answer = await cluster.complete(session, [*context, *ids_of(seed + 1000, 20)], **asked)
    return answer


def wrong(siblings: Siblings, answer: Answer) -> list[int]:
    blocks = range(answer.moonpool["sibling_tokens"] // BLOCK)
    return wrong_tokens(siblings.models, answer.prompt_ids, answer.token_ids, blocks, SPAN, BLOCK)


async def test_the_siblings_kv_is_reused_and_named(
    cluster: Any, siblings: Siblings, session: aiohttp.ClientSession
) -> None:
    answer = await receive(session, cluster, 1, max_tokens=24, return_receipt=True)
    whole = CONTEXT // BLOCK * BLOCK
    assert (answer.moonpool["sibling_tokens"], answer.cached_tokens) == (whole, 0)
    assert answer.moonpool["approximate_tokens"] == whole
    kv = answer.moonpool["receipt"]["attempts"][0]["kv"]
    assert (kv["sibling_tokens"], kv["computed_tokens"]) == (whole, CONTEXT + 20 - whole)
    assert wrong(siblings, answer) == []
    async with asyncio.timeout(30):
        while await counted(session, cluster) < whole:
            await asyncio.sleep(0.05)  # until the next report
    # The same prompt again: nothing that followed from the sibling's KV counts as the receiver's own.
    again = await cluster.complete(session, answer.prompt_ids, model="receiver", temperature=0.0, max_tokens=24)
    assert again.cached_tokens == 0
    await cluster.validate()


async def counted(session: aiohttp.ClientSession, cluster: Any) -> float:
    """The cluster's counter of tokens whose KV a sibling computed."""
    async with session.get(f"{cluster.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("moonpool:sibling_tokens_total{"))


@pytest.mark.parametrize("victim", ["receiver-decode-0", "receiver-decode-1", "conductor"])
async def test_an_answer_goes_on_after_the_death_of(
    cluster: Any, siblings: Siblings, session: aiohttp.ClientSession, victim: str
) -> None:
    context = ids_of(2 + len(victim))
    await cluster.complete(session, context, max_tokens=1)
    await cluster.validate()
    prompt, ids, old, sibling_tokens = [*context, *ids_of(77, 20)], list[int](), 0, 0
    body = {"model": "receiver", "prompt": prompt, "temperature": 0.0, "stream": True, "ignore_eos": True}
    body |= {"return_token_ids": True, "max_tokens": 300}
    async with session.post(f"{cluster.url}/v1/completions", json=body) as response:
        async for event in events_of(response):
            for choice in event.get("choices", []):
                ids += choice.get("token_ids") or []
            sibling_tokens = event.get("moonpool", {}).get("sibling_tokens", sibling_tokens)
            if len(ids) >= 100 and not old:
                old = cluster.kill(victim)
    assert len(ids) == 300
    assert sibling_tokens == CONTEXT // BLOCK * BLOCK
    blocks = range(sibling_tokens // BLOCK)
    assert wrong_tokens(siblings.models, prompt, ids, blocks, SPAN, BLOCK) == []
    await cluster.wait_restarted(victim, old)
    await cluster.validate()


async def events_of(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    assert response.status == 200, await response.text()
    async for line in response.content:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            assert "error" not in event, event
            yield event


async def test_flipped_bits_in_what_the_sibling_stored_are_caught_and_computed(
    cluster: Any, siblings: Siblings, session: aiohttp.ClientSession
) -> None:
    context = ids_of(15)
    await cluster.complete(session, context, max_tokens=1)
    await cluster.validate()
    flip_bits(cluster.pid("pool-0"))
    answer = await cluster.complete(
        session, [*context, *ids_of(79, 20)], model="receiver", temperature=0.0, max_tokens=24, ignore_eos=True
    )
    assert answer.moonpool["sibling_tokens"] == 0
    assert own_wrong_tokens(siblings.models[1], answer.prompt_ids, answer.token_ids) == []
    await cluster.validate()


async def test_without_the_siblings_kv_the_answer_is_exact(
    cluster: Any, siblings: Siblings, session: aiohttp.ClientSession
) -> None:
    context = ids_of(9)
    await cluster.complete(session, context, max_tokens=1)
    old = cluster.kill("pool-0")
    await cluster.wait_restarted("pool-0", old)
    answer = await cluster.complete(
        session, [*context, *ids_of(78, 20)], model="receiver", temperature=0.0, max_tokens=24, ignore_eos=True
    )
    assert answer.moonpool["sibling_tokens"] == 0
    assert own_wrong_tokens(siblings.models[1], answer.prompt_ids, answer.token_ids) == []
    await cluster.validate()


def test_a_profile_that_cannot_be_read_is_refused(
    siblings: Siblings, tmp_path: Path, moonpool: Any, assert_refused: Any
) -> None:
    (tmp_path / "broken.json").write_text("{")
    done = moonpool("serve", siblings.folders[0], "--reuse-profile", tmp_path / "broken.json", "--port", 0)
    assert_refused(done, "broken.json", "not JSON", "moonpool droidspeak profile")
