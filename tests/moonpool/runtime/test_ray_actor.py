"""A role's life within its actor, and the process that holds a Ray of our own: what they say arrives, and is let go."""

import asyncio
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from moonpool.runtime.ray_actor import LOST_EXIT_CODE, ActorPlacement, RoleActor, StartedLife, _Life
from moonpool.runtime.ray_head import _address, _started
from moonpool.runtime.ray_life import ActorAway, RayLife
from moonpool.supervision.child import ChildPlan, LogFile


def test_what_a_role_said_is_told_again_until_it_was_heard_and_then_let_go() -> None:
    life = _Life()
    for number in range(3):
        life.add_event("line", number)
    first = life.follow(0, 0.0)
    assert life.follow(0, 0.0) == first == (3, [("line", 0), ("line", 1), ("line", 2)])  # the answer may be lost
    life.add_event("end", 0)
    assert life.follow(3, 0.0) == (4, [("end", 0)])
    assert life._events == [("end", 0)]
    assert life.follow(4, 0.0) == (4, [])
    waiting = threading.Timer(0.01, life.add_event, ("line", "late"))
    waiting.start()
    assert life.follow(4, 60.0) == (5, [("line", "late")])
    waiting.join()


def test_a_role_that_nobody_listens_to_keeps_its_last_words_and_its_announcement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moonpool.runtime.ray_actor._MOST_EVENTS", 3)
    life = _Life()
    life.add_event("ready", {"target": "h:1"})
    for number in range(5):
        life.add_event("line", number)
    assert life.follow(0, 0.0) == (6, [("line", 2), ("line", 3), ("line", 4)])
    assert life._ready == {"target": "h:1"}


class Unreachable:
    """An actor that cannot be reached for the first calls; its role runs and then ends."""

    def __init__(self, away: int) -> None:
        self.away = away
        self.asked: list[tuple[int, int]] = []

    async def follow(self, number: int, after: int, wait_s: float) -> tuple[int, list[tuple[str, Any]]]:
        self.asked.append((number, after))
        if len(self.asked) <= self.away:
            raise ActorAway("the network is down")
        return after + 2, [("line", "still here"), ("end", 0)]

    async def signal(self, *, kill: bool) -> None:
        raise ActorAway("the network is down")

    def kill(self) -> None: ...


async def lived(actor: Unreachable, tmp_path: Path) -> tuple[int, list[str], list[dict[str, Any]], list[str]]:
    """A life that another launcher began: exit code, lines, announcements, and whether it was given up."""
    lines: list[str] = []
    ready: list[dict[str, Any]] = []
    unheard: list[str] = []

    async def begin(say: Any) -> tuple[Unreachable, StartedLife]:
        return actor, StartedLife(number=3, pid=77, after=40, ready={"target": "h:1"})

    log = LogFile(tmp_path / "log")
    life = RayLife(
        begin, log, on_ready=ready.append, on_line=lines.append, on_unheard=lambda: unheard.append("x"), name="n"
    )
    code = await life.ended
    log.close()
    return code, lines, ready, unheard


async def test_a_role_whose_actor_cannot_be_reached_for_a_while_is_followed_from_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moonpool.runtime.ray_life._AGAIN_S", 0.001)
    actor = Unreachable(away=3)
    assert await lived(actor, tmp_path) == (0, ["still here"], [{"target": "h:1"}], [])
    assert actor.asked == [(3, 40)] * 4


async def test_an_actor_that_stays_away_is_given_up_and_its_role_may_be_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moonpool.runtime.ray_life._AGAIN_S", 0.001)
    monkeypatch.setattr("moonpool.runtime.ray_life._UNHEARD_S", 0.05)
    code, lines, _, unheard = await lived(Unreachable(away=10**9), tmp_path)
    assert (code, unheard) == (LOST_EXIT_CODE, ["x"])
    assert "cannot be reached for 0.05 s: the network is down" in lines[0]


def test_an_actor_starts_follows_and_hands_on_its_role(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import sys, time; print('MOONPOOL_READY {}', flush=True); print('up', flush=True); time.sleep(600)"
    monkeypatch.setattr(
        "moonpool.runtime.ray_actor.child_plan", lambda *given: ChildPlan("d", (sys.executable, "-c", script))
    )
    before = asyncio.get_event_loop_policy()
    actor, place = RoleActor(), ActorPlacement("host", str(short_path / "run"), prints=False)
    asyncio.set_event_loop_policy(before)
    plan: Any = ("d", "decode-node", {"listen": "h:0"}, {})
    first = actor.start(plan, place, adopt=False)
    after, heard = first.after, list[Any]()
    while ("line", "up") not in heard:
        after, events = actor.follow(first.number, after, 60.0)
        heard += events
    again = actor.start(plan, place, adopt=True)
    assert (again.number, again.pid, again.ready) == (first.number, first.pid, {})
    assert again.after <= after  # the last answer may have been lost
    other = actor.start(("d", "decode-node", {"listen": "h:1"}, {}), place, adopt=True)  # not what runs
    assert other.pid != first.pid
    assert actor.follow(first.number, after, 60.0)[1] == [("end", LOST_EXIT_CODE)]
    assert actor.host() == "host"
    anew = actor.start(plan, place, adopt=False)
    assert anew.pid != other.pid
    actor.signal(kill=True)
    after, ended = anew.after, list[Any]()
    while not any(kind == "end" for kind, _ in ended):
        after, events = actor.follow(anew.number, after, 60.0)
        ended += events
    assert ended[-1] == ("end", -9)
    stop_loop(actor)


def stop_loop(actor: RoleActor) -> None:
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "role"]
    actor._loop.call_soon_threadsafe(actor._loop.stop)
    thread.join()
    actor._loop.close()


def test_the_address_of_a_ray_is_found_among_what_it_says_at_once() -> None:
    told = "a notice\nMOONPOOL_RAY 127.0.0.1:1\n"
    said = f"import sys; sys.stdout.write({told!r}); sys.stdout.flush(); "
    head = _started([sys.executable, "-c", said + "sys.stdin.read()"])
    with head:
        assert _address(head) == "127.0.0.1:1"
