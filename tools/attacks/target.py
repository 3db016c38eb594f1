"""The attacked cluster: its addresses, the keys of its tenants, and requests under these keys."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

ATTACKER, VICTIM, LIMITED, ADMIN = "attacker", "victim", "limited", "admin"
KEYS = {name: f"key-of-{name}-0123456789" for name in (ATTACKER, VICTIM, LIMITED, ADMIN)}
# The limited tenant's quota.
REQUESTS_PER_MINUTE, TOKENS_PER_MINUTE, MAX_CONCURRENT = 5, 4000, 1

NO_ANSWER = "no answer"
"""Outcome of a request without an answer within its time."""


def write_keys_file(path: Path) -> Path:
    """Write an API keys file with a tenant for each of `KEYS`, of which `LIMITED` has a quota. Returns the path."""
    entries = []
    for name, key in KEYS.items():
        entry: dict[str, Any] = {
            "name": name,
            "hash": f"sha256:{hashlib.sha256(key.encode()).hexdigest()}",
            "tenant": name,
            "scope": "admin" if name == ADMIN else "user",
        }
        if name == LIMITED:
            entry |= {
                "requests_per_minute": REQUESTS_PER_MINUTE,
                "tokens_per_minute": TOKENS_PER_MINUTE,
                "max_concurrent": MAX_CONCURRENT,
            }
        entries.append(entry)
    path.touch(mode=0o600)
    path.write_text(json.dumps({"keys": entries}))  # JSON is YAML
    return path


@dataclass(frozen=True)
class Answer:
    """HTTP response; `status` is 0 if there was none, and `body` then names the error."""

    status: int
    body: bytes
    took_s: float

    @property
    def outcome(self) -> str:
        return str(self.status) if self.status else NO_ANSWER


@dataclass(frozen=True)
class AttackedCluster:
    """Cluster started by `moonpool serve` with the keys file of `write_keys_file`."""

    url: str
    ready_file: Path

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return str(parts.hostname), int(parts.port or 80)

    @property
    def ready(self) -> dict[str, Any]:
        """The content of the ready file, read anew."""
        ready: dict[str, Any] = json.loads(self.ready_file.read_text())
        return ready

    def pids(self) -> dict[str, int]:
        """Return the process id of every running node."""
        return {name: int(node["pid"]) for name, node in self.ready["nodes"].items() if node["pid"]}

    def socket_path(self, node_id: str) -> str:
        """Return the path of a node's gRPC socket."""
        return f"{self.ready['run_dir']}/{node_id}.sock"


def headers(who: str | None) -> dict[str, str]:
    """Return the headers of a JSON request of a tenant, or of a client without a key."""
    return {"content-type": "application/json"} | ({"authorization": f"Bearer {KEYS[who]}"} if who else {})


def encoded(body: Any) -> bytes:
    """Return the bytes of a body, which JSON values are encoded to."""
    return body if isinstance(body, bytes) else json.dumps(body).encode()


async def post(
    session: aiohttp.ClientSession,
    target: AttackedCluster,
    path: str,
    body: Any,
    who: str | None = ATTACKER,
    *,
    within_s: float = 30.0,
) -> Answer:
    """Send a request and read the whole answer; without one within `within_s`, the status is 0."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    try:
        async with (
            asyncio.timeout(within_s),
            session.post(target.url + path, data=io.BytesIO(encoded(body)), headers=headers(who)) as response,
        ):
            status, answer = response.status, await response.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        status, answer = 0, f"{type(error).__name__}: {error}".encode()
    return Answer(status, answer, loop.time() - began)


def unlimited_session() -> aiohttp.ClientSession:
    """Return a session without limits on connections or time."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None))


@dataclass(frozen=True)
class Attack:
    """An attack on a cluster. `run` carries it out once and counts what the attacker saw, by outcome."""

    name: str
    description: str
    run: Callable[[AttackedCluster], Awaitable[Counter[str]]]
    expected: frozenset[str]  # the outcomes that the attacker may see of a defended cluster
    within_s: float = 60.0  # bound on one run

    def unexpected(self, outcomes: Mapping[str, int]) -> dict[str, int]:
        """Return the outcomes that a defended cluster does not give."""
        return {outcome: count for outcome, count in outcomes.items() if outcome not in self.expected}


async def together(requests: list[Awaitable[Answer]]) -> Counter[str]:
    """Await requests sent at the same time and count their outcomes."""
    return Counter(answer.outcome for answer in await asyncio.gather(*requests))
