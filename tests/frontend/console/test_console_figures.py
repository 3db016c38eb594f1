"""The console's figures over several conductors and pool nodes, of this version and of earlier ones."""

from typing import Any

from frontend.console.figures import merged_sessions, past_figures, tenant_usage
from frontend.console.pool_contents import pool_contents


def turn(number: int) -> dict[str, Any]:
    return {"request_id": f"r{number}", "at_s": float(number)}


def session(name: str, numbers: range, *, parent: str = "", turns: int = 0) -> dict[str, Any]:
    rows = [turn(number) for number in numbers]
    first = {"session": name, "parent": parent, "tenant": "t", "first_at_s": rows[0]["at_s"]}
    return {**first, "num_turns": turns or len(rows), "turns": rows}


def test_a_session_whose_turns_several_conductors_placed_is_one() -> None:
    one = {"sessions": [session("a", range(0, 10, 2), turns=30)]}
    other = {"sessions": [session("b", range(3, 4)), session("a", range(1, 20, 2), parent="b")]}
    merged, lone = merged_sessions([one, other])
    assert (merged["session"], merged["parent"], merged["num_turns"], merged["first_at_s"]) == ("a", "b", 40, 0.0)
    assert [each["request_id"] for each in merged["turns"]] == [
        f"r{number}" for number in (3, 4, 5, 6, 7, 8, 9, 11, 13, 15, 17, 19)
    ]
    assert lone["session"] == "b"
    assert len(one["sessions"][0]["turns"]) == 5  # an overview is shown again while its conductor does not answer


def test_a_bounded_number_of_sessions_is_shown() -> None:
    overview = {"sessions": [session(f"s{number}", range(number, number + 1)) for number in range(100)]}
    shown = merged_sessions([overview])
    assert [each["session"] for each in shown] == [f"s{number}" for number in range(99, 59, -1)]


def usage(model: str, tenant: str, tokens: int) -> dict[str, Any]:
    counts = dict.fromkeys(("requests", "computed_tokens", "reused_tokens", "generated_tokens", "kv_block_s"), tokens)
    return {"model": model, "tenant": tenant, "account": f"account of {tenant}", **counts}


def test_tenants_usage_is_summed_over_conductors() -> None:
    one, other = [usage("m", "a", 1), usage("n", "a", 2)], [usage("m", "a", 4), usage("m", "b", 8)]
    found = tenant_usage([{"tenants": one}, {"tenants": other}])
    assert [(each["model"], each["tenant"], each["reused_tokens"]) for each in found] == [
        ("m", "a", 5),
        ("m", "b", 8),
        ("n", "a", 2),
    ]
    assert one[0]["reused_tokens"] == 1


def test_conductors_of_earlier_versions_have_neither_sessions_nor_usage() -> None:
    past = past_figures([{"slices": [], "slice_s": 10.0, "requests": [], "hottest": []}], 0.0)
    assert (past["sessions"], past["tenants"], past["requests"]) == ([], [], [])


def held(namespaces: dict[str, tuple[int, int]], retained: dict[str, int], refused: int = 0) -> dict[str, Any]:
    """State of a pool node: blocks in memory and on SSD by namespace, and retained prefixes in memory by account."""
    return {
        "namespaces": {
            name: {
                "blocks": max(blocks),
                "tiers": {
                    tier: {"blocks": number, "used_bytes": 100 * number}
                    for tier, number in zip(("dram", "ssd"), blocks, strict=True)
                },
            }
            for name, blocks in namespaces.items()
        },
        "retained": {
            "dram": [{"account": name, "prefixes": number, "bytes": 10 * number} for name, number in retained.items()],
            "ssd": [],
        },
        "counters": {"pool_retained_refused": refused, "pool_retained_preempted": 1},
    }


def test_contents_are_summed_over_pool_nodes_most_bytes_first() -> None:
    states = [held({"aa": (1, 2), "bb": (9, 0)}, {"x": 1}, refused=3), held({"aa": (4, 8)}, {"x": 2, "y": 7})]
    found = pool_contents(states, {"aa": "model a"})
    assert [(each["namespace"], each["model"]) for each in found["namespaces"]] == [("aa", "model a"), ("bb", "")]
    assert found["namespaces"][0]["dram"] == {"blocks": 5, "bytes": 500}
    assert found["namespaces"][0]["ssd"] == {"blocks": 10, "bytes": 1000}
    assert found["retained"] == [
        {"account": "y", "dram": {"prefixes": 7, "bytes": 70}, "ssd": {"prefixes": 0, "bytes": 0}},
        {"account": "x", "dram": {"prefixes": 3, "bytes": 30}, "ssd": {"prefixes": 0, "bytes": 0}},
    ]
    assert (found["refused"], found["preempted"]) == (3, 2)


def test_rows_are_bounded() -> None:
    many = held({f"{number:03}": (number, 0) for number in range(1, 301)}, {f"t{number}": 1 for number in range(300)})
    found = pool_contents([many], {})
    assert (len(found["namespaces"]), found["namespaces"][0]["namespace"], len(found["retained"])) == (200, "300", 200)


def test_pool_nodes_of_earlier_versions_report_no_contents() -> None:
    found = pool_contents([{"namespaces": {"aa": {"blocks": 5, "spec": {}}}, "counters": {}}], {})
    assert (found["namespaces"], found["retained"], found["refused"]) == ([], [], 0)
