"""Where rdma cannot be used: by name it is an error that says why, by choice another transport is used."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from messenger import Messenger, MessengerConfig, SharedMemory
from messenger.errors import RdmaUnavailable
from messenger.rdma import handshake
from settings.keys import assemble

CHILD = """
import json, sys
from messenger import Messenger, MessengerConfig, SharedMemory
from settings.keys import assemble
transport, nbytes = sys.argv[1], int(sys.argv[2])
configs = [assemble(MessengerConfig, transport=transport, host_id=name) for name in "ab"]
nodes = [Messenger(config, node_id=name, incarnation=1) for config, name in zip(configs, "ab", strict=True)]
endpoints = [node.start() for node in nodes]
regions = [node.register(SharedMemory.create(nbytes, "x")) for node in nodes]
key = nodes[1].grant(regions[1], 0, nbytes, read=True, write=True)
try:
    write = nodes[0].connect(endpoints[1]).write(key, regions[0], [[0, 0, nbytes]], deadline_s=20)
    print(json.dumps(write.result().transport))
except Exception as error:
    print(json.dumps(f"{type(error).__name__}: {error}"))
for node in nodes:
    node.close()
"""


def with_little_memory(transport: str, limit_nbytes: int, nbytes: int) -> str:
    """Return the outcome of a write in a process with this limit on locked memory."""
    limits = ["prlimit", f"--memlock={limit_nbytes}", "setpriv", "--bounding-set", "-ipc_lock", sys.executable, "-c"]
    done = subprocess.run([*limits, CHILD, transport, str(nbytes)], capture_output=True, text=True, timeout=200)
    assert done.stdout, done.stderr
    answer: str = json.loads(done.stdout)
    return answer


def test_memory_that_may_not_be_locked_is_named() -> None:
    assert "may lock 1024 KiB of memory: raise it" in with_little_memory("rdma", 1 << 20, 16 << 20)


def test_memory_that_may_not_be_locked_goes_by_tcp_where_that_is_allowed() -> None:
    assert with_little_memory("auto", 1 << 20, 16 << 20) == "tcp"


def test_a_device_that_is_not_there_is_named() -> None:
    messenger = Messenger(
        assemble(MessengerConfig, transport="rdma", rdma_devices=("mlx5_9",)), node_id="a", incarnation=1
    )
    with pytest.raises(RdmaUnavailable, match=r"mlx5_9 .*there is no such device; this machine has rxe0/1"):
        messenger.start()


@pytest.mark.transports("rdma")
def test_a_named_device_is_the_only_one_used(make_node: Any) -> None:
    a, b = make_node("a", rdma_devices=("rxe1",)), make_node("b")
    a.messenger.connect(b.endpoint).write(b.grant(), a.region, [[0, 0, 1 << 20]]).result()
    assert {flow.key.rail for flow in a.messenger._counters.flows() if flow.key.rail} == {"rxe1/1"}


def test_a_peer_of_another_build_is_reached_by_tcp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nodes = [
        Messenger(assemble(MessengerConfig, host_id=name, shm_dir=tmp_path), node_id=name, incarnation=1)
        for name in ("a", "b")
    ]
    endpoints = [node.start() for node in nodes]
    assert all(endpoint.rdma for endpoint in endpoints)
    builds = iter([b"one build.......", b"another build..."])
    monkeypatch.setattr(handshake, "fingerprint", lambda: next(builds, b"a third one....."))
    memories = [SharedMemory.create(4096, "x") for _ in nodes]
    regions = [node.register(memory) for node, memory in zip(nodes, memories, strict=True)]
    key = nodes[1].grant(regions[1], 0, 4096, read=True, write=True)
    peer = nodes[0].connect(endpoints[1])
    assert peer.write(key, regions[0], [[0, 0, 4096]]).result().transport == "tcp"
    assert nodes[0].counters()["rdma_given_up"] == 1
    for node in nodes:
        node.close()
    for memory in memories:
        memory.close()
