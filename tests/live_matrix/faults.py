"""The eight faults of the live matrix: how each strikes a running cluster, heals, and can be seen to have struck."""

from __future__ import annotations

import asyncio
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import aiohttp
import psutil

from tests.e2e.conftest import metric
from tests.e2e.damage import flip_a_bit_per
from tests.live_matrix.requests import Phase
from tests.live_matrix.streams import Stream
from tools.soak.namespaces import TwoHosts

NOTICED_S = 60.0
MISMATCHES = "moonpool:digest_mismatches_total"
FLIPPED_STEP_NBYTES = 4096  # less than a layer of a block has


class Fault(ABC):
    """A fault. `number` counts the rounds of one run: each strikes another process of the role."""

    name: str
    arrives_after = False  # the arriving requests are sent when it has struck
    needs_stored_kv = False  # the arriving requests' prompts lie in the pools, and in no worker
    breaks_connections = False  # clients ask again

    async def moment(self, cluster: Any, number: int, arriving: Sequence[Stream]) -> None:
        """Wait for the moment to strike. By default an arriving request has its first token: the others wait, are
        computed or are handed over.
        """
        waits = [asyncio.create_task(stream.reach(1)) for stream in arriving]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    @abstractmethod
    async def strike(self, cluster: Any, number: int) -> None:
        """Do the damage. Return when it is done."""

    @abstractmethod
    async def heal(self, cluster: Any, session: aiohttp.ClientSession) -> None:
        """Undo it, or wait until the cluster has. Check that it had been done."""

    def hit(self, of_a_kind: Sequence[Stream]) -> bool:
        """Return True if it is known to have disturbed one of these requests, of which some were in mid-answer; called
        when all have ended. By default: one was placed again.
        """
        return any(stream.answer.attempts > 1 for stream in of_a_kind)


class Kill(Fault):
    """kill -9 of a process of a role. `victims`: one per round."""

    def __init__(self, role: str, victims: Sequence[str]) -> None:
        self.name = f"kill {role}"
        self._victims = victims
        self._killed: tuple[str, int] | None = None

    async def strike(self, cluster: Any, number: int) -> None:
        victim = self._victims[number % len(self._victims)]
        process = psutil.Process(cluster.pid(victim))
        self._killed = victim, cluster.kill(victim)
        await asyncio.to_thread(psutil.wait_procs, [process], timeout=NOTICED_S)
        assert not process.is_running(), f"{victim} is still there"

    async def heal(self, cluster: Any, session: aiohttp.ClientSession) -> None:
        assert self._killed is not None
        await cluster.wait_restarted(*self._killed)


class KillConductor(Kill):
    """Running answers need no conductor; those that arrive after its death wait for the next one."""

    arrives_after = True

    def hit(self, of_a_kind: Sequence[Stream]) -> bool:
        return True  # all arrived after its death


class KillFrontend(Kill):
    """Breaks all connections."""

    breaks_connections = True

    def hit(self, of_a_kind: Sequence[Stream]) -> bool:
        return any(stream.num_breaks for stream in of_a_kind)


class KillPool(Kill):
    """A pool node dies from which arriving requests load their prompts, and where answers are to be stored."""

    needs_stored_kv = True

    def hit(self, of_a_kind: Sequence[Stream]) -> bool:
        return True  # answers in progress are to be stored there


class Hang(Fault):
    """SIGSTOP of workers: they keep their connections and say nothing. `victims`: those of one round."""

    name = "hang"

    def __init__(self, victims: Sequence[Sequence[str]]) -> None:
        self._victims = victims
        self._stopped: dict[str, int] = {}

    async def strike(self, cluster: Any, number: int) -> None:
        self._stopped = {name: cluster.pid(name) for name in self._victims[number % len(self._victims)]}
        for pid in self._stopped.values():
            os.kill(pid, signal.SIGSTOP)
        async with asyncio.timeout(NOTICED_S):
            while any(psutil.Process(pid).status() != psutil.STATUS_STOPPED for pid in self._stopped.values()):
                await asyncio.sleep(0.01)

    async def heal(self, cluster: Any, session: aiohttp.ClientSession) -> None:
        for pid in self._stopped.values():
            os.kill(pid, signal.SIGCONT)
        async with asyncio.timeout(NOTICED_S):
            while await _nodes_down(session, cluster.url):
                await asyncio.sleep(0.1)
        now = {name: cluster.pid(name) for name in self._stopped}
        assert now == self._stopped, f"processes {now} were {self._stopped} when they were stopped"


class Partition(Fault):
    """Packets of KV to a decode node are dropped. The control plane, which uses unix sockets, goes on."""

    name = "partition"

    def __init__(self, hosts: TwoHosts, victims: Sequence[str]) -> None:
        self._hosts, self._victims = hosts, victims
        self._port = 0
        self._has_dropped = False

    async def moment(self, cluster: Any, number: int, arriving: Sequence[Stream]) -> None:
        """Wait until data goes to the node."""
        process = psutil.Process(cluster.pid(self._victims[number % len(self._victims)]))
        listening = {c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        (self._port,) = listening
        self._hosts.firewall(0, "-A", "INPUT", "-p", "tcp", "--dport", str(self._port))  # counts
        self._hosts.firewall(0, "-Z")
        async with asyncio.timeout(NOTICED_S):
            while not any(self._hosts.passed(0, "INPUT")):
                await asyncio.sleep(0.005)

    async def strike(self, cluster: Any, number: int) -> None:
        self._hosts.firewall(0, "-I", "INPUT", "-p", "tcp", "--dport", str(self._port), "-j", "DROP")

    async def heal(self, cluster: Any, session: aiohttp.ClientSession) -> None:
        self._has_dropped = bool(self._hosts.passed(0, "INPUT")[0])  # not if all KV had come before the strike
        self._hosts.heal()

    def hit(self, of_a_kind: Sequence[Stream]) -> bool:
        return self._has_dropped and super().hit(of_a_kind)


class FlippedBit(Fault):
    """Bits flip in the pools' memory before the arriving requests load their prompts from there."""

    name = "flipped bit"
    arrives_after = True
    needs_stored_kv = True

    def __init__(self, pools: Sequence[str]) -> None:
        self._pools = pools
        self._before = 0.0

    async def strike(self, cluster: Any, number: int) -> None:
        async with aiohttp.ClientSession() as session:
            self._before = await metric(session, cluster.url, MISMATCHES)
        for pool in self._pools:
            await asyncio.to_thread(flip_a_bit_per, FLIPPED_STEP_NBYTES, cluster.pid(pool))

    async def heal(self, cluster: Any, session: aiohttp.ClientSession) -> None:
        async with asyncio.timeout(NOTICED_S):  # nodes report about once a second
            while await metric(session, cluster.url, MISMATCHES) <= self._before:
                await asyncio.sleep(0.1)

    def hit(self, of_a_kind: Sequence[Stream]) -> bool:
        arriving = [stream for stream in of_a_kind if stream.asked.phase == Phase.ARRIVING]
        return any(
            not stream.answer.sibling_tokens if stream.asked.context else stream.answer.recomputed_blocks
            for stream in arriving
        )


async def _nodes_down(session: aiohttp.ClientSession, url: str) -> int:
    """Return how many nodes the conductor exports as not up."""
    async with session.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(line.startswith("moonpool:node_up") and line.endswith(" 0.0") for line in lines)
