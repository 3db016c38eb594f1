"""A process that guesses epochs, but holds no reservation's key, neither hangs a hand-off nor changes a token."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgpack
import numpy as np
import pytest

from engine import Model
from messenger import Messenger, MessengerConfig, Peer
from settings.keys import assemble
from worker.kv_notification import KV_TAG, PushedBlocks, pack_notification

Start = Callable[..., Awaitable[Any]]
Prompt = Callable[..., list[int]]
Greedy = Callable[[Model, list[int], int], list[int]]


def nested_lists(epoch: int) -> bytes:
    """Notification in the former form, which raised in the callback that a commit waited for."""
    return bytes(
        msgpack.packb({"e": epoch, "l": 0, "b": [[1], [2]], "v": [[8], [8]], "d": np.zeros(2, dtype="<u8").tobytes()})
    )


class Forger:
    """Sends notifications for every reservation of a node as soon as it exists.

    It knows the epochs, and which digests the memory has that nobody has written yet: all but the key.
    """

    def __init__(self, messenger: Messenger, face: Any) -> None:
        self.sent = 0
        self._node = face.node
        self._peer: Peer = messenger.connect(face.node.endpoint)

    async def run(self) -> None:
        while True:
            for epoch, (token, target) in list(self._node.kv_receiver._by_epoch.items()):
                await asyncio.gather(*(asyncio.wrap_future(each) for each in self._forge(epoch, token, target)))
            await asyncio.sleep(0)

    def _forge(self, epoch: int, token: int, target: Any) -> Iterator[Any]:
        memory = self._node.memory
        blocks = np.arange(target.held_blocks, target.num_blocks)
        valid = target.valid_tokens(blocks)
        slots = [target.slots[block] for block in blocks]
        for layer in memory.place_of_layer:
            digests = memory.one_layer_digests(layer, slots, valid)[None]
            told = PushedBlocks(range(layer, layer + 1), blocks, valid, digests)
            for guess in (0, token ^ 1, token ^ (1 << 63)):
                yield self._notify(pack_notification(epoch, guess, told))
        yield self._notify(nested_lists(epoch))

    def _notify(self, payload: bytes) -> Any:
        self.sent += 1
        return self._peer.notify(KV_TAG, payload, deadline_s=20.0)


@contextlib.asynccontextmanager
async def forgers(*faces: Any) -> Any:
    """Forgers for these nodes; yields them, and at the end each must have been refused."""
    messenger = Messenger(assemble(MessengerConfig, transport="shm"), node_id="forger", incarnation=1)
    messenger.start()
    found = [Forger(messenger, face) for face in faces]
    tasks = [asyncio.create_task(forger.run()) for forger in found]
    try:
        yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(messenger.close)


@pytest.mark.parametrize("helpers", [0, 1], ids=["alone", "in a prefill group"])
async def test_forged_notifications_hang_nothing_and_change_no_token(
    start_pair: Start, model: Model, prompt: Prompt, greedy: Greedy, helpers: int
) -> None:
    """Also not early ones, for memory that is still unwritten and has just the digests that they name."""
    pair = await start_pair("shm", helpers=helpers)
    faces = [pair.decode, *((pair.prefill, *pair.helpers) if helpers else ())]
    prompts = [prompt(180 + 10 * number, number) for number in range(4)]
    async with forgers(*faces) as all_forgers:
        for number, ids in enumerate(prompts):
            request = await pair.frontend.submit(pair.submit(ids, f"r{number}"))
            async with asyncio.timeout(60):
                await request.ended.wait()
            assert request.failures == []
            assert request.token_ids == greedy(model, ids, 12)
    for forger, face in zip(all_forgers, faces, strict=True):
        counts = face.node.counters.snapshot()
        assert forger.sent > 0
        assert counts["refused_pushes"] + counts.get("late_pushes", 0) == forger.sent
        assert counts["refused_pushes"] > 0
        assert "digest_mismatches" not in counts
    assert "repushed_blocks" not in pair.prefill.node.counters.snapshot()
    assert "lost_groups" not in pair.prefill.node.counters.snapshot()
    await pair.at_rest()
