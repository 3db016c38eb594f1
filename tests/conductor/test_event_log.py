"""The decision log: what it says, how it is bounded, and that it replays."""

import json
from pathlib import Path

import numpy as np
import pytest

from conductor.config import ConductorConfig
from conductor.core import Core
from conductor.errors import ConfigError, LogFormatError
from conductor.event_log import replay
from conductor.policy import Objectives, PolicyConfig
from conductor.policy.codec import decision_from_json, event_from_json, to_json
from conductor.policy.decisions import Copy, Place, Reject
from conductor.policy.events import NodeJoined, Tick

GOLDEN = Path(__file__).parent / "golden" / "decisions.jsonl"


def as_json(decisions):
    return [to_json(decision) for decision in decisions]


def agree(left, right):
    """Equal but for the last digits of floats, which another machine's arithmetic may round otherwise."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(agree(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(agree, left, right))
    return left == pytest.approx(right, rel=1e-6) if isinstance(left, float) else left == right


def test_the_golden_log_replays_to_its_decisions():
    kinds = set()
    for now_ns, event, logged, now in replay(GOLDEN):
        assert agree(as_json(logged), as_json(now)), (now_ns, event)
        kinds |= {type(decision) for decision in now}
    assert kinds == {Place, Reject, Copy}


def test_a_changed_policy_does_not_replay(tmp_path):
    lines = GOLDEN.read_text().splitlines()
    header = json.loads(lines[0])
    header["config"]["balancing_threshold"] = 50.0
    changed = tmp_path / "changed.jsonl"
    changed.write_text("\n".join([json.dumps(header), *lines[1:]]) + "\n")
    assert any(logged != now for _, _, logged, now in replay(changed))


def test_a_log_replays_under_the_objectives_of_each_model(tmp_path, make):
    path = tmp_path / "d.jsonl"
    objectives = {"n": Objectives(1e-6, 0.0), "m": Objectives(0.0, 9.0)}
    core = Core(
        ConductorConfig("none", ttft_objective_s=100.0, model_objectives=objectives, decision_log=path),
        clock=iter(range(1, 100)).__next__,
    )
    for model in ("m", "n"):
        for role in ("prefill", "decode"):
            core.handle(NodeJoined(make.node(f"{model}-{role}", role, host="0", model=model)))
    made = [type(core.handle(make.request(model, model=model))[0]) for model in ("m", "n")]
    core.close()
    assert made == [Place, Reject]
    rows = list(replay(path))
    assert all(logged == now for _, _, logged, now in rows)
    assert [type(now[0]) for _, _, _, now in rows if now] == made


def test_the_log_is_bounded_and_its_files_replay_in_order(tmp_path, make):
    path = tmp_path / "d.jsonl"
    config = ConductorConfig("none", decision_log=path, decision_log_bytes=4000, decision_log_files=100)
    core = Core(config, clock=iter(range(1, 10_000)).__next__)
    for view in (make.node("p", "prefill"), make.node("d", "decode")):
        core.handle(NodeJoined(view))
    for i in range(40):
        core.handle(make.request(f"r{i}"), keys=np.array([i, 2**64 - 1], np.uint64))
    core.close()
    files = sorted(tmp_path.iterdir(), key=lambda file: -int(file.suffix[1:]) if file.suffix[1:].isdigit() else 0)
    assert len(files) > 3
    assert all(file.stat().st_size <= 4000 for file in files)
    rows = list(replay(*files))
    assert len(rows) == 42
    assert all(logged == now for _, _, logged, now in rows)


def test_only_so_many_files_are_kept(tmp_path):
    path = tmp_path / "d.jsonl"
    config = ConductorConfig("none", decision_log=path, decision_log_bytes=600, decision_log_files=2)
    core = Core(config, clock=iter(range(1, 10_000)).__next__)
    for _ in range(100):
        core.handle(Tick())
    core.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["d.jsonl", "d.jsonl.1", "d.jsonl.2"]


def test_a_restart_keeps_the_former_log(tmp_path):
    path = tmp_path / "d.jsonl"
    for _ in range(2):
        core = Core(ConductorConfig("none", decision_log=path))
        core.handle(Tick())
        core.close()
    assert len(list(replay(path))) == len(list(replay(tmp_path / "d.jsonl.1"))) == 1


def test_what_happens_after_the_close_begins_no_new_file(tmp_path):
    path = tmp_path / "d.jsonl"
    core = Core(ConductorConfig("none", decision_log=path))
    core.handle(Tick())
    core.close()
    core.handle(Tick())
    core.close()
    assert len(list(replay(path))) == 1
    assert list(tmp_path.iterdir()) == [path]


def test_a_log_that_cannot_be_written_does_not_stop_decisions(tmp_path, make, caplog):
    (tmp_path / "log").mkdir()
    core = Core(ConductorConfig("none", decision_log=tmp_path / "log"))
    assert core.handle(make.request())[0].reason == "no_nodes"
    assert "cannot be written" in caplog.text
    core.close()


@pytest.mark.parametrize(
    "line",
    ["{", "[]", '{"now_ns":1,"event":{"type":"Nothing"},"decisions":[]}', '{"now_ns":1,"event":{"type":"Tick"}}'],
)
def test_a_malformed_row_is_named_by_file_and_line(tmp_path, line):
    path = tmp_path / "bad.jsonl"
    path.write_text(GOLDEN.read_text().splitlines()[0] + "\n" + line + "\n")
    with pytest.raises(LogFormatError, match=r"bad\.jsonl, line 2"):
        list(replay(path))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"type": "NodeLost", "node_id": "a"}, "incarnation"),
        ({"type": "NodeLost", "node_id": 1, "incarnation": 1}, "NodeLost.node_id"),
        ({"type": "NodeLost", "node_id": "a", "incarnation": 1, "more": 2}, "unknown fields more"),
        ({"type": "NodeReported", "node_id": "a", "held": {}}, "expected a list"),
        ({"type": "NodeReported", "node_id": "a", "held": [3]}, "expected an object"),
        ({"type": "Place"}, "no known type"),
    ],
)
def test_an_event_of_the_wrong_form_is_refused_by_field(row, said):
    with pytest.raises(LogFormatError, match=said):
        event_from_json(row)


def test_a_reason_that_is_none_is_refused():
    row = {"type": "Reject", "request_id": "r", "attempt": 0, "reason": "mood", "message": "", "retry_after_s": 1}
    with pytest.raises(LogFormatError, match="mood"):
        decision_from_json(row)


@pytest.mark.parametrize(
    "values",
    [
        {"report_timeout_s": -1.0},
        {"balancing_threshold": 0.5},
        {"ttft_objective_s": -1.0},
        {"max_queue_s": 0.0},
        {"tbt_objective_s": 1e400},
    ],
)
def test_a_configuration_that_cannot_work_is_refused_by_name(values):
    with pytest.raises(ConfigError, match=next(iter(values))):
        PolicyConfig(**values)
    with pytest.raises(ConfigError, match=next(iter(values))):
        ConductorConfig("unix:/x", **values)
