"""Targets: what a conductor keeps. Event log, decision records, directory snapshots, records in Redis and in files."""

import asyncio
import hashlib
import json
import random
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import zstandard

from conductor.decision_log.codec import config_to_json, event_from_json, to_json
from conductor.decision_log.event_log import recorded_runs, replay
from conductor.decision_log.journal import read_journal
from conductor.decision_log.record_search import find_records
from conductor.directory import Directory
from conductor.directory.directory import DumpedNode, Position
from conductor.directory.table import Replicas
from conductor.errors import LogFormatError, SharedStoreRefused
from conductor.shared_store.redis_store import NodeRecord, SnapshotPointer
from conductor.shared_store.snapshots import SnapshotFacts, Snapshots, SnapshotWriter
from conductor.slo.stores import FileVersions
from conductor.slo.versions import Acknowledgement, SloVersion
from tools.fuzz import mutation
from tools.fuzz.target import ROOT, FuzzTarget, Misjudged, scratch_folder, text_of

_GOLDEN = ROOT / "tests" / "conductor" / "golden" / "decisions.jsonl"


class FolderTarget(FuzzTarget):
    """Base of targets that read a folder."""

    def open(self) -> None:
        """Make the folder."""
        self._folder = scratch_folder()
        self.path = Path(self._folder.name)

    def warm_up(self) -> None:
        """Run the seeds, since the first use of a kernel compiles it."""
        for case in self.seeds():
            self.run(case)

    def close(self) -> None:
        """Remove the folder."""
        self._folder.cleanup()


class EventLogFiles(FolderTarget):
    """Files of the event log, plain or compressed, and their replay."""

    name = "decision-log"
    covers: tuple[str, ...] = (
        "conductor/decision_log/codec.py",
        "conductor/decision_log/event_log.py",
        "conductor/decision_log/files.py",
    )
    allowed: tuple[type[BaseException], ...] = (LogFormatError, OSError)
    tokens: tuple[bytes, ...] = (b"\n", b'{"dropped":3}\n', b"null", b"[", b"{", b"\x28\xb5\x2f\xfd")
    deadline_s = 30.0
    _words = ("type", "Tick", "NodeJoined", "RequestArrived", "now_ns", "event", "decisions", "dropped", "config", "m")

    def open(self) -> None:
        """Compile the policy's kernels."""
        super().open()
        self.warm_up()

    def seeds(self) -> Sequence[bytes]:
        lines = _GOLDEN.read_bytes().splitlines(keepends=True)
        head, kinds = lines[0], {json.loads(line)["event"]["type"]: line for line in lines[1:]}
        few = head + b"".join(lines[1:14])
        return few, head + b"".join(kinds.values()), zstandard.compress(few)

    def mutate(self, rng: random.Random, case: bytes, other: bytes) -> bytes:
        """Mutate a line as JSON, the order of lines, or bytes."""
        if not case.startswith(b"{") or rng.random() < 0.15:
            return mutation.mutate_bytes(rng, case, other, self.tokens)
        lines = case.splitlines()
        at = rng.randrange(len(lines))
        if rng.random() < 0.1:
            rng.shuffle(lines)
        else:
            lines[at] = mutation.mutate_json(rng, lines[at], lines[-1], self.tokens, self._words)
        text = b"\n".join(lines) + b"\n"
        return zstandard.compress(text) if rng.random() < 0.05 else text

    def run(self, case: bytes) -> None:
        """Replay every run of the log; an event must survive its own encoding."""
        packed = case.startswith(b"\x28\xb5\x2f\xfd")
        path = self.path / f"events-000001.jsonl{'.zst' if packed else ''}"
        for old in self.path.iterdir():
            old.unlink()
        path.write_bytes(case)
        for run in recorded_runs(self.path):
            config_to_json(run.config)
            for step in replay(run):
                row = to_json(step.event)
                if to_json(event_from_json(json.loads(json.dumps(row)))) != row and "NaN" not in json.dumps(row):
                    raise Misjudged("an event is another one after it was encoded and decoded")


class DecisionFiles(FolderTarget):
    """Records of decisions and the journal of open ones, searched for a request: one text, split at a line of `=`."""

    name = "decision-files"
    covers: tuple[str, ...] = (
        "conductor/decision_log/record_search.py",
        "conductor/decision_log/journal.py",
        "conductor/decision_log/files.py",
    )
    allowed: tuple[type[BaseException], ...] = (OSError,)
    tokens: tuple[bytes, ...] = (
        b"\n",
        b"=\n",
        b'"request_id":"r"',
        b'"at":',
        b"null",
        b'{"over":',
        b'{"open":',
        b"\x28\xb5\x2f\xfd",
    )
    _words = ("request_id", "r", "attempts", "at", "open", "over", 1.5)
    _record: ClassVar[dict[str, Any]] = {"request_id": "r", "at": 12.5, "attempts": [], "outcome": "unknown"}

    def seeds(self) -> Sequence[bytes]:
        row = json.dumps(self._record, separators=(",", ":")).encode()
        other = row.replace(b'"r"', b'"s"')
        return [
            other + b"\n" + row + b"\n=\n" + b'{"open":' + other + b'}\n{"over":"s"}\n{"open":' + row + b"}\n",
            row + b"\n" + row + b"\n=\n",
        ]

    def mutate(self, rng: random.Random, case: bytes, other: bytes) -> bytes:
        """Mutate a line as JSON, or bytes."""
        lines = case.split(b"\n")
        at = rng.randrange(len(lines))
        if rng.random() < 0.4 or mutation.from_json(lines[at]) is None:
            return mutation.mutate_bytes(rng, case, other, self.tokens)
        changed = mutation.mutate_json(rng, lines[at], lines[0], self.tokens, self._words)
        value = mutation.from_json(changed)
        lines[at] = changed if value is None else json.dumps(value, separators=(",", ":")).encode()
        return b"\n".join(lines)

    def run(self, case: bytes) -> None:
        """Search for the request, as `Explain` does, and encode what was found."""
        records, _, opened = case.partition(b"=\n")
        (self.path / "decisions-000001.jsonl").write_bytes(records)
        (self.path / "open.jsonl").write_bytes(opened)
        found = find_records(self.path, "r")
        json.dumps(found.to_json())
        for record in found.records:
            if record["request_id"] != "r" or not isinstance(record["attempts"], list):
                raise Misjudged("a record of another request, or without attempts")
        for request_id, record in read_journal(self.path).items():
            if not isinstance(request_id, str) or not isinstance(record, dict):
                raise Misjudged("an open record that is not an object, or whose id is not a text")


_LENGTH = struct.Struct("<I")


class DirectorySnapshot(FolderTarget):
    """Snapshots of the directory. A case lacks the checksum, which is added unless its first byte is odd."""

    name = "snapshot"
    covers: tuple[str, ...] = ("conductor/shared_store/snapshots.py", "conductor/directory/directory.py")
    tokens: tuple[bytes, ...] = (b"MOONDIR1", b'"nodes"', b'"targets"', b"[", b"null", b"-1", b"1e999")
    _words = ("cluster", "nodes", "targets", "written_at", "c", "pool-0", 7, 0)

    def open(self) -> None:
        """Start a loop."""
        super().open()
        self._loop = asyncio.new_event_loop()
        self.warm_up()
        self._loop.close()  # with its threads: only those of the next one are traced
        self._loop = asyncio.new_event_loop()

    def seeds(self) -> Sequence[bytes]:
        nodes = (DumpedNode("pool-0", 1, 3, Position(7, 9), 5), DumpedNode("pool-1", 2, 0, Position(8, 1), 1))
        path = self.path / "seed"
        with SnapshotWriter(path) as writer:
            writer.add(Replicas(np.arange(1, 6, dtype=np.uint64), np.array([2, 3, 4, 5, 2], np.uint32)))
            writer.finish(SnapshotFacts("c", 12.5, nodes, {"pool-0": "unix:/p.sock"}))
        whole = path.read_bytes()[:-16]
        path.unlink()
        return [b"\0" + whole]

    def mutate(self, rng: random.Random, case: bytes, other: bytes) -> bytes:
        """Mutate the metadata as JSON, or bytes."""
        at = case.find(b'{"cluster"')
        if at < 4 or rng.random() < 0.4:
            return mutation.mutate_bytes(rng, case, other, self.tokens)
        text = mutation.mutate_json(rng, case[at:], case[at:], self.tokens, self._words)
        return case[: at - 4] + _LENGTH.pack(len(text)) + text

    def run(self, case: bytes) -> None:
        """Restore the snapshot; one that cannot be used is ignored, and then the directory must be empty."""
        signed = case[1:]
        if not case or not case[0] & 1:
            signed += hashlib.blake2b(signed, digest_size=16).digest()
        (self.path / "directory.snapshot").write_bytes(signed)
        directory = Directory()
        snapshots = Snapshots(self.path, "c", directory)
        targets = self._loop.run_until_complete(snapshots.restore([]))
        if not all(isinstance(name, str) and isinstance(target, str) for name, target in targets.items()):
            raise Misjudged("a node or a target that is not a text")
        problems = directory.validate()
        if problems:
            raise Misjudged(f"the directory is inconsistent: {problems[0]}")

    def close(self) -> None:
        """Close the loop."""
        self._loop.close()
        super().close()


class SharedRecords(FolderTarget):
    """Records in Redis, and versions of the objectives in a file: the first byte selects the kind."""

    name = "shared-store"
    covers: tuple[str, ...] = (
        "conductor/shared_store/redis_store.py",
        "conductor/slo/versions.py",
        "conductor/slo/stores.py",
    )
    allowed: tuple[type[BaseException], ...] = (SharedStoreRefused,)
    _words = (
        "node_id", "role", "target", "incarnation", "host_id", "conductor", "path", "host", "written_at", "positions",
        "version", "content", "digest", "at_s", "versions", "cluster", "format", "until", "said", "{}", 1,
    )  # fmt: skip

    def open(self) -> None:
        """Start a loop."""
        super().open()
        self._loop = asyncio.new_event_loop()

    def seeds(self) -> Sequence[bytes]:
        for old in self.path.iterdir():
            old.unlink()
        version = SloVersion(1, "{}", "a", "first", 0.0, "configuration", "")
        acknowledgement = Acknowledgement("one", 1, 1, "")
        self._loop.run_until_complete(self._versions().keep([version]))
        self._loop.run_until_complete(self._versions().acknowledge(acknowledgement, 1e9))
        (acknowledged,) = self.path.glob("acknowledged-*.json")
        return [
            b"0" + NodeRecord("pool-0", "pool", "unix:/p.sock", 7, "host", 1).to_json().encode(),
            b"1" + SnapshotPointer("/s", "host", 12.5, {"pool-0": (7, 9)}).to_json().encode(),
            b"2" + version.to_json().encode(),
            b"3" + acknowledgement.to_json().encode(),
            b"4" + (self.path / "objectives.json").read_bytes(),
            b"5" + acknowledged.read_bytes(),
        ]

    def mutate(self, rng: random.Random, case: bytes, other: bytes) -> bytes:
        """Mutate the JSON."""
        return case[:1] + mutation.mutate_json(rng, case[1:], other[1:], (), self._words)

    def run(self, case: bytes) -> None:
        """Parse the record, and use it as its readers do."""
        kind, data = case[:1], case[1:]
        text = text_of(data)
        if kind == b"0":
            node = NodeRecord.from_json(text)
            _texts(node.node_id, node.role, node.target)
            _integers(node.incarnation, node.conductor)
            hash(node)
        elif kind == b"1":
            pointer = SnapshotPointer.from_json(text)
            sorted([pointer, pointer], key=lambda each: -each.written_at)
            for pair in pointer.positions.values():
                _integers(*pair)
        elif kind == b"2":
            version = SloVersion.from_json(text)
            _ = version.description, version.digest
            _integers(version.version)
        elif kind == b"3":
            known = Acknowledgement.from_json(text)
            _texts(known.node_id)
            _integers(known.version, known.incarnation)
        elif kind == b"4":
            (self.path / "objectives.json").write_bytes(data)
            self._loop.run_until_complete(self._versions().history())
        else:
            for path in self.path.glob("acknowledged-*.json"):
                path.unlink()
            (self.path / "acknowledged-x.json").write_bytes(data)
            self._loop.run_until_complete(self._versions().acknowledged())

    def _versions(self) -> FileVersions:
        return FileVersions(self.path, "c")

    def close(self) -> None:
        """Close the loop."""
        self._loop.close()
        super().close()


def _texts(*values: Any) -> None:
    if not all(isinstance(value, str) for value in values):
        raise Misjudged("a field that must be a text is not one")


def _integers(*values: Any) -> None:
    if not all(type(value) is int for value in values):
        raise Misjudged("a field that must be an integer is not one")
