"""The real messenger over the simulated TCP: its guarantees under crashes, revokes, partitions and random operations.

Scenarios run in processes of their own, since the simulated world must be installed before the messenger is loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent


def run(script: str, *arguments: object, hash_seed: int = 0) -> list[dict[str, Any]]:
    """Return the lines of JSON that a script writes."""
    done = subprocess.run(
        [sys.executable, HERE / script, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def play(scenario: str, first: int, last: int, *, hash_seed: int = 0) -> list[dict[str, Any]]:
    """Return a scenario's outcomes with the seeds from `first` to `last`."""
    outcomes = run("messenger_scenarios.py", scenario, first, last, hash_seed=hash_seed)
    for outcome in outcomes:
        if "error" in outcome:
            pytest.fail(f"{scenario} with seed {outcome['seed']}: {outcome['error']}")
    assert [outcome["seed"] for outcome in outcomes] == list(range(first, last + 1))
    assert not any(outcome.get("problems") for outcome in outcomes)
    return outcomes


def test_transfers_of_all_sizes_arrive_in_order_and_urgent_ones_first() -> None:
    for outcome in play("transfers", 0, 5):
        assert outcome["ended"] == ["urgent", "background"]
        assert outcome["refused"] == ["RemoteAccessError", "RemoteAccessError"]


def test_nothing_lands_after_a_revoke() -> None:
    outcomes = play("revoke", 0, 24)
    assert sum(outcome["is_partial"] for outcome in outcomes) > 5
    assert {outcome["ends_with"] for outcome in outcomes} >= {"RemoteAccessError"}


def test_operations_fail_when_their_owner_dies_and_its_successor_is_another_peer() -> None:
    errors = Counter(error for outcome in play("crash", 0, 19) for error in outcome["errors"])
    assert set(errors) >= {"PeerUnreachable", "PeerRestarted"}


def test_a_host_without_power_is_noticed_by_keepalive() -> None:
    (outcome,) = play("silence", 0, 0)
    assert outcome["lost"] == "caller"
    assert 30 < outcome["after_s"] < 60


def test_operations_outlast_a_short_partition_or_fail_at_their_deadline() -> None:
    outcomes = play("partition", 0, 19)
    assert not any(outcome["reconnects"] for outcome in outcomes)
    assert not any(outcome["failed"] for outcome in outcomes if outcome["heals_early"])
    assert any(outcome["failed"] for outcome in outcomes if not outcome["heals_early"])


def test_closing_ends_all_operations() -> None:
    outcomes = play("closing", 0, 29)
    errors = {outcome["closes"]: set[str]() for outcome in outcomes}
    for outcome in outcomes:
        errors[outcome["closes"]].update(outcome["errors"])
        # A connection that is being made is not always ended: at most, it takes the handshake's time limit.
        assert outcome["took_s"] < 0.1
    assert errors == {"caller": {"MessengerClosed"}, "owner": {"PeerUnreachable"}}


def test_random_operations_under_faults_agree_with_a_model_of_the_memory() -> None:
    counts: Counter[str] = Counter()
    for outcome in play("load", 0, 49):
        counts.update({name: number for name, number in outcome.items() if isinstance(number, int)})
    operations = {"write", "read", "notify", "write_notify"}
    failures = {"TransferCancelled", "TransferDeadlineExceeded", "PeerUnreachable"}
    assert min(counts[name] for name in operations) > 1000
    assert min(counts[name] for name in failures) > 5
    assert min(counts[name] for name in ("cut", "half", "stop", "kill", "slow")) > 5


def test_a_seed_has_one_schedule() -> None:
    together = play("load", 100, 102, hash_seed=1)
    assert together == play("load", 100, 102, hash_seed=2)
    assert together[-1:] == play("load", 102, 102, hash_seed=3)
    assert len({outcome["digest"] for outcome in together}) == 3


@pytest.mark.parametrize("seed", range(3))
def test_simulated_sockets_behave_as_the_kernels(seed: int, kernels: dict[str, Any]) -> None:
    (outcomes,) = run("socket_cases.py", seed)
    assert outcomes == kernels


@pytest.fixture(scope="module")
def kernels() -> dict[str, Any]:
    """Return the outcomes of the cases with the kernel's sockets."""
    sys.path.insert(0, str(HERE))
    try:
        import socket_cases
    finally:
        sys.path.remove(str(HERE))
    modules = socket_cases.Modules(socket, select, threading, lambda: time.sleep(0.05), contextlib.ExitStack())
    outcomes: dict[str, Any] = json.loads(json.dumps(socket_cases.run_all(modules)))
    return outcomes
