"""Roles that end and come back one by one, as in an upgrade, two conductors among them: nobody notices.

Both versions of the upgrade are this source tree, the newer one with another number: what is shown is that roles go and
come while they serve, and that processes which name different versions work together. Engines are paced, every token is
known.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from moonpool.cluster_view.collector import ask_cluster
from moonpool_proto.v1 import common_pb2
from moonpool_proto.v1.conductor_pb2_grpc import ConductorStub
from rpc.control import open_channel
from rpc.versions import named, own_software, package_version
from tests.e2e.bare_roles import Load, Role, Roles
from worker.paced.profiles import profile_of
from worker.policy.cost_profile import save_profile

pytestmark = pytest.mark.long

NEWER = "99.0.0"
SAMPLING: dict[str, Any] = {"temperature": 0.8, "seed": 42}
DRAWN: dict[str, Any] = {"max_tokens": 200, **SAMPLING}
CONDUCTORS = ("c0", "c1")
KNOWN_S = 60.0
GRACE_S = 1.0  # shorter than an answer, so that some are finished and some move
NUM_DIALOGUES = 4


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Goes before PYTHONPATH: the installation calls itself so from then on."""
    folder = tmp_path_factory.mktemp("newer")
    about = folder / f"moonpool-{NEWER}.dist-info" / "METADATA"
    about.parent.mkdir()
    about.write_text(f"Metadata-Version: 2.1\nName: moonpool\nVersion: {NEWER}\n")
    return str(folder)


@pytest.fixture(scope="module")
def roles(paced_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Roles]:
    folder = Path(os.path.realpath(tmp_path_factory.mktemp("r")))
    instant = profile_of("instant")
    save_profile(replace(instant, decode=replace(instant.decode, fixed_s=0.015)), folder / "slower.json")
    flags = ["--engine", "paced", "--paced-profile", str(folder / "slower.json"), "--block-tokens", "8"]
    started = Roles(folder, paced_model, *flags, "--worker-drain-grace", str(GRACE_S))
    try:
        started.start()
        yield started
    finally:
        started.close()


@pytest.fixture
def check(paced_model: Path, judge_of: Callable[[Path], Any]) -> Callable[[Load], None]:
    """Nothing went wrong, and each token is the one that had to be."""

    def check(load: Load) -> None:
        assert load.errors == []
        assert load.answers
        for prompt, tokens in load.answers:
            answer = SimpleNamespace(prompt_ids=prompt, token_ids=tokens)
            assert judge_of(paced_model).wrong_tokens(answer, **SAMPLING) == []

    return check


@pytest.fixture
async def load(roles: Roles, session: aiohttp.ClientSession) -> Load:
    """Under way."""
    await roles.until_ready()
    load = Load(roles.urls, **DRAWN)
    load.begin(session, NUM_DIALOGUES)
    await load.more(20 * NUM_DIALOGUES)
    return load


async def versions(roles: Roles) -> dict[str, str]:
    reply = await ask_cluster(roles.conductors[0])
    return {status.node.node_id: status.node.software.version for status in reply.nodes}


async def states(roles: Roles) -> dict[str, dict[str, Any]]:
    """The conductors', by name."""
    found = {}
    for name in CONDUCTORS:
        async with open_channel(roles[name].target) as channel:
            reply = await ConductorStub(channel).State(common_pb2.JsonRequest(), wait_for_ready=True, timeout=30)
        found[name] = json.loads(reply.json)
    return found


async def until(holds: Callable[[dict[str, dict[str, Any]]], bool], roles: Roles) -> dict[str, dict[str, Any]]:
    """Both conductors' states, once `holds` of them."""
    deadline_s = time.monotonic() + KNOWN_S
    while not holds(seen := await states(roles)):
        assert time.monotonic() < deadline_s, seen
        await asyncio.sleep(0.05)
    return seen


async def placed_by(roles: Roles) -> dict[str, int]:
    """Requests placed, by conductor."""
    return {name: state["counters"].get("placed", 0) for name, state in (await states(roles)).items()}


def one(roles: Roles, session: aiohttp.ClientSession, *, max_tokens: int) -> Load:
    """A single request to the first frontend."""
    load = Load(roles.urls[:1], max_tokens=max_tokens, **SAMPLING)
    load.begin(session, 1, once=True)
    return load


async def test_both_conductors_know_the_nodes_the_blocks_and_what_the_other_placed(
    roles: Roles, session: aiohttp.ClientSession
) -> None:
    await roles.until_ready()
    load = one(roles, session, max_tokens=300)

    def agree(states: dict[str, dict[str, Any]]) -> bool:
        committed = {tuple(state["nodes"][d]["committed_tokens"] for d in ("d0", "d1")) for state in states.values()}
        return all(state["requests"] for state in states.values()) and len(committed) == 1

    seen = await until(agree, roles)
    assert sorted(state["counters"].get("placed", 0) for state in seen.values()) == [0, 1]
    await load.end()

    def same_directory(states: dict[str, dict[str, Any]]) -> bool:
        first, second = (state["pools"]["pool"] for state in states.values())
        return bool(first["blocks"]) and first == second and first["state"] == "exact"

    await until(lambda states: not any(state["requests"] for state in states.values()), roles)
    await until(same_directory, roles)
    await roles.at_rest()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_requests_go_on_and_new_ones_are_placed_when_the_conductor_that_is_asked_dies_or_hangs(
    how: signal.Signals, roles: Roles, session: aiohttp.ClientSession, check: Callable[[Load], None]
) -> None:
    before = await placed_by(roles)
    under_way = one(roles, session, max_tokens=400)
    await under_way.more()
    after = await placed_by(roles)
    (asked,) = (name for name in CONDUCTORS if after[name] > before[name])
    roles[asked].signal(how)
    fresh = one(roles, session, max_tokens=8)
    await fresh.end()
    if how is signal.SIGSTOP:
        roles[asked].signal(signal.SIGCONT)
    else:
        await asyncio.to_thread(roles[asked].wait_ended)
        roles[asked].start()
        await asyncio.to_thread(roles[asked].wait_ready)
    await under_way.end()
    (other,) = (name for name in CONDUCTORS if name != asked)
    assert (await placed_by(roles))[other] > after[other]
    check(fresh)
    check(under_way)
    await until(lambda states: all(state["ready_models"] for state in states.values()), roles)
    await until(lambda states: not any(state["requests"] for state in states.values()), roles)
    await until(lambda states: states[asked]["pools"].get("pool", {}).get("state") == "exact", roles)
    await roles.at_rest()


@pytest.mark.nightly
async def test_an_upgrade_role_by_role_under_load_loses_nothing(
    roles: Roles, newer: str, load: Load, check: Callable[[Load], None]
) -> None:
    for role in roles:
        role.signal(signal.SIGTERM)
        assert await asyncio.to_thread(role.wait_ended) == 0, role.log
        await load.more()
        role.start(newer)
        await asyncio.to_thread(role.wait_ready)
        await load.more(NUM_DIALOGUES * 40)
        assert load.errors == [], role.name
        if role.name == "p0":
            assert set((await versions(roles)).values()) == {package_version(), NEWER}
    await load.end()
    check(load)
    assert set((await versions(roles)).values()) == {NEWER}
    await roles.at_rest()


async def test_requests_wait_for_conductors_that_are_all_restarted(
    roles: Roles, load: Load, check: Callable[[Load], None]
) -> None:
    for name in ("c0", "c1"):
        roles[name].signal(signal.SIGTERM)
    for name in ("c0", "c1"):
        assert await asyncio.to_thread(roles[name].wait_ended) == 0
    await load.more()
    for name in ("c0", "c1"):
        roles[name].start()
    for name in ("c0", "c1"):
        await asyncio.to_thread(roles[name].wait_ready)
    await load.more(NUM_DIALOGUES * DRAWN["max_tokens"])  # more than what ran at the time had left
    await load.end()
    check(load)
    await roles.at_rest()


def test_a_worker_that_cannot_work_with_the_cluster_ends_and_names_both_versions(roles: Roles, newer: str) -> None:
    arguments = [word.replace("d1", "stranger") for word in roles["d1"].arguments]
    stranger = Role("stranger", arguments, roles.folder / "stranger.log")
    stranger.start(newer, "import rpc.versions as it; it.WIRE, it.OLDEST_WIRE = 99, 98")
    assert stranger.wait_ended() == 2
    assert f"node 'stranger' is Moonpool {NEWER} (wire 99), which needs wire 98 or newer" in stranger.log
    assert f"this conductor is {named(own_software())}" in stranger.log


async def test_a_second_signal_ends_a_worker_at_once_and_its_answers_go_on_elsewhere(
    roles: Roles, load: Load, check: Callable[[Load], None]
) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        roles["d0"].signal(number)
    await asyncio.to_thread(roles["d0"].wait_ended)
    await load.end()
    check(load)


def test_without_conductors_every_role_ends_when_it_is_told(roles: Roles) -> None:
    for name in ("c0", "c1"):
        roles[name].kill()
    left = [role for role in roles if role.is_running]
    assert {role.name for role in left} == {"pool", "p0", "p1", "d1", "f0", "f1"}
    for role in left:
        role.signal(signal.SIGTERM)
    assert {role.name: role.wait_ended() for role in left} == {role.name: 0 for role in left}


def test_a_worker_that_waits_for_its_cluster_ends_when_it_is_told(roles: Roles) -> None:
    before = len(roles["p0"].log)
    roles["p0"].start()
    while "waiting for the pool node" not in roles["p0"].log[before:]:
        assert roles["p0"].is_running
        time.sleep(0.05)  # polling for a line of a process that is seen to run
    roles["p0"].signal(signal.SIGTERM)
    assert roles["p0"].wait_ended() == 0
