"""Requests for what the caller may not have: each operator's page and action, without a key and as a tenant."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tools.attacks.target import ADMIN, ATTACKER, Attack, AttackedCluster, encoded, headers, unlimited_session

NODE = {"node_id": "decode-0"}


@dataclass(frozen=True)
class GuardedRequest:
    """A request, and the status that its caller must get."""

    name: str
    path: str
    who: str | None
    status: int
    body: Any = None  # sent with POST, if given
    headers: dict[str, str] = field(default_factory=dict)

    async def attempt(self, session: aiohttp.ClientSession, target: AttackedCluster) -> tuple[int, bytes]:
        """Return the status and the body of the response."""
        method = "GET" if self.body is None else "POST"
        data = None if self.body is None else encoded(self.body)
        async with session.request(
            method, target.url + self.path, data=data, headers=headers(self.who) | self.headers, allow_redirects=False
        ) as response:
            return response.status, await response.read()


def _as(scheme: str) -> dict[str, str]:
    return {"authorization": scheme}


ACCESSES = (
    GuardedRequest("models without a key", "/v1/models", None, 401),
    GuardedRequest("models with an unknown key", "/v1/models", None, 401, headers=_as("Bearer nope")),
    GuardedRequest("models with basic authentication", "/v1/models", None, 401, headers=_as("Basic a2V5")),
    GuardedRequest("completion without a key", "/v1/completions", None, 401, {"prompt": "a", "max_tokens": 1}),
    GuardedRequest("tokenising without a key", "/tokenize", None, 401, {"prompt": "a"}),
    GuardedRequest("console's state without a key", "/console/api/state", None, 401),
    GuardedRequest("console's state as a tenant", "/console/api/state", ATTACKER, 403),
    GuardedRequest("a request's decision as a tenant", "/console/api/requests/cmpl-1", ATTACKER, 403),
    GuardedRequest("validation without a key", "/validate", None, 401),
    GuardedRequest("validation as a tenant", "/validate", ATTACKER, 403),
    GuardedRequest("drain without a key", "/console/api/drain", None, 401, NODE),
    GuardedRequest("drain as a tenant", "/console/api/drain", ATTACKER, 403, NODE),
    GuardedRequest("role switch as a tenant", "/console/api/switch", ATTACKER, 403, NODE),
    GuardedRequest("objectives as a tenant", "/console/api/objectives", ATTACKER, 403, {}),
    GuardedRequest("whether keys are needed", "/console/api/about", None, 200),
    GuardedRequest("console's state as an admin", "/console/api/state", ADMIN, 200),
)


async def _run(target: AttackedCluster) -> Counter[str]:
    found: Counter[str] = Counter()
    async with unlimited_session() as session:
        for access in ACCESSES:
            status, _ = await access.attempt(session, target)
            found["as expected" if status == access.status else f"{access.name}: {status}"] += 1
    return found


DENIED = Attack(
    "access beyond one's key",
    f"{len(ACCESSES)} requests without or with the wrong key",
    _run,
    frozenset({"as expected"}),
)
