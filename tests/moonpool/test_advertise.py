"""Nodes that listen at every interface, as in a container: what the others are told to dial, by real processes."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moonpool.supervision.child import READY_PREFIX
from moonpool_proto.v1 import common_pb2, conductor_pb2
from moonpool_proto.v1.conductor_pb2_grpc import ConductorStub
from moonpool_proto.v1.pool_pb2_grpc import PoolStub
from moonpool_proto.v1.worker_pb2_grpc import WorkerStub
from rpc.control import call, open_channel

Start = Callable[..., str]


@pytest.fixture
def start(short_path: Path) -> Iterator[Start]:
    """Start a role with these flags and wait until it is ready; gives the target it announces."""
    running: list[subprocess.Popen[str]] = []
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MOONPOOL_")}

    def begin(*arguments: str) -> str:
        command = [
            sys.executable,
            "-m",
            "moonpool",
            *arguments,
            "--socket-dir",
            str(short_path),
            "--log-level",
            "error",
        ]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=kept | {"OMP_NUM_THREADS": "1"})
        running.append(process)
        assert process.stdout is not None
        ready = next(line for line in process.stdout if line.startswith(READY_PREFIX))
        target: str = json.loads(ready.removeprefix(READY_PREFIX))["target"]
        return target

    yield begin
    for process in reversed(running):
        process.terminate()
    for process in running:
        process.communicate(timeout=30)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


async def ask(target: str, stub: Callable[[Any], Any], method: str, request: Any) -> Any:
    async with open_channel(target) as channel:
        return await call(getattr(stub(channel), method)(request), what=method, target=target, deadline_s=10.0)


def test_nodes_at_a_wildcard_are_dialled_at_what_they_advertise(start: Start) -> None:
    conductor = start("conductor", "--listen", "127.0.0.1:0")
    wildcard = ["--listen", "0.0.0.0:0", "--advertise", "localhost:0", "--conductor", conductor, "--transport", "tcp"]
    data_ports = [free_port(), free_port()]
    data = [
        ["--data-host", "0.0.0.0", "--data-advertise", "localhost", "--data-port", str(port)] for port in data_ports
    ]
    pool = start("pool-node", *wildcard, *data[0], "--pool-bytes", "16MiB")
    worker = start(
        "aggregated-node", *wildcard, *data[1], "--pool", pool, "--capacity-tokens", "1024", "--threads", "1"
    )
    reply = asyncio.run(ask(conductor, ConductorStub, "Cluster", conductor_pb2.ClusterRequest()))
    nodes = {status.node.role: status.node for status in reply.nodes}
    found = [nodes[common_pb2.ROLE_POOL], nodes[common_pb2.ROLE_AGGREGATED]]
    assert [node.target for node in found] == [pool, worker]
    assert all(target.startswith("localhost:") and not target.endswith(":0") for target in (pool, worker))
    assert [(node.endpoint.tcp_host, node.endpoint.tcp_port) for node in found] == [
        ("localhost", port) for port in data_ports
    ]
    for target, stub in ((pool, PoolStub), (worker, WorkerStub)):
        answer = asyncio.run(ask(target, stub, "Validate", common_pb2.JsonRequest()))
        assert json.loads(answer.json)["ok"]
