"""The simulated gRPC behaves as grpc.aio does: expectations were taken from runs of the real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCENARIOS = Path(__file__).with_name("rpc_scenarios.py")
ROOT = SCENARIOS.parents[3]
REFUSED = "failed to connect to all addresses; last error: UNKNOWN: h0:7000: Failed to connect to remote host: "
CANCELLED = "Locally cancelled by application!"

Outcome = dict[str, Any]


def run(seed: int, *names: str, hash_seed: int = 1) -> dict[str, Outcome]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "proto")])
    done = subprocess.run(
        [sys.executable, str(SCENARIOS), str(seed), *names],
        env={**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": str(hash_seed)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module", params=[1, 2])
def outcomes(request: pytest.FixtureRequest) -> dict[str, Outcome]:
    return run(request.param)


def outcome(outcomes: dict[str, Outcome], name: str) -> Outcome:
    found = {key: value for key, value in outcomes[name].items() if key != "digest"}
    assert "failed" not in found, f"{found['failed']}\n{found['story']}"
    return found


def test_unary_calls_and_their_errors(outcomes: dict[str, Outcome]) -> None:
    assert outcome(outcomes, "unary") == {
        "epoch": 5,
        "ends": {
            "abort": ["FAILED_PRECONDITION", "no room"],
            "raise": ["UNKNOWN", "Unexpected <class 'ValueError'>: a bug"],
            "set code": ["NOT_FOUND", "not here"],
        },
        "unknown method": ["UNIMPLEMENTED", "Method not found!"],
        "not implemented": [
            "UNIMPLEMENTED",
            "Unexpected <class 'NotImplementedError'>: Method not implemented!",
        ],
        "malformed": "UNKNOWN",
        "state": "READY",
        "log": [],
    }


def test_streams_in_both_directions(outcomes: dict[str, Outcome]) -> None:
    assert outcome(outcomes, "streams") == {
        "blocks": True,
        "joins": [0, 1, 2, 3, 4],
        "read": ["one", "two"],
        "write after done_writing": 'RPC is half closed after calling "done_writing".',
        "ends": ["EOF", "EOF"],
        "code": "OK",
        "sum": "42",
        "log": ["all read", "not cancelled"],
    }


def test_a_deadline_ends_the_call_on_both_sides(outcomes: dict[str, Outcome]) -> None:
    assert outcome(outcomes, "deadline") == {
        "end": ["DEADLINE_EXCEEDED", "Deadline Exceeded"],
        "took_s": 2.0,
        "by server": ["cancelled"],
        "call": "DEADLINE_EXCEEDED",
        "log": ["cancelled", "cancelled"],
    }


def test_a_cancelled_call_cancels_its_servicer(outcomes: dict[str, Outcome]) -> None:
    assert outcome(outcomes, "cancel") == {
        "unary": ["CancelledError", "CANCELLED", CANCELLED, True],
        "read": "CancelledError",
        "later": "RPC already finished.",
        "log": ["cancelled", "and the stream", "all read", "cancelled"],  # its reads end first
    }


def test_an_aborts_status_comes_after_the_messages_before_it(outcomes: dict[str, Outcome]) -> None:
    assert outcome(outcomes, "abort_of_stream") == {
        "done": False,
        "read": "one",
        "end": ["ABORTED", "enough"],
        "log": [],
    }


def test_a_crash_of_the_server_ends_its_calls_and_the_channel_connects_again(outcomes: dict[str, Outcome]) -> None:
    reset = ["UNAVAILABLE", "Stream removed ([Errno 104] Connection reset by peer)"]
    assert outcome(outcomes, "crash") == {
        "ends": [reset, reset],
        "at once": True,
        "later": "RPC already finished.",
        "refused": ["UNAVAILABLE", REFUSED + "Connection refused"],
        "waited": 4,
        "reconnects": True,
        "again": 6,
        "log": [],
    }


def test_a_crash_of_the_client_cancels_its_servicers(outcomes: dict[str, Outcome]) -> None:
    assert outcome(outcomes, "crash_of_client") == {"log": ["attached", "all read", "cancelled"]}


def test_keepalive_finds_a_partition_on_both_sides(outcomes: dict[str, Outcome]) -> None:
    assert outcome(outcomes, "partition") == {
        "alive": True,
        "end": ["UNAVAILABLE", "Stream removed (keepalive watchdog timeout)"],
        "by keepalive": True,
        "connecting": [
            "UNAVAILABLE",
            "failed to connect to all addresses; last error: UNKNOWN: h0:7000: connect deadline exceeded",
        ],
        "in time": True,
        "by server": ["all read", "cancelled"],
        "again": 2,
        "log": ["all read", "cancelled"],
    }


def test_a_host_that_came_back_resets_connections(outcomes: dict[str, Outcome]) -> None:
    assert outcome(outcomes, "loss_of_host") == {
        "end": ["UNAVAILABLE", "Stream removed ([Errno 104] Connection reset by peer)"],
        "by the ping": True,
        "log": [],
    }


def test_no_connection_is_made_to_a_stopped_process(outcomes: dict[str, Outcome]) -> None:
    assert outcome(outcomes, "pause_of_server") == {
        "end": [
            "UNAVAILABLE",
            "failed to connect to all addresses; last error: UNKNOWN: h0:7000: connect deadline exceeded",
        ],
        "again": 1,
        "log": [],
    }


def test_attempts_to_connect_are_backed_off(outcomes: dict[str, Outcome]) -> None:
    found = outcome(outcomes, "backoff")
    assert found["unavailable"]
    assert found["at once"] == 1  # for 50 calls
    assert 10 <= found["attempts"] <= 20  # within ten seconds: 0.1 s apart, then 0.16 s, ..., 1 s


def test_a_write_blocks_while_the_server_does_not_read(outcomes: dict[str, Outcome]) -> None:
    found = outcome(outcomes, "flow_to_server")
    assert 32 << 10 <= found.pop("bytes") <= 80 << 10
    assert found == {"blocked": True, "then": 1000, "answers": 1001, "log": ["all read", "not cancelled"]}


def test_the_write_of_a_message_larger_than_the_window_ends_when_it_is_read(outcomes: dict[str, Outcome]) -> None:
    found = outcome(outcomes, "flow_of_a_large_message")
    assert (found["blocked"], found["answer"]) == (True, 200 << 10)


def test_servicers_wait_for_clients_that_do_not_read(outcomes: dict[str, Outcome]) -> None:
    found = outcome(outcomes, "flow_to_client")
    assert 8 <= found["generated"] <= 20  # of 200 blocks of 4 KiB
    assert 16 <= found["more"] <= 24  # after 20 more were read
    assert 32 <= found["written"] <= 80  # messages of 1 KiB
    assert found["log"] == ["write failed"]  # after the client's cancellation


def test_a_cancelled_write_stays_pending_and_the_status_waits_for_it(outcomes: dict[str, Outcome]) -> None:
    assert outcome(outcomes, "blocked_write_and_abort") == {
        "before": ["aborts"],
        "the cancelled one, too": True,
        "end": "you do not read",
        "log": ["aborts", "has aborted"],
    }


def test_a_failed_write_replaces_the_status(outcomes: dict[str, Outcome]) -> None:
    internal = ["INTERNAL", "Internal error from Core"]
    assert outcome(outcomes, "blocked_write_and_crash") == {"write": internal, "read": internal, "log": []}


def test_a_stopping_server_accepts_no_calls_and_gives_running_ones_the_grace(outcomes: dict[str, Outcome]) -> None:
    assert outcome(outcomes, "stop") == {
        "short": len("wait a second"),
        "long": ["UNAVAILABLE", "Cancelling all calls"],
        "new": ["UNAVAILABLE", REFUSED + "Connection refused"],
        "log": ["finished", "cancelled", ["stopped", 2.0]],
    }


def test_an_exception_of_the_clients_generator_cancels_the_call(outcomes: dict[str, Outcome]) -> None:
    assert outcome(outcomes, "generator_raises") == {"end": "CancelledError", "code": "CANCELLED", "log": []}


def test_closing_a_channel_cancels_its_calls(outcomes: dict[str, Outcome]) -> None:
    found = outcome(outcomes, "close_of_channel")
    assert sorted(found.pop("log")) == ["all read", "cancelled", "cancelled"]
    assert found == {"ends": ["CancelledError", "CancelledError"], "new": "Channel is closed."}


def test_messages_have_a_maximum_size(outcomes: dict[str, Outcome]) -> None:
    assert outcome(outcomes, "too_large") == {
        "sent": ["RESOURCE_EXHAUSTED", "CLIENT: Sent message larger than max (3006 vs. 2000)"],
        "received": ["RESOURCE_EXHAUSTED", "CLIENT: Received message larger than max (4099 vs. 1000)"],
        "log": [],
    }


def test_calls_may_begin_in_another_order_than_they_were_sent(outcomes: dict[str, Outcome]) -> None:
    found = outcome(outcomes, "order_of_starts")
    assert (found["all"], found["reordered"], found["stream in order"]) == (True, True, True)


def test_a_calls_deadline_and_callbacks_are_seen(outcomes: dict[str, Outcome]) -> None:
    assert outcome(outcomes, "metadata") == {"seq": 1, "remaining": True, "callback": [True], "log": []}


def test_servers_listen_at_free_ports_and_at_all_names_of_their_host(outcomes: dict[str, Outcome]) -> None:
    found = outcome(outcomes, "addresses")
    assert found == {"port": True, "ends": [2, 2, 2], "in use": True, "again": True, "log": []}


def test_join_tokens_are_checked_by_the_servers_interceptor(outcomes: dict[str, Outcome]) -> None:
    assert outcome(outcomes, "tokens") == {"without": "UNAUTHENTICATED", "with": 1, "log": []}


def test_a_seed_gives_the_same_run_again_and_another_seed_another() -> None:
    first, again, other = run(7), run(7, hash_seed=4711), run(8)
    assert first == again
    assert all(first[name]["digest"] != other[name]["digest"] for name in first)
    alone = run(7, "order_of_starts", hash_seed=3)  # earlier runs in the process do not matter
    assert alone["order_of_starts"] == first["order_of_starts"]
