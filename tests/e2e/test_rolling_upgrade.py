"""SIGTERM to every role under load, one after the other, while its successor is of another version: nobody notices.

Both versions are this source tree, the newer one with another number: what is shown is that roles go and come while
they serve, and that processes which name different versions work together. Engines are paced, every token is known.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from engine.config import read_config
from messenger.software import package_version
from moonpool.questions import ask_cluster
from tests.e2e.bare_roles import Load, Roles
from worker.paced.profiles import profile_of
from worker.paced.tokens import Draw, PacedTokens
from worker.policy.cost_profile import save_profile

NEWER = "99.0.0"
DRAWN: dict[str, Any] = {"max_tokens": 200, "temperature": 0.8, "seed": 42}
GRACE_S = 1.0  # shorter than an answer, so that some are finished and some move
NUM_DIALOGUES = 4


@pytest.fixture(scope="module")
def model(two_group_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without weights, and with a profile by which an answer takes some seconds."""
    path = tmp_path_factory.mktemp("weightless")
    for file in two_group_model.iterdir():
        if file.suffix != ".safetensors":
            shutil.copyfile(file, path / file.name)
    instant = profile_of("instant")
    save_profile(replace(instant, decode=replace(instant.decode, fixed_s=0.015)), path / "slow.json")
    return path


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Goes before PYTHONPATH: the installation calls itself so from then on."""
    folder = tmp_path_factory.mktemp("newer")
    about = folder / f"moonpool-{NEWER}.dist-info" / "METADATA"
    about.parent.mkdir()
    about.write_text(f"Metadata-Version: 2.1\nName: moonpool\nVersion: {NEWER}\n")
    return str(folder)


@pytest.fixture(scope="module")
def roles(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Roles]:
    folder = Path(os.path.realpath(tmp_path_factory.mktemp("r")))
    flags = ["--engine", "paced", "--paced-profile", str(model / "slow.json"), "--block-tokens", "8"]
    started = Roles(folder, model, *flags, "--worker-drain-grace", str(GRACE_S))
    try:
        started.start()
        yield started
    finally:
        started.close()


@pytest.fixture
def check(model: Path) -> Callable[[Load], None]:
    """Nothing went wrong, and each token is the one that had to be."""
    known = PacedTokens.of(model, read_config(model), 0)

    def check(load: Load) -> None:
        assert load.errors == []
        assert len(load.answers) >= NUM_DIALOGUES
        for prompt, tokens in load.answers:
            draw = Draw(DRAWN["seed"], DRAWN["temperature"], 0)
            assert tokens == known.answer(np.array(prompt, np.int32), draw, len(tokens))

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
