"""An actor that nobody listens to any more: after a while its role is drained, and the actor leaves Ray for good."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

_LOOK_S = 0.5
_KILLED_S = 30.0


@dataclass(frozen=True)
class Orphanhood:
    """After `after_s` of silence the role has `drain_s` to end. Then the actor of that name, and its placement group
    ("" = it has none), are given back.
    """

    after_s: float
    drain_s: float
    actor: str
    group: str


class Orphan(Protocol):
    """The actor, as it is watched."""

    def silent_s(self) -> float:
        """Since when nobody has asked it anything."""
        ...

    def runs(self) -> bool:
        """Its role does."""
        ...

    def signal(self, *, kill: bool) -> None: ...


def watch(orphan: Orphan, rule: Orphanhood, leave: Callable[[Orphanhood], None] | None = None) -> threading.Thread:
    """On a thread of its own, until the actor has left."""
    thread = threading.Thread(target=_watch, args=(orphan, rule, leave or _leave), name="orphan", daemon=True)
    thread.start()
    return thread


def _watch(orphan: Orphan, rule: Orphanhood, leave: Callable[[Orphanhood], None]) -> None:
    while True:
        time.sleep(min(_LOOK_S, rule.after_s))
        if orphan.silent_s() < rule.after_s:
            continue
        print(f"Nobody has asked for {orphan.silent_s():.0f} s: the role is drained", flush=True)
        for kill, within_s in ((False, rule.drain_s), (True, _KILLED_S)):
            if orphan.runs() and orphan.silent_s() >= rule.after_s:
                orphan.signal(kill=kill)
                _wait_ended(orphan, rule, within_s)
        if orphan.silent_s() >= rule.after_s and _left(rule, leave):
            return


def _wait_ended(orphan: Orphan, rule: Orphanhood, within_s: float) -> None:
    """Or until somebody has come, who will have the role started again: that life is not ours to end."""
    until_s = time.monotonic() + within_s
    while orphan.runs() and orphan.silent_s() >= rule.after_s and time.monotonic() < until_s:
        time.sleep(min(0.1, rule.after_s / 4))


def _left(rule: Orphanhood, leave: Callable[[Orphanhood], None]) -> bool:
    try:
        leave(rule)
    except Exception as error:  # whatever it is, an actor that stays would hold its host's place for ever
        print(f"Ray did not let it leave, again soon: {error}", flush=True)
        return False
    return True


def _leave(rule: Orphanhood) -> None:
    import ray
    from ray.util import get_placement_group, remove_placement_group

    try:
        if rule.group:
            remove_placement_group(get_placement_group(rule.group))
    except ValueError:
        pass  # there is none any more
    ray.kill(ray.get_actor(rule.actor), no_restart=True)
