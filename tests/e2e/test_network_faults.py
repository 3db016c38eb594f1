"""A cluster whose data network breaks between prefill and decode in mid-request: no wrong token, no hang, and it heals.

The cluster runs on a host of its own (a network namespace), where a firewall drops what goes to the messenger of the
decode nodes; what the control plane says goes by unix sockets and is not touched.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
import pytest

from tools.soak.namespaces import TwoHosts

DECODERS = ("decode-0", "decode-1")
PUSH_TIMEOUT_S = 2.0
ENDS_WITHIN_S = 90.0


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, 2000, length).tolist()


@dataclass
class Networked:
    """A cluster, and the firewall of its host."""

    cluster: Any
    hosts: TwoHosts

    def port(self, node_id: str) -> int:
        """Where the node's messenger listens."""
        (listening,) = [
            connection.laddr.port
            for connection in psutil.Process(self.cluster.pid(node_id)).net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        ]
        return int(listening)

    async def reached(self, nodes: tuple[str, ...]) -> None:
        """Wait until data goes to one of the nodes."""
        for node in nodes:
            self.hosts.firewall(0, "-A", "INPUT", "-p", "tcp", "--dport", str(self.port(node)))
        self.hosts.firewall(0, "-Z")
        async with asyncio.timeout(ENDS_WITHIN_S):
            while not any(self.hosts.passed(0, "INPUT")):
                await asyncio.sleep(0.005)

    def partition(self, nodes: tuple[str, ...]) -> None:
        for node in nodes:
            self.hosts.firewall(0, "-I", "INPUT", "-p", "tcp", "--dport", str(self.port(node)), "-j", "DROP")


@pytest.fixture(scope="module")
def networked(namespaces: None, random_model: Path, start_cluster: Callable[..., Any]) -> Iterator[Networked]:
    flags = ["--decode-nodes", "2", "--block-tokens", "8", "--transport", "tcp", "--push-timeout", str(PUSH_TIMEOUT_S)]
    with TwoHosts() as hosts, hosts.inside(0), start_cluster(random_model, *flags) as cluster:
        yield Networked(cluster, hosts)


async def ask(session: aiohttp.ClientSession, cluster: Any, prompt_ids: list[int]) -> Any:
    """The answer, or the error's message."""
    body = {"model": cluster.ready["model"], "prompt": prompt_ids, "max_tokens": 6, "temperature": 0.0}
    async with session.post(f"{cluster.url}/v1/completions", json=body | {"return_token_ids": True}) as response:
        answer = await response.json()
    if response.status != 200:
        return str(answer["error"]["message"])
    return type("A", (), {"prompt_ids": prompt_ids, "token_ids": answer["choices"][0]["token_ids"]})


@pytest.mark.parametrize(
    "cut",
    [
        pytest.param(DECODERS[:1], id="from one of two decode nodes", marks=pytest.mark.long),
        pytest.param(DECODERS, id="from all decode nodes", marks=pytest.mark.nightly),
    ],
)
async def test_a_partition_in_mid_request_ends_every_request_in_time_and_heals(
    cut: tuple[str, ...],
    networked: Networked,
    random_model: Path,
    judge_of: Callable[[Path], Any],
    session: aiohttp.ClientSession,
) -> None:
    cluster = networked.cluster
    prompts = [prompt(100 * len(cut) + seed, 900) for seed in range(4)]
    asked = [asyncio.create_task(ask(session, cluster, one)) for one in prompts]
    await networked.reached(cut)
    networked.partition(cut)
    started_s = time.monotonic()
    async with asyncio.timeout(ENDS_WITHIN_S):
        answers = await asyncio.gather(*asked)
    errors = [answer for answer in answers if isinstance(answer, str)]
    assert len(cut) > 1 or errors == []  # the other decode node took over
    assert all("decode" in error for error in errors), errors
    assert time.monotonic() - started_s < ENDS_WITHIN_S
    networked.hosts.heal()
    async with asyncio.timeout(ENDS_WITHIN_S):
        while isinstance(await ask(session, cluster, prompts[0]), str):
            await asyncio.sleep(0.2)
        again = await asyncio.gather(*(ask(session, cluster, one) for one in prompts))
    assert [answer for answer in again if isinstance(answer, str)] == []
    await cluster.validate()
    judge = judge_of(random_model)
    assert [answer for answer in (*answers, *again) if answer not in errors and judge.wrong_tokens(answer)] == []
