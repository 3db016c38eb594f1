"""Output of a frontend at its most verbose, through successes and failures, holds no secret."""

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moonpool_proto.v1 import worker_pb2
from rpc import control
from rpc.join_tokens import JoinTokens
from telemetry import logs
from tests.frontend.keys.conftest import ADMIN, ENTRIES, OTHER, USER, WriteKeys, bearer, entry_of

COMPLETIONS = "/v1/completions"
WRONG, TOKEN, STRANGER = "mp-wrong-secret-4", "join-token-secret-5-0123", "join-token-secret-6-4567"
TENANT_SALT, SALT, PROMPT = "tenant-salt-secret-7", "salt-secret-8", "a prompt that is secret-9"
SECRETS = (ADMIN, USER, OTHER, WRONG, TOKEN, STRANGER, TENANT_SALT, SALT, PROMPT)


def tokens(path: Path, token: str) -> JoinTokens:
    path.touch(0o600)
    path.write_text(token)
    return JoinTokens(path)


@pytest.fixture(autouse=True)
def joined(tmp_path: Path) -> Iterator[None]:
    """Before the scripted cluster starts: its processes, the frontend's included, show each other tokens."""
    control.admit_by(tokens(tmp_path / "tokens", TOKEN))
    yield
    control.admit_by(None)


@pytest.fixture(params=["text", "json"])
def written(request: pytest.FixtureRequest) -> Iterator[io.StringIO]:
    """All that is logged, in one format or the other."""
    root, stream = logging.getLogger(), io.StringIO()
    handlers, level = list(root.handlers), root.level
    logs.configure("frontend", "fe-0", "debug", json=request.param == "json", stream=stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)


async def test_no_secret_is_written_whatever_happens(
    cluster: Any, start_front: Any, write_keys: WriteKeys, written: io.StringIO, tmp_path: Path, until: Any
) -> None:
    cluster.answer_with(lambda submit: ([20], worker_pb2.FINISH_LENGTH))
    entries = [*ENTRIES[:2], entry_of("beta-1", OTHER, "beta", cache_salt=TENANT_SALT)]
    body = {"prompt": PROMPT, "max_tokens": 1, "cache_salt": SALT}
    told: list[str] = []
    path = write_keys(*entries)

    async def ask(front: Any, key: str, sent: Any = body, path: str = COMPLETIONS) -> int:
        status, answer = await front.post(path, sent, **bearer(key))
        told.append(json.dumps(answer))
        return int(status)

    async def logged() -> str:
        return written.getvalue()

    async with start_front(api_keys_file=path) as front:
        assert [await ask(front, key) for key in (USER, OTHER, WRONG)] == [200, 200, 401]
        assert await ask(front, USER, path=f"{COMPLETIONS}?api_key={USER}") == 200
        assert await ask(front, USER, body | {"seed": "x"}) == 400
        assert await ask(front, USER, path=f"/v1/nothing?api_key={USER}") == 404
        for page in ("/validate", "/openapi.json", "/metrics"):
            async with front.http.get(front.url + page, **bearer(ADMIN)) as response:
                assert response.status == 200
                told.append(await response.text())
        path.write_text(f"keys: [{{name: acme-1, hash: {USER}, cache_salt: {TENANT_SALT}}}]")  # broken
        await until(logged, lambda text: "keeping the previous API keys" in text)
    write_keys(*entries)
    control.admit_by(tokens(tmp_path / "of a stranger", STRANGER))
    async with start_front(api_keys_file=path, request_timeout_s=0.5) as front:
        assert await ask(front, USER) == 504
        await until(logged, lambda text: "refused a call from" in text and "set join_token_file" in text)
    assert "request finished" in written.getvalue()
    everything = written.getvalue() + "".join(told)
    assert [secret for secret in SECRETS if secret in everything] == []
