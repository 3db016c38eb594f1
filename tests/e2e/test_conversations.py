"""Dialogues against a live cluster: real answers come back as history, and nearly all of every prompt is reused."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest

from frontend import FrontendConfig, ServedModelConfig, serve_frontend
from frontend.tokenizer import Tokenizer
from loadtest.tokens import sentence
from settings.keys import assemble

MODEL = Path(__file__).parents[2] / "moonpool" / "data" / "model"
TURNS = 50
CLUSTERS: dict[int, tuple[str, ...]] = {16: (), 8: ("--aggregated", "1")}  # flags by tokens per block
LONG: dict[str, Any] = {"temperature": 2.0, "max_tokens": 28}


@dataclass
class Live:
    """A cluster and its tokens per block."""

    cluster: Any
    block: int

    @property
    def url(self) -> str:
        return str(self.cluster.url)


@dataclass
class Dialogue:
    """One chat; every answer becomes part of its history."""

    url: str
    session: aiohttp.ClientSession
    name: str
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)

    async def ask(self, question: str, **options: Any) -> dict[str, Any]:
        """One turn."""
        self.messages.append({"role": "user", "content": question})
        body = {
            "messages": self.messages,
            "temperature": 1.0,
            "seed": len(self.turns),
            "cache_salt": self.name,
            "return_token_ids": True,
            "max_tokens": 12,
            **options,
        }
        async with self.session.post(f"{self.url}/v1/chat/completions", json=body) as response:
            turn: dict[str, Any] = await response.json()
            assert response.status == 200, turn
        self.turns.append(turn)
        self.messages.append({"role": "assistant", "content": turn["choices"][0]["message"]["content"]})
        return turn

    def share_cached(self) -> float:
        """Return the share of all prompt tokens from the second turn on."""
        return sum(map(cached, self.turns[1:])) / sum(len(turn["prompt_token_ids"]) for turn in self.turns[1:])


def cached(turn: dict[str, Any]) -> int:
    """Prompt tokens whose KV was reused."""
    return int(turn["usage"]["prompt_tokens_details"]["cached_tokens"])


def computed(turn: dict[str, Any]) -> list[int]:
    """All ids whose KV there is after a turn: an answer's last one is never fed back."""
    return [*turn["prompt_token_ids"], *turn["choices"][0]["token_ids"][:-1]]


def common(a: list[int], b: list[int]) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def question(name: str, turn: int) -> str:
    """Nine words."""
    return " ".join(sentence(Random(f"{name} {turn}")).split()[:9])


async def talk(dialogue: Dialogue, turns: int = TURNS) -> Dialogue:
    for turn in range(turns):
        await dialogue.ask(question(dialogue.name, turn))
    return dialogue


async def talk_in_letters(dialogue: Dialogue, turns: int = TURNS) -> Dialogue:
    """Short questions, answered letter by letter: no tokenizer would make these ids of their text."""
    tokenizer = Tokenizer(MODEL)
    letters = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "etaoinshrdlu"]
    odd = {"logit_bias": {str(token_id): 100 for token_id in letters}, "frequency_penalty": 2.0, "temperature": 2.0}
    for turn in range(turns):
        await dialogue.ask(("Go on.", "More.")[turn % 2], max_tokens=20, **odd)
    return dialogue


async def talk_long(dialogue: Dialogue, turns: int = TURNS, **options: Any) -> Dialogue:
    """Short questions, long answers."""
    for turn in range(turns):
        await dialogue.ask(("Go on.", "More.")[turn % 2], **LONG, **options)
    return dialogue


@pytest.fixture(scope="module", params=[pytest.param(8, marks=pytest.mark.nightly), 16])
def live(request: pytest.FixtureRequest, start_cluster: Callable[..., AbstractContextManager[Any]]) -> Iterator[Live]:
    flags = ["--block-tokens", str(request.param), "--max-model-len", "2048"]
    with start_cluster(MODEL, *flags, *CLUSTERS[request.param]) as cluster:
        yield Live(cluster, request.param)


@asynccontextmanager
async def front_without_memory(live: Live) -> AsyncIterator[str]:
    """The address of a further frontend of the cluster that remembers no answers."""
    stop, url = asyncio.Event(), asyncio.get_running_loop().create_future()
    config = assemble(
        FrontendConfig,
        models=(ServedModelConfig(MODEL, live.cluster.ready["model"]),),
        conductor_targets=(live.cluster.ready["conductor"],),
        port=0,
        node_id="front-without-memory",
        block_tokens=live.block,
        answer_memory_bytes=0,
    )
    serving = asyncio.create_task(serve_frontend(config, stop, url.set_result))
    try:
        async with asyncio.timeout(60):
            yield await url
    finally:
        stop.set()
        await serving


async def test_fifty_turns_reuse_at_least_95_percent_of_their_prompts(live: Live, session: Any) -> None:
    dialogues = [Dialogue(live.url, session, name) for name in ("ada", "bob", "cyd")]
    await asyncio.gather(talk(dialogues[0]), talk_long(dialogues[1]), talk_in_letters(dialogues[2]))
    shares = [round(dialogue.share_cached(), 4) for dialogue in dialogues]
    print(f"blocks of {live.block}: {shares} of the prompts from turn 2 on were cached")
    assert all(len(dialogue.turns[-1]["prompt_token_ids"]) > 1000 for dialogue in dialogues)
    assert min(shares) >= 0.95
    await live.cluster.validate()


@pytest.mark.long
@pytest.mark.parametrize("live", [16], indirect=True)
async def test_without_the_memory_of_answers_less_is_reused(live: Live, session: Any) -> None:
    async with front_without_memory(live) as url:
        off = await talk_in_letters(Dialogue(url, session, "off"))
    on = await talk_in_letters(Dialogue(live.url, session, "on"))
    print(f"blocks of {live.block}: {on.share_cached():.4f} with the memory, {off.share_cached():.4f} without")
    assert on.share_cached() >= 0.97
    assert off.share_cached() < on.share_cached() - 0.01


async def test_all_of_an_answer_that_a_stop_string_cut_is_found_by_the_next_turn(live: Live, session: Any) -> None:
    tokenizer = Tokenizer(MODEL)
    whole = await Dialogue(live.url, session, "whole").ask("Tell me a story.", **LONG)
    texts = [tokenizer.decode([token_id], skip_special_tokens=True) for token_id in whole["choices"][0]["token_ids"]]
    assert len(texts) > 20
    told = "".join(texts)
    stop = next(told[at : at + 3] for at in range(len(told) * 2 // 3, len(told)) if told.find(told[at : at + 3]) == at)
    dialogue = Dialogue(live.url, session, "cut")
    first = await dialogue.ask("Tell me a story.", stop=stop, **{**LONG, "max_tokens": 400})
    assert first["choices"][0]["stop_reason"] == stop
    await live.cluster.validate()
    second = await dialogue.ask("Go on.", stop=stop, **LONG)
    prompt = second["prompt_token_ids"]
    reusable = common(computed(first), prompt)
    # All ids of the answer but the one that the stop string cut, and what came with it.
    assert reusable >= len(first["prompt_token_ids"]) + 12
    assert cached(second) == reusable
    await live.cluster.validate()


async def test_a_client_that_leaves_frees_everything(live: Live, session: Any) -> None:
    body = {"messages": [{"role": "user", "content": "Tell me a story."}], "stream": True, **LONG, "max_tokens": 1500}
    response = await session.post(f"{live.url}/v1/chat/completions", json=body)
    await response.content.readline()
    response.close()
    await live.cluster.validate()


async def test_an_edited_history_is_reused_up_to_the_edit(live: Live, session: Any) -> None:
    dialogue = await talk_long(Dialogue(live.url, session, "edited"), 12)
    await live.cluster.validate()
    before = dialogue.turns[5]  # the last one that the edit leaves as it was
    dialogue.messages[12] = {"role": "user", "content": "Something else."}
    turn = await dialogue.ask("And?", **LONG)
    same = common(computed(dialogue.turns[11]), turn["prompt_token_ids"])
    assert len(computed(before)) <= same < len(dialogue.turns[6]["prompt_token_ids"])
    assert cached(turn) == same // live.block * live.block


@pytest.mark.long
@pytest.mark.parametrize("live", [16], indirect=True)
async def test_the_dialogue_generator_finds_high_reuse_and_no_wrong_token(live: Live, tmp_path: Path) -> None:
    flags = "--dialogues 2 --turns 12 --think-time 0.02 --turn-tokens 8 --answer-tokens 24 --temperature 2 --verify"
    command = [sys.executable, "-m", "moonpool", "dialogues", "--url", live.url, "--out", str(tmp_path), *flags.split()]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    figures = json.loads(done.stdout.decode().splitlines()[-1])
    assert (figures["completed"], figures["wrong_tokens"]) == (24, 0)
    assert figures["share_of_history"] > 0.9
    report = json.loads((tmp_path / "dialogues.json").read_text())
    assert report["verified_turns"] == 24
    assert report["verification"]["requests_with_reuse"] >= 22


@pytest.mark.long
@pytest.mark.parametrize("live", [16], indirect=True)
async def test_a_dialogue_longer_than_the_context_goes_on_and_is_reused(live: Live, session: Any) -> None:
    dialogue = Dialogue(live.url, session, "endless", [{"role": "system", "content": "You are a patient helper."}])
    await talk_long(dialogue, 110, truncation="auto")
    dropped = [turn["moonpool"]["dropped_messages"] for turn in dialogue.turns]
    print(f"blocks of {live.block}: {dialogue.share_cached():.4f} cached over cuts at {sorted(set(dropped))}")
    assert dropped[0] == 0
    assert 2 <= len(set(dropped)) <= 6
    assert dialogue.share_cached() >= 0.9
