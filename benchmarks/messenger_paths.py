"""Measures how long a transfer stalls when one of two networks between two hosts fails in the middle of it.

Two hosts are network namespaces, connected by two wires of 100 MB/s each (token buckets). Node `a` writes 48 MiB to
node `b`; after 0.15 s one wire drops every packet, is unplugged, or slows down tenfold. The bytes are compared at the
end.

Reported for each kind of failure, as medians and maxima over the rounds, in milliseconds:
    detection   from the failure to the decision to leave the path
    stall       from the decision until a part that the path carried is acknowledged by the other path, less the time
                that the part takes at the wire's speed
    total       the whole transfer; `undisturbed` is the same without a failure

Needs root, iproute2, iptables and the kernel's sch_tbf.

Run: python benchmarks/messenger_paths.py [--rounds N] [--store]; the last line of output is JSON, with
`worst_stall_ms`.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

# Replace this folder on the path by the repository root: this file's neighbours would hide packages.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np  # noqa: E402

from benchmarks.stored import store  # noqa: E402
from messenger import Messenger, MessengerConfig, SharedMemory  # noqa: E402
from messenger.paths import PeerPaths  # noqa: E402
from messenger.peer import SPREAD_PART_NBYTES  # noqa: E402
from messenger.stream import Stream  # noqa: E402
from settings.keys import assemble  # noqa: E402
from tools.soak.namespaces import TwoHosts, what_is_missing  # noqa: E402

NBYTES = 48 << 20
WIRE_BYTES_S = 100_000_000
FAILS_AFTER_S = 0.15

Failure = Callable[[TwoHosts, int], None]


def _drop(hosts: TwoHosts, wire: int) -> None:
    hosts.firewall(1, "-A", "INPUT", "-d", hosts.address(1, wire), "-j", "DROP")


def _unplug(hosts: TwoHosts, wire: int) -> None:
    hosts.unplug(1, wire)


def _slow(hosts: TwoHosts, wire: int) -> None:
    hosts.limit(0, wire, WIRE_BYTES_S // 10)


FAILURES: dict[str, Failure | None] = {"undisturbed": None, "drop": _drop, "unplug": _unplug, "slow_tenfold": _slow}


class Times:
    """Times of the last transfer, recorded by wrappers around the messenger's methods."""

    def __init__(self) -> None:
        self.left_s = 0.0
        self.repeated_s = 0.0
        self._moved: set[int] = set()
        self._leave = PeerPaths._leave_locked
        self._acknowledged = Stream.acknowledged

    def forget(self) -> None:
        self.left_s = self.repeated_s = 0.0
        self._moved.clear()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record while the block runs."""
        times, leave, acknowledged = self, self._leave, self._acknowledged

        def on_leave(paths: PeerPaths, path: int, reason: str) -> None:
            if not times.left_s:
                times.left_s = time.monotonic()
                for stream in paths._streams:
                    if stream.path == path:
                        times._moved |= {id(part) for part in stream.in_flight.sent}  # type: ignore[attr-defined]
            leave(paths, path, reason)

        def on_acknowledged(stream: Stream, parts: list[Any], *, more_at_hand: bool) -> None:
            if times._moved and not times.repeated_s and any(id(part) in times._moved for part in parts):
                times.repeated_s = time.monotonic()
            acknowledged(stream, parts, more_at_hand=more_at_hand)

        with patch.object(PeerPaths, "_leave_locked", on_leave), patch.object(Stream, "acknowledged", on_acknowledged):
            yield


def node(hosts: TwoHosts, host: int, name: str) -> tuple[Messenger, Any]:
    """Return a started messenger on the host, and its region."""
    config = assemble(
        MessengerConfig, transport="tcp", data_host=hosts.address(host, 0), data_paths=(hosts.address(host, 1),)
    )
    messenger = Messenger(config, node_id=name, incarnation=1)
    messenger.start()
    return messenger, messenger.register(SharedMemory.create(NBYTES, name))


def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the milliseconds of every round, by failure and figure."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in FAILURES}
    times, random = Times(), np.random.default_rng(1)
    with TwoHosts(wires=2) as hosts, times.recording():
        with hosts.inside(1):
            b, b_region = node(hosts, 1, "b")
        with hosts.inside(0):
            a, a_region = node(hosts, 0, "a")
            key = b.grant(b_region, 0, NBYTES, read=True, write=True)
            peer = a.connect(b.endpoint)
            for number in range(rounds):
                for name, fail in FAILURES.items():
                    hosts.heal()
                    for wire in range(2):
                        hosts.limit(0, wire, WIRE_BYTES_S)
                    while a.counters()["paths_down_open"]:
                        peer.write(key, a_region, [[0, 0, 1]]).result()
                        time.sleep(0.02)
                    a_region.array[:] = random.integers(0, 256, NBYTES, dtype=np.uint8)
                    times.forget()
                    began_s = time.monotonic()
                    future = peer.write(key, a_region, [[0, 0, NBYTES]], deadline_s=60)
                    time.sleep(FAILS_AFTER_S)
                    failed_s = time.monotonic()
                    if fail is not None:
                        fail(hosts, number % 2)
                    future.result()
                    row = {"total": time.monotonic() - began_s}
                    if not np.array_equal(a_region.array, b_region.array):
                        raise SystemExit(f"{name}: the bytes differ")
                    if times.left_s and times.repeated_s:
                        part_s = SPREAD_PART_NBYTES / WIRE_BYTES_S
                        row["detection"] = times.left_s - failed_s
                        row["stall"] = max(0.0, times.repeated_s - times.left_s - part_s)
                    for figure, seconds in row.items():
                        found[name].setdefault(figure, []).append(round(seconds * 1e3, 1))
            a.close()
            b.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="transfers for each kind of failure (default: 6)")
    parser.add_argument("--store", action="store_true", help="write the result")
    arguments = parser.parse_args()
    missing = what_is_missing()
    if missing is not None:
        raise SystemExit(missing)
    load_before = os.getloadavg()[0]
    found = measure(arguments.rounds)
    summary = {
        name: {figure: {"median_ms": statistics.median(each), "max_ms": max(each)} for figure, each in figures.items()}
        for name, figures in found.items()
    }
    for name, figures in summary.items():
        print(name, ", ".join(f"{figure} {each['median_ms']} ({each['max_ms']})" for figure, each in figures.items()))
    stalls = [figures["stall"]["max_ms"] for figures in summary.values() if "stall" in figures]
    result = {
        "benchmark": "messenger_paths",
        "rounds": arguments.rounds,
        "load_1m": [load_before, os.getloadavg()[0]],
        "worst_stall_ms": max(stalls, default=None),
        "by_failure": summary,
    }
    if arguments.store:
        store("messenger-paths", result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
