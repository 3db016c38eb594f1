"""Objectives in a folder that conductors share."""

import asyncio
import threading
from pathlib import Path

import pytest

from conductor.errors import SharedStoreRefused
from conductor.slo import stores
from conductor.slo.stores import FileVersions
from conductor.slo.versions import Acknowledgement, SloVersion


async def test_one_that_ends_while_it_acknowledges_is_waited_for_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = FileVersions(tmp_path, "c")
    begun, may_end, written = threading.Event(), threading.Event(), threading.Event()
    replace = stores._replace

    def slowly(path: Path, text: str) -> None:
        begun.set()
        assert may_end.wait(60)
        replace(path, text)
        written.set()

    monkeypatch.setattr(stores, "_replace", slowly)
    acknowledging = asyncio.create_task(versions.acknowledge(Acknowledgement("one", 1, 1, ""), 60.0))
    await asyncio.to_thread(begun.wait, 60)
    acknowledging.cancel()
    asyncio.get_running_loop().call_later(0.1, may_end.set)
    with pytest.raises(asyncio.CancelledError):
        await acknowledging
    await versions.withdraw("one")
    assert await asyncio.to_thread(written.wait, 60)
    assert await versions.acknowledged() == []


async def test_ids_that_are_alike_acknowledge_by_themselves(tmp_path: Path) -> None:
    versions, ids = FileVersions(tmp_path, "c"), ["a/b", "a_b", "a.b", "../a"]
    for node_id in ids:
        await versions.acknowledge(Acknowledgement(node_id, 1, 1, ""), 60.0)
    assert {each.node_id for each in await versions.acknowledged()} == set(ids)
    await versions.withdraw("a/b")
    assert {each.node_id for each in await versions.acknowledged()} == set(ids) - {"a/b"}


async def test_a_copy_is_not_kept_over_another_clusters_and_a_damaged_one_is_replaced(tmp_path: Path) -> None:
    mine, others = FileVersions(tmp_path, "mine"), FileVersions(tmp_path, "others")
    version = SloVersion(1, "{}", "a", "first", 0.0, "configuration", "")
    await others.keep([version])
    with pytest.raises(SharedStoreRefused, match="belongs to the cluster 'others', but this one is 'mine'"):
        await mine.keep([version])
    assert await others.history() == [version]
    (tmp_path / "objectives.json").write_text("{", encoding="utf-8")
    await mine.keep([version])
    assert await mine.history() == [version]
