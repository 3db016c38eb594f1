"""The console's API: its files, data, admin actions, and access."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from frontend.console import routes
from frontend.console.actions import ConsoleActions
from moonpool_proto.v1 import common_pb2, conductor_pb2
from rpc.control import ControlError
from tests.conductor.world import NAMESPACE, SPEC

PAGE = Path(routes.__file__).parent / "page"
AS_ADMIN = {"authorization": "Bearer mp-admins-key"}
AS_USER = {"authorization": "Bearer mp-users-key"}


async def told(http: aiohttp.ClientSession, bed: Any, path: str, **kwargs: Any) -> tuple[int, Any]:
    async with http.get(f"{bed.url}/console/api/{path}", **kwargs) as answer:
        return answer.status, await answer.json()


async def done(http: aiohttp.ClientSession, bed: Any, path: str, body: Any, **kwargs: Any) -> tuple[int, Any]:
    async with http.post(f"{bed.url}/console/api/{path}", json=body, **kwargs) as answer:
        return answer.status, await answer.json()


async def seen(http: aiohttp.ClientSession, bed: Any, holds: Any, **kwargs: Any) -> Any:
    """The state, once that `holds`."""
    async with asyncio.timeout(60):
        while True:
            status, state = await told(http, bed, "state", **kwargs)
            assert status == 200, state
            if holds(state):
                return state
            await asyncio.sleep(0.05)


async def test_the_page_comes_with_types_tags_and_a_policy_that_lets_nothing_in_from_elsewhere(
    open_bed: Any, http: aiohttp.ClientSession
) -> None:
    async with open_bed() as bed:
        async with http.get(f"{bed.url}/console", allow_redirects=False) as answer:
            assert (answer.status, answer.headers["location"]) == (307, "console/")
        kinds = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
        for name in ["", *sorted(path.name for path in PAGE.iterdir())]:
            async with http.get(f"{bed.url}/console/{name}") as answer:
                assert answer.status == 200, name
                assert answer.headers["content-type"].split(";")[0] == kinds[Path(name or "index.html").suffix]
                policy = answer.headers["content-security-policy"]
                assert "default-src 'none'" in policy
                assert "unsafe" not in policy
                assert "http:" not in policy
                assert answer.headers["x-content-type-options"] == "nosniff"
                assert answer.headers["cache-control"] == "no-cache"
                tag = answer.headers["etag"]
            async with http.get(f"{bed.url}/console/{name}", headers={"if-none-match": tag}) as again:
                assert (again.status, await again.read()) == (304, b"")
            async with http.head(f"{bed.url}/console/{name}", headers={"if-none-match": '"other"'}) as head:
                assert (head.status, await head.read()) == (200, b"")
        for path in ("nothing.js", "../service.py", "%2e%2e/service.py", "api/", "api/nothing", "api/requests/"):
            async with http.get(f"{bed.url}/console/{path}") as answer:
                assert answer.status == 404, path
        async with http.get(f"{bed.url}/console/api/drain") as answer:
            assert (answer.status, answer.headers["allow"]) == (405, "POST")


async def test_the_state_tells_nodes_loads_flows_and_objectives(open_bed: Any, http: aiohttp.ClientSession) -> None:
    async with open_bed(ttft_slo_s=1.0, tbt_slo_s=60.0) as bed:
        await bed.join_usual()
        counters = {"pool_used_bytes": 512.0, "pool_capacity_bytes": 1024.0, "pool_lookup_blocks": 10.0}
        counters |= {"pool_hit_dram_blocks": 7.0, "pool_evicted_dram_room_blocks": 3.0, "pool_held_blocks": 5.0}
        assert await bed.serve("cmpl-1", ttft_s=0.4)
        assert await bed.serve("cmpl-2", ttft_s=2.0)
        assert not await bed.serve("cmpl-3", prompt=4000, ttft_objective_s=0.000001)
        state = await seen(http, bed, lambda state: len(state["requests"]) == 3 and len(state["nodes"]) == 4)
        nodes = {node["id"]: node for node in state["nodes"]}
        assert (nodes["decode-1"]["role"], nodes["decode-1"]["state"]) == ("decode", "ready")
        assert nodes["prefill-0"]["queue_s"] is not None
        everything = state["window"]["tiny"]
        assert (everything["arrived"], everything["rejected"], everything["finished"]) == (3, 1, 2)
        assert everything["reasons"] == {"ttft": 1}
        assert ["", "ttft", "met", 1] in everything["attained"]
        assert ["", "ttft", "missed", 1] in everything["attained"]
        median, p95 = everything["ttft"]
        assert 0.35 < median < 0.45
        assert 1.8 < p95 < 2.2
        assert state["window"][""]["arrived"] == 3
        assert sum(each["models"]["tiny"]["arrived"] for each in state["slices"]) == 3
        outcomes = {each["request_id"]: (each["outcome"], each["reason"]) for each in state["requests"]}
        assert outcomes == {"cmpl-1": ("finished", ""), "cmpl-2": ("finished", ""), "cmpl-3": ("rejected", "ttft")}
        assert [(each["model"], each["ttft"]) for each in state["objectives"]] == [("tiny", "1s")]
        (conductor,) = state["conductors"]
        assert (conductor["is_asked"], conductor["problem"], conductor["has_decision_log"]) == (True, "", False)
        await bed.join("pool-0", "pool", counters=counters)
        state = await seen(http, bed, lambda state: state["pool"]["nodes"])
        (pool,) = state["pool"]["nodes"]
        assert pool["tiers"]["memory"] == {
            "used_bytes": 512,
            "capacity_bytes": 1024,
            "blocks": 5,
            "hit_blocks": 7,
            "evicted_blocks": {"room": 3},
        }
        assert "ssd" not in pool["tiers"]


async def test_a_conductor_that_goes_away_leaves_what_it_told_with_its_age(
    open_bed: Any, http: aiohttp.ClientSession
) -> None:
    async with open_bed() as bed:
        await bed.join_usual()
        await bed.serve("cmpl-1")
        await seen(http, bed, lambda state: state["requests"] and len(state["nodes"]) == 4)
        await bed.stop_conductor()
        state = await seen(http, bed, lambda state: state["problem"] and state["conductors"][0]["problem"])
        assert len(state["nodes"]) == 4
        assert state["requests"][0]["request_id"] == "cmpl-1"
        assert state["age_s"] > 0
        await bed.start_conductor()
        state = await seen(http, bed, lambda state: not state["problem"] and not state["conductors"][0]["problem"])
        assert state["requests"] == []  # it has begun anew


async def test_a_requests_path_is_told_by_conductor_and_frontend(open_bed: Any, http: aiohttp.ClientSession) -> None:
    async with open_bed() as bed:
        await bed.join_usual()
        await bed.serve("cmpl-<b>/1", ttft_s=0.5)
        status, path = await told(http, bed, "requests/cmpl-%3Cb%3E%2F1")
        assert (status, path["request_id"], path["front_door"]) == (200, "cmpl-<b>/1", None)
        remembered = path["conductors"][0]["remembered"]
        assert (remembered["ttft_s"], remembered["predicted_ttft_s"] > 0) == (0.5, True)
        _, unknown = await told(http, bed, "requests/never")
        assert (unknown["front_door"], unknown["conductors"][0]["remembered"]) == (None, None)


async def test_all_conductors_are_asked_at_once_to_explain_a_request() -> None:
    class Conductors:
        targets = ("one:7000", "other:7000", "gone:7000")
        asked = asyncio.Barrier(len(targets))

        async def ask(self, method: str, call: Any, *, target: str, deadline_s: float) -> Any:
            async with asyncio.timeout(5):
                await self.asked.wait()
            if target == "gone:7000":
                raise ControlError("it does not answer", what=method, target=target, code="UNAVAILABLE")
            return common_pb2.JsonReply(json=json.dumps({"log": None, "remembered": {"id": method}}))

    conductors: Any = Conductors()
    problem = "Explain at gone:7000: it does not answer [UNAVAILABLE]"
    assert await ConsoleActions(conductors).explain("r1") == [
        {"target": "one:7000", "problem": "", "log": None, "remembered": {"id": "Explain"}},
        {"target": "other:7000", "problem": "", "log": None, "remembered": {"id": "Explain"}},
        {"target": "gone:7000", "problem": problem, "log": None, "remembered": None},
    ]


async def test_the_pools_blocks_are_told_by_model_and_its_retained_prompts_by_tenant(
    open_bed: Any, http: aiohttp.ClientSession
) -> None:
    async with open_bed() as bed:
        await bed.join_usual()
        await bed.start_pool()
        await bed.join("pool-9", "pool")  # nothing listens at its address
        await bed.pools.store(0, 6)
        assert await bed.serve("cmpl-1", prompt=64, cached=16, tenant="acme")
        await bed.place("cmpl-2", tenant="acme")
        state = await seen(
            http, bed, lambda state: len(state["pool"]["nodes"]) == 2 and any(t["requests"] for t in state["tenants"])
        )
        (usage,) = state["tenants"]
        assert (usage["tenant"], usage["model"], usage["requests"]) == ("acme", "tiny", 1)
        assert (usage["reused_tokens"], usage["computed_tokens"], usage["generated_tokens"]) == (16, 48, 8)
        assert await bed.pools.retain(4, tenant=usage["account"], lifetime_s=600)
        async with asyncio.timeout(60):
            while not (contents := (await told(http, bed, "pool"))[1])["retained"]:
                await asyncio.sleep(0.05)
        (namespace,) = contents["namespaces"]
        assert (namespace["namespace"], namespace["model"]) == (NAMESPACE.hex(), "tiny")
        assert namespace["dram"] == {"blocks": 6, "bytes": 6 * SPEC.slot_nbytes(0)}
        assert namespace["ssd"] == {"blocks": 0, "bytes": 0}
        (retained,) = contents["retained"]
        assert retained["account"] == usage["account"]
        assert retained["dram"] == {"prefixes": 1, "bytes": 4 * SPEC.slot_nbytes(0)}
        assert list(contents["problems"]) == ["pool-9"]


async def test_a_session_is_told_with_its_turns(open_bed: Any, http: aiohttp.ClientSession) -> None:
    agent, helper = conductor_pb2.Session(id=1 << 63, parent_id=0), conductor_pb2.Session(id=5, parent_id=1 << 63)
    hints = conductor_pb2.RequestHints(pause_s=30.0, lifetime_s=300.0)
    async with open_bed() as bed:
        await bed.join_usual()
        for number in range(14):
            assert await bed.serve(f"cmpl-{number}", prompt=64 + number, session=agent, hints=hints, tenant="acme")
        assert await bed.serve("cmpl-helper", session=helper)
        state = await seen(http, bed, lambda state: len(state["sessions"]) == 2)
        last, first = state["sessions"]
        assert (last["session"], last["parent"], last["num_turns"]) == (f"{5:016x}", f"{1 << 63:016x}", 1)
        assert (first["session"], first["parent"], first["tenant"]) == (f"{1 << 63:016x}", "", "acme")
        assert (first["num_turns"], len(first["turns"])) == (14, 12)
        turn = first["turns"][-1]
        assert (turn["request_id"], turn["prompt_tokens"], turn["reused_tokens"]) == ("cmpl-13", 77, 16)
        assert (turn["pause_s"], turn["lifetime_s"], turn["outcome"]) == (30.0, 300.0, "finished")
        _, path = await told(http, bed, "requests/cmpl-13")
        assert path["conductors"][0]["remembered"]["session"] == first["session"]


async def test_the_feed_has_requests_that_no_node_can_serve(open_bed: Any, http: aiohttp.ClientSession) -> None:
    async with open_bed() as bed:
        await bed.join_usual()
        assert await bed.serve("cmpl-1")
        assert (await bed.place("cmpl-long", prompt=100_000, tenant="acme")).rejection.reason == "too_long"
        state = await seen(http, bed, lambda state: len(state["requests"]) == 2)
        refused, placed = state["requests"]
        assert (placed["request_id"], placed["outcome"]) == ("cmpl-1", "finished")
        assert (refused["request_id"], refused["reason"], refused["tenant"]) == ("cmpl-long", "too_long", "acme")
        assert state["conductors"][0]["decided"] == 2


async def test_reading_needs_an_admins_key_where_any_key_is_asked_for(
    open_bed: Any, http: aiohttp.ClientSession
) -> None:
    async with open_bed(with_keys=True) as bed:
        for path in ("state", "pool", "objectives", "requests/r"):
            for headers, expected in (
                ({}, 401),
                (AS_USER, 403),
                ({"authorization": "Bearer no"}, 401),
                (AS_ADMIN, 200),
            ):
                assert (await told(http, bed, path, headers=headers))[0] == expected, (path, headers)
        assert await told(http, bed, "about") == (200, {"needs_key": True, "has_admin": True})
        async with http.get(f"{bed.url}/console/") as answer:  # the page itself tells nothing
            assert answer.status == 200


@pytest.mark.parametrize("path", ["drain", "switch", "objectives"])
async def test_nobody_acts_without_an_admins_key(open_bed: Any, http: aiohttp.ClientSession, path: str) -> None:
    body = {"node_id": "decode-0", "role": "prefill", "content": {"cluster": {"ttft": "1s"}}, "reason": "none"}
    async with open_bed(with_keys=True) as bed:
        await bed.join_usual()
        for headers, expected in (({}, 401), (AS_USER, 403)):
            status, said = await done(http, bed, path, body, headers=headers)
            assert status == expected, said
        version = (await bed.stub.ShowSlo(conductor_pb2.ShowSloRequest(), timeout=10)).current.version
        assert version == 1
        await bed.stop_front()
        await bed.start_front(with_keys=False)  # anybody may read, and still nobody may act
        status, said = await done(http, bed, path, body)
        assert (status, said["error"]["code"]) == (403, "no_admin_key")
        assert "moonpool keys new --admin" in said["error"]["message"]


async def test_an_admin_drains_and_switches_and_is_told_refusals(open_bed: Any, http: aiohttp.ClientSession) -> None:
    async with open_bed(with_keys=True) as bed:
        await bed.join_usual()
        status, _ = await done(http, bed, "drain", {"node_id": "decode-1"}, headers=AS_ADMIN)
        assert status == 200
        assert (await bed.nodes["decode-1"].command()).HasField("drain")
        status, said = await done(http, bed, "switch", {"node_id": "decode-0", "role": "prefill"}, headers=AS_ADMIN)
        assert (status, "the last decode node" in said["error"]["message"]) == (409, True)
        status, _ = await done(http, bed, "switch", {"node_id": "prefill-0", "role": "decode"}, headers=AS_ADMIN)
        assert status == 200
        assert (await bed.nodes["prefill-0"].command()).switch_role.role
        state = await seen(http, bed, lambda state: _state(state, "prefill-0") == "switching", headers=AS_ADMIN)
        assert _state(state, "decode-1") == "draining"
        status, said = await done(http, bed, "drain", {"node_id": "nobody"}, headers=AS_ADMIN)
        assert (status, "unknown node 'nobody'" in said["error"]["message"]) == (404, True)
        for path, body in (
            ("drain", {}),
            ("drain", {"node_id": 7}),
            ("switch", {"node_id": "decode-0", "role": "pool"}),
            ("objectives", {"content": []}),
            ("objectives", {"content": {}, "trial": "yes"}),
            ("objectives", {"content": {}, "trial": True, "expect_version": -1}),
            ("objectives", {"content": {"cluster": {"ttft": "soon"}}, "trial": True}),
            ("objectives", {"content": {}, "trial": False}),
            ("drain", []),
            ("drain", {"node_id": "\ud800"}),
        ):
            status, said = await done(http, bed, path, body, headers=AS_ADMIN)
            assert status == 400, (path, body, said)
        async with http.post(f"{bed.url}/console/api/drain", data=b"{", headers=AS_ADMIN) as answer:
            assert answer.status == 400


async def test_objectives_are_previewed_and_changed_and_the_audit_names_the_key(
    open_bed: Any, http: aiohttp.ClientSession
) -> None:
    async with open_bed(with_keys=True, ttft_slo_s=2.0) as bed:
        await bed.join_usual()
        await bed.serve("cmpl-1", ttft_s=0.25)
        change = {"content": {"cluster": {"ttft": "0.001ms"}}, "expect_version": 1}
        status, trial = await done(http, bed, "objectives", change | {"trial": True}, headers=AS_ADMIN)
        assert status == 200, trial
        (row,) = trial["preview"]["rows"]
        assert (row["now_rejected"], row["stay_admitted"], trial["preview"]["judged"]) == (1, 0, 1)
        assert trial["differences"] == ["cluster.ttft: 2s -> 0.000001s"]
        _, now = await told(http, bed, "objectives", headers=AS_ADMIN)
        assert now["current"]["version"] == 1
        wanted = change | {"reason": "a test", "author": "mallory"}
        status, made = await done(http, bed, "objectives", wanted, headers=AS_ADMIN)
        assert (status, made["version"]["version"], made["version"]["author"]) == (200, 2, "ops (console)")
        status, said = await done(http, bed, "objectives", wanted, headers=AS_ADMIN)
        assert (status, "expected version 1" in said["error"]["message"]) == (409, True)
        assert not await bed.serve("cmpl-2")


async def test_many_viewers_cost_one_question_a_second_and_none_costs_none(
    open_bed: Any, http: aiohttp.ClientSession
) -> None:
    async with open_bed() as bed:
        answers = await asyncio.gather(*(told(http, bed, "state") for _ in range(20)))
        assert len({json.dumps(state, sort_keys=True) for _, state in answers}) == 1


async def test_keys_are_in_no_log_line(open_bed: Any, http: aiohttp.ClientSession, log_lines: Any) -> None:
    async with open_bed(with_keys=True) as bed:
        await bed.join_usual()
        await done(http, bed, "drain", {"node_id": "decode-1"}, headers=AS_ADMIN)
        await told(http, bed, "state", headers={"authorization": "Bearer mp-wrong"})
        text = json.dumps(log_lines())
        assert "ops (console) drains node 'decode-1'" in text
        assert "mp-admins-key" not in text
        assert "mp-wrong" not in text


def _state(state: Any, node_id: str) -> str:
    return next((node["state"] for node in state["nodes"] if node["id"] == node_id), "")
