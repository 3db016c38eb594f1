"""Logs of all roles about requests: JSON, with id and attempt, without client content or secrets."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import yaml

KEY, PROMPT, SALT = "key-4711-secret", "the prompt that nobody may read", "salt-0815"
WRONG_KEY = "key-0000-wrong"
FILE_KEY, ADMIN, TENANT_SALT = "mp-file-key-0042-secret", "mp-admin-0007-secret", "tenant-salt-0099-secret"
TOKEN, OLD_TOKEN, REDIS_PASSWORD = (
    "join-token-0123456789-secret",
    "join-token-9876543210-secret",
    "redis-word-1234-secret",
)
SECRETS = (KEY, WRONG_KEY, SALT, FILE_KEY, ADMIN, TENANT_SALT, TOKEN, OLD_TOKEN, REDIS_PASSWORD)


def entry(name: str, key: str, tenant: str, **more: str) -> dict[str, str]:
    return {"name": name, "hash": "sha256:" + hashlib.sha256(key.encode()).hexdigest(), "tenant": tenant, **more}


def private(path: Path, text: str) -> str:
    path.touch(0o600)
    path.write_text(text)
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("secrets")


@pytest.fixture(scope="module")
def cluster(random_model: Path, start_cluster: Callable[..., Any], folder: Path, otlp_receiver: Any) -> Iterator[Any]:
    """With secrets of every kind, all given as operators should: by files and variables."""
    entries = [entry("acme", FILE_KEY, "acme", cache_salt=TENANT_SALT), entry("ops", ADMIN, "ops", scope="admin")]
    flags = ["--log-format", "json", "--log-level", "debug", "--engine", "paced"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOONPOOL_API_KEY", KEY)
        patch.setenv("MOONPOOL_API_KEYS_FILE", private(folder / "keys.yaml", yaml.safe_dump({"keys": entries})))
        patch.setenv("MOONPOOL_JOIN_TOKEN_FILE", private(folder / "tokens", f"{TOKEN}\n{OLD_TOKEN}\n"))
        patch.setenv("MOONPOOL_REDIS_URL", "redis://127.0.0.1:9/0")  # nobody is there, which is told often
        patch.setenv("MOONPOOL_REDIS_PASSWORD", REDIS_PASSWORD)
        patch.setenv("MOONPOOL_DECISION_LOG", str(folder / "decisions"))
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", otlp_receiver.url)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        with start_cluster(random_model, *flags) as running:
            yield running


@pytest.fixture(scope="module")
def refusals() -> list[str]:
    """The bodies of answers that refuse something."""
    return []


@pytest.fixture
async def request_id(cluster: Any, session: aiohttp.ClientSession, refusals: list[str]) -> str:
    """Logs of a request that was served after several were refused, each with content that must not be logged."""
    url, headers = f"{cluster.url}/v1/completions", {"authorization": f"Bearer {KEY}"}
    body = {"prompt": PROMPT, "max_tokens": 6, "ignore_eos": True, "cache_salt": SALT, "stop": [PROMPT]}
    refused: list[tuple[dict[str, Any], dict[str, str]]] = [
        (body, {"authorization": f"Bearer {WRONG_KEY}"}),
        (body, {"authorization": f"Basic {FILE_KEY}"}),
        (body | {"temperature": PROMPT}, headers),
        (body | {"prompt": {"text": PROMPT}}, headers),
        (body | {"model": PROMPT}, headers),
        (body | {"structured_outputs": {"regex": f"({PROMPT}"}}, headers),
        (body, headers | {"x-slo-class": PROMPT}),
    ]
    for sent, given in refused:
        async with session.post(url, json=sent, headers=given) as response:
            assert 400 <= response.status < 500, await response.text()
            refusals.append(await response.text())
    async with session.post(url, data=f'{{"prompt": "{PROMPT}", '.encode(), headers=headers) as response:
        assert response.status == 400
        refusals.append(await response.text())
    async with session.get(f"{cluster.url}/validate", headers={"authorization": f"Bearer {FILE_KEY}"}) as response:
        assert response.status == 403
        refusals.append(await response.text())
    for key in (FILE_KEY, KEY):
        async with session.post(url, json=body, headers={"authorization": f"Bearer {key}"}) as response:
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
        for secret in (*SECRETS, PROMPT):
            assert secret not in text, (node, secret)
        assert lines_of(cluster, node)


def command_lines(cluster: Any) -> dict[int, str]:
    """Return the command lines of `serve` and all roles, as any user of the machine sees them."""
    supervisor = psutil.Process(cluster.process.pid)
    processes = [supervisor, *supervisor.children(recursive=True)]
    assert len(processes) >= 6
    return {each.pid: " ".join(each.cmdline()) for each in processes}


def files_that_others_may_see(cluster: Any, folder: Path) -> dict[str, str]:
    """Those of the run directory, unless they are their user's alone; the decision log and `serve`'s output, which are
    given on."""
    run_dir = Path(cluster.ready["run_dir"])
    settings = list(run_dir.glob("*.yaml"))
    assert len(settings) >= 5
    assert {path.stat().st_mode & 0o077 for path in (run_dir, *settings)} == {0}
    assert REDIS_PASSWORD in (run_dir / "conductor.yaml").read_text()  # which is why
    assert not [path for path in settings if TOKEN in path.read_text()]
    decisions = [path for path in (folder / "decisions").rglob("*") if path.is_file()]
    assert decisions
    found = [path for path in run_dir.rglob("*") if path.is_file() and path.stat().st_mode & 0o077]
    return {str(path): path.read_bytes().decode(errors="replace") for path in (*found, *decisions, cluster.log)}


async def test_no_secret_is_seen_in_answers_metrics_traces_files_or_command_lines(
    cluster: Any, request_id: str, refusals: list[str], session: aiohttp.ClientSession, folder: Path, otlp_receiver: Any
) -> None:
    seen = {f"refusal {number}": text for number, text in enumerate(refusals)}
    for path in ("/metrics", "/openapi.json", "/health", "/ready", "/validate", "/v1/models", "/console"):
        async with session.get(cluster.url + path, headers={"authorization": f"Bearer {ADMIN}"}) as response:
            assert response.status == 200, path
            seen[path] = await response.text()
    assert "moonpool:" in seen["/metrics"]
    async with asyncio.timeout(60):
        while not otlp_receiver.spans:
            await asyncio.sleep(0.05)
    seen["traces"] = repr(otlp_receiver.spans) + repr(otlp_receiver.headers)
    seen |= {f"command line {pid}": line for pid, line in command_lines(cluster).items()}
    seen |= files_that_others_may_see(cluster, folder)
    assert [(where, secret) for where, text in seen.items() for secret in SECRETS if secret in text] == []


async def test_a_command_asks_a_cluster_with_its_join_token_and_nothing_without(
    cluster: Any, request_id: str, folder: Path
) -> None:
    def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MOONPOOL_")}
        asked = [sys.executable, "-m", "moonpool", *command, "--ready-file", str(cluster.ready_file)]
        return subprocess.run(asked, capture_output=True, text=True, env=kept | variables, timeout=100, check=False)

    token_file = os.environ["MOONPOOL_JOIN_TOKEN_FILE"]
    asked = ["validate", "--wait", "20", "--json", "--admin-key-file", private(folder / "admin", ADMIN)]
    validated = await asyncio.to_thread(run, *asked, MOONPOOL_JOIN_TOKEN_FILE=token_file)
    assert json.loads(validated.stdout)["ok"], validated.stdout + validated.stderr
    stranger = await asyncio.to_thread(run, "status", "--json")
    assert stranger.returncode == 1
    assert "set join_token_file (MOONPOOL_JOIN_TOKEN_FILE)" in stranger.stderr
    assert "refused a call from unix:" in text_of(cluster, "conductor")
    assert not [secret for secret in SECRETS if secret in validated.stdout + validated.stderr + stranger.stderr]
