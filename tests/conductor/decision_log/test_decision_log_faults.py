"""The decision log under a slow disk, a full one and a kill."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from conductor.decision_log import find_records
from conductor.decision_log.event_log import recorded_runs, replay
from conductor.decision_log.files import numbered, read_lines
from conductor.decision_log.journal import read_journal
from conductor.policy.events import RequestCompleted, Tick


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
    assert "the writer fell behind" in caplog.text
    rows = [line for path in numbered(tmp_path / "log", "events").values() for _, line in read_lines(path)]
    assert any(json.loads(line) == {"dropped": counts["lost"]["behind"]} for line in rows)


FULL = """
import resource, sys, signal
from pathlib import Path
sys.path.insert(0, {tests!r})
from conductor.config import ConductorConfig
from settings.keys import assemble
from conductor.core import Core
from conductor.policy.events import NodeJoined, NodeView, RequestArrived, RequestCompleted
core = Core(assemble(ConductorConfig, listen="none", decision_log=Path({folder!r})))
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


def test_a_full_disk_costs_counted_lines_and_nothing_else(tmp_path, records):
    script = FULL.format(folder=str(tmp_path / "log"), tests=str(Path(__file__).parents[3]))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert "File too large" in done.stderr
    assert done.stderr.count("requests are not affected") == 1
    names = [row["request_id"] for row in records()]
    lost = int(done.stdout)
    assert lost > 30
    assert names[:10] == [f"r{i}" for i in range(10)]
    assert names[-10:] == [f"r{i}" for i in range(50, 60)]
    assert read_journal(tmp_path / "log") == {}
    (life,) = recorded_runs(tmp_path / "log")
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


def test_a_kill_costs_at_most_the_last_moments(tmp_path, start, records):
    script = KILLED.format(folder=str(tmp_path / "log"), tests=str(Path(__file__).parents[3]))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        os.kill(process.pid, signal.SIGKILL)
    assert [row["request_id"] for row in records()] == [f"r{i}" for i in range(10)]
    assert find_records(tmp_path / "log", "long").records[0]["outcome"] == "open"
    (life,) = recorded_runs(tmp_path / "log")
    steps = list(replay(life))
    assert len(steps) == 2 + 1 + 20
    assert all(step.logged == step.made for step in steps)
    core = start()
    core.handle(RequestCompleted("long", 0, "finished", 1.0, 0.1, 4))
    core.close()
    assert records()[-1]["output_length"] == 4


def test_no_thread_is_left(start):
    before = threading.active_count()
    core = start()
    assert threading.active_count() == before + 1
    core.close()
    assert threading.active_count() == before
