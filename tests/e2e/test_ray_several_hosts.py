"""A cluster under Ray on several raylets, in two network namespaces, with GPUs that only Ray believes in.

Workers have paced engines, which need no device. Where they run is read from Ray's own tables.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
import pytest

from tools.soak.namespaces import TwoHosts

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]
HEAD = "10.77.0.1:6379"
WAIT_S = 240.0
_TABLE = """
import json, sys, ray
ray.init(sys.argv[1], log_to_driver=False, logging_level="error", namespace="look")
nodes = {each["NodeID"]: each for each in ray.nodes() if each["Alive"]}
rows = []
for group in ray.util.placement_group_table().values():
    if group["state"] == "REMOVED":
        continue
    node = nodes.get(next(iter(group["bundles_to_node_id"].values()), ""), {})
    row = {"name": group["name"], "state": group["state"], "bundle": group["bundles"][0]}
    rows.append(row | {"raylet": node.get("Labels", {}).get("raylet", "")})
print("TABLE " + json.dumps(rows))
"""


@dataclass
class RayHosts:
    """Raylets, each by its rack's name, in one of two namespaces."""

    hosts: TwoHosts
    folder: Path
    raylets: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, host: int, **resources: float) -> None:
        """Start a raylet; "head" is Ray's head, which runs no worker."""
        program = str(Path(sys.executable).parent / "ray")
        command = [*self.hosts.command(host), program, "start", "--block", "--disable-usage-stats", "--num-cpus=2"]
        command += [f"--node-ip-address={self.hosts.addresses[host]}", "--object-store-memory=80000000"]
        if name == "head":
            command += ["--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={self.folder}"]
        else:
            gpus = resources.pop("gpus", 0)
            command += [
                f"--address={HEAD}",
                f"--num-gpus={gpus:g}",
                f"--labels=moonpool.io/rack={name[:2]},raylet={name}",
            ]
            command += [f"--resources={json.dumps({f'moonpool_{role}': n for role, n in resources.items()})}"]
        with (self.folder.parent / f"{name}.log").open("wb") as log:
            self.raylets[name] = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def wait_for(self, num_nodes: int) -> None:
        """Wait until so many raylets have joined."""
        script = "import sys, ray; ray.init(sys.argv[1], log_to_driver=False); print(len(ray.nodes()))"
        deadline = time.monotonic() + WAIT_S
        while True:
            done = self._run(script)
            if done.returncode == 0 and int(done.stdout.split()[-1]) >= num_nodes:
                return
            assert time.monotonic() < deadline, done.stderr[-2000:]
            time.sleep(1.0)  # polling for other processes, bounded by the deadline above

    def table(self) -> list[dict[str, Any]]:
        """Return the placement groups that are not removed."""
        done = self._run(_TABLE)
        assert done.returncode == 0, done.stderr[-2000:]
        line = next(line for line in done.stdout.splitlines() if line.startswith("TABLE "))
        rows: list[dict[str, Any]] = json.loads(line.removeprefix("TABLE "))
        return rows

    def placed(self) -> dict[str, str]:
        """Return the raylet of each placed worker; its first two letters are its rack."""
        return {_node(row): row["raylet"] for row in self.table() if row["state"] == "CREATED"}

    def kill(self, name: str) -> None:
        """Kill a raylet with everything that it has started, as the death of its host does."""
        raylet = self.raylets.pop(name)
        root = psutil.Process(raylet.pid)
        for process in [*root.children(recursive=True), root]:
            process.kill()
        raylet.wait()

    def close(self) -> None:
        for name in list(self.raylets):
            self.kill(name)

    def begin(self, *command: str) -> subprocess.Popen[bytes]:
        """Begin a command on the first host."""
        return subprocess.Popen([*self.hosts.command(0), *command])

    def _run(self, script: str) -> subprocess.CompletedProcess[str]:
        command = [*self.hosts.command(0), sys.executable, "-c", script, HEAD]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)


def _node(row: Mapping[str, Any]) -> str:
    """Return the node id in a placement group's name, ray-HASH-NODE."""
    return str(row["name"]).split("-", 2)[2]


def _waiting(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the placement groups for which no raylet has room, or that are about to be created."""
    return [row for row in rows if row["state"] == "PENDING"]


@pytest.fixture(scope="module")
def ray_hosts(namespaces: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHosts]:
    folder = Path(f"/tmp/mp-ray-{os.getpid()}") / "tmp"  # Ray adds much to the path of a unix socket
    folder.mkdir(parents=True)
    with TwoHosts() as hosts, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_gcs_server_request_timeout_seconds", "30")
        patch.setenv("RAY_health_check_period_ms", "1000")
        patch.setenv("RAY_health_check_failure_threshold", "3")
        mine = RayHosts(hosts, folder)
        try:
            # One after the other: Ray makes sockets' names unique by looking which ones exist.
            mine.start("head", 0)
            mine.wait_for(1)
            mine.start("r1", 0, prefill=2, decode=1, pool=1, gpus=1)
            mine.wait_for(2)
            mine.start("r1b", 1, decode=2, pool=1, gpus=1)
            mine.wait_for(3)
            mine.start("r2", 1, prefill=2, decode=2, pool=1, gpus=2)
            mine.wait_for(4)
            yield mine
        finally:
            mine.close()
            shutil.rmtree(folder.parent, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster(ray_hosts: RayHosts, random_model: Path, start_cluster: Callable[..., Any]) -> Iterator[Any]:
    flags = ["--ray-address", HEAD, "--ray-gpus", "0.5", "--prefill-nodes", "2", "--decode-nodes", "2"]
    paced = ["--engine", "paced", "--paced-profile", "instant", "--block-tokens", "8"]
    with ray_hosts.hosts.inside(0), start_cluster(random_model, *flags, *paced) as running:
        yield running


async def answer(cluster: Any, session: aiohttp.ClientSession) -> list[int]:
    prompt = np.random.default_rng(3).integers(5, 2000, 120).tolist()
    done = await cluster.complete(session, prompt, max_tokens=24, temperature=0.0)
    ids: list[int] = list(done.token_ids)
    return ids


async def until(look: Callable[[], Any], holds: Callable[[Any], bool]) -> Any:
    async with asyncio.timeout(WAIT_S):
        while not holds(seen := await asyncio.to_thread(look)):
            await asyncio.sleep(1.0)  # polling for other processes, bounded by the time-out above
        return seen


async def test_workers_lie_by_role_and_rack_and_share_gpus(
    ray_hosts: RayHosts, cluster: Any, session: aiohttp.ClientSession
) -> None:
    with ray_hosts.hosts.inside(0):
        assert len(await answer(cluster, session)) == 24
    rows = {_node(row): row for row in ray_hosts.table()}
    assert set(rows) == {"prefill-0", "prefill-1", "decode-0", "decode-1"}
    assert all(row["state"] == "CREATED" for row in rows.values())
    assert [row["bundle"]["GPU"] for row in rows.values()] == [0.5] * 4
    raylets = ray_hosts.placed()
    assert raylets["prefill-0"] == raylets["prefill-1"], "prefill workers of a model are together"
    racks = {raylet[:2] for raylet in raylets.values()}
    assert len(racks) == 1, "decode workers are in the rack of the prefill workers whose KV they receive"


async def test_a_worker_without_room_is_a_demand_that_the_autoscaler_sees_and_a_new_host_meets(
    ray_hosts: RayHosts, cluster: Any
) -> None:
    command = ["node", "scale", "prefill=5", "--ready-file", str(cluster.ready_file)]
    scaling = ray_hosts.begin(sys.executable, "-m", "moonpool", *command)
    try:
        rows = await until(ray_hosts.table, lambda rows: len(rows) == 7 and len(_waiting(rows)) == 1)
        (waiting,) = _waiting(rows)
        assert waiting["bundle"] == {"moonpool_prefill": 1.0, "GPU": 0.5}
        node = _node(waiting)  # any of the new ones
        ray_hosts.start("r3", 1, prefill=1, pool=1, gpus=1)
        raylets = await until(ray_hosts.placed, lambda raylets: node in raylets)
        assert raylets[node] == "r3"
        assert await asyncio.to_thread(scaling.wait, WAIT_S) == 0
    finally:
        scaling.kill()
        scaling.wait()


async def test_after_the_loss_of_a_host_its_workers_run_elsewhere_and_answers_are_the_same(
    ray_hosts: RayHosts, cluster: Any, session: aiohttp.ClientSession
) -> None:
    with ray_hosts.hosts.inside(0):
        before = await answer(cluster, session)
        lost = ray_hosts.placed()["decode-0"]
        ray_hosts.kill(lost)
        await until(ray_hosts.placed, lambda raylets: raylets.get("decode-0", lost) not in (lost, ""))
        async with asyncio.timeout(WAIT_S):
            while True:
                async with session.get(f"{cluster.url}/ready") as response:
                    if response.status == 200:
                        break
                await asyncio.sleep(0.5)  # polling for other processes, bounded by the time-out above
        assert await answer(cluster, session) == before
