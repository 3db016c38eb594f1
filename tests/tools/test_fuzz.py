"""The fuzzer: every target finds a defect planted in its parser, and hangs, deaths and growth are found, too."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import numpy as np
import pytest
import zstandard

from tools.fuzz.campaign import campaign
from tools.fuzz.coverage import LineCoverage
from tools.fuzz.fuzzer import Findings, Fuzzer
from tools.fuzz.process import TargetProcess, load
from tools.fuzz.report import write_report
from tools.fuzz.target import FuzzTarget
from tools.fuzz.targets import TARGETS


class Plant(NamedTuple):
    """A defect: `place` is replaced by `defect(original)`. It must be found within `cases`."""

    place: str
    defect: Callable[[Any], Any]
    cases: int = 3000


def _without_type_check(original: Any) -> Any:
    from kvpool.local.protocol import _KINDS

    return lambda kind, body: _KINDS[kind - 1](*msgpack.unpackb(body))


def _frames_without_type_check(original: Any) -> Any:
    from messenger import frames

    return lambda kind, body: (
        frames._FRAMING._kinds[kind]._make(msgpack.unpackb(body)) if kind != 4 else original(kind, body)
    )


def _unguarded_record(original: Any) -> Any:
    from conductor.shared_store.redis_store import NodeRecord

    return classmethod(lambda cls, text: NodeRecord(**json.loads(text)))


def _unchecked_facts(original: Any) -> Any:
    from conductor.directory.directory import DumpedNode, Position
    from conductor.shared_store.snapshots import SnapshotFacts

    def facts(fields: Any) -> Any:
        nodes = (DumpedNode(a, b, c, Position(*position), d) for a, b, c, position, d in fields["nodes"])
        return SnapshotFacts(fields["cluster"], fields["written_at"], tuple(nodes), fields["targets"])

    return facts


def _rows_reversed(original: Any) -> Any:
    return lambda self, message, rows, region: original(self, message, rows[::-1], region)


def _chain_unchecked(original: Any) -> Any:
    def from_proto(submit: Any, **limits: Any) -> Any:
        if len(submit.chain_seed) != 16 or len(submit.chain) != 32 or len(submit.prompt_ids) != 76:
            raise IndexError("a key beyond the chain")
        return original(submit, **limits)

    return from_proto


def _names_unchecked(original: Any) -> Any:
    def malformed(request: Any, num_keys: int, block_tokens: int) -> str:
        _ = {"m": 1}[request.model], {"": 1, "chat": 2}[request.slo_class]
        return str(original(request, num_keys, block_tokens))

    return malformed


def _damage_ignored(original: Any) -> Any:
    from kvpool.errors import SsdCorrupt

    def finish(self: Any, reads: Any, chunk: Any, results: Any) -> None:
        original(self, reads, chunk, results)
        results[:] = [None if isinstance(each, SsdCorrupt) else each for each in results]

    return finish


def _frame_unchecked(original: Any) -> Any:
    return lambda frame, length: np.frombuffer(zstandard.ZstdDecompressor().decompress(frame.data), np.uint8)


def _commit_any_epoch(original: Any) -> Any:
    async def commit(self: Any, asked: Any) -> Any:
        assert self._open[asked.epoch]
        return await original(self, asked)

    return commit


def _body_cut(original: Any) -> Any:
    def passed_on(body: Any, *, is_streamed: bool) -> Any:
        body.body = body.body[:60]
        return original(body, is_streamed=is_streamed)

    return passed_on


def _conjoined_unchecked(original: Any) -> Any:
    return lambda schema: sum("pattern" in part for part in schema["allOf"])


PLANTS = {
    "trace-formats": Plant("traces.fields.is_integer", lambda original: lambda value: True, 400),
    "traces": Plant("traces.reader.is_integer", lambda original: lambda value: True),
    "config": Plant(
        "moonpool.config.sources.nearest", lambda original: lambda name, known: {k: k for k in known}[name]
    ),
    "keys": Plant("frontend.keys_file.check_name", lambda original: lambda text, where: text),
    "objectives": Plant("conductor.policy.objectives._weight", lambda original: lambda value, where: float(value)),
    "model-config": Plant("engine.config._is_token_id", lambda original: lambda value: True),
    "checkpoint": Plant("engine.folder._is_file_name", lambda original: lambda name: True, 10_000),
    "tokenizer": Plant(
        "frontend.tokenizer._read_json",
        lambda original: lambda path, optional=False: json.loads(path.read_bytes()) if path.exists() else {},
    ),
    "json-schema": Plant("worker.grammar._conjoined_patterns", _conjoined_unchecked),
    "regex": Plant("worker.grammar.source_nbytes", lambda original: lambda source: len(source.encode())),
    "lark": Plant("worker.grammar._check_repeats", lambda original: int),
    "sse": Plant(
        "loadtest.client.cached_tokens_of",
        lambda original: lambda usage, count: usage["prompt_tokens_details"]["cached_tokens"],
    ),
    "decision-log": Plant("conductor.decision_log.event_log._number", lambda original: lambda row, name: row[name]),
    "decision-files": Plant("conductor.decision_log.record_search._record", lambda original: json.loads),
    "snapshot": Plant("conductor.shared_store.snapshots._checked_facts", _unchecked_facts),
    "shared-store": Plant("conductor.shared_store.redis_store.NodeRecord.from_json", _unguarded_record),
    "ssd-journal": Plant("kvpool.ssd.recovery._is_key", lambda original: lambda value: True),
    "ssd-folder": Plant("kvpool.ssd.read_write.SsdReader._finish", _damage_ignored, 400),
    "coded-block": Plant("kvpool.block_coding._decompressed", _frame_unchecked, 400),
    "pool-local": Plant("kvpool.local.server.decode_body", _without_type_check),
    "kv-notification": Plant("worker.kv_receiver.KVReceiver._check", lambda original: lambda *_: None),
    "frames": Plant("messenger.frames.decode_body", _frames_without_type_check),
    "rdma-handshake": Plant("messenger.rdma.handshake._require", lambda original: lambda *_: None),
    "messenger-tcp": Plant("messenger.tcp.transport.TcpResponder.land", _rows_reversed, 600),
    "messenger-shm": Plant(
        "messenger.sockets.SocketLink.take_fd", lambda original: lambda self: self._fds.popleft(), 600
    ),
    "messenger-tls": Plant(
        "messenger.tcp.tls_link.TlsLink._refused", lambda original: lambda self, error: {}[error], 400
    ),
    "grpc-conductor": Plant("conductor.scheduling._malformed", _names_unchecked, 600),
    "grpc-pool": Plant("kvpool.service._nanoseconds", lambda original: lambda name, seconds: int(seconds * 1e9), 600),
    "grpc-prefill": Plant("worker.request.Request.from_proto", _chain_unchecked, 600),
    "grpc-decode": Plant("decode_node.server.DecodeService.commit", _commit_any_epoch, 600),
    "endpoint-picker": Plant("endpoint_picker.exchange._passed_on", _body_cut),
    "http": Plant(
        "frontend.api.routes.parse", lambda original: lambda model, body: model.model_validate_json(body), 300
    ),
}


def test_every_target_has_a_planted_defect_and_its_modules() -> None:
    assert PLANTS.keys() == TARGETS.keys()
    for place in TARGETS.values():
        assert LineCoverage(load(place).covers).num_lines() > 20, place


@pytest.fixture
def no_loop() -> Iterator[None]:
    """Targets with a loop set it for their process."""
    yield
    asyncio.set_event_loop(None)


@pytest.mark.parametrize("name", TARGETS)
def test_a_planted_defect_is_found(name: str, monkeypatch: pytest.MonkeyPatch, no_loop: None) -> None:
    plant = PLANTS[name]
    target: FuzzTarget = load(TARGETS[name])
    target.open()
    try:
        sound = Fuzzer(target, "sound").run(cases=len(target.seeds()) + 20)
        assert not sound.defects
        owner_path, _, attribute = plant.place.rpartition(".")
        owner: Any = pytest.importorskip(owner_path) if not owner_path.rpartition(".")[2][0].isupper() else None
        if owner is None:
            module, _, kind = owner_path.rpartition(".")
            owner = getattr(pytest.importorskip(module), kind)
        monkeypatch.setattr(owner, attribute, plant.defect(getattr(owner, attribute)))
        found = Fuzzer(target, "planted").run(cases=plant.cases, stop_at_first=True)
        assert found.defects, f"not found within {found.cases} cases"
    finally:
        monkeypatch.undo()
        target.close()


class Fragile(FuzzTarget):
    """Target that hangs, dies or grows at certain cases."""

    name = "fragile"
    covers = ("tools/fuzz/report.py",)
    deadline_s = 1.5
    max_growth_nbytes = 32 << 20

    def seeds(self) -> list[bytes]:
        return [b"fine"]

    def mutate(self, rng: Any, case: bytes, other: bytes) -> bytes:
        return rng.choice((*[b"fine"] * 12, b"hang", b"die", b"grow"))  # type: ignore[no-any-return]

    def run(self, case: bytes) -> None:
        if case == b"hang":
            asyncio.run(asyncio.sleep(60))
        if case == b"die":
            np.frombuffer(b"", np.uint8)
            __import__("os").abort()
        if case == b"grow":
            bytearray(100 << 20)[:] = b"x" * (100 << 20)


def test_a_hang_a_death_and_growth_are_found_and_their_cases_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    found = TargetProcess("tests.tools.test_fuzz:Fragile", tmp_path / "fragile", 38).run(cases=40, seconds=60)
    assert {defect.kind for defect in found.defects.values()} == {"hang", "death", "memory"}
    cases = {path.read_bytes() for path in (tmp_path / "fragile").glob("defect-*.case")}
    assert cases == {b"hang", b"die", b"grow"}
    text = (tmp_path / "fragile" / "defect-001.txt").read_text()
    assert text.startswith("python -m tools.fuzz --replay ")
    assert found.cases >= 40


def test_a_campaign_runs_the_cases_and_writes_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = campaign(["traces", "frames"], seed=1, cases=300, seconds=60, processes=2, out=tmp_path)
    write_report(found, seed=1, out=tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["defects"] == 0
    assert {name: each["cases"] for name, each in report["targets"].items()} == {"traces": 300, "frames": 300}
    assert all(0 < each["lines"] <= each["num_lines"] for each in report["targets"].values())
    assert "| traces | 300 |" in capsys.readouterr().out


def test_the_seed_determines_the_cases() -> None:
    def cases(seed: str) -> list[bytes]:
        seen: list[bytes] = []
        target = load(TARGETS["frames"])
        found: Findings = Fuzzer(target, seed).run(cases=200, before=lambda _, case: seen.append(case))
        assert not found.defects
        return seen

    assert cases("a") == cases("a") != cases("b")
