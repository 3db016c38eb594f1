"""Faults of a run, drawn from a seed. Pure.

The cluster has two hosts, 0 and 1, with one of each role on either, and tolerates the loss of one host. A run consists
of rounds. All faults of a round strike roles of one host, or links of one of its roles, and may overlap; a round ends
when all of them are healed. Before the next round the cluster must have recovered.

    round 0, host 1   kill decode-1 ──▶
                         cut frontend-1 ╳ decode-0 ────────▶
                              kill pool-1 ──▶                recovery
    round 1, host 0                                                   kill conductor-0 ──▶ …
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

HOSTS = (0, 1)
LINKS = (
    ("client", "frontend"),
    ("frontend", "conductor"),
    ("frontend", "prefill"),
    ("frontend", "decode"),
    ("conductor", "prefill"),
    ("conductor", "decode"),
    ("conductor", "pool"),
    ("conductor", "redis"),
    ("prefill", "decode"),
    ("prefill", "pool"),
    ("decode", "pool"),
    ("pool", "pool"),
)
"""Pairs of roles that exchange messages. Workers of different models do not."""
ALONE = ("client", "redis")  # ends of links that are on neither host
ROLES = ("frontend", "conductor", "pool", "prefill", "decode")
WORKERS = ("prefill", "decode")
ROUND_S = 22.0
KILLS_PER_ROUND = 3
OTHERS_PER_ROUND = 3
RECOVERY_S = 7.0  # of each round, in which no fault begins
LONGEST_S = 9.0
# A killed role is busy starting for some seconds: a second kill within them would strike the same start.
BETWEEN_KILLS_S = 3.5
SUSPECT_S = 5.0  # `--report-timeout`: a silent node gets no work from then on


class FaultKind(StrEnum):
    """Kinds of faults; that of a link is `cut_` and its roles."""

    KILL = "kill"
    PAUSE_SHORT = "pause_short"
    PAUSE_LONG = "pause_long"
    DISK_FULL = "disk_full"
    DISK_ERRORS = "disk_errors"
    DISK_SLOW = "disk_slow"
    DISK_CORRUPT = "disk_corrupt"
    CLOCK_JUMP = "clock_jump"
    SLOW_NODE = "slow_node"
    MEMORY_PRESSURE = "memory_pressure"


def cut_kind(link: tuple[str, str]) -> str:
    """Return the name of the kind of fault that cuts a link."""
    return f"cut_{link[0]}_{link[1]}"


CUTS = {cut_kind(link): link for link in LINKS}
ALL_KINDS = (*(str(kind) for kind in FaultKind), *CUTS)


@dataclass(frozen=True)
class PlannedFault:
    """One fault. `at_s`: since the round's beginning; `seconds`: 0 for a fault that heals itself; `strength` in [0, 1)
    is interpreted by the kind; `drops`: cut links drop packets instead of rejecting them."""

    kind: str
    node: str
    peer: str  # of a cut link, otherwise ""
    at_s: float
    seconds: float
    strength: float
    drops: bool = False


@dataclass(frozen=True)
class Round:
    """Faults of one host, in order of time."""

    number: int
    host: int
    faults: tuple[PlannedFault, ...]


@dataclass(frozen=True)
class Topology:
    """Names of the cluster's nodes; `models` are prefixes of the workers' names: "" or "paced-"."""

    models: tuple[str, ...]

    def nodes(self, role: str, host: int) -> list[str]:
        """Return the names of the host's nodes of a role."""
        prefixes = self.models if role in WORKERS else ("",)
        return [f"{prefix}{role}-{host}" for prefix in prefixes]

    @property
    def names(self) -> list[str]:
        """Names of all nodes."""
        return [name for role in ROLES for host in HOSTS for name in self.nodes(role, host)]


def draw_schedule(seed: int, seconds: float, topology: Topology, kinds: Sequence[str] = ALL_KINDS) -> list[Round]:
    """Return the rounds of a run of about `seconds`.

    Each round has `KILLS_PER_ROUND` kills if `kinds` include them. The other kinds come in turn, in a new order each
    time, so that their numbers differ by at most one.
    """
    unknown = sorted(set(kinds) - set(ALL_KINDS))
    if unknown or not kinds:
        raise ValueError(f"kinds must be some of {', '.join(ALL_KINDS)}, got {', '.join(unknown) or 'none'}")
    rng = random.Random(seed)
    others = [kind for kind in kinds if kind != FaultKind.KILL]
    deck: list[str] = []
    rounds = []
    first = rng.choice(HOSTS)
    for number in range(max(1, round(seconds / ROUND_S))):
        host = (first + number) % 2
        window_s = ROUND_S - RECOVERY_S
        faults = []
        if FaultKind.KILL in kinds:
            victims = rng.sample([name for role in ROLES for name in topology.nodes(role, host)], KILLS_PER_ROUND)
            faults += [
                PlannedFault(FaultKind.KILL, name, "", 1.0 + turn * BETWEEN_KILLS_S + rng.random(), 0.0, rng.random())
                for turn, name in enumerate(victims)
            ]
        for _ in range(OTHERS_PER_ROUND if others else 0):
            deck = deck or rng.sample(others, len(others))
            faults.append(_draw(rng, deck.pop(), host, window_s, topology))
        rounds.append(Round(number, host, tuple(sorted(faults, key=lambda fault: fault.at_s))))
    return rounds


def _draw(rng: random.Random, kind: str, host: int, window_s: float, topology: Topology) -> PlannedFault:
    seconds = rng.uniform(3.0, LONGEST_S)
    peer, drops = "", rng.random() < 0.5
    if kind in CUTS:
        node, peer = _ends(rng, CUTS[kind], host, topology)
    elif kind in (FaultKind.DISK_FULL, FaultKind.DISK_ERRORS, FaultKind.DISK_SLOW, FaultKind.DISK_CORRUPT):
        node = f"pool-{host}"
    else:
        node = rng.choice([name for role in ROLES for name in topology.nodes(role, host)])
    if kind == FaultKind.PAUSE_SHORT:
        seconds = rng.uniform(0.5, 0.6 * SUSPECT_S)
    elif kind == FaultKind.PAUSE_LONG:
        seconds = rng.uniform(1.3 * SUSPECT_S, LONGEST_S)
    elif kind == FaultKind.DISK_CORRUPT:
        seconds = 0.0
    return PlannedFault(kind, node, peer, rng.uniform(0.5, max(0.6, window_s - seconds)), seconds, rng.random(), drops)


def _ends(rng: random.Random, link: tuple[str, str], host: int, topology: Topology) -> tuple[str, str]:
    """Return a node of the host and the other end, which may be on either host."""
    near, far = link if rng.random() < 0.5 else link[::-1]
    if near in ALONE:
        near, far = far, near
    node = rng.choice(topology.nodes(near, host))
    if far in ALONE:
        return node, far
    if near == far:
        return node, f"{far}-{1 - host}"
    peers = topology.nodes(far, rng.choice(HOSTS))
    if near in WORKERS and far in WORKERS:
        peers = [peer for peer in peers if model_of(peer) == model_of(node)]
    return node, rng.choice(peers)


def model_of(node: str) -> str:
    """Return the prefix of a worker's name that stands for its model."""
    return node[: -len(node.rsplit("-", 2)[-2]) - 2] if node.count("-") > 1 else ""


def counts(rounds: Sequence[Round]) -> dict[str, int]:
    """Return the number of faults per kind."""
    return dict(Counter(fault.kind for each in rounds for fault in each.faults))
