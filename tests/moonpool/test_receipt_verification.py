"""`moonpool decisions verify`: a true receipt is confirmed, any change of it is found, and so is one of the log."""

import copy
import json
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from conductor import wire
from conductor.config import ConductorConfig
from conductor.core import Core
from conductor.decision_log import RecordedRun, recorded_runs
from conductor.decision_log.files import numbered, read_lines
from conductor.policy.decisions import Place
from conductor.policy.events import (
    KvSources,
    NodeJoined,
    NodeView,
    ObjectivesChanged,
    PoolMatch,
    PoolMatches,
    RequestArrived,
    RequestCompleted,
    Tick,
)
from frontend.receipts import receipt_of
from frontend.request import AttemptRecord, GenerationRequest, RequestStats, SamplingParams
from moonpool.cli import app
from moonpool.errors import ReceiptError
from moonpool.receipt_verification import read_receipts, verify
from moonpool_proto.v1 import conductor_pb2
from settings.keys import assemble

BLOCK, PROMPT = 16, 296
NODES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
KV = KvSources(64, 32, 0, 16, 1), KvSources(PROMPT + 4, 0, 0, 0, 0)


def view(node_id: str) -> NodeView:
    role = node_id.split("-")[0]
    host = node_id[-1]
    own = (f"pool-{host}", "m", BLOCK, 4096, 4096, 8, 1024)
    return NodeView(node_id, role, 1, host, *own)  # type: ignore[arg-type]


def place(core: Core, event: RequestArrived) -> AttemptRecord:
    """Handle an arrival as the conductor's service does, and record it as the frontend does."""
    decision = core.handle(event)[0]
    assert isinstance(decision, Place)
    assert core.last_event is not None
    nodes = {name: conductor_pb2.Node(node_id=name) for name in (*NODES, "pool-0", "pool-1")}
    refs = {name: conductor_pb2.NodeRef(node_id=name, incarnation=1) for name in nodes}
    placement = conductor_pb2.Placement(slo_version=core.policy.slo.version)
    wire.write_placement(placement, decision, nodes, refs)
    placement.decision.run, placement.decision.number = core.last_event
    return AttemptRecord(placement, event.generated)


TTFT_S, TOKENS = 10.3 - 10.0, 131
HELD = PoolMatches.of(PoolMatch("pool-0", 3), PoolMatch("pool-1", 2))
FIRST = RequestArrived("cmpl-1", 0, "f", "m", PROMPT, 256, HELD, tenant="acme")
AGAIN = replace(FIRST, attempt=1, prompt_tokens=PROMPT + 5, max_new_tokens=251, generated=5, excluded=("decode-0",))
STATS = RequestStats(token_ids=array("I", range(TOKENS)), first_token_s=10.3, last_token_s=12.9)
RETRIED = RequestCompleted("cmpl-1", 0, "retry", TTFT_S, 0.011, 5, 64, kv=KV[0])
FINISHED = RequestCompleted("cmpl-1", 1, "finished", TTFT_S, STATS.mean_tbt_s, TOKENS, 64, kv=KV[1])


def begin(folder: Path, **log: Any) -> Core:
    """A conductor with a log in `folder` and all nodes, under version 1 of its objectives."""
    core = Core(assemble(ConductorConfig, listen="none", decision_log=folder, **log))
    for node in (*map(view, NODES), *(NodeView(f"pool-{i}", "pool", 1, f"{i}") for i in "01")):
        core.handle(NodeJoined(node))
    core.handle(ObjectivesChanged(1, '{"cluster": {"ttft": "60s"}}'))
    return core


def receipt_for(*records: AttemptRecord) -> dict[str, Any]:
    """The receipt that the frontend gives for these attempts."""
    for record, kv in zip(records, KV, strict=True):
        record.kv = proto(kv)
    prompt, chain = np.arange(PROMPT, dtype=np.int32), np.zeros((0, 16), np.uint8)
    sampling = SamplingParams(256, 1.0, 1.0, 0, 7)
    request = GenerationRequest("cmpl-1", "m", prompt, chain, b"", BLOCK, sampling, 10.0, 600.0, wants_receipt=True)
    found = receipt_of(request, replace(STATS, placements=list(records)), TTFT_S)
    return dict(json.loads(json.dumps(found)))


def write_log(folder: Path, *, ended: bool = True, num_others: int = 0, **log: Any) -> dict[str, Any]:
    """Write the log of a conductor that places a request twice, after others; return the request's receipt."""
    core = begin(folder, **log)
    for number in range(num_others):
        core.handle(RequestArrived(f"other-{number}", 0, "f", "m", PROMPT, 20))
        core.handle(RequestCompleted(f"other-{number}", 0, "finished"))
    first = place(core, FIRST)
    core.handle(RETRIED)
    core.handle(ObjectivesChanged(2, '{"cluster": {"ttft": "50s"}}'))
    again = place(core, AGAIN)
    core.handle(Tick())
    if ended:
        core.handle(FINISHED)
    core.handle(Tick())
    core.close()
    return receipt_for(first, again)


def proto(kv: KvSources) -> conductor_pb2.KvSources:
    return conductor_pb2.KvSources(
        cached_tokens=kv.cached_tokens,
        cached_dram_tokens=kv.cached_dram_tokens,
        cached_ssd_tokens=kv.cached_ssd_tokens,
        cached_remote_tokens=kv.cached_remote_tokens,
        recomputed_blocks=kv.recomputed_blocks,
        sibling_tokens=kv.sibling_tokens,
    )


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("receipts") / "log"


@pytest.fixture(scope="module")
def receipt(log: Path) -> dict[str, Any]:
    return write_log(log)


@pytest.fixture(scope="module")
def runs(log: Path, receipt: dict[str, Any]) -> list[RecordedRun]:
    return recorded_runs(log)


def check(value: Any, runs: list[RecordedRun]) -> Any:
    (verdict,) = verify(read_receipts(json.dumps(value).encode()), runs)
    return verdict


def is_confirmed(value: Any, runs: list[RecordedRun]) -> bool:
    """True if the receipt is well-formed, and everything in it is what the log gives."""
    try:
        return bool(check(value, runs).is_true)
    except ReceiptError:
        return False


def test_a_true_receipt_is_confirmed_with_the_places_of_its_decisions(
    receipt: dict[str, Any], runs: list[RecordedRun]
) -> None:
    verdict = check(receipt, runs)
    assert verdict.is_true, (verdict.differences, verdict.problems)
    assert [(one.attempt, one.decision) for one in verdict.decisions] == [
        (each["attempt"], each["decision"]) for each in receipt["attempts"]
    ]
    lines = dict(read_lines(verdict.decisions[1].path))
    event = json.loads(lines[verdict.decisions[1].line])["event"]
    assert (event["type"], event["request_id"], event["attempt"]) == ("RequestArrived", "cmpl-1", 1)
    assert [each["objectives_version"] for each in receipt["attempts"]] == [1, 2]


def holder_and_key(value: Any, steps: tuple[int, ...]) -> tuple[Any, Any]:
    """An object or list within `value`, and one of its keys, chosen by `steps`."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key, steps = keys[steps[0] % len(keys)], steps[1:]
        if not steps or not isinstance(value[key], dict | list) or not value[key]:
            return value, key
        value = value[key]


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 2**64), st.floats(), st.text(max_size=8), st.sampled_from(NODES)
)
changes = st.one_of(scalars, st.sampled_from(["delete", "double", "empty", "one more", "last bit"]))


@settings(max_examples=400)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=4).map(tuple), changes)
def test_any_changed_field_is_found(
    receipt: dict[str, Any], runs: list[RecordedRun], steps: tuple[int, ...], change: Any
) -> None:
    altered = copy.deepcopy(receipt)
    holder, key = holder_and_key(altered, steps)
    old = holder[key]
    if change == "delete":
        del holder[key]
    elif change == "double" and isinstance(holder, list):
        holder.append(old)
    elif change == "empty":
        holder[key] = type(old)()
    elif change == "one more":
        holder[key if isinstance(holder, dict) else 0] = {**old, "x": 1} if isinstance(old, dict) else 1
    elif change == "last bit":
        holder[key] = float(np.nextafter(old, 2)) if isinstance(old, float) else old
    else:
        holder[key] = change
    assert is_confirmed(altered, runs) == (json.dumps(altered) == json.dumps(receipt))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("attempts", 0, "predicted_ttft_s"), 0.5),
        (("attempts", 1, "decode_node"), "decode-0"),
        (("attempts", 0, "kv", "cached_dram_tokens"), 48),
        (("attempts", 1, "objectives_version"), 1),
        (("ttft_s",), 0.1),
        (("generated_tokens",), 130),
    ],
)
def test_a_changed_field_is_named_with_both_values(
    receipt: dict[str, Any], runs: list[RecordedRun], path: tuple[Any, ...], value: Any
) -> None:
    altered = copy.deepcopy(receipt)
    holder = altered
    for key in path[:-1]:
        holder = holder[key]
    true, holder[path[-1]] = holder[path[-1]], value
    verdict = check(altered, runs)
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)[1:]
    assert verdict.differences == [(name, value, true)]
    assert verdict.problems == []


def test_an_attempt_that_is_left_out_is_missed(receipt: dict[str, Any], runs: list[RecordedRun]) -> None:
    first, second = receipt["attempts"]
    without_first = check(receipt | {"attempts": [second]}, runs)
    assert ("attempts[0].attempt", 1, 0) in without_first.differences
    without_last = check(receipt | {"attempts": [first]}, runs)
    assert "later attempts are missing" in " ".join(without_last.problems)
    assert check(receipt | {"attempts": []}, runs).problems == ["attempts: the receipt has none"]
    assert not is_confirmed(receipt | {"attempts": [second, first]}, runs)


def renamed(receipt: dict[str, Any], decision: str | None) -> dict[str, Any]:
    altered = copy.deepcopy(receipt)
    altered["attempts"][1]["decision"] = decision
    return altered


def test_a_decision_that_the_log_does_not_have_is_said_to_be_missing(
    receipt: dict[str, Any], runs: list[RecordedRun]
) -> None:
    run, number = receipt["attempts"][1]["decision"].split("-")
    for decision, said in (
        (None, "kept no event log"),
        ("x", "must be RUN-NUMBER"),
        (f"{run}-999", f"the logs do not have {run}-999"),
        (f"abc-{number}", "no log has the conductor's run abc"),
        (f"{run}-1", "is not the placement of a request: NodeJoined"),
    ):
        verdict = check(renamed(receipt, decision), runs)
        assert not verdict.is_true
        assert said in " ".join(verdict.problems)
    assert "the logs have no events" in " ".join(check(receipt, []).problems)


def rewritten(runs: list[RecordedRun], folder: Path, change: Callable[[bytes], bytes]) -> list[RecordedRun]:
    """The same log, each line of it changed."""
    (run,) = runs
    (path,) = run.paths
    (folder / "events-000001.jsonl").write_bytes(b"".join(change(line) + b"\n" for _, line in read_lines(path)))
    return recorded_runs(folder)


def test_a_changed_log_is_no_evidence(receipt: dict[str, Any], runs: list[RecordedRun], tmp_path: Path) -> None:
    decided = f'"predicted_ttft_s":{receipt["attempts"][1]["predicted_ttft_s"]!r}'.encode()
    altered = copy.deepcopy(receipt)
    altered["attempts"][1]["predicted_ttft_s"] = 0.25
    both = rewritten(runs, tmp_path, lambda line: line.replace(decided, b'"predicted_ttft_s":0.25'))
    verdict = check(altered, both)  # the receipt agrees with the log's record, and the replay with neither
    assert [one.field for one in verdict.differences] == ["attempts[1].predicted_ttft_s"]
    assert "the log's own record differs from its replay: [0].predicted_ttft_s is 0.25 in the log" in " ".join(
        verdict.problems
    )


def test_a_change_of_an_earlier_decision_is_found(
    receipt: dict[str, Any], runs: list[RecordedRun], tmp_path: Path
) -> None:
    mark = b'"request_id":"cmpl-1","attempt":0,"prefill"'
    changed = rewritten(runs, tmp_path, lambda line: line.replace(mark, mark.replace(b'"attempt":0', b'"attempt":7')))
    problems = " ".join(check(receipt, changed).problems)
    assert "attempts[1]: 1 earlier decisions of the log differ from their replay" in problems


def test_without_the_end_of_an_attempt_its_measurements_are_not_confirmed(tmp_path: Path) -> None:
    receipt = write_log(tmp_path, ended=False)
    verdict = check(receipt, recorded_runs(tmp_path))
    assert verdict.differences == []
    assert [problem[:41] for problem in verdict.problems] == ["attempts[1]: no log has the end of this a"]


def test_an_end_that_the_conductors_successor_logged_is_found(tmp_path: Path) -> None:
    receipt = write_log(tmp_path, ended=False)
    core = Core(assemble(ConductorConfig, listen="none", decision_log=tmp_path))
    core.handle(FINISHED)
    core.close()
    found = recorded_runs(tmp_path)
    assert len(found) == 2
    assert check(receipt, found).is_true


def test_attempts_that_different_conductors_placed_are_confirmed_by_both_logs(tmp_path: Path) -> None:
    one, other = (begin(tmp_path / name) for name in ("one", "other"))
    receipt = receipt_for(place(one, FIRST), place(other, AGAIN))
    one.handle(RETRIED)
    other.handle(FINISHED)
    for core in (one, other):
        core.close()
    both = [recorded_runs(tmp_path / name)[0] for name in ("other", "one")]
    assert check(receipt, both).is_true
    verdict = check(receipt, both[1:])
    assert (verdict.is_true, verdict.differences) == (False, [])
    assert [one.attempt for one in verdict.decisions] == [0]


def test_a_log_whose_beginning_was_rotated_away_cannot_confirm(tmp_path: Path) -> None:
    sizes = {"decision_log_size_bytes": 4096, "decision_log_files": 1}
    receipt = write_log(tmp_path, num_others=30, **sizes)
    assert min(numbered(tmp_path, "events")) > 1
    problems = " ".join(check(receipt, recorded_runs(tmp_path)).problems)
    assert "the earlier parts were removed by rotation" in problems


def test_a_log_of_several_files_confirms(tmp_path: Path) -> None:
    receipt = write_log(tmp_path, num_others=30, decision_log_size_bytes=4096, decision_log_files=100)
    (run,) = recorded_runs(tmp_path)
    assert len(run.paths) > 2
    assert check(receipt, [run]).is_true


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "must be a JSON object"),
        ("{}", "version: Field required"),
        ('{"moonpool": {"request_id": "r"}}', 'request one with "return_receipt": true'),
        ('{"moonpool": []}', "has no receipt"),
    ],
)
def test_what_is_no_receipt_is_refused_with_the_reason(raw: str, said: str) -> None:
    with pytest.raises(ReceiptError, match=said):
        read_receipts(raw.encode())


json_values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@given(st.binary() | json_values.map(lambda value: json.dumps(value).encode()))
def test_anything_else_is_refused_by_name(raw: bytes) -> None:
    with pytest.raises(ReceiptError):
        read_receipts(raw)


def test_a_terminal_obeys_no_text_of_a_receipt(receipt: dict[str, Any], log: Path) -> None:
    for altered in (
        receipt | {"request_id": "a\x1b[31m"},
        receipt | {"b\x1b[31m": 1},
        receipt | {"model": "c\x1b[31m"},
    ):
        code, said = run("-", "--log", log, text=json.dumps(altered))
        assert (code, "\x1b" in said, "\\x1b[31m" in said) == (1, False, True)


def run(*words: str | Path, text: str | None = None) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["decisions", "verify", *map(str, words)], input=text)
    return done.exit_code, done.output


def test_the_command_reads_files_and_standard_input_receipts_and_answers(
    receipt: dict[str, Any], log: Path, tmp_path: Path
) -> None:
    path = tmp_path / "receipt.json"
    path.write_text(json.dumps(receipt))
    code, said = run(path, "--log", log)
    assert (code, said.splitlines()[0]) == (0, "Receipt of cmpl-1: true")
    assert "Attempt 2: decision " in said
    answer = json.dumps({"id": "cmpl-1", "moonpool": [{"receipt": receipt}, {"receipt": receipt}]})
    code, said = run("-", "--log", log, text=answer)
    assert (code, said.count("Receipt of cmpl-1: true")) == (0, 2)


def test_the_command_names_every_difference_and_exits_with_one(receipt: dict[str, Any], log: Path) -> None:
    altered = receipt | {"ttft_s": 0.25, "model": "n"}
    code, said = run("-", "--log", log, text=json.dumps(altered))
    assert code == 1
    assert "Receipt of cmpl-1: not true" in said
    assert "ttft_s: 0.25 in the receipt, " in said
    assert "model: 'n' in the receipt, 'm' in the log" in said
    code, said = run("-", "--log", log, "--json", text=json.dumps(altered))
    told = json.loads(said)["receipts"][0]
    assert (code, told["true"], {one["field"] for one in told["differences"]}) == (1, False, {"ttft_s", "model"})


def test_the_command_says_why_it_cannot_verify(receipt: dict[str, Any], tmp_path: Path) -> None:
    write_log(tmp_path / "other")
    code, said = run("-", "--log", tmp_path / "other", text=json.dumps(receipt))
    assert code == 1
    assert "Receipt of cmpl-1: not verified" in said
    assert "no log has the conductor's run" in said
    for words, text, problem in (
        ((tmp_path / "none.json", "--log", tmp_path), None, "cannot be read"),
        (("-", "--log", tmp_path / "none"), json.dumps(receipt), "the decision log cannot be read"),
        (("-", "--log", tmp_path), "{}", "not a receipt of this version"),
    ):
        code, said = run(*words, text=text)
        assert code == 1
        assert problem in said
