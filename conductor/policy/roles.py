"""Role switching and pool sizing: each role's demand against its nodes, with hysteresis. Pure.

Demand is the arriving work, the rejected work included, in node-seconds per second. The split matters: of 16 nodes that
could serve 99 % of Mooncake's requests with 8 for prefill, 5 for prefill served 78 % (FAST'25).

The number of nodes that a model's demand needs is a hint for autoscalers. It rises soon after nodes are needed and
falls only long after they were last useful: a missing node costs requests, a surplus one only its time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, exp
from typing import Final, Literal

from conductor.policy.config import NS

__all__ = [
    "Demand",
    "ModelSizing",
    "RoleLoad",
    "Sizing",
    "Split",
    "Switch",
    "Switching",
    "better_split",
    "node_counts",
]

_MEMORY_S: Final = 60.0  # over which demand is measured, about
_MOST_AWAY: Final = 10_000
_PRESSURE: Final = 0.7  # a share of its time below which no role needs help
_GAIN: Final = 0.85  # a change must bring the busier role to this share of what it was


@dataclass(slots=True)
class Demand:
    """Recent demand of one model's requests: sums that decay with time."""

    prefill_s: float = 0.0  # predicted seconds of prefill
    requests: float = 0.0
    prompt_tokens: float = 0.0
    answers: float = 0.0  # requests that told how long their answer was
    answer_tokens: float = 0.0
    at_ns: int = 0
    began_ns: int | None = None
    _away: dict[int, int] = field(default_factory=dict)  # prompts that were rejected, and when; oldest first

    def arrived(self, now_ns: int, prefill_s: float, prompt_tokens: int) -> None:
        """A request wants a place, whatever becomes of it."""
        self._fade(now_ns)
        self.prefill_s += prefill_s
        self.requests += 1
        self.prompt_tokens += prompt_tokens

    def turned_away(self, now_ns: int, prompt_key: int) -> None:
        """A request that has arrived is rejected; its client may come back with it."""
        if prompt_key:
            self._away.pop(prompt_key, None)
            self._away[prompt_key] = now_ns
            if len(self._away) > _MOST_AWAY:
                del self._away[next(iter(self._away))]

    def comes_back(self, now_ns: int, prompt_key: int) -> bool:
        """Return True if this prompt was rejected so recently that it is still counted."""
        at_ns = self._away.pop(prompt_key, None)
        return at_ns is not None and now_ns - at_ns < _MEMORY_S * NS

    def answered(self, now_ns: int, tokens: int) -> None:
        """A request ended after so many tokens."""
        self._fade(now_ns)
        self.answers += 1
        self.answer_tokens += tokens

    def prefill_load(self, now_ns: int) -> float:
        """Nodes that prefill keeps busy."""
        self._fade(now_ns)
        return self.prefill_s / self._span_s(now_ns)

    def decode_load(self, now_ns: int, step_s: float, room: float) -> float:
        """Nodes that decode keeps busy, each with `room` requests at once and `step_s` between their tokens."""
        self._fade(now_ns)
        tokens = self.answer_tokens / self.answers if self.answers else 0.0
        return self.requests / self._span_s(now_ns) * tokens * step_s / max(room, 1.0)

    @property
    def mean_context(self) -> float:
        """Tokens of KV that a request has halfway through its answer."""
        answer = self.answer_tokens / self.answers if self.answers else 0.0
        return self.prompt_tokens / self.requests + answer / 2 if self.requests else 0.0

    def _span_s(self, now_ns: int) -> float:
        """Return the period that the sums cover: less than the memory, soon after the first request."""
        began_ns = now_ns if self.began_ns is None else self.began_ns
        return max(1.0, _MEMORY_S * (1 - exp(-(now_ns - began_ns) / NS / _MEMORY_S)))

    def _fade(self, now_ns: int) -> None:
        if self.began_ns is None:
            self.began_ns = self.at_ns = now_ns
        keep = exp(-(now_ns - self.at_ns) / NS / _MEMORY_S)
        self.at_ns = now_ns
        self.prefill_s *= keep
        self.requests *= keep
        self.prompt_tokens *= keep
        self.answers *= keep
        self.answer_tokens *= keep


@dataclass(frozen=True, slots=True)
class Split:
    """Nodes of a model by role, and how many of each its demand would keep busy."""

    prefill_nodes: int
    decode_nodes: int
    prefill_load: float
    decode_load: float

    @property
    def busiest(self) -> float:
        """Share of its time that the busier role has work; above 1 it cannot keep up, and requests miss objectives."""
        return max(self.prefill_load / self.prefill_nodes, self.decode_load / self.decode_nodes)

    def moved(self, to: str) -> "Split | None":
        """One node changes to role `to`; None where the other role would have none left."""
        change = 1 if to == "prefill" else -1
        prefill_nodes, decode_nodes = self.prefill_nodes + change, self.decode_nodes - change
        if min(prefill_nodes, decode_nodes) < 1:
            return None
        return Split(prefill_nodes, decode_nodes, self.prefill_load, self.decode_load)


def better_split(now: Split) -> Literal["prefill", "decode"] | None:
    """The role that one more node should have; None while the split is good, or cannot be bettered much."""
    if now.busiest < _PRESSURE:
        return None
    to: Literal["prefill", "decode"] = (
        "prefill" if now.prefill_load / now.prefill_nodes > now.decode_load / now.decode_nodes else "decode"
    )
    moved = now.moved(to)
    return to if moved is not None and moved.busiest < _GAIN * now.busiest else None


@dataclass(frozen=True, slots=True)
class Switch:
    """A requested change: one more node of role `to` for the model."""

    to: Literal["prefill", "decode"]
    reason: str


@dataclass
class Switching:
    """One model's wish over time: it must last, and rests after it was granted."""

    hold_ns: int
    rest_ns: int
    demand: Demand = field(default_factory=Demand)
    _wanted: str | None = None
    _since_ns: int = 0
    _resting_until_ns: int | None = None

    def look(self, now_ns: int, split: Split) -> Switch | None:
        """Once in a while: a change that has been better all the time for `hold_ns`, `rest_ns` after the last one."""
        to = better_split(split)
        if to != self._wanted:
            self._wanted, self._since_ns = to, now_ns
        if to is None or now_ns - self._since_ns < self.hold_ns:
            return None
        if self._resting_until_ns is not None and now_ns < self._resting_until_ns:
            return None
        self._resting_until_ns = now_ns + self.rest_ns
        self._wanted = None
        moved = split.moved(to)
        assert moved is not None  # better_split has seen it
        return Switch(to, f"{_told(split)}; with one more for {to}: {_told(moved)}")


def _told(split: Split) -> str:
    prefill, decode = split.prefill_load / split.prefill_nodes, split.decode_load / split.decode_nodes
    return f"{split.prefill_nodes} prefill nodes {prefill:.0%} busy, {split.decode_nodes} decode nodes {decode:.0%}"


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
