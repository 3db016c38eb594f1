"""Loads from several pool nodes, layer by layer: what counts as right is right, whatever is damaged or fails."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine import KvGroupShape
from kvpool import Lease, layer_digests
from messenger import Messenger, MessengerConfig, PeerLost, SharedMemory
from messenger.memory import RemoteKey
from settings.keys import assemble
from worker import kv_loading
from worker.counters import WorkerCounters
from worker.errors import LoadLost
from worker.kv_loading import LoadSettings, PoolLoad
from worker.layer_gate import LayerGate
from worker.paced.memory import PacedMemory
from worker.policy import WindowSlots
from worker.prefix_blocks import PinnedBlocks
from worker.slot_memory import spec_of

LAYERS, BLOCK, BLOCKS = 4, 4, 6
SEEN_FROM = 4
"""First block that the token after the last one sees in the windowed group, layers 1 and 3."""


def is_windowed(layer: int) -> bool:
    return layer % 2 == 1


def needs(layer: int, block: int) -> bool:
    """Return True if the block is to be loaded in this layer."""
    return not is_windowed(layer) or block >= SEEN_FROM


class Host:
    """A worker's memory, and two pool nodes that hold blocks of its kind."""

    def __init__(self, folder: Path) -> None:
        shapes = (
            KvGroupShape("full", 0, (0, 2), 1, 4, "float32"),
            KvGroupShape("window", 8, (1, 3), 1, 4, "float32"),
        )
        config = assemble(MessengerConfig, shm_dir=folder)
        self.messengers = [Messenger(config, node_id=name, incarnation=1) for name in ("worker", "a", "b")]
        for each in self.messengers:
            each.start()
        spec = spec_of(shapes, BLOCK)
        windows = WindowSlots(BLOCKS, BLOCKS, window_blocks=spec.window_blocks)
        windows.hold(range(BLOCKS))
        self.memory = PacedMemory(spec, BLOCKS, self.messengers[0], windows)
        self.spec = self.memory.spec
        nbytes = BLOCKS * self.spec.block_nbytes
        self.source = np.random.default_rng(0).integers(0, 255, nbytes, dtype=np.uint8)
        self.pools = [SharedMemory.create(nbytes, "pool") for _ in range(2)]
        self.keys: list[RemoteKey] = []
        for pool, messenger in zip(self.pools, self.messengers[1:], strict=True):
            self.keys.append(messenger.grant(messenger.register(pool), 0, nbytes, read=True, write=False))
        starts = [0, BLOCKS * self.spec.slot_nbytes(0)]
        self.offsets = np.stack([starts[g] + np.arange(BLOCKS) * self.spec.slot_nbytes(g) for g in range(2)])
        full = np.full(BLOCKS, BLOCK, np.int32)
        rows = [self.source[starts[g] :][: BLOCKS * self.spec.slot_nbytes(g)].reshape(BLOCKS, -1) for g in range(2)]
        self.digests = [layer_digests(rows[g], self.spec, g, full) for g in range(2)]

    @property
    def received(self) -> NDArray[np.uint8]:
        """The worker's memory."""
        region = self.memory.host_region
        assert region is not None
        return region.array

    def pinned(self, cut: int) -> list[PinnedBlocks]:
        """Blocks [0, cut) of the lasting group at one pool node and the rest at the other."""
        return [self._lease(0, at, first, end) for at, (first, end) in enumerate(((0, cut), (cut, BLOCKS)))]

    def windows(self, cut: int) -> list[PinnedBlocks]:
        """The blocks of the windowed group that the next token sees, at the pool node of the last lasting ones."""
        return [self._lease(1, int(cut <= SEEN_FROM), SEEN_FROM, BLOCKS)]

    def _lease(self, group: int, at: int, first: int, end: int) -> PinnedBlocks:
        rows, chain = slice(first, end), np.zeros((end - first, 16), np.uint8)
        digests = [self.digests[group][rows]]
        offsets = self.offsets[group : group + 1, rows]
        lease = Lease("", self.keys[at], self.messengers[1 + at].endpoint, offsets, digests, chain)
        client: Any = Client()
        return PinnedBlocks(first, lease, client, is_own=False, block_tokens=BLOCK, is_windowed=group == 1)

    def place(self, layer: int, block: int) -> int:
        """Byte of one layer of one block in a pool node's region."""
        group, index = self.memory.place_of_layer[layer]
        return int(self.offsets[group, block]) + index * self.spec.layer_nbytes(group) + 7

    def has(self, slots: list[int], layer: int, block: int) -> bool:
        """Return True if the layer of the block is in its slot as the pool nodes were given it."""
        group, index = self.memory.place_of_layer[layer]
        size = self.spec.layer_nbytes(group)
        at = int(self.memory.offsets(group, slots[block : block + 1])[0]) + index * size
        start = int(self.offsets[group, block]) + index * size
        return bool((self.received[at : at + size] == self.source[start : start + size]).all())

    def close(self) -> None:
        self.memory.close()
        for each in self.messengers:
            each.close()
        for pool in self.pools:
            pool.close()


class Client:
    """A pool node's client that is not called."""

    target = "pool"


class Breaking:
    """A messenger whose reads from one peer fail from the n-th one on."""

    def __init__(self, inner: Messenger, node_id: str, after: int) -> None:
        self._inner, self._node_id, self._left = inner, node_id, after

    def connect(self, endpoint: Any) -> Any:
        peer = self._inner.connect(endpoint)
        if endpoint.node_id != self._node_id:
            return peer
        self._left -= 1
        return self if self._left < 0 else peer

    def read(self, *_: Any, **__: Any) -> Future[Any]:
        failed: Future[Any] = Future()
        failed.set_exception(PeerLost("gone", peer=self._node_id, transport="shm", address=""))
        return failed


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    made = Host(tmp_path_factory.mktemp("host"))
    yield made
    made.close()


class Unreachable:
    """A local pool that is not there."""


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cut=st.integers(1, BLOCKS - 1),
    first=st.integers(0, BLOCKS - 1),
    damaged=st.lists(st.tuples(st.integers(0, LAYERS - 1), st.integers(0, BLOCKS - 1)), max_size=3),
    breaks=st.none() | st.tuples(st.sampled_from(["a", "b"]), st.integers(0, LAYERS)),
    least_read=st.sampled_from([1, 700, 1 << 30]),
)
def test_leading_blocks_are_right_in_all_layers_and_the_gate_opens_for_right_layers_only(
    host: Host,
    cut: int,
    first: int,
    damaged: list[tuple[int, int]],
    breaks: tuple[str, int] | None,
    least_read: int,
) -> None:
    for pool in host.pools:
        pool.array[: len(host.source)] = host.source
    for layer, block in set(damaged):
        at = cut <= SEEN_FROM if is_windowed(layer) else block >= cut
        host.pools[at].array[host.place(layer, block)] ^= 8
    host.received[:] = 0
    slots = list(np.random.default_rng(cut).permutation(BLOCKS))
    counters = WorkerCounters()
    messenger: Any = host.messengers[0]
    if breaks is not None:
        messenger = Breaking(messenger, *breaks)
    failed_calls: list[str] = []
    load_settings = LoadSettings(
        host.memory,
        messenger,
        Unreachable(),  # type: ignore[arg-type]
        counters,
        60.0,
        lambda target, _: failed_calls.append(target),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_loading, "LEAST_READ_NBYTES", least_read)
        patch.setattr(kv_loading, "LEAST_SLICE_NBYTES", 1)
        own = [int(s) for s in slots[first:]]
        groups = load_settings.memory.spec.lasting
        load = PoolLoad(load_settings, host.pinned(cut), own, first, host.windows(cut), groups=groups)
    wanted = BLOCKS - first
    gate = LayerGate(LAYERS, wanted, held_blocks=0, stall_s=60.0, lost=LoadLost, changed=lambda: None)
    gate.require(wanted)
    gate.mark((1, 3), np.arange(SEEN_FROM - first))
    good = asyncio.run(load.run(gate))
    assert load.num_blocks == wanted
    for block in range(first, first + good):
        assert all(host.has([int(s) for s in slots], layer, block) for layer in range(LAYERS) if needs(layer, block))
    bad = {block for layer, block in damaged if block >= first and needs(layer, block)}
    if breaks is None:
        assert good == min(bad, default=BLOCKS) - first
        assert (counters.snapshot().get("digest_mismatches", 0) > 0) == bool(bad)
        assert set(load.bad_blocks) <= bad
        assert bool(load.bad_blocks) == bool(bad)
    else:
        assert good <= min(bad, default=BLOCKS) - first
    assert gate.is_open == (good == wanted)
    if good < wanted:
        assert isinstance(gate.error, LoadLost)
        for layer in range(LAYERS):  # whatever a step was allowed to use was right
            if gate.has(layer):
                blocks = [block for block in range(first, BLOCKS) if needs(layer, block)]
                assert all(host.has([int(s) for s in slots], layer, block) for block in blocks)
