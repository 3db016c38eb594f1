"""Many requests with shared prefixes over little memory, cancelled and placed again at random: the tokens are right."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from engine import Model

Start = Callable[..., Awaitable[Any]]
Prompt = Callable[..., list[int]]
Greedy = Callable[[Model, list[int], int], list[int]]

NUM_REQUESTS = 60
AT_ONCE = 16


class Client:
    """One request's life, drawn from `seed`: finished, cancelled, or begun again where it was."""

    def __init__(self, pair: Any, seed: int, prompt: Prompt) -> None:
        self._pair = pair
        self._random = random.Random(seed)
        self._name = f"r{seed}"
        head = prompt(96, seed=self._random.randrange(3))[: self._random.choice([0, 8, 24, 64, 64, 96])]
        # Some prompts end on a block's border, and some are the same as others.
        self.prompt = head + prompt(self._random.choice([1, 8, 9]), seed=self._random.choice([7, 100 + seed]))
        self.max_tokens = self._random.randint(1, 24)
        self.got: list[int] = []
        self.fate = self._random.choice(["finish", "finish", "cancel", "again"])

    async def run(self, places: asyncio.Semaphore) -> None:
        async with places:
            request = await self._submit(1)
            if self.fate != "finish":
                await self._a_while(request)
            if self.fate == "cancel":
                await self._cancel(1)
            if self.fate == "again" and not request.ended.is_set():
                self.got = self._leading(request)
                if self._random.random() < 0.5:
                    await self._cancel(1)
                if len(self.got) < self.max_tokens:
                    request = await self._submit(2)
                    await request.ended.wait()
            if self.fate == "finish":
                await request.ended.wait()
            assert request.failures == []
            self.got = self.got[: request.first] + self._leading(request)

    async def _submit(self, attempt: int) -> Any:
        done = len(self.got)
        submit = self._pair.submit(
            self.prompt + self.got, self._name, max_tokens=self.max_tokens, attempt=attempt, generated=done
        )
        return await self._pair.frontend.submit(submit)

    def _leading(self, request: Any) -> list[int]:
        """Tokens without a gap: the first comes by another stream than the rest, and may be late."""
        found: list[int] = []
        while (index := request.first + len(found)) in request.tokens:
            found.append(request.tokens[index])
        return found

    async def _a_while(self, request: Any) -> None:
        """Any moment from before the prefill to after the end."""
        count = self._random.randint(0, self.max_tokens)
        if count == 0:
            for _ in range(self._random.randrange(40)):
                await asyncio.sleep(0)
            return
        reaching = asyncio.ensure_future(request.reaches(count))
        await asyncio.wait([reaching, asyncio.ensure_future(request.ended.wait())], return_when=asyncio.FIRST_COMPLETED)

    async def _cancel(self, attempt: int) -> None:
        for node in self._random.sample(["prefill", "decode"], 2):
            await self._pair.frontend.cancel(node, self._name, attempt)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
async def test_tokens_are_right_and_nothing_is_held_whatever_happens(
    transport: str, start_pair: Start, model: Model, prompt: Prompt, greedy: Greedy
) -> None:
    pair = await start_pair(transport, pool=True, capacity_tokens=384)
    places = asyncio.Semaphore(AT_ONCE)
    clients = [Client(pair, seed, prompt) for seed in range(NUM_REQUESTS)]
    async with asyncio.timeout(60):
        await asyncio.gather(*(client.run(places) for client in clients))
    await pair.at_rest()
    for client in clients:
        want = greedy(model, client.prompt, client.max_tokens)
        assert client.got == (want[: len(client.got)] if client.fate == "cancel" else want), client.fate
    assert {client.fate for client in clients} == {"finish", "cancel", "again"}
    assert pair.prefill.node.counters.snapshot()["cached_tokens"] > 0
