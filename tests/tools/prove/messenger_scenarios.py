"""Scenarios for test_simulated_messenger.py: real messengers over the simulated TCP.

`python messenger_scenarios.py NAME FIRST LAST` runs a scenario with the seeds from FIRST to LAST, and writes a line of
JSON for each: its outcome, the digest of its event log, or the error that ended it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import sys
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from tools.prove import imports
from tools.prove.world import basics, clock, native_reference, sockets
from tools.prove.world.addresses import address_of
from tools.prove.world.network import SimNetwork
from tools.prove.world.process import Process
from tools.prove.world.scheduler import World, set_world

imports.install(
    {
        **native_reference.REPLACED,
        **sockets.REPLACED,
        **basics.REPLACED,
    }
)

from messenger import (  # noqa: E402
    Endpoint,
    Messenger,
    MessengerConfig,
    MessengerError,
    Peer,
    PeerLost,
    PeerRestarted,
    Priority,
    RemoteAccessError,
    RemoteKey,
    SharedMemory,
    TransferCancelled,
    TransferDeadlineExceeded,
)
from settings.messenger import TransportSettings  # noqa: E402
from settings.node import HostSettings  # noqa: E402

MIB = 1 << 20
Outcome = dict[str, Any]


class Node:
    """A messenger in a process of its own, with one registered region."""

    endpoint: Endpoint
    messenger: Messenger

    def __init__(self, scene: Scene, name: str, region_nbytes: int) -> None:
        self.scene, self.name = scene, name
        self.memory = SharedMemory.create(region_nbytes, name, huge_pages="off")
        self.notes: list[tuple[str, bytes, bytes]] = []
        self.lost: list[tuple[str, int]] = []
        self.is_ready = False
        self.process = Process(scene.world, name, f"host-{name}")
        self.process.at_death.append(lambda: scene.network.close_all(self.process))
        self.process.start(self._main)

    @property
    def bytes(self) -> Any:
        """The region's memory, uint8 [n]."""
        return self.memory.array

    async def _main(self) -> None:
        scene = self.scene
        self._stop = asyncio.Event()
        host = self.process.host if scene.uses_names else address_of(self.process.host)
        self.messenger = Messenger(
            MessengerConfig(
                transport=TransportSettings(transport="tcp", data_host=host, streams_per_peer=scene.num_streams),
                host=HostSettings(host_id=self.process.host, data_port=scene.ports[self.name]),
            ),
            node_id=self.name,
            incarnation=clock.secrets.randbits(64),
        )
        self.messenger.on_notify(lambda *note: self.notes.append(note))
        self.messenger.on_peer_lost(lambda *peer: self.lost.append(peer))
        self.endpoint = self.messenger.start()
        self.region = self.messenger.register(self.memory)
        self.is_ready = True
        await self._stop.wait()
        await asyncio.to_thread(self.messenger.close)

    def grant(self, *, read: bool = True, write: bool = True) -> RemoteKey:
        """Return a key of the whole region."""
        return self.messenger.grant(self.region, 0, self.region.nbytes, read=read, write=write)

    def peer(self, other: Node) -> Peer:
        """Return the peer at the other node's endpoint."""
        return self.messenger.connect(other.endpoint)

    async def do(self, make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Run a coroutine on this node's loop, from any node's loop. Never returns if the node dies."""
        here = asyncio.get_running_loop()
        answer = here.create_future()

        def finish(done: asyncio.Task[Any]) -> None:
            if not answer.done():
                error = done.exception()
                if error is None:
                    answer.set_result(done.result())
                else:
                    answer.set_exception(error)

        def begin() -> None:
            task = asyncio.get_running_loop().create_task(make())
            task.add_done_callback(lambda done: here.call_soon_threadsafe(finish, done))

        self.process.loop.call_soon_threadsafe(begin)
        return await answer

    async def close(self) -> None:
        """End the process in order."""
        self.process.loop.call_soon_threadsafe(self._stop.set)
        await self.scene.until(lambda: self.process.is_dead, 60.0)


class Scene:
    """A world with nodes, and a driver, which is a process on a host of its own."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed, most_steps=5_000_000)
        set_world(self.world)
        self.network = SimNetwork(self.world)
        self.rng = random.Random(f"scenario {seed}")
        self.uses_names = self.rng.random() < 0.5
        self.num_streams = self.rng.choice((1, 2, 2, 4))
        self.ports: dict[str, int] = {}

    @property
    def now_s(self) -> float:
        """Time of the world."""
        return self.world.now_ns / 1e9

    def run(self, scenario: Callable[[Scene], Coroutine[Any, Any, Outcome]]) -> Outcome:
        """Run the scenario in the driver; it has 10 minutes."""
        driver = Process(self.world, "driver", "host-driver")
        driver.start(lambda: scenario(self))
        if not self.world.run(lambda: driver.is_dead, 600.0):
            raise TimeoutError("the scenario has not ended")
        if isinstance(driver.exit, Exception):
            raise driver.exit
        return dict(driver.exit)

    async def until(self, condition: Callable[[], bool], limit_s: float) -> None:
        """Wait until the condition holds. Raises TimeoutError."""
        async with asyncio.timeout(limit_s):
            while not condition():
                await asyncio.sleep(limit_s / 1000)

    async def node(self, name: str, region_nbytes: int = 4 * MIB) -> Node:
        """Start a node, and wait until it is ready. It listens at the same port each time."""
        self.ports.setdefault(name, 7000 + len(self.ports))
        node = Node(self, name, region_nbytes)
        await self.until(lambda: node.is_ready, 5.0)
        return node

    def cut(self, one: Node, other: Node, *, both: bool = True) -> None:
        """Let nothing through from one node's host to the other's."""
        self.network.cut(one.process.host, other.process.host)
        if both:
            self.network.cut(other.process.host, one.process.host)

    def heal(self, one: Node, other: Node) -> None:
        """Let everything through again."""
        self.network.heal(one.process.host, other.process.host)
        self.network.heal(other.process.host, one.process.host)


def pattern(rng: random.Random, nbytes: int) -> Any:
    """Return random bytes, uint8 [n]."""
    return np.frombuffer(rng.randbytes(nbytes), np.uint8)


def many_slices(rng: random.Random, region_nbytes: int, count: int) -> list[tuple[int, int, int]]:
    """Return slices whose local and remote ranges are disjoint, in random order on one side."""
    room = region_nbytes // count
    places = list(range(count))
    rng.shuffle(places)
    slices = []
    for index, place in enumerate(places):
        nbytes = rng.randint(1, room)
        slices.append(
            (index * room + rng.randint(0, room - nbytes), place * room + rng.randint(0, room - nbytes), nbytes)
        )
    return slices


def moved(source: Any, target: Any, slices: list[tuple[int, int, int]], *, to_remote: bool) -> Any:
    """Return the target's bytes after the transfer of slices (local, remote, nbytes)."""
    expected = target.copy()
    for local, remote, nbytes in slices:
        start, end = (local, remote) if to_remote else (remote, local)
        expected[end : end + nbytes] = source[start : start + nbytes]
    return expected


async def failure(future: Any) -> MessengerError | None:
    """Return the error with which the operation ends; None if it succeeds."""
    try:
        await asyncio.wrap_future(future)
    except MessengerError as error:
        return error
    return None


# Scenarios.


async def transfers(scene: Scene) -> Outcome:
    """Writes, reads and notifications of all sizes, among three nodes."""
    rng = scene.rng
    scene.num_streams = 4  # large writes go by two of them
    nodes = [await scene.node(name, 12 * MIB) for name in "abc"]
    a, b, c = nodes
    for node in nodes:
        node.bytes[:] = pattern(rng, 12 * MIB)
    key, refused_key = b.grant(), c.grant(write=False)

    async def use() -> Outcome:
        peer = a.peer(b)
        for count in (1, 7, 100, 5000):
            slices = many_slices(rng, 2 * MIB, count)
            expected = moved(a.bytes, b.bytes, slices, to_remote=True)
            result = await asyncio.wrap_future(peer.write(key, a.region, slices))
            assert result.nbytes == sum(each[2] for each in slices)
            assert (b.bytes == expected).all(), f"wrong bytes after a write of {count} slices"
            slices = many_slices(rng, 2 * MIB, count)
            expected = moved(b.bytes, a.bytes, slices, to_remote=False)
            await asyncio.to_thread(peer.read(key, a.region, slices).result)
            assert (a.bytes == expected).all(), f"wrong bytes after a read of {count} slices"
        whole = peer.write_notify(key, a.region, [(0, 0, 12 * MIB)], b"whole", lambda: b"payload")
        await asyncio.wrap_future(whole)
        assert (a.bytes == b.bytes).all()
        assert b.notes == [("a", b"whole", b"payload")]
        notes = [peer.notify(b"n", bytes([number])) for number in range(40)]
        await asyncio.gather(*map(asyncio.wrap_future, notes))
        assert b.notes[1:] == [("a", b"n", bytes([number])) for number in range(40)]
        ended: list[str] = []
        background = peer.write(key, a.region, [(0, 0, 8 * MIB)], priority=Priority.BACKGROUND)
        background.add_done_callback(lambda _: ended.append("background"))
        urgent = peer.write(key, a.region, [(0, 9 * MIB, MIB)], priority=Priority.URGENT)
        urgent.add_done_callback(lambda _: ended.append("urgent"))
        await asyncio.gather(asyncio.wrap_future(background), asyncio.wrap_future(urgent))
        beyond = await failure(peer.write(key, a.region, [(0, 12 * MIB - 1, 2)]))
        readonly = await failure(a.peer(c).write(refused_key, a.region, [(0, 0, 1)]))
        before = c.bytes.copy()
        await asyncio.wrap_future(a.peer(c).read(refused_key, a.region, [(0, 5, 3 * MIB)]))
        assert (a.bytes[: 3 * MIB] == before[5 : 5 + 3 * MIB]).all()
        return {
            "ended": ended,
            "refused": [type(beyond).__name__, type(readonly).__name__],
            "problems": [problem for node in nodes for problem in node.messenger.validate()],
        }

    outcome = dict(await a.do(use))
    for node in nodes:
        await node.close()
    return outcome


async def revoke(scene: Scene) -> Outcome:
    """The owner revokes a key at some time during a large write; from then on its memory must not change."""
    rng = scene.rng
    owner, caller = await scene.node("owner", 12 * MIB), await scene.node("caller", 12 * MIB)
    caller.bytes[:] = 1 + pattern(rng, 12 * MIB) % 255
    key, delay_s = owner.grant(), rng.choice((0.0, 0.001, 0.005, 0.02))
    is_both = rng.random() < 0.5
    cut = scene.world.at(rng.uniform(0.0, 0.03), lambda: scene.cut(caller, owner, both=is_both))
    if rng.random() < 0.5:  # otherwise bytes under way stay there: the grace period ends by a cut
        cut.cancel()

    async def write() -> MessengerError | None:
        operation = caller.peer(owner).write(key, caller.region, [(0, 0, 12 * MIB)], deadline_s=3.0)
        return await failure(operation)

    async def take_back() -> Any:
        def blocking() -> Any:
            owner.messenger.revoke(key)
            return owner.bytes.copy()

        return await asyncio.to_thread(blocking)

    writing = asyncio.ensure_future(caller.do(write))
    await asyncio.sleep(delay_s)
    began_s = scene.now_s
    left = await owner.do(take_back)
    took_s = scene.now_s - began_s
    cut.cancel()
    scene.heal(caller, owner)
    error = await writing
    await asyncio.sleep(5.0)
    landed = int(np.count_nonzero(left))
    assert (owner.bytes == left).all(), "the memory changed after the key was revoked"
    assert (left == np.where(left, caller.bytes, 0)).all(), "wrong bytes"
    assert error is not None or landed == 12 * MIB
    again = await caller.do(lambda: failure(caller.peer(owner).write(key, caller.region, [(0, 0, 8)])))
    assert isinstance(again, RemoteAccessError), again
    assert took_s < 0.3, f"the revoke took {took_s} s"
    return {
        "ends_with": type(error).__name__,
        "is_partial": 0 < landed < 12 * MIB,
        "problems": owner.messenger.validate() + caller.messenger.validate(),
    }


async def crash(scene: Scene) -> Outcome:
    """The owner dies during transfers, and comes back as another process."""
    rng = scene.rng
    owner, caller = await scene.node("owner", 16 * MIB), await scene.node("caller", 16 * MIB)
    owner.bytes[:], caller.bytes[:] = 1, 2
    key = owner.grant()

    async def move() -> list[MessengerError | None]:
        peer = caller.peer(owner)
        operations: list[Any] = [peer.write(key, caller.region, [(0, 0, 12 * MIB)])]
        operations += [peer.read(key, caller.region, [(12 * MIB, 12 * MIB, 4 * MIB)]), peer.notify(b"t", b"p")]
        return [await failure(each) for each in operations]

    moving = asyncio.ensure_future(caller.do(move))
    await asyncio.sleep(rng.uniform(0.0, 0.01))
    owner.process.end("crashes")
    restarted = await scene.node("owner", 16 * MIB) if rng.random() < 0.5 else None
    errors = [error for error in await moving if error is not None]
    assert all(isinstance(error, PeerLost) and error.peer == "owner" for error in errors), errors
    if errors:
        await scene.until(lambda: caller.lost == [("owner", owner.endpoint.incarnation)], 3.0)
    if restarted is None:
        restarted = await scene.node("owner", 16 * MIB)
    late = await caller.do(lambda: failure(caller.peer(owner).write(key, caller.region, [(0, 0, 8)])))
    assert isinstance(late, PeerRestarted), late
    assert not restarted.bytes.any()
    new_key = restarted.grant()
    error = await caller.do(lambda: failure(caller.peer(restarted).write(new_key, caller.region, [(0, 0, 16 * MIB)])))
    assert error is None, error
    assert (restarted.bytes == caller.bytes).all()
    caller.process.end("crashes")
    lost = caller.endpoint.node_id, caller.endpoint.incarnation
    await scene.until(lambda: restarted.lost == [lost], 3.0)
    return {"errors": sorted({type(error).__name__ for error in errors}), "problems": restarted.messenger.validate()}


async def silence(scene: Scene) -> Outcome:
    """The owner's host dies while nothing is under way: both sides notice it without any operation."""
    owner, caller = await scene.node("owner"), await scene.node("caller")
    key = owner.grant()
    assert await caller.do(lambda: failure(caller.peer(owner).write(key, caller.region, [(0, 0, 8)]))) is None
    scene.network.kill_host(caller.process.host)
    caller.process.end("loses power")
    began_s = scene.now_s
    await scene.until(lambda: bool(owner.lost), 120.0)
    return {"lost": owner.lost[0][0], "after_s": scene.now_s - began_s}


async def partition(scene: Scene) -> Outcome:
    """The network between two nodes is cut during operations, and whole again before or after their deadlines."""
    rng = scene.rng
    owner, caller = await scene.node("owner", 16 * MIB), await scene.node("caller", 16 * MIB)
    caller.bytes[:] = 1 + pattern(rng, 16 * MIB) % 255
    key, deadline_s = owner.grant(), 1.5
    slices = [[(4 * MIB * index, 4 * MIB * index, rng.randint(1, 4 * MIB))] for index in range(4)]

    async def move() -> list[tuple[MessengerError | None, float]]:
        peer = caller.peer(owner)

        async def one(rows: Any) -> tuple[MessengerError | None, float]:
            began_s = scene.now_s
            error = await failure(peer.write(key, caller.region, rows, deadline_s=deadline_s))
            return error, scene.now_s - began_s

        return await asyncio.gather(*map(one, slices))

    moving = asyncio.ensure_future(caller.do(move))
    await asyncio.sleep(rng.uniform(0.0, 0.01))
    scene.cut(caller, owner, both=rng.random() < 0.7)
    heals_early = rng.random() < 0.5
    await asyncio.sleep(rng.uniform(0.05, 1.0) if heals_early else 3.0)
    scene.heal(caller, owner)
    results = await moving
    for (error, took_s), [(start, _, nbytes)] in zip(results, slices, strict=True):
        there, sent = owner.bytes[start : start + nbytes], caller.bytes[start : start + nbytes]
        assert error is None or isinstance(error, TransferDeadlineExceeded), error
        assert took_s < deadline_s + 0.1
        assert (there == sent).all() if error is None else (there == np.where(there, sent, 0)).all()

    async def whole() -> MessengerError | None:
        return await failure(caller.peer(owner).write(key, caller.region, [(0, 0, 16 * MIB)]))

    connects = []
    for pause_s in (0.0, 40.0):  # what was held up must not end the connection later
        await asyncio.sleep(pause_s)
        owner.bytes[:] = 0
        error = await caller.do(whole)
        assert error is None, error
        assert (owner.bytes == caller.bytes).all()
        connects.append(caller.messenger.counters()["connects"])
    return {
        "heals_early": heals_early,
        "reconnects": connects[1] - connects[0],
        "failed": sum(error is not None for error, _ in results),
        "problems": owner.messenger.validate() + caller.messenger.validate(),
    }


async def closing(scene: Scene) -> Outcome:
    """A side closes its messenger during operations, with the network whole or cut; nothing may hang."""
    rng = scene.rng
    owner, caller = await scene.node("owner", 12 * MIB), await scene.node("caller", 12 * MIB)
    key, closes = owner.grant(), rng.choice((owner, caller))

    async def move() -> list[MessengerError | None]:
        peer = caller.peer(owner)
        operations: list[Any] = [peer.write(key, caller.region, [(0, 0, 12 * MIB)], deadline_s=2.0)]
        operations += [peer.read(key, caller.region, [(0, 0, 4 * MIB)], deadline_s=2.0), peer.notify(b"t", b"p")]
        return await asyncio.gather(*map(failure, operations))

    moving = asyncio.ensure_future(caller.do(move))
    await asyncio.sleep(rng.uniform(0.0, 0.01))
    if is_cut := rng.random() < 0.5:
        scene.cut(owner, caller, both=rng.random() < 0.5)
        await asyncio.sleep(rng.choice((0.0, 0.05)))
    began_s = scene.now_s
    await closes.do(lambda: asyncio.to_thread(closes.messenger.close))
    took_s = scene.now_s - began_s
    scene.heal(owner, caller)
    errors = [type(error).__name__ for error in await moving if error is not None]
    return {"closes": closes.name, "is_cut": is_cut, "took_s": took_s, "errors": errors}


# Random operations, against a model of the memory.

LANE_NBYTES = 48 << 10
LOAD_S = 1.2
MEAN_PAUSE_S = 0.05
LONGEST_STOP_S = 0.3


class Lane:
    """Bytes of an owner's region that one caller writes. `known` [LANE_NBYTES] are those that must be there.

    `pending` is a write that has not succeeded: each of its bytes may be there or not, until the key is revoked.
    """

    def __init__(self, owner: Node, start: int) -> None:
        self.owner, self.start = owner, start
        self.known = np.zeros(LANE_NBYTES, np.uint8)
        self.pending: Any = None
        self.key: RemoteKey | None = None

    @property
    def bytes(self) -> Any:
        """The bytes that are there now."""
        return self.owner.bytes[self.start : self.start + LANE_NBYTES]

    def check(self, when: str) -> None:
        """Raise AssertionError if the bytes cannot be there."""
        there = self.bytes
        right = there == self.known
        if self.pending is not None:
            right |= there == self.pending
        wrong = int(np.count_nonzero(~right))
        assert not wrong, f"{wrong} wrong bytes of {self.owner.name} at {self.start} {when}"

    async def renew(self) -> None:
        """Revoke the key and make a new one, in the owner's process. Afterwards nothing is pending."""

        def blocking() -> None:
            if self.key is not None:
                began_s = self.owner.scene.now_s
                self.owner.messenger.revoke(self.key)
                took_s = self.owner.scene.now_s - began_s
                assert took_s < 1.0 + LONGEST_STOP_S, f"a revoke took {took_s} s"
            self.check("after a revoke")
            self.known, self.pending = self.bytes.copy(), None
            self.key = self.owner.messenger.grant(self.owner.region, self.start, LANE_NBYTES, read=True, write=True)

        await asyncio.to_thread(blocking)


class Load:
    """Nodes that write and read each other's memory, while the driver breaks things."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.nodes: dict[str, Node] = {}
        self.lanes: dict[tuple[int, str], Lane] = {}  # by owner's incarnation and caller
        self.counts: dict[str, int] = {}
        self.noted: dict[tuple[int, int], dict[int, bool]] = {}  # whether notification N succeeded, by owner and caller
        self.running: dict[Process, None] = {}
        self.problems: list[str] = []
        self.ends_s = scene.now_s + LOAD_S

    def count(self, name: str) -> None:
        """Count an event."""
        self.counts[name] = self.counts.get(name, 0) + 1

    def lane(self, owner: Node, caller: str) -> Lane:
        """Return the caller's lane in the owner's region."""
        place = owner.endpoint.incarnation, caller
        if place not in self.lanes:
            self.lanes[place] = Lane(owner, "abc".index(caller) * LANE_NBYTES)
        return self.lanes[place]

    def begin(self, node: Node) -> None:
        """Let a node use the others' memory from now on."""
        self.nodes[node.name] = node
        self.running[node.process] = None

        def begin() -> None:
            task = asyncio.get_running_loop().create_task(self._use_all(node))
            task.add_done_callback(ended)

        def ended(task: asyncio.Task[None]) -> None:
            self.running.pop(node.process)
            if (error := task.exception()) is not None:
                self.problems.append("".join(traceback.format_exception(error)))

        node.process.loop.call_soon_threadsafe(begin)

    async def _use_all(self, node: Node) -> None:
        others = [other for other in "abc" if other != node.name]
        await asyncio.gather(*(use(node, other) for other in others for use in (self._use, self._notify)))

    async def _notify(self, node: Node, other: str) -> None:
        """Send notifications several at a time, over the connections that the other operations break."""
        rng = random.Random(f"{self.scene.world.seed} {node.endpoint.incarnation} {other} notes")
        while self.scene.now_s < self.ends_s:
            await asyncio.sleep(rng.expovariate(1 / 2 / MEAN_PAUSE_S))
            owner = self.nodes[other]
            notes = [self._note(owner, node) for _ in range(rng.randint(1, 6))]
            peer = node.peer(owner)
            errors = await asyncio.gather(*(failure(peer.notify(b"n", note, deadline_s=1.0)) for note in notes))
            for note, error in zip(notes, errors, strict=True):
                assert error is None or isinstance(error, PeerLost | TransferDeadlineExceeded), error
                self._noted(owner, node, note, error)
                self.count("notify" if error is None else "failed notify")

    def _note(self, owner: Node, caller: Node) -> bytes:
        """Return the payload of the caller's next notification."""
        sent = self.noted.setdefault((owner.endpoint.incarnation, caller.endpoint.incarnation), {})
        number = len(sent)
        sent[number] = False
        return caller.endpoint.incarnation.to_bytes(8, "big") + number.to_bytes(4, "big")

    def _noted(self, owner: Node, caller: Node, note: bytes, error: Exception | None) -> None:
        """Record that a notification succeeded or failed."""
        if error is None:
            assert (caller.name, b"n", note) in owner.notes, "a notification succeeded and was not delivered"
            self.noted[owner.endpoint.incarnation, caller.endpoint.incarnation][int.from_bytes(note[8:], "big")] = True

    async def _use(self, node: Node, other: str) -> None:
        rng = random.Random(f"{self.scene.world.seed} {node.endpoint.incarnation} {other}")
        local = (3 + "abc".index(other)) * LANE_NBYTES
        owner: Node | None = None
        number = 0
        while self.scene.now_s < self.ends_s:
            if owner is None or owner is not self.nodes.get(other) or owner.process.is_dead:
                owner = self.nodes.get(other)
                if owner is None or owner.process.is_dead:
                    owner = None
                    await asyncio.sleep(0.02)
                    continue
                if not await self._renew(self.lane(owner, node.name)):
                    owner = None
                    continue
            number += 1
            error = await self._operation(rng, node, self.lane(owner, node.name), local, number)
            if error is not None and not await self._renew(self.lane(owner, node.name)):
                owner = None
            if rng.random() < 0.7:  # at other times one operation follows the other
                await asyncio.sleep(rng.expovariate(1 / MEAN_PAUSE_S))

    async def _renew(self, lane: Lane) -> bool:
        """Renew the lane's key; returns False if its owner dies."""
        asked = asyncio.ensure_future(lane.owner.do(lane.renew))
        while not asked.done():
            if lane.owner.process.is_dead:
                asked.cancel()
                return False
            await asyncio.wait([asked], timeout=0.02)
        asked.result()
        return True

    async def _operation(
        self, rng: random.Random, node: Node, lane: Lane, local: int, number: int
    ) -> MessengerError | None:
        kind = rng.choice(("write", "write", "read", "write_notify", "cancel"))
        deadline_s, priority = rng.choice((0.02, 0.3, 1.0, 3.0)), rng.choice(list(Priority))
        peer, key = node.peer(lane.owner), lane.key
        assert key is not None
        rows = [
            (local + at, lane.start + to, nbytes)
            for at, to, nbytes in many_slices(rng, LANE_NBYTES, rng.choice((1, 1, 3, 40)))
        ]
        mine = node.bytes[local : local + LANE_NBYTES]
        options: dict[str, Any] = {"deadline_s": deadline_s, "priority": priority}
        if kind == "read":
            expected = moved(lane.owner.bytes, node.bytes, rows, to_remote=False)[local : local + LANE_NBYTES]
            operation: Any = peer.read(key, node.region, rows, **options)
        else:
            mine[:] = pattern(rng, LANE_NBYTES)
            relative = [(at - local, to - lane.start, nbytes) for at, to, nbytes in rows]
            lane.pending = moved(mine, lane.known, relative, to_remote=True)
            if kind == "write_notify":
                note = self._note(lane.owner, node)
                operation = peer.write_notify(key, node.region, rows, b"n", note, deadline_s=deadline_s)
            else:
                operation = peer.write(key, node.region, rows, **options)
        began_s = self.scene.now_s
        if kind == "cancel":
            await asyncio.sleep(rng.choice((0.0, 0.001)))
            operation.cancel()
        error = await failure(operation)
        took_s = self.scene.now_s - began_s
        self.scene.world.tell(node.name, f"{kind} {number} to {lane.owner.name}: {error}")
        self.count("failed" if error is not None else kind)
        if kind == "write_notify":
            self._noted(lane.owner, node, note, error)
        assert took_s < deadline_s + 0.5 + LONGEST_STOP_S, f"{kind} with deadline {deadline_s} took {took_s} s"
        if error is not None:
            assert isinstance(error, PeerLost | TransferDeadlineExceeded | TransferCancelled), error
            self.count(type(error).__name__)
            if kind == "read":  # its local memory may be used for something else now
                mine[:] = left = pattern(rng, LANE_NBYTES)
                await asyncio.sleep(rng.uniform(0.0, 0.1))
                assert (mine == left).all(), "a read that failed wrote to its memory later"
            return error
        if kind == "read":
            assert (mine == expected).all(), "a read returned wrong bytes"
        else:
            lane.known, lane.pending = lane.pending, None
        if not lane.owner.process.is_dead:
            lane.check(f"after a {kind}")
        return None

    async def break_things(self) -> None:
        """Cut links, stop processes, and kill one now and then, until the load ends."""
        scene, rng = self.scene, self.scene.rng
        while scene.now_s < self.ends_s - 0.3:
            await asyncio.sleep(rng.expovariate(5.0))
            one, other = (self.nodes[name] for name in rng.sample("abc", 2))
            how = rng.choice(("cut", "half", "stop", "stop", "kill", "slow"))
            self.count(how)
            if how in ("cut", "half"):
                scene.cut(one, other, both=how == "cut")
                await asyncio.sleep(rng.choice((0.01, 0.1, 0.5)))
                scene.heal(one, other)
            elif how == "stop":
                scene.world.pause(one.process)
                await asyncio.sleep(rng.uniform(0.0, LONGEST_STOP_S))
                scene.world.go_on(one.process)
            elif how == "slow":
                scene.network.link(one.process.host, other.process.host).slower = rng.choice((1.0, 30.0, 1000.0))
            else:
                for _ in range(200):  # until a write to it is under way
                    if any(lane.pending is not None and lane.owner is one for lane in self.lanes.values()):
                        break
                    await asyncio.sleep(0.0005)
                self.running.pop(one.process, None)
                one.process.end("is killed")
                await asyncio.sleep(rng.choice((0.0, 0.05, 0.5)))
                self.begin(await scene.node(one.name))

    def check_notes(self) -> None:
        """Raise AssertionError if a notification was lost, delivered twice or out of order."""
        owners = {lane.owner.endpoint.incarnation: lane.owner for lane in self.lanes.values()}
        for (owner, caller), sent in self.noted.items():
            if owner not in owners or owners[owner].process.is_dead:
                continue
            notes = [note for _, _, note in owners[owner].notes if int.from_bytes(note[:8], "big") == caller]
            got = [int.from_bytes(note[8:], "big") for note in notes]
            assert got == sorted(set(got)), f"notifications delivered twice or out of order: {got}"
            assert {number for number, succeeded in sent.items() if succeeded} <= set(got), "lost notifications"


async def load(scene: Scene) -> Outcome:
    """Random operations with faults, against a model of the memory."""
    nodes = [await scene.node(name) for name in "abc"]
    running = Load(scene)
    for node in nodes:
        running.begin(node)
    await running.break_things()
    await scene.until(lambda: not running.running, 30.0)
    assert not running.problems, running.problems[0]
    await asyncio.sleep(3.0)
    for lane in running.lanes.values():
        if not lane.owner.process.is_dead:
            lane.check("at the end")
    running.check_notes()
    for node in running.nodes.values():
        assert not node.messenger.validate()
        await node.close()
    return running.counts


SCENARIOS = {one.__name__: one for one in (transfers, revoke, crash, silence, partition, closing, load)}


def main(name: str, first: int, last: int) -> None:
    """Run a scenario with these seeds."""
    logging.basicConfig(level=logging.CRITICAL)
    for seed in range(first, last + 1):
        scene = Scene(seed)
        line: Outcome = {"seed": seed}
        try:
            line |= scene.run(SCENARIOS[name])
        except Exception:
            line["error"] = traceback.format_exc()
        print(json.dumps(line | {"digest": scene.world.digest, "steps": scene.world.num_steps}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
