"""In which order things happen: a notify after the data before it, batches as they were submitted, handlers alone."""

import asyncio
from typing import Any

import numpy as np
import pytest


def test_a_notify_finds_all_writes_before_it_landed(make_node: Any) -> None:
    a, b = make_node("a", 1 << 20), make_node("b", 1 << 20)
    a.array[:] = 1
    seen: list[int] = []
    b.messenger.on_notify(lambda _node, _tag, payload: seen.append(int(b.array[: int(payload)].sum())))
    peer, key = a.messenger.connect(b.endpoint), b.grant()
    for first in range(0, 1 << 20, 1 << 16):
        peer.write(key, a.region, [[first, first, 1 << 16]])
        peer.notify(b"so far", b"%d" % (first + (1 << 16)))
    peer.notify(b"end", b"0").result()
    assert seen == [*range(1 << 16, (1 << 20) + 1, 1 << 16), 0]


def test_a_write_notify_is_delivered_once_its_whole_batch_landed(make_node: Any) -> None:
    nbytes = 20 << 20
    a, b = make_node("a", nbytes), make_node("b", nbytes)
    a.array[:] = 1
    seen: list[tuple[str, bytes, bytes, int]] = []
    b.messenger.on_notify(lambda node, tag, payload: seen.append((node, tag, payload, int(b.array.sum()))))
    peer = a.messenger.connect(b.endpoint)
    peer.write_notify(b.grant(), a.region, [[0, 0, nbytes]], b"layer 3", b"digests").result()
    assert seen == [("a", b"layer 3", b"digests", nbytes)]


def test_a_write_notify_of_nothing_is_a_notify(pair: Any) -> None:
    a, b = pair
    peer = a.messenger.connect(b.endpoint)
    assert peer.write_notify(b.grant(), a.region, np.empty((0, 3), np.int64), b"t", b"p").result().nbytes == 0
    assert b.notes == [("a", b"t", b"p")]
    assert peer.write(b.grant(), a.region, [[5, 5, 0]]).result().nbytes == 0


def test_a_failing_handler_disturbs_neither_the_others_nor_the_caller(
    pair: Any, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = pair
    calls: list[bytes] = []

    def fail(_node: str, _tag: bytes, _payload: bytes) -> None:
        raise RuntimeError("broken handler")

    b.messenger.on_notify(fail)
    b.messenger.on_notify(lambda _node, tag, _payload: calls.append(tag))
    a.messenger.connect(b.endpoint).notify(b"t", b"").result()
    assert calls == [b"t"]
    assert "broken handler" in caplog.text
    # The record's traceback holds on to the node.
    caplog.clear()


async def test_futures_work_from_asyncio(pair: Any) -> None:
    a, b = pair
    peer, key = a.messenger.connect(b.endpoint), b.grant()
    writes = [asyncio.wrap_future(peer.write(key, a.region, [[i, i, 1]])) for i in range(20)]
    assert sum(result.nbytes for result in await asyncio.gather(*writes)) == 20
    assert await asyncio.wrap_future(peer.notify(b"t", b"")) is None
