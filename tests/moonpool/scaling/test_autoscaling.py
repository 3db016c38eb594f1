"""A cluster that follows its demand: bounds, several conductors, what fails; over a real connection to a conductor."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.config import ModelEntry
from moonpool.errors import ConfigError, StartupFailed
from moonpool.plan import WorkerGroup
from moonpool.scaling import autoscaler
from moonpool.scaling.autoscaler import Bounds, autoscaled, parse_bounds
from moonpool_proto.v1 import conductor_pb2
from moonpool_proto.v1.conductor_pb2_grpc import ConductorServicer, add_ConductorServicer_to_server
from rpc.control import start_server

LARGE, SMALL = ModelEntry("large", Path("/large")), ModelEntry("small", Path("/small"))
GROUPS = {
    f"{prefix}{role}": WorkerGroup(f"{prefix}{role}", role, model)
    for prefix, model in (("", LARGE), ("small-", SMALL))
    for role in ("prefill", "decode", "aggregated")
}


def test_bounds_are_read_by_group() -> None:
    assert parse_bounds(["decode=1:4", "small-aggregated=2:2"], GROUPS) == {
        "decode": Bounds(1, 4),
        "small-aggregated": Bounds(2, 2),
    }


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["decode"], "must be ROLE=MIN:MAX"),
        (["decode=4"], "must be ROLE=MIN:MAX"),
        (["decode=0:4"], "1 <= MIN <= MAX"),
        (["decode=5:4"], "1 <= MIN <= MAX"),
        (["decode=1:999"], "<= 256"),
        (["pool=1:4"], "must have a role of prefill"),
        (["decode=1:4", "decode=1:5"], "names decode twice"),
    ],
)
def test_what_is_not_a_bound_is_refused_by_name(given: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_bounds(given, GROUPS)


@given(
    st.integers(1, 8),
    st.integers(0, 8),
    st.integers(0, 20),
    st.lists(st.one_of(st.none(), st.integers(0, 40)), max_size=4),
)
def test_the_count_is_the_largest_need_within_the_bounds(
    least: int, more: int, present: int, needs: list[int | None]
) -> None:
    told = [{} if need is None else {"large": {"decode": need, "prefill": 99}} for need in needs]
    bounds = {"decode": Bounds(least, least + more)}
    (count,) = autoscaled(bounds, GROUPS, {"decode": present}, told).values()
    known = [need for need in needs if need is not None]
    assert count == min(least + more, max(least, max(known, default=present)))


def test_each_model_follows_its_own_demand() -> None:
    told = [{"large": {"decode": 3}, "small": {"aggregated": 2}}]
    bounds = {"decode": Bounds(1, 9), "small-aggregated": Bounds(1, 9), "small-decode": Bounds(1, 9)}
    assert autoscaled(bounds, GROUPS, {"small-decode": 4}, told) == {
        "decode": 3,
        "small-aggregated": 2,
        "small-decode": 4,
    }


class Told(ConductorServicer):
    """A conductor that wants so many decode nodes."""

    def __init__(self) -> None:
        self.wants = 3

    async def Cluster(self, request: Any, context: Any) -> conductor_pb2.ClusterReply:
        reply = conductor_pb2.ClusterReply()
        labels = {"model_name": "large", "role": "decode"}
        reply.samples.add(name="desired_nodes", labels=labels, value=self.wants)
        return reply


async def test_demand_is_followed_up_and_down_also_after_a_change_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autoscaler, "EVERY_S", 0.01)
    monkeypatch.setattr(autoscaler, "_REST_S", 0.02)
    conductor, target = Told(), f"unix:{tmp_path}/c.sock"
    server = await start_server(target, lambda server: add_ConductorServicer_to_server(conductor, server))
    present, said, calls = {"decode": 1, "prefill": 1}, list[str](), list[dict[str, int]]()
    changed = asyncio.Event()

    async def scale(counts: Mapping[str, int]) -> None:
        calls.append(dict(counts))
        if len(calls) == 1:
            raise StartupFailed("no room", node_id="decode-1", log_tail=[], log_path="")
        present.update(counts)
        changed.set()

    following = asyncio.create_task(
        autoscaler.autoscale(
            {"decode": Bounds(1, 2)},
            GROUPS,
            conductors=[target, f"unix:{tmp_path}/nobody.sock"],
            present=lambda: present,
            scale=scale,
            say=said.append,
        )
    )
    try:
        async with asyncio.timeout(60):
            await changed.wait()
            changed.clear()
            conductor.wants = 1
            await changed.wait()
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await server.stop(0)
    assert calls == [{"decode": 2}, {"decode": 2}, {"decode": 1}]
    assert said[0] == "Autoscaling: decode 1 to 2"
    assert said[1].startswith("Autoscaling failed, again in 0.02 s: ")
    assert said[-1] == "Autoscaling: decode 2 to 1"
