"""Figures from the seconds of turns: medians, and ratios within a round. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.transfers.contenders import Turn

THROUGHPUT, LATENCY = "throughput", "latency"
DIRECTIONS = ("write", "read")


@dataclass(frozen=True)
class SpeedRatio:
    """Reported ratio: speed of `ours` over `theirs`, for batches of at least `from_nbytes`."""

    name: str
    ours: str
    theirs: str
    from_nbytes: int = 0


PAIRS = (
    SpeedRatio("tcp_vs_mooncake", "tcp", "mooncake"),
    SpeedRatio("tcp_vs_nixl_tcp", "tcp", "nixl_tcp"),
    SpeedRatio("tcp_notified_vs_nixl_tcp_notified", "tcp_notified", "nixl_tcp_notified"),
    SpeedRatio("tcp_vs_iperf3", "tcp", "iperf3", 1 << 20),
    SpeedRatio("shm_vs_nixl", "shm", "nixl"),
    SpeedRatio("shm_notified_vs_nixl_notified", "shm_notified", "nixl_notified"),
    SpeedRatio("shm_vs_memcpy", "shm", "memcpy", 1 << 20),
    SpeedRatio("tcp_vs_plain_socket", "tcp", "plain_socket"),
    SpeedRatio("tcp_encrypted_vs_tcp", "tcp_encrypted", "tcp"),
    SpeedRatio("tcp_encrypted_vs_aes_socket", "tcp_encrypted", "aes_socket"),
    SpeedRatio("tcp_digests_vs_tcp", "tcp_digests", "tcp"),
    SpeedRatio("tcp_digests_vs_mooncake", "tcp_digests", "mooncake"),
    SpeedRatio("shm_digests_vs_shm", "shm_digests", "shm"),
    SpeedRatio("shm_digests_vs_nixl", "shm_digests", "nixl"),
)


@dataclass(frozen=True, order=True)
class ComparisonCell:
    """Throughput or latency of batches of one label (size) in one direction."""

    label: str
    direction: str
    metric: str


@dataclass
class Rounds:
    """Values per cell and contender, one per round: 1e9 bytes per second, or the median seconds of a batch."""

    values: dict[ComparisonCell, dict[str, list[float]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    batch_nbytes: dict[str, int] = field(default_factory=dict)

    def add(self, label: str, contender: str, turn: Turn, seconds: list[float]) -> None:
        direction = DIRECTIONS[not turn.write]
        if turn.window == 1:
            self.values[ComparisonCell(label, direction, LATENCY)][contender].append(statistics.median(seconds))
        else:
            self.values[ComparisonCell(label, direction, THROUGHPUT)][contender].append(turn.nbytes / seconds[0] / 1e9)
        self.batch_nbytes[label] = turn.shape[0] * turn.shape[1]

    def ratio(self, cell: ComparisonCell, ours: str, theirs: str) -> float | None:
        """Return the median over rounds of the speed ratio; None if either did not take part."""
        found = self.values[cell]
        if ours not in found or theirs not in found:
            return None
        ratios = (
            a / b if cell.metric == THROUGHPUT else b / a for a, b in zip(found[ours], found[theirs], strict=True)
        )
        return statistics.median(ratios)

    def cells(self) -> list[ComparisonCell]:
        return [cell for cell, found in self.values.items() if found]


def summary(rounds: Rounds) -> dict[str, Any]:
    """Return the pairs' minimum ratios over sizes and directions, and all figures under `by_size`."""
    told: dict[str, Any] = {}
    for pair in PAIRS:
        for metric in (THROUGHPUT, LATENCY):
            found = [
                ratio
                for cell in rounds.cells()
                if cell.metric == metric and rounds.batch_nbytes[cell.label] >= pair.from_nbytes
                if (ratio := rounds.ratio(cell, pair.ours, pair.theirs)) is not None
            ]
            name = pair.name if metric == THROUGHPUT else f"{pair.name}_{metric}"
            if found:
                told[name] = round(min(found), 3)
    return told | {"by_size": by_size(rounds)}


def by_size(rounds: Rounds) -> dict[str, Any]:
    """Return {label: {direction: {contender: {gbps, p50_us}, "ratios": {pair: {throughput, latency}}}}}."""
    told: dict[str, Any] = {}
    for cell in rounds.cells():
        row = told.setdefault(cell.label, {}).setdefault(cell.direction, {})
        for contender, values in rounds.values[cell].items():
            middle = statistics.median(values)
            figures = {"gbps": round(middle, 3)} if cell.metric == THROUGHPUT else {"p50_us": round(middle * 1e6, 1)}
            row.setdefault(contender, {}).update(figures)
        ratios = row.setdefault("ratios", {})
        for pair in PAIRS:
            ratio = rounds.ratio(cell, pair.ours, pair.theirs)
            if ratio is not None:
                ratios.setdefault(pair.name, {})[cell.metric] = round(ratio, 3)
    return told


def slices_vs_one_piece(rounds: Rounds, slices: str, piece: str, contenders: Iterable[str]) -> dict[str, float]:
    """Return {"<contender>_<direction>": ratio} of the throughputs of two labels of equal bytes."""
    told = {}
    for direction in DIRECTIONS:
        many = rounds.values[ComparisonCell(slices, direction, THROUGHPUT)]
        one = rounds.values[ComparisonCell(piece, direction, THROUGHPUT)]
        for contender in contenders:
            if many[contender] and one[contender]:
                ratios = (a / b for a, b in zip(many[contender], one[contender], strict=True))
                told[f"{contender}_{direction}"] = round(statistics.median(ratios), 3)
    return told
