"""Command line of the soak test: load and faults for a number of seconds; the last line of output is the JSON report.

The exit status is 1 if a byte was wrong, an error was unexpected, an operation hung, or a resource grew or leaked.
"""

import argparse
import faulthandler
import json
import random
import secrets
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from messenger import Messenger
from messenger.errors import RdmaUnavailable
from tools.soak.diagnosis import diagnose
from tools.soak.fleet import Member, PeerGone, Settings, Trouble
from tools.soak.peer import configured
from tools.soak.watch import growth, open_descriptors, running_threads, usage, verbs_resources
from tools.soak.worker import DEADLINE_S, PATIENCE_S, SLACK_S, Worker

TRANSPORTS = {
    "auto": ("tcp", "shm", "tls"),
    "tcp": ("tcp",),
    "tls": ("tls",),
    "shm": ("shm",),
    "rdma": ("rdma",),
}
PROGRESS_S = 5.0
SAMPLE_S = 1.0
STALL_S = 4.0
"""Seconds without progress after which an operation on an undisturbed peer is diagnosed."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.soak", description="Soak test of the messenger; the last line of output is JSON."
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="duration (%(default)g)")
    parser.add_argument(
        "--seed", type=int, default=None, help="random seed of sizes, shapes and faults; random if not given"
    )
    parser.add_argument(
        "--transport", choices=tuple(TRANSPORTS), default="auto", help="auto: tcp, shm and tcp with TLS in one run"
    )
    parser.add_argument(
        "--peers", type=int, help="number of peer processes; the first of each transport is not replaced"
    )
    parser.add_argument("--workers", type=int, default=2, help="load threads per peer (%(default)d)")
    parser.add_argument("--slot-kib", type=int, default=1024, help="memory per thread in KiB (%(default)d)")
    parser.add_argument("--trouble-every-s", type=float, default=2.0, help="mean time between faults (%(default)g)")
    parser.add_argument(
        "--patience", type=float, default=1.0, help="factor of time limits on slow machines (%(default)g)"
    )
    arguments = parser.parse_args()
    if arguments.seconds <= 0 or arguments.trouble_every_s <= 0 or arguments.patience <= 0:
        parser.error("--seconds, --trouble-every-s and --patience must be above 0")
    if arguments.workers < 1 or arguments.slot_kib < 1:
        parser.error("--workers and --slot-kib must be at least 1")
    if arguments.peers is None:
        arguments.peers = 2 * max(2, len(TRANSPORTS[arguments.transport]))
    if arguments.peers <= len(TRANSPORTS[arguments.transport]):
        parser.error(f"--peers must be above the number of transports ({len(TRANSPORTS[arguments.transport])})")
    faulthandler.enable()
    if arguments.seed is None:
        arguments.seed = secrets.randbits(32)
    print(f"soak: seed {arguments.seed}, {arguments.transport}, {arguments.seconds:.0f} s", flush=True)
    with tempfile.TemporaryDirectory(prefix="mp-soak-") as run_dir:
        try:
            report = Soak(arguments, run_dir).run()
        except RdmaUnavailable as error:
            parser.error(f"--transport rdma: {error}")
    print(json.dumps(report))
    return 1 if report["failures"] else 0


class Soak:
    def __init__(self, arguments: argparse.Namespace, run_dir: str) -> None:
        self._arguments = arguments
        self._settings = Settings(
            transports=TRANSPORTS[arguments.transport],
            run_dir=run_dir,
            slots=arguments.workers,
            slot_nbytes=arguments.slot_kib << 10,
            patience=arguments.patience,
        )
        self._over = threading.Event()
        self._told: set[Worker] = set()
        self._failures: list[str] = []
        self._samples: list[dict[str, int]] = []
        self._steady_samples: list[dict[str, int]] = []

    def run(self) -> dict[str, Any]:
        before, verbs_before = usage(), verbs_resources()
        started_s = time.monotonic()
        callers = self._callers()
        members = [Member(number, self._settings) for number in range(self._arguments.peers)]
        seed = self._arguments.seed
        workers = [
            Worker(callers[member.transport], member, slot, self._settings, (seed, number, slot), self._over)
            for number, member in enumerate(members)
            for slot in range(self._arguments.workers)
        ]
        trouble = Trouble(members, callers, self._arguments.trouble_every_s, random.Random(seed))
        for worker in workers:
            worker.thread.start()
        trouble.start()
        self._watch(members, workers, trouble, started_s + self._arguments.seconds)
        trouble.close()
        self._over.set()
        self._join(workers)
        self._question(members, set(callers.values()))
        counters = Counter[str]()
        for messenger in set(callers.values()):
            counters.update(messenger.counters())
            messenger.close()
        for member in members:
            member.close()
        for worker in workers:
            worker.close()
        self._failures += growth("the caller", self._samples) + growth(members[0].node_id, self._steady_samples)
        after = self._usage_at_rest(before)
        for what, opened in (("descriptors", open_descriptors), ("threads", running_threads)):
            if after[what] > before[what]:
                self._failures.append(
                    f"{after[what]} {what} at the end, {before[what]} at the start; now open: {opened()}"
                )
        verbs_after = verbs_resources()
        if verbs_after != verbs_before:
            self._failures.append(f"verbs resources: {verbs_before} at the start, {verbs_after} at the end")
        if trouble.failure is not None:
            self._failures.append(f"the fault injection failed: {trouble.failure!r}")
        return {
            "seed": seed,
            "transport": self._arguments.transport,
            "seconds": round(time.monotonic() - started_s, 1),
            "operations": dict(_total(workers, "operations")),
            "errors": dict(_total(workers, "errors")),
            "trouble": dict(trouble.events),
            "gib_moved": round(sum(worker.nbytes for worker in workers) / 2**30, 3),
            "gib_checked": round(sum(worker.checked_nbytes for worker in workers) / 2**30, 6),
            "connects": counters["connects"],
            "retries": counters["retries"],
            "before": before,
            "middle": self._samples[len(self._samples) // 2] if self._samples else before,
            "after": after,
            "failures": self._failures,
        }

    def _callers(self) -> dict[str, Messenger]:
        """Return the calling messengers by transport: one for all unencrypted transports and one with TLS."""
        plain = [transport for transport in self._settings.transports if transport != "tls"]
        spoken = {"tls": ["tls"]} if "tls" in self._settings.transports else {}
        if plain:
            spoken["auto" if len(plain) > 1 else plain[0]] = plain
        callers: dict[str, Messenger] = {}
        for transport, names in spoken.items():
            config = configured(self._settings.messenger(transport))
            messenger = Messenger(config, node_id=f"soak-{transport}", incarnation=1)
            messenger.start()
            callers |= dict.fromkeys(names, messenger)
        return callers

    def _usage_at_rest(self, before: dict[str, int]) -> dict[str, int]:
        """Return the usage when the thread count is back at its initial value, or after a timeout.

        A thread may still be counted shortly after its join.
        """
        end_s = time.monotonic() + 5.0 * self._arguments.patience
        while (now := usage())["threads"] > before["threads"] and time.monotonic() < end_s:
            time.sleep(0.01)
        return now

    def _watch(self, members: list[Member], workers: list[Worker], trouble: Trouble, end_s: float) -> None:
        """Sample and check until the time is up or something failed."""
        started_s = shown_s = time.monotonic()
        while not self._over.wait(SAMPLE_S) and time.monotonic() < end_s:
            self._samples.append(usage())
            if self._hang(workers):
                return
            try:
                self._steady_samples.append(members[0].ask(members[0].generation, "report")["usage"])
            except PeerGone:
                self._failures.append(f"{members[0].node_id} exited unexpectedly")
                return
            if time.monotonic() - shown_s >= PROGRESS_S:
                shown_s = time.monotonic()
                self._show(shown_s - started_s, workers, trouble)

    def _hang(self, workers: list[Worker]) -> bool:
        """Return True if an operation exceeded its deadline. Diagnoses operations that stall on undisturbed peers."""
        now_s = time.monotonic()
        for worker in workers:
            since_s = worker.waits_since_s
            if since_s is None:
                continue
            stalls = now_s - since_s > STALL_S * self._arguments.patience
            if stalls and worker not in self._told and not worker.member.was_disturbed_since(since_s):
                self._told.add(worker)
                diagnose(f"{worker.name}: no progress for {now_s - since_s:.1f} s", worker.member, worker.messenger)
            if now_s - since_s > worker.longest_wait_s + STALL_S:
                self._failures.append(f"{worker.name}: an operation exceeded its deadline")
                return True
        return False

    def _show(self, elapsed_s: float, workers: list[Worker], trouble: Trouble) -> None:
        operations, errors = _total(workers, "operations"), _total(workers, "errors")
        moved_gib = sum(worker.nbytes for worker in workers) / 2**30
        used = " ".join(f"{name} {value}" for name, value in self._samples[-1].items())
        print(
            f"{elapsed_s:6.0f} s  {operations.total()} operations, {moved_gib:.2f} GiB, "
            f"{errors.total()} expected errors, {trouble.events.total()} faults; {used}",
            flush=True,
        )

    def _join(self, workers: list[Worker]) -> None:
        limit_s = (DEADLINE_S + SLACK_S + PATIENCE_S) * 2 * self._arguments.patience
        end_s = time.monotonic() + limit_s
        for worker in workers:
            worker.thread.join(max(0.0, end_s - time.monotonic()))
            if worker.thread.is_alive():
                self._failures.append(f"{worker.thread.name} hangs")
                faulthandler.dump_traceback()
            elif worker.failure is not None:
                self._failures.append(f"{type(worker.failure).__name__}: {worker.failure}")

    def _question(self, members: list[Member], messengers: Iterable[Messenger]) -> None:
        """Check that nothing is pending at rest, and that every notification arrived after its data."""
        for messenger in messengers:
            self._failures += messenger.validate()
        for member in members:
            try:
                self._failures += member.ask(member.generation, "report")["wrong"]
            except PeerGone:
                self._failures.append(f"{member.node_id} exited unexpectedly")


def _total(workers: list[Worker], name: str) -> Counter[str]:
    return sum((getattr(worker, name) for worker in workers), Counter())


if __name__ == "__main__":
    sys.exit(main())
