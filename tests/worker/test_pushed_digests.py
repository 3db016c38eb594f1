"""Verification of pushed KV by the digests that the messenger computed while it wrote, over real sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool import KvGroup, KvSpec
from messenger import Messenger, MessengerConfig, RemoteKey
from settings.keys import assemble
from worker.counters import WorkerCounters
from worker.kv_notification import KV_TAG, PushedBlocks, pack_notification
from worker.kv_receiver import KVReceiver
from worker.paced.memory import PacedMemory
from worker.slot_memory import windows_of

BLOCK, NUM_BLOCKS, LAST_TOKENS = 8, 5, 3
SPEC = KvSpec(
    (
        KvGroup("full", 0, (0, 2), kv_heads=2, head_dim=16, dtype="float32"),
        KvGroup("window", 16, (1,), kv_heads=1, head_dim=8, dtype="float16"),
    ),
    BLOCK,
)


class Side:
    """A messenger with slots of random KV."""

    def __init__(self, name: str, folder: Path, transport: str) -> None:
        config = assemble(MessengerConfig, transport=transport, shm_dir=folder)
        self.messenger = Messenger(config, node_id=name, incarnation=1)
        self.receiver = KVReceiver(self, self.messenger, WorkerCounters())  # type: ignore[arg-type]
        self.endpoint = self.messenger.start()
        windows = windows_of(SPEC, NUM_BLOCKS)
        assert windows is not None
        windows.hold(range(NUM_BLOCKS))
        self.memory = PacedMemory(SPEC, NUM_BLOCKS, self.messenger, windows)
        self.memory._array[:] = np.random.default_rng(len(name)).integers(0, 256, self.memory.nbytes, np.uint8)
        self.read: list[tuple[int, list[int]]] = []  # layers and slots that were read for their digests
        real = self.memory.one_layer_digests

        def recorded(layer: int, slots: Any, valid: Any) -> Any:
            self.read.append((layer, list(slots)))
            return real(layer, slots, valid)

        self.memory.one_layer_digests = recorded  # type: ignore[method-assign]

    # The memory as the receiver sees it.

    @property
    def place_of_layer(self) -> dict[int, tuple[int, int]]:
        return self.memory.place_of_layer

    def is_windowed(self, layer: int) -> bool:
        return self.memory.is_windowed(layer)

    def pushed_digests(self, *pushed: Any) -> Any:
        return self.memory.pushed_digests(*pushed)

    def close(self) -> None:
        self.receiver.close()
        self.memory.close()
        self.messenger.close()


class Target:
    """All blocks of a prompt whose last one is partial."""

    held_blocks, num_blocks, seen_from = 0, NUM_BLOCKS, 0

    def __init__(self) -> None:
        self.slots = list(range(NUM_BLOCKS))
        self.right: dict[int, list[bool]] = {}

    def valid_tokens(self, blocks: Any) -> Any:
        return np.where(blocks == NUM_BLOCKS - 1, LAST_TOKENS, BLOCK).astype(np.int32)

    def announce(self) -> None: ...

    def verified(self, layer: int, blocks: Any, right: Any) -> None:
        self.right[layer] = right.tolist()


@pytest.fixture(params=["tcp", "shm"])
def sides(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Side, Side]]:
    made = [Side(name, tmp_path, request.param) for name in ("writer", "owner")]
    yield made[0], made[1]
    for side in made:
        side.close()


Push = Callable[..., dict[int, list[bool]]]


@pytest.fixture
def push(sides: tuple[Side, Side]) -> Push:
    writer, owner = sides
    blocks = np.arange(NUM_BLOCKS)

    def push(
        layers: range, key: RemoteKey, *, damage: Callable[[], None] = lambda: None, writes: bool = True
    ) -> dict[int, list[bool]]:
        """Push layers of all blocks, whose bytes `damage` changes after their digests were taken."""
        target = Target()
        epoch = owner.receiver.open_epoch(key, target)
        valid = target.valid_tokens(blocks)
        digests = np.stack([writer.memory.one_layer_digests(layer, target.slots, valid) for layer in layers])
        damage()
        remote = list(owner.memory.all_offsets(target.slots, range(owner.memory.num_groups)))
        slices = np.concatenate([writer.memory.layer_slices(layer, target.slots, remote) for layer in layers])
        told = pack_notification(epoch, key.token, PushedBlocks(layers, blocks, valid, digests))
        peer = writer.messenger.connect(owner.endpoint)
        peer.write_notify(key, writer.memory.region, slices if writes else slices[:0], KV_TAG, told).result()
        owner.receiver._verifier.submit(lambda: None).result(30)
        return target.right

    return push


ALL_RIGHT = [True] * NUM_BLOCKS


def test_whole_layers_are_verified_without_reading_them_again_and_partial_ones_are_read(
    sides: tuple[Side, Side], push: Push
) -> None:
    owner = sides[1]
    key = owner.memory.grant_write(range(NUM_BLOCKS))
    assert push(range(3), key) == dict.fromkeys(range(3), ALL_RIGHT)
    assert owner.read == [(layer, [NUM_BLOCKS - 1]) for layer in range(3)]


@pytest.mark.parametrize("bit", [0, 3, 7])
def test_a_bit_flipped_on_the_way_is_found_in_a_layer_that_is_not_read_again(
    sides: tuple[Side, Side], push: Push, bit: int
) -> None:
    writer, owner = sides
    at = int(writer.memory.offsets(0, [2])[0]) + SPEC.layer_nbytes(0) + 17  # layer 2 of block 2

    def flip() -> None:
        writer.memory._array[at] ^= 1 << bit

    right = push(range(3), owner.memory.grant_write(range(NUM_BLOCKS)), damage=flip)
    assert right == {0: ALL_RIGHT, 1: ALL_RIGHT, 2: [True, True, False, True, True]}
    assert (2, [NUM_BLOCKS - 1]) in owner.read


def test_digests_of_an_earlier_grant_are_not_used_for_a_later_one(sides: tuple[Side, Side], push: Push) -> None:
    """The slots were overwritten between the two, and the second writer only claims to have written them."""
    owner = sides[1]
    key = owner.memory.grant_write(range(NUM_BLOCKS))
    push(range(3), key)
    owner.messenger.revoke(key)
    owner.memory._array[:] ^= 0xFF
    again = owner.memory.grant_write(range(NUM_BLOCKS))
    assert push(range(3), again, writes=False) == dict.fromkeys(range(3), [False] * NUM_BLOCKS)


def test_layers_that_the_compiled_loop_did_not_write_are_read(
    sides: tuple[Side, Side], push: Push, monkeypatch: pytest.MonkeyPatch
) -> None:
    for responder in ("messenger.tcp.transport.TcpResponder", "messenger.shm.transport.ShmResponder"):
        monkeypatch.setattr(f"{responder}.compiled_loop", lambda *_: None)
    owner = sides[1]
    assert push(range(3), owner.memory.grant_write(range(NUM_BLOCKS))) == dict.fromkeys(range(3), ALL_RIGHT)
    assert owner.read == [(layer, list(range(NUM_BLOCKS))) for layer in range(3)]
