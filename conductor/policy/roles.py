"""Rules of role switching and pool sizing: they compare each role's demand with its nodes, with hysteresis.

Demand is the arriving work, including rejected requests, in node-seconds per second. The split between prefill and
decode nodes matters: of 16 nodes, 8 for prefill could serve 99 % of Mooncake's requests, but 5 only 78 % (FAST'25).

The number of nodes that a model's demand needs is a hint for autoscalers. It rises soon after nodes are needed and
falls only long after they were last used, since a missing node costs requests and a surplus one only its time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil, exp, floor, sqrt
from typing import Final, Literal

from conductor.policy.events import NS

__all__ = [
    "Demand",
    "ModelSizing",
    "RoleLoad",
    "Sizing",
    "Split",
    "Switch",
    "Switching",
    "better_split",
    "decode_spare",
    "node_counts",
    "prefill_spare",
]

SwitchTarget = Literal["prefill", "decode"]
"""Role that nodes change to."""

_MEMORY_S: Final = 60.0  # time constant of the measurement of demand
_MOST_AWAY: Final = 10_000
_PRESSURE: Final = 0.7  # utilisation below which no role needs another node
_GAIN: Final = 0.85  # a change must reduce the utilisation of the busier role to this share of what it was


@dataclass(slots=True)
class Demand:
    """Recent demand of one model's requests: sums that decay with time."""

    prefill_s: float = 0.0  # predicted seconds of prefill
    requests: float = 0.0
    prompt_tokens: float = 0.0
    reserved_tokens: float = 0.0  # pages that decode nodes reserve for the requests
    answers: float = 0.0  # requests that have ended, so that the length of their answer is known
    answer_tokens: float = 0.0
    at_ns: int = 0
    began_ns: int | None = None
    _away: dict[int, int] = field(default_factory=dict)  # prompt keys of rejected requests, and when; oldest first

    def arrived(self, now_ns: int, prefill_s: float, prompt_tokens: int, reserved_tokens: int = 0) -> None:
        """Count an arriving request, whether it is admitted or not."""
        self._fade(now_ns)
        self.prefill_s += prefill_s
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.reserved_tokens += max(reserved_tokens, prompt_tokens)

    def turned_away(self, now_ns: int, prompt_key: int) -> None:
        """Remember a rejected request, so that its retry is not counted as further demand."""
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
        """Count the answer of a request that has ended."""
        self._fade(now_ns)
        self.answers += 1
        self.answer_tokens += tokens

    def prefill_load(self, now_ns: int) -> float:
        """Return the number of nodes that the prefills keep busy."""
        self._fade(now_ns)
        return self.prefill_s / self._span_s(now_ns)

    @property
    def mean_prefill_s(self) -> float:
        """Mean predicted seconds of a prefill."""
        return self.prefill_s / self.requests if self.requests else 0.0

    def decode_load(self, now_ns: int, step_s: float, room: float) -> float:
        """Return the number of nodes that decoding keeps busy, if each runs `room` requests with steps of `step_s`."""
        self._fade(now_ns)
        tokens = self.answer_tokens / self.answers if self.answers else 0.0
        return self.requests / self._span_s(now_ns) * tokens * step_s / max(room, 1.0)

    @property
    def mean_context(self) -> float:
        """Mean number of KV tokens of a request halfway through its answer."""
        answer = self.answer_tokens / self.answers if self.answers else 0.0
        return self.prompt_tokens / self.requests + answer / 2 if self.requests else 0.0

    @property
    def mean_reserved(self) -> float:
        """Mean number of KV tokens for which a decode node reserves pages for a request."""
        return self.reserved_tokens / self.requests if self.requests else 0.0

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
        self.reserved_tokens *= keep
        self.answers *= keep
        self.answer_tokens *= keep


@dataclass(frozen=True, slots=True)
class Split:
    """Number of nodes of a model by role, and number of nodes that its demand would keep busy."""

    prefill_nodes: int
    decode_nodes: int
    prefill_load: float
    decode_load: float

    @property
    def busiest(self) -> float:
        """Utilisation of the busier role; above 1 it cannot keep up, and requests miss their objectives."""
        return max(self.prefill_load / self.prefill_nodes, self.decode_load / self.decode_nodes)

    def moved(self, to: SwitchTarget, nodes: int = 1) -> "Split | None":
        """Return the split after `nodes` have changed to role `to`; None if the other role would have no node left."""
        change = nodes if to == "prefill" else -nodes
        prefill_nodes, decode_nodes = self.prefill_nodes + change, self.decode_nodes - change
        if min(prefill_nodes, decode_nodes) < 1:
            return None
        return Split(prefill_nodes, decode_nodes, self.prefill_load, self.decode_load)


def better_split(now: Split, most_share: float) -> "Switch | None":
    """Return the change that helps the busier role most; None if the split is good or a change would gain too little.

    At most `most_share` of the other role's nodes change, but at least one.
    """
    if now.busiest < _PRESSURE:
        return None
    to: SwitchTarget = (
        "prefill" if now.prefill_load / now.prefill_nodes > now.decode_load / now.decode_nodes else "decode"
    )
    giving = now.decode_nodes if to == "prefill" else now.prefill_nodes
    best, nodes = now, 0
    for count in range(1, max(1, floor(most_share * giving)) + 1):
        moved = now.moved(to, count)
        if moved is not None and moved.busiest < best.busiest:
            best, nodes = moved, count
    if best.busiest >= _GAIN * now.busiest:
        return None
    return Switch(to, nodes, f"{_split_text(now)}; with {nodes} more for {to}: {_split_text(best)}")


@dataclass(frozen=True, slots=True)
class Switch:
    """Change of `nodes` nodes of the model to role `to`."""

    to: SwitchTarget
    nodes: int
    reason: str


@dataclass
class Switching:
    """Hysteresis of one model's role switches: a change must be due for `hold_ns`, and `rest_ns` after the last one."""

    hold_ns: int
    rest_ns: int
    most_share: float = 0.5
    demand: Demand = field(default_factory=Demand)
    _wanted: SwitchTarget | None = None
    _since_ns: int = 0
    _resting_until_ns: int | None = None

    def update(self, now_ns: int, split: Split) -> Switch | None:
        """Return the change that is due now, if any; call this regularly."""
        switch = better_split(split, self.most_share)
        to = switch.to if switch is not None else None
        if to != self._wanted:
            self._wanted, self._since_ns = to, now_ns
        if switch is None or now_ns - self._since_ns < self.hold_ns:
            return None
        if self._resting_until_ns is not None and now_ns < self._resting_until_ns:
            return None
        self._resting_until_ns = now_ns + self.rest_ns
        self._wanted = None
        return switch


def _split_text(split: Split) -> str:
    prefill, decode = split.prefill_load / split.prefill_nodes, split.decode_load / split.decode_nodes
    return f"{split.prefill_nodes} prefill nodes {prefill:.0%} busy, {split.decode_nodes} decode nodes {decode:.0%}"


_GROW_AT: Final = 0.85  # utilisation, spare included, above which another node is needed
_SHRINK_TO: Final = 0.7  # highest utilisation, spare included, of the remaining nodes after one is removed
_UTILISATION: Final = 0.7  # of prefill nodes without an objective, or with one that leaves little time
_TAIL: Final = 3.0  # -log(0.05)
_SQUARED_VARIATION: Final = 2.0  # of the duration of prefills: squared ratio of its deviation to its mean
_MOST: Final = 4096  # nodes
_TREND_S: Final = 180.0
_AHEAD_S: Final = 120.0  # for which demand is extrapolated: its measurement lags, and nodes take time to start


@dataclass(frozen=True, slots=True)
class RoleLoad:
    """Number of nodes of a role, and number of nodes that its demand keeps busy (None: not known yet).

    `spare`: nodes that must be free on average, so that short fluctuations of the demand do not delay requests beyond
    their objectives. `busy_now`: nodes that the demand of the last minute and the waiting work keep busy; it may exceed
    `busy` for a short time.
    """

    nodes: int
    busy: float | None
    spare: float = 0.0
    busy_now: float = 0.0


@dataclass
class Sizing:
    """Number of nodes that one role should have, with hysteresis.

    Once demand is known the result does not depend on the present number of nodes, so an autoscaler that follows it
    late or not at all does not change it.
    """

    grow_ns: int
    shrink_ns: int
    wanted: int | None = None  # None before the first node or demand
    _since_ns: int = 0  # since when more, or fewer, nodes have been needed without interruption
    _bound: int = 0  # minimum number needed since then (of more), or maximum (of fewer); 0: no change is pending

    def update(self, now_ns: int, load: RoleLoad) -> int | None:
        """Return the number of nodes that the role should have now, at least 1; None if nothing is known yet."""
        if load.busy is None:  # demand is unknown: keep the present number
            self.wanted = load.nodes or self.wanted
            self._bound = 0
            return self.wanted
        need, enough = node_counts(load.busy, load.spare, load.busy_now)
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
        """Continue a pending change to `bound` nodes, or begin one to `need` if `bound` is 0; apply it after `hold_ns`.

        Call with the bound that all calls since the change began agree on.
        """
        if not bound:
            self._since_ns, bound = now_ns, need
        self._bound = bound
        if now_ns - self._since_ns >= hold_ns:
            self.wanted, self._bound = bound, 0


def node_counts(busy: float, spare: float = 0.0, busy_now: float = 0.0) -> tuple[int, int]:
    """Return (nodes needed, nodes that suffice to remove the others) for a demand as in `RoleLoad`.

    The second number is never smaller than the first.
    """
    need = max(_nodes((busy + spare) / _GROW_AT), _nodes(busy_now))
    return need, max(need, _nodes((busy + spare) / _SHRINK_TO))


def prefill_spare(busy: float, prefill_s: float, ttft_s: float) -> float:
    """Return the prefill nodes that must be free on average, so that few requests wait beyond their objective.

    `prefill_s`: mean duration of a prefill, `ttft_s`: objective, 0 if there is none. By the exponential tail of the
    waiting time of a queue with Poisson arrivals, of which 5 % may exceed what the objective leaves (Kingman).
    """
    usual = busy * (_GROW_AT / _UTILISATION - 1)
    left_s = ttft_s - prefill_s
    return min(usual, _TAIL * (1 + _SQUARED_VARIATION) / 2 * prefill_s / left_s) if left_s > 0 else usual


def decode_spare(busy: float, room: float) -> float:
    """Return the decode nodes that must be free on average for fluctuations of the number of answers.

    `room`: concurrent answers of a node. With Poisson arrivals their number varies by its square root, of which two are
    kept free (square-root staffing).
    """
    return 2 * sqrt(busy / max(room, 1.0))


def _nodes(count: float) -> int:
    return max(1, min(_MOST, ceil(count)))


@dataclass(slots=True)
class Trend:
    """Level and slope of a series by double exponential smoothing (Brown), with a time constant of `_TREND_S`."""

    mean: float = 0.0
    mean_of_means: float = 0.0
    at_ns: int = -1

    def add(self, now_ns: int, value: float) -> None:
        """Add a value; the first one is the level."""
        if self.at_ns < 0:
            self.mean = self.mean_of_means = value
        keep = exp(-max(0, now_ns - self.at_ns) / NS / _TREND_S)
        self.mean += (1 - keep) * (value - self.mean)
        self.mean_of_means += (1 - keep) * (self.mean - self.mean_of_means)
        self.at_ns = now_ns

    def ahead(self, seconds: float) -> float:
        """Return the value to expect after `seconds`, at least 0."""
        slope_per_s = (self.mean - self.mean_of_means) / _TREND_S
        level = 2 * self.mean - self.mean_of_means
        return max(0.0, level + slope_per_s * seconds)


@dataclass
class ModelSizing:
    """Number of nodes that each role of one model should have."""

    grow_ns: int
    shrink_ns: int
    roles: dict[str, Sizing] = field(default_factory=dict)
    _trends: dict[str, Trend] = field(default_factory=dict)  # of the nodes that the demand keeps busy, by role

    def update(self, now_ns: int, loads: Mapping[str, RoleLoad]) -> None:
        """Update the sizing of each role in `loads`; roles that are not in it are dropped."""
        self.roles = {role: self.roles.get(role) or Sizing(self.grow_ns, self.shrink_ns) for role in loads}
        for role, load in loads.items():
            if load.busy is None:
                self._trends.pop(role, None)
            else:
                trend = self._trends.setdefault(role, Trend())
                trend.add(now_ns, load.busy)
                load = replace(load, busy=trend.ahead(_AHEAD_S))
            self.roles[role].update(now_ns, load)
