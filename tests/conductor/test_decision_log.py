"""The decision log: what a record says, how files are bounded, what a kill, a full disk or a slow one cost."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from conductor.config import ConductorConfig
from conductor.core import Core
from conductor.decision_log import DecisionLogConfig, search, searching
from conductor.decision_log.files import LineFiles, LinesLost, numbered, read_lines
from conductor.decision_log.hashing import Hashes
from conductor.decision_log.journal import read_journal
from conductor.decision_log.replaying import lives, replay
from conductor.errors import ConfigError
from conductor.policy.config import NS
from conductor.policy.events import NodeJoined, RequestCompleted, Tick
from traces import read_trace

BLOCK = 16


class Clock:
    """Stands still unless told."""

    def __init__(self) -> None:
        self.now_ns = 1000 * NS

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def start(tmp_path, make):
    """Cores with a log in tmp_path/log, a prefill and a decode node; all are closed at the end."""
    started = []

    def begin(*, clock=None, log=None, **config):
        settings = DecisionLogConfig(tmp_path / "log", **(log or {}))
        core = Core(ConductorConfig("none", decision_log=settings, **config), clock=clock or Clock())
        started.append(core)
        for view in (make.node("prefill-0", "prefill"), make.node("decode-0", "decode")):
            core.handle(NodeJoined(view))
        return core

    yield begin
    for core in started:
        core.close()


def records(folder):
    return [json.loads(line) for path in numbered(folder / "log", "decisions").values() for _, line in read_lines(path)]


def chain(*parts):
    return np.array([value for part, count in parts for value in range(part * 1000, part * 1000 + count)], np.uint64)


def test_a_record_is_a_row_of_a_trace_with_the_decision_and_then_the_truth(tmp_path, start, make):
    core = start(log={"block_tokens": 64}, ttft_objective_s=50.0)
    clock = core._clock
    core.handle(make.request("a", prompt=200, new=30, tenant="acme", slo_class=""), chain((1, 12)))
    clock.now_ns += NS
    core.handle(RequestCompleted("a", 0, "finished", 0.5, 0.02, 17, 48))
    core.close()
    (row,) = records(tmp_path)
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


def test_the_files_are_a_trace_that_the_replayer_reads(tmp_path, start, make):
    core = start(log={"block_tokens": 64})
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


def test_a_rejection_is_written_once_however_often_it_is_asked_again(tmp_path, start, make):
    core = start(ttft_objective_s=1e-9)
    clock = core._clock
    for _ in range(40):
        core.handle(make.request("a"))
        clock.now_ns += NS // 2
    assert records(tmp_path) == []
    clock.now_ns += 3 * NS
    core.handle(Tick())
    core.close()
    (row,) = records(tmp_path)
    assert (row["outcome"], row["output_length"]) == ("rejected", 0)
    assert row["attempts"][0]["decision"]["reason"] == "ttft"
    assert (len(row["attempts"]), row["attempts_left_out"]) == (16, 24)
    assert row["attempts"][-1]["at_ms"] == 39 * 500


def test_what_became_of_an_attempt_stands_with_its_last_decision(tmp_path, start, make):
    core = start()
    core.handle(make.request("a", prompt=5000))
    core.handle(make.request("a", prompt=100))  # front doors ask again under the same number, for some reasons
    core.handle(RequestCompleted("a", 0, "finished", 0.1, 0.02, 20))
    core.close()
    (row,) = records(tmp_path)
    told = [(one["attempt"], one["decision"]["type"], one.get("outcome")) for one in row["attempts"]]
    assert told == [(0, "Reject", None), (0, "Place", "finished")]


def test_all_attempts_of_a_request_stand_in_one_record(tmp_path, start, make):
    core = start()
    core.handle(make.request("a", prompt=100))
    core.handle(RequestCompleted("a", 0, "retry", 0.1, 0.0, 7))
    core.handle(make.request("a", prompt=107, attempt=1, generated=7, excluded=("decode-9",)))
    core.handle(RequestCompleted("a", 1, "finished", 0.1, 0.02, 20))
    core.close()
    (row,) = records(tmp_path)
    assert (row["input_length"], row["output_length"], row["outcome"]) == (100, 20, "finished")
    assert [attempt["outcome"] for attempt in row["attempts"]] == ["retry", "finished"]
    assert (row["attempts"][1]["generated"], row["attempts"][1]["excluded"]) == (7, ["decode-9"])


def test_an_id_that_is_used_again_has_two_records(tmp_path, start, make):
    core = start()
    for outcome in ("finished", "cancelled"):
        core.handle(make.request("a"))
        core.handle(RequestCompleted("a", 0, outcome))
    core.handle(make.request("a", attempt=2, generated=1))
    core.handle(make.request("a"))
    core.handle(RequestCompleted("a", 0, "failed"))
    core.close()
    assert [row["outcome"] for row in records(tmp_path)] == ["finished", "cancelled", "unknown", "failed"]
    assert len(search(tmp_path / "log", "a").records) == 4


def test_of_a_request_whose_end_nobody_tells_the_record_says_so(tmp_path, start, make):
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
    assert {row["request_id"]: row["outcome"] for row in records(tmp_path)} == {
        "orphan": "orphaned",
        "silent": "unknown",
        "retried": "unknown",
    }


@pytest.mark.parametrize("with_events", [True, False])
def test_what_a_conductor_left_open_the_next_one_ends(tmp_path, start, make, with_events):
    core = start(log={"with_events": with_events})
    core.handle(make.request("a", prompt=100))
    core.handle(make.request("over"))
    core.handle(RequestCompleted("over", 0, "finished"))
    core.close()
    assert list(read_journal(tmp_path / "log")) == ["a"]
    assert search(tmp_path / "log", "a").records[0]["outcome"] == "open"
    core = start(log={"with_events": with_events})
    core.handle(RequestCompleted("a", 0, "finished", 1.5, 0.03, 9))
    core.close()
    assert {row["request_id"]: row["outcome"] for row in records(tmp_path)} == {"over": "finished", "a": "finished"}
    assert read_journal(tmp_path / "log") == {}
    assert bool(numbered(tmp_path / "log", "events")) == with_events


def test_hash_ids_tell_equal_prefixes_and_nothing_else():
    hashes = Hashes(b"secret", 512)
    keys = chain((1, 64))
    ids = hashes.ids(keys, BLOCK, 1024, "a")
    assert len(ids) == 2
    assert all(0 <= one < 2**53 for one in ids)
    assert hashes.ids(keys, BLOCK, 1024, "b") == ids
    assert Hashes(b"other", 512).ids(keys, BLOCK, 1024, "a") != ids
    # A tenant's salt is in the keys: other salt, other keys, no id in common.
    assert not set(hashes.ids(chain((2, 64)), BLOCK, 1024, "a")) & set(ids)
    # The last tokens have no key: nobody can say whether they are the same.
    assert hashes.ids(keys[:63], BLOCK, 1020, "a")[1] != hashes.ids(keys[:63], BLOCK, 1020, "b")[1]


@pytest.mark.parametrize("key_tokens", [1, 16, 48, 512, 700, 4096])
def test_an_equal_hash_id_always_means_an_equal_prefix(key_tokens):
    hashes = Hashes(b"s", 512)
    prompt_tokens = 5000
    one = np.arange(prompt_tokens // key_tokens, dtype=np.uint64)
    for split in range(0, len(one) + 1, max(1, len(one) // 7)):
        other = one.copy()
        other[split:] += np.uint64(1 << 40)
        mine, yours = (hashes.ids(keys, key_tokens, prompt_tokens, name) for keys, name in ((one, "a"), (other, "b")))
        assert len(set(mine)) == len(mine) == -(-prompt_tokens // 512)
        for number, (left, right) in enumerate(zip(mine, yours, strict=True)):
            end = min((number + 1) * 512, prompt_tokens)
            assert (left == right) == (end <= split * key_tokens), (number, split)


def test_an_absurdly_long_prompt_costs_no_more_than_a_long_one(tmp_path, start, make):
    core = start()
    assert core.handle(make.request("a", prompt=2**32 - 1))[0].reason == "too_long"
    core.close()
    row = core_row(tmp_path)
    assert (row["input_length"], row["asked_length"]) == (512 << 15, 2**32 - 1)
    assert len(row["hash_ids"]) == 1 << 15


def core_row(tmp_path):
    (record,) = read_journal(tmp_path / "log").values()
    return record


def test_files_are_turned_over_compressed_and_bounded(tmp_path, start, make):
    core = start(log={"file_bytes": 4096, "num_files": 3})
    for i in range(60):
        core.handle(make.request(f"r{i}"))
        core.handle(RequestCompleted(f"r{i}", 0, "finished"))
    core.close()
    files = numbered(tmp_path / "log", "decisions")
    assert len(files) == 4
    assert min(files) > 1
    assert [path.suffix for path in files.values()] == [".zst", ".zst", ".zst", ".jsonl"]
    for path in files.values():
        lines = [line for _, line in read_lines(path)]
        assert 0 < sum(map(len, lines)) + len(lines) <= 4096
        assert path.stat().st_mode & 0o077 == 0
    names = [row["request_id"] for row in records(tmp_path)]
    assert names == [f"r{i}" for i in range(60 - len(names), 60)]
    found = search(tmp_path / "log", "r0")
    assert (found.records, found.num_removed_files) == ([], min(files) - 1)
    assert [row["request_id"] for row in search(tmp_path / "log", "r59").records] == ["r59"]


def test_a_file_that_is_removed_while_it_is_searched_is_no_damage(tmp_path, start, make, monkeypatch):
    core = start(log={"file_bytes": 4096, "num_files": 3})
    for i in range(60):
        core.handle(make.request(f"r{i}"))
        core.handle(RequestCompleted(f"r{i}", 0, "finished"))
    core.close()

    def numbered_before_the_oldest_went(folder: Path, stem: str) -> dict[int, Path]:
        files = numbered(folder, stem)
        min(files.items())[1].unlink()
        return files

    monkeypatch.setattr(searching, "numbered", numbered_before_the_oldest_went)
    found = search(tmp_path / "log", "r59")
    assert [row["request_id"] for row in found.records] == ["r59"]
    assert found.damaged == ()


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


def test_a_torn_last_line_is_no_line(tmp_path, start, make):
    core = start()
    for name in "ab":
        core.handle(make.request(name))
        core.handle(RequestCompleted(name, 0, "finished"))
    core.close()
    path = numbered(tmp_path / "log", "decisions")[1]
    path.write_bytes(path.read_bytes()[:-20])
    assert [row["request_id"] for row in records(tmp_path)] == ["a"]
    assert search(tmp_path / "log", "b").records == []
    core = start()
    core.handle(make.request("c"))
    core.handle(RequestCompleted("c", 0, "finished"))
    core.close()
    assert [row["request_id"] for row in records(tmp_path)] == ["a", "c"]


def test_two_conductors_do_not_write_the_same_log(tmp_path, start):
    start()
    with pytest.raises(ConfigError, match="another conductor writes its log there"):
        start()


def test_a_folder_that_cannot_be_used_is_refused_by_name(tmp_path):
    (tmp_path / "log").write_text("")
    with pytest.raises(ConfigError, match=r"decision_log is '.*log', which cannot be used"):
        Core(ConductorConfig("none", decision_log=DecisionLogConfig(tmp_path / "log")))


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", "[" * 100_000, '{"secret": "zz", "started_ms": 1}', '{"secret": "", "started_ms": 1}'),
        '{"secret": "%s", "started_ms": 1}' % ("00" * 65),
        '{"secret": "00", "started_ms": 1e999}',
    ],
)
def test_a_damaged_identity_is_said(tmp_path, text):
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "log.json").write_text(text)
    for _ in range(2):  # the folder is not held by one that could not begin
        with pytest.raises(ConfigError, match=r"log\.json is damaged"):
            Core(ConductorConfig("none", decision_log=DecisionLogConfig(tmp_path / "log")))


def test_hash_ids_stay_the_same_over_restarts(tmp_path, start, make):
    for name in "ab":
        core = start(log={"block_tokens": 64})
        core.handle(make.request(name, prompt=128), chain((1, 8)))
        core.handle(RequestCompleted(name, 0, "finished"))
        core.close()
    first, second = records(tmp_path)
    assert first["hash_ids"] == second["hash_ids"]
    assert (tmp_path / "log" / "log.json").stat().st_mode & 0o077 == 0


def test_a_writer_that_falls_behind_leaves_out_counts_and_never_blocks(tmp_path, start, make, monkeypatch, caplog):
    monkeypatch.setattr("conductor.decision_log.writer._MOST_ENTRIES", 50)
    core = start()
    with core.log._writing:  # as if the disk did not answer
        for i in range(200):
            core.handle(make.request(f"r{i}"))
            core.handle(RequestCompleted(f"r{i}", 0, "finished"))
    core.handle(Tick())
    while len(core.log._waiting):
        time.sleep(0.01)
    core.handle(Tick())
    counts = core.log.counts()
    core.close()
    assert counts["lost"]["behind"] >= 345
    assert "the writer is behind" in caplog.text
    rows = [line for path in numbered(tmp_path / "log", "events").values() for _, line in read_lines(path)]
    assert any(json.loads(line) == {"dropped": counts["lost"]["behind"]} for line in rows)


FULL = """
import resource, sys, signal
from pathlib import Path
sys.path.insert(0, {tests!r})
from conductor.config import ConductorConfig
from conductor.core import Core
from conductor.decision_log import DecisionLogConfig
from conductor.policy.events import NodeJoined, NodeView, RequestArrived, RequestCompleted
core = Core(ConductorConfig("none", decision_log=DecisionLogConfig(Path({folder!r}))))
for name, role in (("p", "prefill"), ("d", "decode")):
    core.handle(NodeJoined(NodeView(name, role, 1, "h", "", "m", 16, 4096, 4096, 8, 1024)))
def serve(first, last):
    for i in range(first, last):
        assert core.handle(RequestArrived(f"r{{i}}", 0, "f", "m", 100, 10))[0].prefill == "p"
        core.handle(RequestCompleted(f"r{{i}}", 0, "finished"))
    core.log.find("x")
serve(0, 10)
resource.setrlimit(resource.RLIMIT_FSIZE, (12000, resource.RLIM_INFINITY))
serve(10, 50)
lost = core.log.counts()["lost"]["disk"]
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
serve(50, 60)
core.close()
print(lost)
"""


def test_a_full_disk_costs_counted_lines_and_nothing_else(tmp_path):
    script = FULL.format(folder=str(tmp_path / "log"), tests=str(Path(__file__).parents[2]))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert "File too large" in done.stderr
    assert done.stderr.count("requests are served as ever") == 1
    names = [row["request_id"] for row in records(tmp_path)]
    lost = int(done.stdout)
    assert lost > 30
    assert names[:10] == [f"r{i}" for i in range(10)]
    assert names[-10:] == [f"r{i}" for i in range(50, 60)]
    assert read_journal(tmp_path / "log") == {}
    (life,) = lives(tmp_path / "log")
    rows = [json.loads(line) for path in life.paths for number, line in read_lines(path) if number > 1]
    dropped = sum(row.get("dropped", 0) for row in rows)
    events = sum("event" in row for row in rows)
    assert events + dropped == 2 + 2 * 60
    assert lost == dropped + (60 - len(names))


KILLED = (
    FULL.split("serve(0, 10)")[0]
    + """
core.handle(RequestArrived("long", 0, "f", "m", 100, 10))
serve(0, 10)
print("ready", flush=True)
signal.pause()
"""
)


def test_a_kill_costs_at_most_the_last_moments(tmp_path, start):
    script = KILLED.format(folder=str(tmp_path / "log"), tests=str(Path(__file__).parents[2]))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        os.kill(process.pid, signal.SIGKILL)
    assert [row["request_id"] for row in records(tmp_path)] == [f"r{i}" for i in range(10)]
    assert search(tmp_path / "log", "long").records[0]["outcome"] == "open"
    (life,) = lives(tmp_path / "log")
    steps = list(replay(life))
    assert len(steps) == 2 + 1 + 20
    assert all(step.logged == step.made for step in steps)
    core = start()
    core.handle(RequestCompleted("long", 0, "finished", 1.0, 0.1, 4))
    core.close()
    assert records(tmp_path)[-1]["output_length"] == 4


def test_lines_that_could_not_be_written_are_told_by_number_and_leave_no_torn_line(tmp_path):
    files = LineFiles(tmp_path, "x", 1 << 20, 2)
    files.write([b"a\n"])
    path = numbered(tmp_path, "x")[1]
    files.close()
    files._fd, files._path, files._nbytes = os.open("/dev/full", os.O_WRONLY), path, 2
    with pytest.raises(LinesLost) as error:
        files.write([b"b\n", b"c\n"])
    assert error.value.count == 2
    files.close()
    files.write([b"d\n"])
    files.close()
    assert [line for path in numbered(tmp_path, "x").values() for _, line in read_lines(path)] == [b"a", b"d"]


def test_a_file_that_is_compressed_while_it_is_found_is_read_all_the_same(tmp_path):
    files = LineFiles(tmp_path, "x", 1 << 20, 5)
    files.write([b"a\n"])
    before = numbered(tmp_path, "x")[1]
    files.turn_over()
    files.close()
    assert before.suffix == ".jsonl"
    assert not before.exists()
    assert [line for _, line in read_lines(before)] == [b"a"]


def test_a_damaged_file_is_named_and_the_others_are_searched(tmp_path, start, make):
    core = start(log={"file_bytes": 4096})
    for i in range(12):
        core.handle(make.request(f"r{i}"))
        core.handle(RequestCompleted(f"r{i}", 0, "finished"))
    core.close()
    first, *_ = numbered(tmp_path / "log", "decisions").values()
    first.write_bytes(first.read_bytes()[:30] + b"x" * 30)
    found = search(tmp_path / "log", "r11")
    assert [row["request_id"] for row in found.records] == ["r11"]
    assert found.damaged[0].startswith(first.name)


def test_no_thread_is_left(start):
    before = threading.active_count()
    core = start()
    assert threading.active_count() == before + 1
    core.close()
    assert threading.active_count() == before
