"""What all roles write about requests: JSON, with the request's id and attempt, and nothing that a client wrote."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

KEY, PROMPT, SALT = "key-4711-secret", "the prompt that nobody may read", "salt-0815"
WRONG_KEY = "key-0000-wrong"


@pytest.fixture(scope="module")
def cluster(random_model: Path, start_cluster: Callable[..., Any]) -> Any:
    flags = ["--log-format", "json", "--log-level", "debug", "--api-key", KEY, "--engine", "paced"]
    with start_cluster(random_model, *flags) as running:
        yield running


@pytest.fixture
async def request_id(cluster: Any, session: aiohttp.ClientSession) -> str:
    """Of a request that was served, after several that were refused, each with what must not be told."""
    url, headers = f"{cluster.url}/v1/completions", {"authorization": f"Bearer {KEY}"}
    body = {"prompt": PROMPT, "max_tokens": 6, "ignore_eos": True, "cache_salt": SALT, "stop": [PROMPT]}
    refused: list[tuple[dict[str, Any], dict[str, str]]] = [
        (body, {"authorization": f"Bearer {WRONG_KEY}"}),
        (body | {"temperature": PROMPT}, headers),
        (body | {"prompt": {"text": PROMPT}}, headers),
        (body | {"model": PROMPT}, headers),
        (body | {"structured_outputs": {"regex": f"({PROMPT}"}}, headers),
        (body, headers | {"x-slo-class": PROMPT}),
    ]
    for sent, given in refused:
        async with session.post(url, json=sent, headers=given) as response:
            assert 400 <= response.status < 500, await response.text()
    async with session.post(url, data=f'{{"prompt": "{PROMPT}", '.encode(), headers=headers) as response:
        assert response.status == 400
    async with session.post(url, json=body, headers=headers) as response:
        answer = await response.json()
        assert response.status == 200, answer
    return str(answer["moonpool"]["request_id"])


def text_of(cluster: Any, node: str) -> str:
    return Path(cluster.ready["nodes"][node]["log"]).read_text()


def lines_of(cluster: Any, node: str) -> list[dict[str, Any]]:
    """A node's log; the lines that announce it to its supervisor are not of it."""
    lines = text_of(cluster, node).splitlines()
    return [json.loads(line) for line in lines if not line.startswith("MOONPOOL_")]


async def test_every_role_tells_a_request_by_id_and_attempt_and_nobody_what_it_says(
    cluster: Any, request_id: str
) -> None:
    expected = {"frontend": "request finished", "conductor": "decided", "prefill-0": "request over here"}
    expected |= {"decode-0": "request over here"}
    async with asyncio.timeout(60):  # workers are told of the end by their own ways
        while True:
            found = {
                node: [line for line in lines_of(cluster, node) if line.get("request_id") == request_id]
                for node in expected
            }
            if all(any(line["message"] == expected[node] for line in found[node]) for node in expected):
                break
            await asyncio.sleep(0.1)
    for node, told in found.items():
        assert {line["node"] for line in told} == {node}
        said = next(line for line in told if line["message"] == expected[node])
        assert said["attempt"] == 0
    for node in cluster.ready["nodes"]:
        text = text_of(cluster, node)
        for secret in (KEY, WRONG_KEY, PROMPT, SALT):
            assert secret not in text, (node, secret)
        assert lines_of(cluster, node)
