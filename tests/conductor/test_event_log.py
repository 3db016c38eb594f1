"""The event log: that it replays to the same decisions, what it says where it cannot, and the form of its lines."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from conductor.config import ConductorConfig
from conductor.core import Core
from conductor.decision_log import recorded_runs, replay
from conductor.decision_log.codec import config_from_json, config_to_json, decision_from_json, event_from_json, to_json
from conductor.decision_log.event_log import EventLogHeader, event_line, head_line
from conductor.errors import LogFormatError
from conductor.policy import Conductor, Objectives, PolicyConfig
from conductor.policy.decisions import ColocatedScore, Considered, Copy, Place, Reject
from conductor.policy.events import (
    NodeJoined,
    NodeReported,
    ObjectivesChanged,
    PrefillSample,
    RequestArrived,
    RequestCompleted,
    Tick,
)
from conductor.policy.objectives import parse_record, record_text
from settings.conductor import DecisionLogSettings
from settings.keys import InvalidSetting, assemble, group_settings

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


def steps_of(log, config=None):
    return [step for life in recorded_runs(log) for step in replay(life, config)]


def core_of(folder, step_ns=1, **config):
    return Core(
        assemble(ConductorConfig, listen="none", decision_log=folder, **config),
        clock=iter(range(1, 100_000 * step_ns, step_ns)).__next__,
    )


def test_the_golden_log_replays_to_its_decisions():
    kinds = set()
    for step in steps_of(GOLDEN):
        assert agree(as_json(step.logged), as_json(step.made)), (step.line, step.event)
        kinds |= {type(decision) for decision in step.made}
    assert kinds == {Place, Reject, Copy}


@pytest.mark.parametrize(("version", "outcome"), [(2, Place), (3, Reject)])
def test_a_log_replays_under_the_rule_for_headers_of_its_version(tmp_path, make, version, outcome):
    """Before version 3 a client could relax its objective where the record named no rule."""
    config = PolicyConfig()
    conductor = Conductor(config, "any" if version == 2 else "tighten")
    head = json.loads(head_line(EventLogHeader(1, 1, config)))
    lines = [json.dumps(head | {"version": version}).encode() + b"\n"]
    nodes = [NodeJoined(make.node(role, role)) for role in ("prefill", "decode")]
    changed = ObjectivesChanged(1, record_text(parse_record({"cluster": {"ttft": "1ms"}})))
    for now_ns, event in enumerate([*nodes, changed, make.request(ttft_objective_s=60.0)], start=1):
        lines.append(event_line(now_ns, event, conductor.on_event(now_ns, event)))
    (tmp_path / "events").write_bytes(b"".join(lines))
    *_, last = steps = steps_of(tmp_path / "events")
    assert all(step.logged == step.made for step in steps)
    assert isinstance(last.made[0], outcome)


def test_what_was_learned_of_lengths_and_prices_follows_from_the_log(tmp_path, make):
    config = {"ttft_slo_s": 4.0, "tbt_slo_s": 0.05, "admission_mode": "predicted", "overrun_probability": 0.1}
    core = core_of(tmp_path, step_ns=30_000_000, **config)
    for role in ("prefill", "decode"):
        core.handle(NodeJoined(make.node(role, role, capacity_tokens=100_000)))
    prefills = tuple(PrefillSample(tokens, 0, tokens * 2e-3) for tokens in (64, 512, 4096)) * 40
    core.handle(NodeReported("prefill", prefills=prefills))
    for i in range(60):
        hints = {"previous_tokens": (0, 9, 400)[i % 3], "expected_tokens": (0, 600)[i % 2]}
        core.handle(make.request(f"r{i}", prompt=100 + 40 * (i % 7), new=900, **hints))
        if i >= 10:
            core.handle(RequestCompleted(f"r{i - 10}", 0, "finished", 0.1, 0.01, (60, 8, 500)[(i - 10) % 3]))
        if i % 8 == 0:
            core.handle(Tick())
    core.close()
    steps = steps_of(tmp_path)
    assert all(step.logged == step.made for step in steps)
    found = [step for step in steps if isinstance(step.event, RequestArrived)]
    assert {step.event.previous_tokens for step in found} == {0, 9, 400}
    assert {step.event.expected_tokens for step in found} == {0, 600}
    assert {type(decision) for step in found for decision in step.made} == {Place, Reject}
    (life,) = recorded_runs(tmp_path)
    unpriced = replay(life, replace(life.config, ttft_reserve=0.0, tbt_reserve=0.0))
    assert any(step.logged != step.made for step in unpriced)


def test_a_log_replays_under_another_configuration_to_other_decisions():
    (life,) = recorded_runs(GOLDEN)
    assert any(step.logged != step.made for step in replay(life, PolicyConfig(balancing_threshold=50.0)))


def test_a_log_replays_under_the_objectives_of_each_model(tmp_path, make):
    objectives = {"n": Objectives(1e-6, 0.0), "m": Objectives(0.0, 9.0)}
    core = core_of(tmp_path, ttft_slo_s=100.0, model_objectives=objectives)
    for model in ("m", "n"):
        for role in ("prefill", "decode"):
            core.handle(NodeJoined(make.node(f"{model}-{role}", role, host="0", model=model)))
    made = [type(core.handle(make.request(model, model=model))[0]) for model in ("m", "n")]
    core.close()
    assert made == [Place, Reject]
    steps = steps_of(tmp_path)
    assert all(step.logged == step.made for step in steps)
    assert [type(step.made[0]) for step in steps if step.made] == made


def test_other_objectives_hold_whatever_versions_a_log_tells_of(tmp_path, make):
    core = core_of(tmp_path)
    for view in (make.node("p", "prefill"), make.node("d", "decode")):
        core.handle(NodeJoined(view))
    core.handle(ObjectivesChanged(1, "{}"))
    assert isinstance(core.handle(make.request())[0], Place)
    core.close()
    (life,) = recorded_runs(tmp_path)
    strict = PolicyConfig(ttft_slo_s=1e-9)
    made = [list(replay(life, strict, own_objectives=own))[-1].made[0] for own in (False, True)]
    assert [type(decision) for decision in made] == [Place, Reject]


def test_a_log_of_several_files_and_lives_replays_life_by_life(tmp_path, make):
    for _ in range(2):
        core = core_of(tmp_path, decision_log_size_bytes=6000, decision_log_files=100)
        for view in (make.node("p", "prefill"), make.node("d", "decode")):
            core.handle(NodeJoined(view))
        for i in range(20):
            core.handle(make.request(f"r{i}"))
        core.close()
    found = recorded_runs(tmp_path)
    assert [life.first_part for life in found] == [1, 1]
    assert all(len(life.paths) > 2 for life in found)
    for life in found:
        steps = list(replay(life))
        assert len(steps) == 22
        assert all(step.logged == step.made for step in steps)


def test_a_life_whose_beginning_was_rotated_away_is_said_not_to_replay(tmp_path, make):
    core = core_of(tmp_path, decision_log_size_bytes=4096, decision_log_files=1)
    for i in range(60):
        core.handle(make.request(f"r{i}"))
    core.close()
    (life,) = recorded_runs(tmp_path)
    assert life.first_part > 1
    with pytest.raises(LogFormatError, match="the earlier parts were removed by rotation"):
        next(replay(life))


def test_nothing_follows_where_events_are_missing(tmp_path, make):
    lines = GOLDEN.read_text().splitlines()
    path = tmp_path / "gap.jsonl"
    path.write_text("\n".join([*lines[:5], '{"dropped":3}', *lines[5:]]) + "\n")
    (life,) = recorded_runs(path)
    steps = replay(life)
    for _ in range(4):
        next(steps)
    with pytest.raises(LogFormatError, match=r"gap\.jsonl, line 6: 3 events are missing here"):
        next(steps)


def test_what_happens_after_the_close_is_not_written(tmp_path):
    core = core_of(tmp_path)
    core.handle(Tick())
    core.close()
    core.handle(Tick())
    core.close()
    assert len(steps_of(tmp_path)) == 1


def test_prompts_and_tenants_keys_stay_out_of_the_event_log(tmp_path, make):
    core = core_of(tmp_path)
    core.handle(make.request("a"), keys=np.array([987654321], np.uint64))
    core.handle(RequestCompleted("a", 0, "finished"))
    core.close()
    assert all("987654321" not in path.read_text() for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "must be a JSON object"),
        ('{"now_ns":1,"event":{"type":"Nothing"},"decisions":[]}', "no known type"),
        ('{"now_ns":1,"event":{"type":"Tick"}}', 'field "decisions" is missing'),
        ('{"now_ns":1,"event":{"type":"Tick"},"decisions":3}', "must be a list"),
        ('{"now_ns":"1","event":{"type":"Tick"},"decisions":[]}', "must be an integer"),
        ('{"now_ns":1,"event":["Tick"],"decisions":[]}', "no known type"),
        ('{"now_ns":1,"event":{"type":["Tick"]},"decisions":[]}', "no known type"),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(tmp_path, line, said):
    path = tmp_path / "bad.jsonl"
    path.write_text(GOLDEN.read_text().splitlines()[0] + "\n" + line + "\n")
    with pytest.raises(LogFormatError, match=rf"bad\.jsonl, line 2: .*{said}"):
        steps_of(path)


def test_objectives_that_cannot_be_are_named_by_file_and_line(tmp_path):
    path = tmp_path / "bad.jsonl"
    row = '{"now_ns":1,"event":{"type":"ObjectivesChanged","version":1,"content":"[1]"},"decisions":[]}'
    path.write_text(GOLDEN.read_text().splitlines()[0] + "\n" + row + "\n")
    with pytest.raises(LogFormatError, match=r"bad\.jsonl, line 2: the record is \[1\]"):
        steps_of(path)


def test_a_log_that_is_not_there_is_named_as_it_was_given(tmp_path):
    with pytest.raises(OSError, match="none'"):
        recorded_runs(tmp_path / "none")


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ('{"timestamp":1}', "not an event log"),
        ('{"version":1}', "version must be 2 or 3, got 1"),
        ('{"version":2,"life":1,"part":1}', 'field "config" is missing'),
        (
            '{"version":2,"life":1,"part":1,"config":{"balancing_threshold":0}}',
            "balancing_threshold must be at least 1, got 0",
        ),
        ('{"version":2,"life":1,"part":1,"config":{"mood":0}}', "unknown fields mood"),
        ('{"version":2,"life":1,"part":1,"config":{"admission":"perhaps"}}', "perhaps"),
    ],
)
def test_a_head_that_is_none_is_named(tmp_path, head, said):
    path = tmp_path / "bad.jsonl"
    path.write_text(head + "\n")
    with pytest.raises(LogFormatError, match=rf"bad\.jsonl, line 1: .*{said}"):
        recorded_runs(path)


def test_a_configuration_is_told_whole_and_read_back():
    config = PolicyConfig(2.0, model_objectives={"m": Objectives(1.0, 0.5)}, admission="shadow", max_copies=0)
    assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config


def test_a_log_of_the_former_rule_for_expensive_requests_is_refused_where_its_decisions_depend_on_it():
    former = {"prefill_reserve": 0.9, "decode_reserve": 0.2}
    logged = {name: value for name, value in config_to_json(PolicyConfig()).items() if "_reserve" not in name}
    for mode in ("none", "early", "predicted-uniform"):
        assert config_from_json(logged | former | {"admission_mode": mode}).admission_mode == mode
    with pytest.raises(LogFormatError, match=r"prefill_reserve, decode_reserve.*replay it with that version"):
        config_from_json(logged | former | {"admission_mode": "predicted"})
    older = config_from_json(logged | dict.fromkeys(former, 0.0) | {"admission_mode": "predicted"})
    assert (older.ttft_reserve, older.tbt_reserve) == (0.0, 0.0)


def test_a_log_of_the_former_rule_for_role_switches_is_refused_where_its_decisions_depend_on_it():
    logged = {name: value for name, value in config_to_json(PolicyConfig()).items() if name != "role_share"}
    assert config_from_json(logged | {"role_switching": "off"}).role_switching == "off"
    for mode in ("advise", "act"):
        with pytest.raises(LogFormatError, match=r"one node at a time.*role_share.*replay it with that version"):
            config_from_json(logged | {"role_switching": mode})


def test_renamed_fields_keep_their_names_in_logs():
    config = config_to_json(PolicyConfig(ttft_slo_s=2.0, colocated_prefill="act"))
    assert (config["ttft_objective_s"], config["undivided"]) == (2.0, "act")
    assert not {"ttft_slo_s", "colocated_prefill"} & config.keys()
    considered = Considered(colocated=ColocatedScore("decode-0", 0.0, 0.1, 0.2, 0.5, is_better=True))
    decision = Place("r", 0, "decode-0", "", 0, (), 0.3, 0.1, considered=considered)
    row = to_json(decision)
    assert row["considered"] == {
        "undivided": {
            "node_id": "decode-0",
            "transfer_s": 0.0,
            "queue_s": 0.1,
            "prefill_s": 0.2,
            "divided_s": 0.5,
            "is_better": True,
        }
    }
    assert decision_from_json(json.loads(json.dumps(row))) == decision


HUGE = 10**400


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"type": "NodeLost", "node_id": "a"}, "incarnation"),
        ({"type": "NodeLost", "node_id": 1, "incarnation": 1}, "NodeLost.node_id"),
        ({"type": "NodeLost", "node_id": "a", "incarnation": 1, "more": 2}, "unknown fields more"),
        ({"type": "NodeLost", "node_id": "a", "incarnation": True}, "True"),
        ({"type": "NodeReported", "node_id": "a", "held": {}}, "must be a list"),
        ({"type": "NodeReported", "node_id": "a", "held": [3]}, "must be a JSON object"),
        (
            {"type": "NodeReported", "node_id": "a", "decodes": [{"batch": 1, "context_tokens": 1, "seconds": HUGE}]},
            "DecodeSample.seconds",
        ),
        ({"type": "CopyFinished", "source": "", "target": "", "match_key": 1, "nbytes": 0, "seconds": HUGE}, "seconds"),
        (
            {
                "type": "RequestArrived",
                "request_id": "r",
                "attempt": 0,
                "frontend_id": "f",
                "model": "m",
                "prompt_tokens": 1,
                "max_new_tokens": 1,
                "matches": [{"pool": "p", "blocks": HUGE}],
            },
            "matches",
        ),
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
        {"ttft_slo_s": -1.0},
        {"max_queue_s": 0.0},
        {"tbt_slo_s": 1e400},
    ],
)
def test_a_configuration_that_cannot_work_is_refused_by_name(values):
    with pytest.raises(InvalidSetting, match=next(iter(values))):
        PolicyConfig(**values)
    with pytest.raises(InvalidSetting, match=next(iter(values))):
        assemble(ConductorConfig, listen="unix:/x", **values)


@pytest.mark.parametrize(
    "name", ["decision_log_size", "decision_log_files", "decision_log_block_tokens", "decision_log_candidates"]
)
def test_a_log_that_cannot_be_is_refused_by_name(tmp_path, name):
    with pytest.raises(InvalidSetting, match=f"{name} must be .* got 0"):
        DecisionLogSettings(tmp_path, **{group_settings(DecisionLogSettings)[name].field: 0})
