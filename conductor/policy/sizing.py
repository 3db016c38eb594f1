"""How many nodes of a role a model's demand needs: a hint for whoever adds and takes away nodes. Pure.

More are wanted soon after they are needed, fewer only long after they were last of use: a node that is missed costs
requests, one too many costs a while of its time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Final

__all__ = ["ModelSizing", "RoleLoad", "Sizing", "node_counts"]

_GROW_AT: Final = 0.7  # share of its time that a node may have work before another is wanted beside it
_SHRINK_TO: Final = 0.55  # those that stay, when one goes, have work for no more of theirs
_MOST: Final = 4096  # nodes: no prediction is worth more


@dataclass(frozen=True, slots=True)
class RoleLoad:
    """Nodes of a role that are there, and how many of them its demand keeps busy; None: that is not known yet."""

    nodes: int
    busy: float | None


@dataclass
class Sizing:
    """One role's wish over time. Nothing of it depends on how many nodes there are once demand is known: who follows
    the wish late, or not at all, does not change it.
    """

    grow_ns: int
    shrink_ns: int
    wanted: int | None = None  # None until there was a node or a demand
    _since_ns: int = 0  # from when on more, or fewer, were needed without a break
    _bound: int = 0  # the least that was needed since, or the most

    def look(self, now_ns: int, load: RoleLoad) -> int | None:
        """Once in a while: the nodes wanted now, at least 1; None where nothing is known."""
        if load.busy is None:  # then as many as there are
            self.wanted = load.nodes or self.wanted
            self._bound = 0
            return self.wanted
        need, enough = node_counts(load.busy)
        if self.wanted is None:
            self.wanted = max(1, load.nodes)
        if need > self.wanted:
            self._hold(now_ns, min(need, self._bound) if self._bound > self.wanted else 0, need, self.grow_ns)
        elif enough < self.wanted:
            self._hold(now_ns, max(enough, self._bound) if 0 < self._bound < self.wanted else 0, enough, self.shrink_ns)
        else:
            self._bound = 0
        return self.wanted

    def _hold(self, now_ns: int, bound: int, need: int, hold_ns: int) -> None:
        """`bound`: what all looks since the change began agree on, 0 where it begins with `need`, now."""
        if not bound:
            self._since_ns, bound = now_ns, need
        self._bound = bound
        if now_ns - self._since_ns >= hold_ns:
            self.wanted, self._bound = bound, 0


def node_counts(busy: float) -> tuple[int, int]:
    """(needed, enough to let others go) for a demand that keeps `busy` nodes at work; the second is never smaller."""
    return _nodes(busy / _GROW_AT), _nodes(busy / _SHRINK_TO)


def _nodes(count: float) -> int:
    return max(1, min(_MOST, ceil(count)))


@dataclass
class ModelSizing:
    """One model's wishes, role by role."""

    grow_ns: int
    shrink_ns: int
    roles: dict[str, Sizing] = field(default_factory=dict)

    def look(self, now_ns: int, loads: Mapping[str, RoleLoad]) -> None:
        """As Sizing.look, of each role; a role that is not named is no longer wanted by anybody."""
        self.roles = {role: self.roles.get(role) or Sizing(self.grow_ns, self.shrink_ns) for role in loads}
        for role, load in loads.items():
            self.roles[role].look(now_ns, load)
