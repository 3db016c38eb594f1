"""Clients of the cluster: each sends one request after the other, and retries as a sensible client would.

Policy of a client: a connection that is refused or broken, a named error of the server (status 429, 500, 503, 504 or an
error event) and an end without a finish reason are retried at the other frontend, as a new request with the same body,
after a pause of 0.2 s that doubles up to 2 s, until `DEADLINE_S` after the request began. An attempt from which nothing
comes for `IDLE_S` hangs.

A request is *lost* if it has no complete answer at its deadline, if an attempt hangs, or if it is refused with a status
that a client does not retry.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Sequence

import aiohttp

from tools.chaos.requests import ClientAttempt, ClientRequest, Form, Script, is_complete, take

IDLE_S = 45.0
DEADLINE_S = 150.0
CONNECT_S = 4.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 2.0
READER_PAUSE_S = 0.04
RETRIED = (408, 429, 500, 502, 503, 504)
SLOW_BUFFER = 4096


class Load:
    """Clients, and all that they asked."""

    def __init__(self, urls: Sequence[str], seed: int, clients: dict[str, int]) -> None:
        """`clients`: number of clients per model."""
        self.requests: list[ClientRequest] = []
        self._urls = list(urls)
        self._seed = seed
        self._scripts = [(model, number) for model, count in clients.items() for number in range(count)]
        self._is_over = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.half_open = 0

    def begin(self, session: aiohttp.ClientSession) -> None:
        """Start all clients."""
        self._tasks = [
            asyncio.create_task(self._lead(session, model, number, place))
            for place, (model, number) in enumerate(self._scripts)
        ]
        self._tasks.append(asyncio.create_task(self._leave_half_open()))

    async def end(self) -> None:
        """Start nothing new, and wait until every request has ended."""
        self._is_over.set()
        await asyncio.gather(*self._tasks)

    def failures(self) -> list[BaseException]:
        """Return the exceptions that ended clients."""
        return [error for task in self._tasks if task.done() and (error := task.exception()) is not None]

    async def _lead(self, session: aiohttp.ClientSession, model: str, number: int, place: int) -> None:
        script, pauses = Script(f"{self._seed}/{model}/{number}", model), random.Random(f"{self._seed}/{place}")
        text = ""
        while not self._is_over.is_set():
            request = script.ask(text)
            self.requests.append(request)
            await self.send(session, request, first_frontend=place + request.number)
            choices = request.attempts[-1].received.choices
            text = choices[0].text if 0 in choices else ""
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_over.wait(), pauses.uniform(0.05, 0.6))

    async def send(self, session: aiohttp.ClientSession, request: ClientRequest, *, first_frontend: int) -> None:
        """Send a request until it has an outcome."""
        began_s, pause_s = time.monotonic(), FIRST_PAUSE_S
        while True:
            attempt = ClientAttempt((first_frontend + len(request.attempts)) % len(self._urls), time.monotonic())
            request.attempts.append(attempt)
            await self._try(session, request, attempt)
            attempt.ended_s = time.monotonic()
            if attempt.outcome in ("completed", "cancelled"):
                request.outcome = attempt.outcome
                return
            if attempt.outcome == "hung":
                request.outcome, request.why = "lost", f"nothing came for {IDLE_S:.0f} s"
                return
            if attempt.outcome.startswith("status "):
                request.outcome, request.why = "lost", f"{attempt.outcome}: {attempt.detail}"
                return
            if time.monotonic() - began_s + pause_s > DEADLINE_S:
                request.outcome, request.why = "lost", f"no answer in {DEADLINE_S:.0f} s; last: {attempt.outcome}"
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _try(self, session: aiohttp.ClientSession, request: ClientRequest, attempt: ClientAttempt) -> None:
        path = "/v1/chat/completions" if request.is_chat else "/v1/completions"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=IDLE_S)
        try:
            async with session.post(
                self._urls[attempt.frontend] + path, json=request.body, timeout=timeout, read_bufsize=SLOW_BUFFER
            ) as response:
                if response.status != 200:
                    self._note_error(attempt, response.status, await response.text())
                elif request.body.get("stream"):
                    await self._read(request, attempt, response)
                else:
                    take(attempt.received, json.loads(await response.read()))
                    attempt.outcome = "completed" if is_complete(request, attempt.received) else "broken"
        except aiohttp.ConnectionTimeoutError as error:
            attempt.outcome, attempt.detail = "refused", repr(error)
        except TimeoutError as error:
            attempt.outcome, attempt.detail = "hung", repr(error)
        except aiohttp.ClientConnectorError as error:
            attempt.outcome, attempt.detail = "refused", repr(error)
        except (aiohttp.ClientError, ConnectionError) as error:
            attempt.outcome, attempt.detail = "broken", repr(error)

    @staticmethod
    def _note_error(attempt: ClientAttempt, status: int, text: str) -> None:
        try:
            error = json.loads(text)["error"]
            attempt.outcome, attempt.detail = str(error["code"] or error["type"]), str(error["message"])
        except (ValueError, KeyError, TypeError):
            attempt.outcome, attempt.detail = f"status {status}", text[:300]
        if status not in RETRIED:
            attempt.outcome = f"status {status}"

    async def _read(self, request: ClientRequest, attempt: ClientAttempt, response: aiohttp.ClientResponse) -> None:
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                error = event["error"]
                attempt.outcome, attempt.detail = str(error["code"] or error["type"]), str(error["message"])
                return
            take(attempt.received, event)
            if 0 < request.cancels_after <= attempt.received.num_tokens:
                attempt.outcome = "cancelled"
                response.close()
                return
            if request.form == Form.SLOW_READER:
                await asyncio.sleep(READER_PAUSE_S)
        attempt.outcome = "completed" if is_complete(request, attempt.received) else "broken"

    async def _leave_half_open(self) -> None:
        """Open connections that send part of a request, stay for seconds, and vanish."""
        rng = random.Random(f"{self._seed}/half-open")
        while not self._is_over.is_set():
            host, _, port = rng.choice(self._urls).removeprefix("http://").rpartition(":")
            with contextlib.suppress(OSError, TimeoutError):
                _, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), CONNECT_S)
                try:
                    writer.write(
                        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 900\r\n\r\n{"[
                            : rng.randrange(9, 80)
                        ]
                    )
                    self.half_open += 1
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._is_over.wait(), rng.uniform(0.5, 4.0))
                finally:
                    writer.transport.abort()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_over.wait(), rng.uniform(0.5, 2.0))
