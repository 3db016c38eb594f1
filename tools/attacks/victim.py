"""A second tenant's requests, sent while another one attacks: their tokens, their failures and their latency."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import aiohttp
import numpy as np

from tools.attacks.target import VICTIM, AttackedCluster, headers, unlimited_session

MAX_RETRIES = 2  # as OpenAI's client
_BACK_OFF_S = 0.1
MAX_TOKENS = 8
_LOW_ID, _HIGH_ID = 5, 1000


@dataclass(frozen=True)
class VictimAnswer:
    """One of the victim's requests; `error` is empty if it was answered in full."""

    is_structured: bool
    prompt_ids: list[int]
    token_ids: list[int]
    ttft_s: float  # from the time at which the request was due
    total_s: float
    retries: int  # after a broken connection
    error: str


def prompt_of(seed: int, length: int) -> list[int]:
    """Return a prompt of random token ids, the same for the same seed."""
    ids: list[int] = np.random.default_rng(seed).integers(_LOW_ID, _HIGH_ID, length).tolist()
    return ids


class Victim:
    """Tenant that sends greedy completions of random prompts, no two the same.

    Every `structured_every`-th request has a grammar, by turns one that the cluster knows and a new one; 0: none has.
    """

    def __init__(
        self, target: AttackedCluster, *, prompt_tokens: int = 90, within_s: float = 60.0, structured_every: int = 4
    ) -> None:
        self._target = target
        self._prompt_tokens, self._within_s, self._structured_every = prompt_tokens, within_s, structured_every
        self._seeds = itertools.count(1)

    async def ask(self, session: aiohttp.ClientSession, due_s: float | None = None) -> VictimAnswer:
        """Send one streamed completion, again after a broken connection, as clients of OpenAI's API do.

        `due_s`: the event loop's time from which latency counts, by default now.
        """
        loop = asyncio.get_running_loop()
        due_s = loop.time() if due_s is None else due_s
        seed, retries = next(self._seeds), 0
        prompt, grammar = prompt_of(seed, self._prompt_tokens), self._grammar(seed)
        while True:
            token_ids: list[int] = []
            texts: list[str] = []
            first_s = 0.0
            try:
                async with asyncio.timeout_at(due_s + self._within_s):
                    async for ids, text in self._stream(session, prompt, grammar):
                        first_s = first_s or loop.time()
                        token_ids += ids
                        texts.append(text)
                error = _fault(token_ids, "".join(texts), grammar)
            except TimeoutError:
                error = f"not answered within {self._within_s:g} s"
            except _HttpError as refused:
                error = str(refused)
            except (aiohttp.ClientError, OSError) as broken:
                error = f"{type(broken).__name__}: {broken}"
                if retries < MAX_RETRIES:
                    retries += 1
                    await asyncio.sleep(_BACK_OFF_S * retries)
                    continue
            now = loop.time()
            return VictimAnswer(bool(grammar), prompt, token_ids, (first_s or now) - due_s, now - due_s, retries, error)

    def _grammar(self, seed: int) -> str:
        """Return the regex of a request, "" for none; each has only texts of a, b and c."""
        if not self._structured_every or seed % self._structured_every:
            return ""
        return "[ab]+" if seed % (2 * self._structured_every) else f"[ab]+|[ab]+c{{{seed}}}"

    async def _stream(
        self, session: aiohttp.ClientSession, prompt: Sequence[int], grammar: str
    ) -> AsyncIterator[tuple[list[int], str]]:
        """Yield the token ids and the text of each event. Raises _HttpError for any status but 200."""
        body = {
            "prompt": list(prompt),
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": not grammar,
            "stream": True,
            "return_token_ids": True,
            **({"guided_regex": grammar} if grammar else {}),
        }
        url = f"{self._target.url}/v1/completions"
        async with session.post(url, json=body, headers=headers(VICTIM)) as response:
            if response.status != 200:
                raise _HttpError(f"HTTP {response.status}: {(await response.text())[:300]}")
            async for line in response.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise _HttpError(f"error event: {event['error']}")
                    for choice in event["choices"]:
                        yield choice.get("token_ids") or [], choice["text"]

    async def ask_until(self, over: asyncio.Event, pause_s: float = 0.05) -> list[VictimAnswer]:
        """Send one request after the other until `over` is set, and one after that."""
        served = []
        async with unlimited_session() as session:
            while not over.is_set():
                served.append(await self.ask(session))
                await asyncio.sleep(pause_s)
            served.append(await self.ask(session))
        return served

    async def ask_at_rate(self, rate: float, seconds: float) -> list[VictimAnswer]:
        """Send `rate` requests per second, answered or not; latency counts from the due times."""
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        async with unlimited_session() as session:
            asked = []
            for number in range(int(rate * seconds)):
                due_s = begin_s + number / rate
                await asyncio.sleep(due_s - loop.time())
                asked.append(asyncio.create_task(self.ask(session, due_s)))
            return await asyncio.gather(*asked)


def _fault(token_ids: Sequence[int], text: str, grammar: str) -> str:
    """Return what is wrong with a complete answer; "" if it has as many tokens as asked for, or follows its grammar."""
    if grammar:
        return "" if text and set(text) <= set("abc") else f"{text!r} does not match {grammar}"
    return "" if len(token_ids) == MAX_TOKENS else f"the answer ended after {len(token_ids)} tokens"


class _HttpError(Exception):
    """The request was refused or failed."""
