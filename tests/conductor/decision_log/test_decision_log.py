"""The decision log: what a record says."""

import json

import pytest

from conductor.decision_log import find_records
from conductor.decision_log.files import numbered
from conductor.decision_log.journal import read_journal
from conductor.policy.events import NS, RequestCompleted, Tick
from traces import read_trace

BLOCK = 16


def test_a_record_is_a_row_of_a_trace_with_the_decision_and_then_the_truth(start, make, records, chain):
    core = start(log={"decision_log_block_tokens": 64}, ttft_slo_s=50.0)
    clock = core._clock
    core.handle(make.request("a", prompt=200, new=30, tenant="acme", slo_class=""), chain((1, 12)))
    clock.now_ns += NS
    core.handle(RequestCompleted("a", 0, "finished", 0.5, 0.02, 17, 48))
    core.close()
    (row,) = records()
    assert (row["input_length"], row["output_length"], row["cached_tokens"]) == (200, 17, 48)
    assert (row["outcome"], row["ttft_s"], row["tbt_s"], row["max_new_tokens"]) == ("finished", 0.5, 0.02, 30)
    assert len(row["hash_ids"]) == 4
    assert "acme" not in json.dumps(row)
    (attempt,) = row["attempts"]
    assert (attempt["outcome"], attempt["ended_ms"]) == ("finished", 1000)
    decision = attempt["decision"]
    assert (decision["type"], decision["prefill"], decision["decode"]) == ("Place", "prefill-0", "decode-0")
    assert decision["considered"]["ttft_objective_s"] == 50.0
    assert [score["node_id"] for score in decision["considered"]["prefill"]] == ["prefill-0"]


def test_the_files_are_a_trace_that_the_replayer_reads(tmp_path, start, make, chain):
    core = start(log={"decision_log_block_tokens": 64})
    clock = core._clock
    for turn in range(3):
        clock.now_ns += NS
        prompt = 150 + 64 * turn
        core.handle(make.request(f"a{turn}", prompt=prompt), chain((1, prompt // BLOCK)))
        core.handle(RequestCompleted(f"a{turn}", 0, "finished", 0.5, 0.02, 5))
    core.close()
    trace = read_trace(numbered(tmp_path / "log", "decisions")[1], block_tokens=64)
    first, second, third = (row.hash_ids for row in trace)
    assert first[:2] == second[:2] == third[:2]
    assert second[2] == third[2] != first[2]
    assert len({*first, *second, *third}) == 4 + 3  # each one's last, partial block is its own
    assert [row.timestamp_ms for row in trace] == sorted(row.timestamp_ms for row in trace)
    assert trace.notices == ()


def test_a_rejection_is_written_once_however_often_it_is_asked_again(start, make, records):
    core = start(ttft_slo_s=1e-9)
    clock = core._clock
    for _ in range(40):
        core.handle(make.request("a"))
        clock.now_ns += NS // 2
    assert records() == []
    clock.now_ns += 3 * NS
    core.handle(Tick())
    core.close()
    (row,) = records()
    assert (row["outcome"], row["output_length"]) == ("rejected", 0)
    assert row["attempts"][0]["decision"]["reason"] == "ttft"
    assert (len(row["attempts"]), row["attempts_left_out"]) == (16, 24)
    assert row["attempts"][-1]["at_ms"] == 39 * 500


def test_what_became_of_an_attempt_stands_with_its_last_decision(start, make, records):
    core = start()
    core.handle(make.request("a", prompt=5000))
    core.handle(make.request("a", prompt=100))  # frontends ask again under the same number, for some reasons
    core.handle(RequestCompleted("a", 0, "finished", 0.1, 0.02, 20))
    core.close()
    (row,) = records()
    told = [(one["attempt"], one["decision"]["type"], one.get("outcome")) for one in row["attempts"]]
    assert told == [(0, "Reject", None), (0, "Place", "finished")]


def test_all_attempts_of_a_request_stand_in_one_record(start, make, records):
    core = start()
    core.handle(make.request("a", prompt=100))
    core.handle(RequestCompleted("a", 0, "retry", 0.1, 0.0, 7))
    core.handle(make.request("a", prompt=107, attempt=1, generated=7, excluded=("decode-9",)))
    core.handle(RequestCompleted("a", 1, "finished", 0.1, 0.02, 20))
    core.close()
    (row,) = records()
    assert (row["input_length"], row["output_length"], row["outcome"]) == (100, 20, "finished")
    assert [attempt["outcome"] for attempt in row["attempts"]] == ["retry", "finished"]
    assert (row["attempts"][1]["generated"], row["attempts"][1]["excluded"]) == (7, ["decode-9"])


def test_an_id_that_is_used_again_has_two_records(tmp_path, start, make, records):
    core = start()
    for outcome in ("finished", "cancelled"):
        core.handle(make.request("a"))
        core.handle(RequestCompleted("a", 0, outcome))
    core.handle(make.request("a", attempt=2, generated=1))
    core.handle(make.request("a"))
    core.handle(RequestCompleted("a", 0, "failed"))
    core.close()
    assert [row["outcome"] for row in records()] == ["finished", "cancelled", "unknown", "failed"]
    assert len(find_records(tmp_path / "log", "a").records) == 4


def test_of_a_request_whose_end_nobody_tells_the_record_says_so(start, make, records):
    core = start(orphan_timeout_s=10.0)
    clock = core._clock
    core.handle(make.request("orphan"))
    for _ in range(3):
        clock.now_ns += 4 * NS
        core.handle(Tick())
    core.handle(make.request("silent"))
    core.handle(make.request("retried"))
    core.handle(RequestCompleted("retried", 0, "retry"))
    clock.now_ns += 3700 * NS
    core.handle(RequestCompleted("nobody", 0, "finished"))
    core.close()
    assert {row["request_id"]: row["outcome"] for row in records()} == {
        "orphan": "orphaned",
        "silent": "unknown",
        "retried": "unknown",
    }


@pytest.mark.parametrize("with_events", [True, False])
def test_what_a_conductor_left_open_the_next_one_ends(tmp_path, start, make, with_events, records):
    core = start(log={"decision_log_events": with_events})
    core.handle(make.request("a", prompt=100))
    core.handle(make.request("over"))
    core.handle(RequestCompleted("over", 0, "finished"))
    core.close()
    assert list(read_journal(tmp_path / "log")) == ["a"]
    assert find_records(tmp_path / "log", "a").records[0]["outcome"] == "open"
    core = start(log={"decision_log_events": with_events})
    core.handle(RequestCompleted("a", 0, "finished", 1.5, 0.03, 9))
    core.close()
    assert {row["request_id"]: row["outcome"] for row in records()} == {"over": "finished", "a": "finished"}
    assert read_journal(tmp_path / "log") == {}
    assert bool(numbered(tmp_path / "log", "events")) == with_events


def test_an_absurdly_long_prompt_costs_no_more_than_a_long_one(tmp_path, start, make):
    core = start()
    assert core.handle(make.request("a", prompt=2**32 - 1))[0].reason == "too_long"
    core.close()
    row = next(iter(read_journal(tmp_path / "log").values()))
    assert (row["input_length"], row["asked_length"]) == (512 << 15, 2**32 - 1)
    assert len(row["hash_ids"]) == 1 << 15


def test_a_search_sees_what_was_decided_a_moment_ago(start, make):
    core = start()
    core.handle(make.request("a"))
    assert core.log.find("a").records[0]["outcome"] == "open"
    core.handle(RequestCompleted("a", 0, "failed"))
    assert core.log.find("a").records[0]["outcome"] == "failed"
    assert core.log.find("no such request").records == []


def test_an_id_of_any_text_is_found_and_no_other(start, make):
    core = start()
    names = ["a", "aa", 'x","request_id":"a', "ü\n\\"]
    for name in names:
        core.handle(make.request(name))
        core.handle(RequestCompleted(name, 0, "finished"))
    for name in names:
        assert [row["request_id"] for row in core.log.find(name).records] == [name]
