"""Where workers would best run: prefill together, decode apart and near it, never where there is no room."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from moonpool.plan import RolePlan
from moonpool.runtime.ray_hosts import RayHost, preferred_host, resource_of


def worker(name: str, model: str = "m") -> RolePlan:
    role = name.rpartition("-")[0]
    return RolePlan(name, f"{role}-node", {}, {}, 2, str(Path("unix:/x")), 5.0, model)


def host(name: str, rack: str = "", *, prefill: int = 0, decode: int = 0, gpus: int = 0) -> RayHost:
    resources = {"moonpool_prefill": float(prefill), "moonpool_decode": float(decode), "GPU": float(gpus)}
    return RayHost(name, f"address-{name}", resources, {"moonpool.io/rack": rack} if rack else {})


def placed_all(names: list[str], hosts: list[RayHost], *, gpus: float = 0.0) -> dict[str, str | None]:
    """Each in its turn, given those before it."""
    found = {one.ray_node_id: one for one in hosts}
    placed: dict[str, tuple[RolePlan, str]] = {}
    chosen: dict[str, str | None] = {}
    for name in names:
        chosen[name] = where = preferred_host(worker(name), found, placed, gpus=gpus)
        if where is not None:
            placed[name] = (worker(name), where)
    return chosen


def test_prefill_workers_fill_a_host_and_then_its_rack() -> None:
    hosts = [
        host("a", "r1", prefill=1),
        host("b", "r2", prefill=2),
        host("c", "r2", prefill=2),
        host("d", "r1", prefill=4),
    ]
    chosen = placed_all([f"prefill-{i}" for i in range(5)], hosts)
    assert list(chosen.values()) == ["a", "d", "d", "d", "d"]


def test_decode_workers_lie_apart_in_the_rack_of_the_prefill_workers() -> None:
    hosts = [
        host("a", "r1", decode=4),
        host("b", "r2", prefill=4),
        host("c", "r2", decode=2),
        host("d", "r2", decode=2),
    ]
    chosen = placed_all(["prefill-0", *(f"decode-{i}" for i in range(5))], hosts)
    assert list(chosen.values()) == ["b", "c", "d", "c", "d", "a"]


def test_where_hosts_have_both_decode_avoids_hosts_that_others_use() -> None:
    hosts = [host("a", prefill=2, decode=2), host("b", prefill=2, decode=2)]
    chosen = placed_all(["prefill-0", "prefill-1", "decode-0", "decode-1"], hosts)
    assert list(chosen.values()) == ["a", "a", "b", "a"]


def test_other_models_workers_are_no_reason_to_be_near() -> None:
    found = {one.ray_node_id: one for one in (host("a", "r1", prefill=2), host("b", "r2", prefill=2))}
    placed = {"prefill-0": (worker("prefill-0", "m"), "b"), "other-prefill-0": (worker("prefill-0", "other"), "a")}
    assert preferred_host(worker("prefill-1"), found, placed, gpus=0.0) == "b"


def test_gpus_are_room_too() -> None:
    hosts = [host("a", prefill=8, gpus=1), host("b", prefill=8, gpus=2)]
    assert list(placed_all([f"prefill-{i}" for i in range(4)], hosts, gpus=1.0).values()) == ["a", "b", "b", None]


def test_workers_share_a_gpu_by_fractions() -> None:
    hosts = [host("a", prefill=8, gpus=1), host("b", prefill=8, gpus=1)]
    chosen = placed_all([f"prefill-{i}" for i in range(21)], hosts, gpus=0.1)
    assert list(chosen.values()) == ["a"] * 8 + ["b"] * 8 + [None] * 5  # by their own resource
    chosen = placed_all([f"prefill-{i}" for i in range(7)], hosts, gpus=0.3)
    assert list(chosen.values()) == ["a"] * 3 + ["b"] * 3 + [None]
    chosen = placed_all([f"prefill-{i}" for i in range(4)], [host("a", prefill=8, gpus=3)], gpus=0.6)
    assert list(chosen.values()) == ["a"] * 3 + [None]  # a worker's fraction lies on one GPU


@given(
    st.lists(
        st.tuples(st.sampled_from(["", "r1", "r2"]), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=6
    ),
    st.lists(st.sampled_from(["prefill", "decode"]), max_size=14),
)
def test_a_host_is_found_as_long_as_one_has_room_and_none_is_overfull(
    shapes: list[tuple[str, int, int]], roles: list[str]
) -> None:
    hosts = [host(str(i), rack, prefill=p, decode=d) for i, (rack, p, d) in enumerate(shapes)]
    chosen = placed_all([f"{role}-{i}" for i, role in enumerate(roles)], hosts)
    for role in ("prefill", "decode"):
        wanted = sum(name.startswith(role) for name in chosen)
        on = [where for name, where in chosen.items() if name.startswith(role) and where is not None]
        offered = {one.ray_node_id: one.resources[resource_of(worker(f"{role}-0"))] for one in hosts}
        assert len(on) == min(wanted, int(sum(offered.values())))
        assert all(on.count(name) <= units for name, units in offered.items())
