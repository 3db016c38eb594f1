"""An actor that nobody asks anything drains its role, kills one that is deaf, and leaves; not while somebody asks."""

from __future__ import annotations

import time

import pytest

from moonpool.runtime.ray_actor import Orphanhood, watch

RULE = Orphanhood(after_s=0.05, drain_s=0.2, actor="a", group="g")


class Role:
    """Ends at a signal, or only when it is killed; `returns`: whether somebody asks again while it drains."""

    def __init__(self, *, deaf: bool = False, returns: int = 0) -> None:
        self.deaf, self.returns = deaf, returns
        self.alive = True
        self.signals: list[bool] = []
        self.heard_s = time.monotonic()
        self.left_alive: list[bool] = []

    def silent_s(self) -> float:
        return time.monotonic() - self.heard_s

    def runs(self) -> bool:
        return self.alive

    def signal(self, *, kill: bool) -> None:
        self.signals.append(kill)
        if kill or not self.deaf:
            self.alive = False
        if self.returns:
            self.returns -= 1
            self.heard_s = time.monotonic()
            self.alive = True  # it is started again

    def leave(self, rule: Orphanhood) -> None:
        assert rule is RULE
        self.left_alive.append(self.alive)


@pytest.mark.parametrize("deaf", [False, True])
def test_an_orphan_ends_its_role_and_leaves(deaf: bool) -> None:
    role = Role(deaf=deaf)
    thread = watch(role, RULE, role.leave)
    thread.join(30)
    assert not thread.is_alive()
    assert role.left_alive == [False]
    assert role.signals == ([False, True] if deaf else [False])


def test_one_that_somebody_comes_for_at_the_last_moment_stays_until_it_is_an_orphan_again() -> None:
    role = Role(returns=2)
    thread = watch(role, RULE, role.leave)
    thread.join(30)
    assert not thread.is_alive()
    assert len(role.signals) >= 3
    assert role.left_alive == [False]


def test_one_that_ray_does_not_let_go_tries_again() -> None:
    role = Role()
    tries: list[int] = []

    def leave(rule: Orphanhood) -> None:
        tries.append(1)
        if len(tries) < 3:
            raise RuntimeError("the head is away")

    thread = watch(role, RULE, leave)
    thread.join(30)
    assert not thread.is_alive()
    assert len(tries) == 3
    assert role.signals == [False]


def test_nothing_happens_while_somebody_asks() -> None:
    role = Role()
    thread = watch(role, RULE, role.leave)
    until_s = time.monotonic() + 20 * RULE.after_s
    while time.monotonic() < until_s:
        role.heard_s = time.monotonic() + 1.0  # asked all the time, however slowly this loop comes round
        time.sleep(0.001)
    assert role.signals == []
    role.heard_s = 0.0
    thread.join(30)
    assert role.left_alive == [False]
