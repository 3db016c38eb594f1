"""`moonpool top`: its figures over time, its layout in a terminal, and its keys."""

import io
import re
from typing import Any

import pytest
from rich.console import Console

from moonpool.cluster_view.activity import ActivityHistory, ClusterActivity, ClusterSample
from moonpool.cluster_view.top_rendering import KEYS, SORTS, TopView, screen, sparkline
from moonpool.commands.top import after_key, name_of
from moonpool_proto.v1 import common_pb2, conductor_pb2

ROLES = {"p": common_pb2.ROLE_PREFILL, "d": common_pb2.ROLE_DECODE, "k": common_pb2.ROLE_POOL}


def reply(*nodes: tuple[str, dict[str, float]], incarnation: int = 1, conductor: int = 1) -> Any:
    """A conductor's word; a node's first letter is its role."""
    told = conductor_pb2.ClusterReply(conductor_incarnation=conductor, ready_models=["m"])
    for name, counters in nodes:
        model = "" if name.startswith("k") else "m"
        node = conductor_pb2.Node(node_id=name, role=ROLES[name[0]], incarnation=incarnation, model=model)
        node.capacity_tokens = 100 if model else 0
        told.nodes.add(node=node, report=conductor_pb2.NodeReport(counters=counters))
    return told


def counted(told: Any, name: str, value: float, **labels: str) -> Any:
    told.samples.add(name=name, labels=labels, value=value)
    return told


def shown(*looks: Any, window_s: float = 60.0) -> ClusterActivity:
    """After looks at second 0, 1, and so on."""
    history = ActivityHistory(window_s)
    for at_s, told in enumerate(looks):
        seen = history.add(ClusterSample(float(at_s), told), None)
    return seen


def text(seen: ClusterActivity, view: TopView | None = None, *, columns: int = 80, lines: int = 24) -> str:
    console = Console(width=columns, height=lines, record=True, file=io.StringIO())
    console.print(screen(seen, view or TopView(keys=KEYS), columns=columns, lines=lines))
    return console.export_text()


def test_rates_are_what_happened_in_the_window() -> None:
    first = reply(("p0", {"prompt_tokens": 1000.0, "cached_tokens": 900.0}), ("d0", {"generation_tokens": 50.0}))
    second = reply(("p0", {"prompt_tokens": 1300.0, "cached_tokens": 975.0}), ("d0", {"generation_tokens": 90.0}))
    seen = shown(first, second, second)
    assert (seen.window_s, seen.prompt_rate, seen.generated_rate) == (2.0, 150.0, 20.0)
    assert (seen.reused_share, seen.generated_rates, seen.prompt_rates) == (0.25, (40.0, 0.0), (300.0, 0.0))
    assert shown(first, second, second, second, window_s=1.5).prompt_rate == 0.0  # it is older than the window


def test_nothing_has_happened_at_the_first_look_or_where_there_is_nothing() -> None:
    for told in (reply(("p0", {"prompt_tokens": 1000.0})), conductor_pb2.ClusterReply()):
        seen = shown(told)
        assert (seen.prompt_rate, seen.reused_share, seen.window_s, seen.attained) == (0.0, None, 0.0, ())
        assert "moonpool top" in text(seen)


def test_a_node_that_began_anew_counts_from_nothing_and_a_new_one_from_when_it_was_seen() -> None:
    before = reply(("d0", {"generation_tokens": 500.0}))
    again = reply(("d0", {"generation_tokens": 20.0}), ("d1", {"generation_tokens": 9000.0}), incarnation=2)
    assert shown(before, again).generated_rate == 20.0


def test_objectives_and_rejections_are_those_of_the_window() -> None:
    def told(met: int, missed: int, rejected: int, conductor: int = 1) -> Any:
        answer = reply(conductor=conductor)
        of = {"model_name": "m", "slo_class": "chat", "objective": "ttft"}
        counted(answer, "slo_requests_total", met, **of, result="met")
        counted(answer, "slo_requests_total", missed, **of, result="missed")
        return counted(answer, "admission_rejected_total", rejected, model_name="m", reason="tbt")

    seen = shown(told(100, 10, 7), told(108, 12, 7), told(109, 12, 9))
    (attained,) = seen.attained
    assert (attained.slo_class, attained.met, attained.judged, seen.rejected) == ("chat", 9, 11, {"tbt": 2})
    assert "chat" in text(seen)
    assert "81.8%" in text(seen)
    assert "rejected  2 tbt" in text(seen)
    seen = shown(told(100, 10, 7), told(3, 1, 1, conductor=2))
    assert (seen.attained[0].judged, seen.rejected) == (4, {"tbt": 1})  # another conductor's count begins anew


def test_a_pool_nodes_tiers_and_what_was_found_there() -> None:
    sizes = {"pool_used_bytes": 3.0 * 2**20, "pool_capacity_bytes": 4.0 * 2**20}
    first = reply(("k0", sizes | {"pool_lookup_blocks": 100.0, "pool_hit_dram_blocks": 100.0}))
    now = sizes | {"pool_lookup_blocks": 110.0, "pool_hit_dram_blocks": 103.0, "pool_hit_ssd_blocks": 2.0}
    second = counted(reply(("k0", now | {"pool_evicted_blocks": 6.0})), "directory_exact", 0.0, node="k0")
    (pool,) = shown(first, second).pools
    assert (pool.found_share, pool.evicted_blocks, pool.directory, list(pool.tiers)) == (0.5, 6, "DEGRADED", ["DRAM"])
    line = next(line for line in text(shown(first, second)).splitlines() if line.startswith("k0"))
    assert "████████·· 75% of 4 MiB" in line
    assert "50%" in line
    assert "DEGRADED" in line


@pytest.mark.parametrize("lines", [20, 24, 60])
@pytest.mark.parametrize("columns", [80, 200])
def test_a_large_cluster_fits_and_says_what_it_leaves_out(columns: int, lines: int) -> None:
    tiers = {"pool_used_bytes": 1.0, "pool_capacity_bytes": 2.0}
    told = reply(
        *((f"p{n:03}-with-a-long-name-of-its-host", {}) for n in range(200)), *((f"k{n}", tiers) for n in range(99))
    )
    for n in range(50):
        of = {"model_name": "m", "slo_class": f"c{n}", "objective": "ttft", "result": "met"}
        counted(told, "slo_requests_total", float(n), **of)
        counted(told, "load", 0.5, model_name=f"model-{n}", phase="prefill")
    seen = shown(reply(conductor=7), told)
    drawn = text(seen, columns=columns, lines=lines).rstrip("\n").splitlines()
    assert len(drawn) <= lines
    assert max(map(len, drawn)) <= columns
    assert drawn[-1].startswith("q quit")
    assert any("waiting" in line and "running" in line and "cached" in line for line in drawn)
    assert any("pool nodes that are less full" in line for line in drawn)
    scrolled = text(seen, TopView(first=298), columns=columns, lines=lines)
    assert "p199" in scrolled
    assert "above" in scrolled
    assert "below" not in scrolled


def test_every_order_can_be_chosen_and_shows_the_troubled_first() -> None:
    told = reply(("p0", {}), ("p1", {}), ("p2", {}))
    told.nodes[1].suspect = True
    told.nodes[2].report.num_running = 5
    view, firsts = TopView(), {}
    for _ in SORTS:
        rows = [line for line in text(shown(told), view).splitlines() if re.match(r"p\d", line)]
        firsts[view.sort] = rows[0][:2]
        view = after_key(view, "s", num_nodes=3)
    assert view.sort == TopView().sort
    assert (firsts["node"], firsts["state"], firsts["running"]) == ("p0", "p1", "p2")
    rows = [
        line
        for line in text(shown(told), after_key(TopView(), "r", num_nodes=3)).splitlines()
        if re.match(r"p\d", line)
    ]
    assert [row[:2] for row in rows] == ["p2", "p1", "p0"]


def test_keys_scroll_within_the_nodes_and_others_mean_nothing() -> None:
    view = after_key(TopView(), "page down", num_nodes=5)
    assert view.first == 4
    assert after_key(after_key(view, "page up", num_nodes=5), "up", num_nodes=5).first == 0
    assert after_key(view, "x", num_nodes=5) == view
    assert after_key(view, "p", num_nodes=5).paused
    assert [name_of(pressed) for pressed in (b"\x1b[A", b"\x1b[6~", b"qqq", b"\xff", b"\x1b")] == [
        "up", "page down", "q", "", "\x1b"
    ]  # fmt: skip


def test_old_figures_say_why_they_are_old() -> None:
    assert "as last seen: the conductor does not answer" in text(
        shown(reply()), TopView(trouble="the conductor does not answer")
    )


def test_a_sparkline_is_as_high_as_its_highest() -> None:
    assert sparkline([0, 1, 2, 4], 3) == "▃▅█"
    assert (sparkline([0, 0], 9), sparkline([], 9)) == ("▁▁", "")
