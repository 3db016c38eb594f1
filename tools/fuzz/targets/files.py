"""Targets: files that operators give. Traces, the configuration, API keys and objectives."""

import gzip
import io
import lzma
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
import zstandard

from conductor.errors import ObjectivesError
from conductor.policy.objectives import parse_record, record_from_text, record_text
from frontend.errors import KeysFileError
from frontend.keys_file import callers_of, parse_keys
from moonpool.config import (
    COMPOSITES,
    ConductorRole,
    EndpointPickerRole,
    FrontendRole,
    PoolNodeRole,
    WorkerRole,
    all_settings,
    load,
)
from moonpool.config.sources import read_yaml
from moonpool.errors import ConfigError
from settings.keys import composite_settings
from settings.yaml_nesting import events_of
from tools.fuzz import mutation
from tools.fuzz.target import FuzzTarget, Misjudged, scratch_folder
from traces.errors import TraceError
from traces.formats import SourceSettings
from traces.reader import read_stream
from traces.source import AUTO, TraceSource

_ROW = b'{"timestamp": %d, "input_length": %d, "output_length": 7, "hash_ids": [%s]}\n'


class Traces(FuzzTarget):
    """Traces in every container."""

    name = "traces"
    covers: tuple[str, ...] = ("traces/reader.py", "traces/lines.py")
    allowed: tuple[type[BaseException], ...] = (TraceError,)
    tokens: tuple[bytes, ...] = (
        b"\n",
        b'"timestamp"',
        b'"hash_ids"',
        b"[",
        b"{",
        b"-1",
        b"1e9",
        b"\xfd7zXZ\x00",
        b"\x1f\x8b",
        b"null",
    )

    def seeds(self) -> Sequence[bytes]:
        plain = b"".join(
            _ROW % (i * 500, 1 + 600 * i, b",".join(b"%d" % n for n in range(1 + 600 * i // 512))) for i in range(5)
        )
        return plain, lzma.compress(plain), gzip.compress(plain), zstandard.compress(plain)

    def mutate(self, rng: random.Random, case: bytes, other: bytes) -> bytes:
        """Mutate rows as JSON, bytes of rows, or bytes of a container."""
        if not case.startswith(b"{") or rng.random() < 0.3:
            return mutation.mutate_bytes(rng, case, other, self.tokens)
        lines = case.splitlines(keepends=True)
        at = rng.randrange(len(lines))
        lines[at] = mutation.mutate_json(rng, lines[at], lines[0], self.tokens, ("timestamp", "hash_ids", 0, -1, 512))
        lines[at] += b"\n"
        plain = b"".join(lines)
        return rng.choice((bytes, bytes, bytes, _xz, gzip.compress, zstandard.compress))(plain)

    def run(self, case: bytes) -> None:
        """Read the trace; rows must be sorted and have as many ids as blocks."""
        trace = read_stream(io.BytesIO(case), source="case")
        times = [row.timestamp_ms for row in trace]
        if times != sorted(times) or times[0] < 0:
            raise Misjudged("rows out of order, or before the trace's start")
        for row in trace:
            if len(row.hash_ids) != -(-row.input_length // 512) or len(set(row.hash_ids)) != len(row.hash_ids):
                raise Misjudged("a row whose ids do not fit its length")


_FORMAT_SEEDS = (
    b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    b"2023-11-16 18:17:03.9799600,4808,10\r\n2024-05-10 00:00:00+00:00,1,0\r\n",
    b"Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    b"5.5,a1,3,GPT-4,700,30,730,Conversation log\n6.0,,1,ChatGPT,1,2,3,API log\n",
    b'{"chat_id": 4, "parent_chat_id": -1, "timestamp": 6.1, "input_length": 20, "output_length": 3, "type": "text", '
    b'"turn": 1, "hash_ids": [7, 7]}\n'
    b'{"chat_id": 5, "parent_chat_id": 4, "timestamp": 9, "input_length": 33, "output_length": 0, "type": "file", '
    b'"turn": 2, "hash_ids": [7, 7, 9]}\n',
    b'[{"id": "c", "conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}]},\n'
    b' {"conversations": []}]\n',
    b'{"session_id": "s", "timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'
    b'{"session_id": "s", "delay": 2.5, "input_length": 7}\n'
    b'{"session_id": "m", "turns": [{"role": "system", "text": "a"}, {"texts": ["b", {"contents": ["c"]}]}]}\n'
    b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "d"}]}], "message_mode": "delta"}\n',
    b'{"id": "a", "block_size": 64, "hash_id_scope": "local", "requests": [{"t": 0, "type": "s", "in": 70, "out": 1, '
    b'"hash_ids": [1]}, {"t": 2, "type": "subagent", "agent_id": "b", "requests": [{"t": 1, "type": "n", "in": 9, '
    b'"out": 0}]}]}\n',
)


class TraceFormats(FuzzTarget):
    """Traces of other formats, each recognised by its beginning."""

    name = "trace-formats"
    covers: tuple[str, ...] = ("traces/formats", "traces/fields.py", "traces/json_values.py", "traces/prompt_blocks.py")
    allowed: tuple[type[BaseException], ...] = (TraceError,)
    tokens: tuple[bytes, ...] = (
        b"\n",
        b",",
        b'"',
        b"[",
        b"]",
        b"{",
        b"}",
        b"-1",
        b"1e9",
        b"NaN",
        b"null",
        b"true",
        b"\xef",
    )

    def seeds(self) -> Sequence[bytes]:
        return _FORMAT_SEEDS

    def mutate(self, rng: random.Random, case: bytes, other: bytes) -> bytes:
        """Mutate a line as JSON, or the bytes of the file."""
        lines = case.splitlines(keepends=True)
        at = rng.randrange(len(lines)) if lines else 0
        if not case.startswith(b"{") or rng.random() < 0.4:
            return mutation.mutate_bytes(rng, case, other, self.tokens)
        lines[at] = mutation.mutate_json(
            rng, lines[at], lines[0], self.tokens, ("turns", "hash_ids", 0, -1, 1 << 70, 0.5)
        )
        lines[at] += b"\n"
        return b"".join(lines)

    def run(self, case: bytes) -> None:
        """Read the trace; requests must have as many different ids as blocks."""
        for row in TraceSource(io.BytesIO(case), "case", AUTO, SourceSettings()).rows():
            if len(row.hash_ids) != -(-row.input_length // 512) or len(set(row.hash_ids)) != len(row.hash_ids):
                raise Misjudged("a request whose ids do not fit its length")
            if row.input_length < 1 or row.output_length < 0:
                raise Misjudged("a request of an impossible length")


def _xz(plain: bytes) -> bytes:
    return lzma.compress(plain, preset=0)


def _value_of(case: bytes) -> Any:
    """Return the value of a YAML text. Raises ValueError for deep nesting, which ends libyaml's composer."""
    text = case.decode()
    for _ in events_of(text):
        pass
    return yaml.load(text, yaml.CSafeLoader)


class YamlTarget(FuzzTarget):
    """Base of targets that read YAML; values are mutated as trees, texts as bytes."""

    tokens: tuple[bytes, ...] = (
        b"\n",
        b": ",
        b"- ",
        b"&a ",
        b"*a",
        b"!!python/object:os.system ",
        b"{",
        b"[",
        b"'",
        b"<<: *a",
        b"? ",
        b"---\n",
    )
    words: tuple[Any, ...] = ()

    def mutate(self, rng: random.Random, case: bytes, other: bytes) -> bytes:
        """Return mutated YAML, often in JSON's syntax, which is YAML, too; mostly short, since the parser is slow."""
        return self._mutated(rng, case, other)[: rng.choice((2000, 2000, 2000, 2000, 300_000))]

    def _mutated(self, rng: random.Random, case: bytes, other: bytes) -> bytes:
        if rng.random() < 0.35:
            return mutation.mutate_bytes(rng, case, other, self.tokens)
        try:
            value, from_other = _value_of(case), _value_of(other)
            changed = mutation.mutate_value(rng, value, from_other, self.words)
            if rng.random() < 0.4:
                return yaml.dump(changed, Dumper=yaml.CSafeDumper, allow_unicode=True).encode("utf-8", "surrogatepass")
            return mutation.to_json(rng, changed)
        except (yaml.YAMLError, ValueError, RecursionError, TypeError, OverflowError, AttributeError):
            return mutation.mutate_bytes(rng, case, other, self.tokens)


class Configuration(YamlTarget):
    """The configuration file, for `serve` and for each role; its length selects the role."""

    name = "config"
    covers: tuple[str, ...] = ("moonpool/config", "settings")
    allowed: tuple[type[BaseException], ...] = (ConfigError,)

    def open(self) -> None:
        """Read the declared settings."""
        self._known = all_settings()
        self._folder = scratch_folder()
        self._path = Path(self._folder.name) / "moonpool.yaml"
        self.words = (*sorted(self._known), "off", "auto", "1GiB", "10%", True, 0, 1)

    def seeds(self) -> Sequence[bytes]:
        models = b"models:\n- {name: a, path: /models/a, aliases: [b], prefill_nodes: 2}\n- path: /models/c\n"
        common = b"conductor: ['unix:/c']\npool: unix:/p\nmodel: /models/m\nlisten: 127.0.0.1:0\nnode_id: n\n"
        found = [b"{}\n", models, common]
        for composite in COMPOSITES:
            scalars = {
                key: setting.default
                for key, setting in composite_settings(composite).items()
                if isinstance(setting.default, bool | int | float | str) and setting.key.item is None
            }
            keys = sorted(scalars)
            found += [yaml.safe_dump({key: scalars[key] for key in keys[at::8]}).encode() for at in range(8)]
        return found

    def run(self, case: bytes) -> None:
        """Load the file as a role does."""
        self._path.write_bytes(case)
        kind = COMPOSITES[len(case) % len(COMPOSITES)]
        load(kind, flags=_REQUIRED.get(kind, {}), environ={}, config_file=self._path, known=self._known)

    def close(self) -> None:
        """Remove the file."""
        self._folder.cleanup()


_REQUIRED: dict[type, dict[str, str]] = {
    PoolNodeRole: {"conductor": "unix:/c", "node_id": "n"},
    WorkerRole: {"conductor": "unix:/c", "pool": "unix:/p", "node_id": "n"},
    FrontendRole: {"conductor": "unix:/c", "node_id": "n"},
    ConductorRole: {"node_id": "n"},
    EndpointPickerRole: {"endpoints": "e:80"},
}
_HASH = "sha256:" + "ab" * 32


class Keys(YamlTarget):
    """The API keys file; errors must not contain values, which might be keys."""

    name = "keys"
    covers: tuple[str, ...] = ("frontend/keys_file.py",)
    allowed: tuple[type[BaseException], ...] = (KeysFileError,)
    words = ("name", "hash", "tenant", "scope", "expires", "cache_salt", "admin", _HASH, "2027-01-31", 10**12, 1)

    def seeds(self) -> Sequence[bytes]:
        return (
            b"keys: []\n",
            f"keys:\n- name: a\n  hash: {_HASH}\n  tenant: t\n".encode(),
            f"keys:\n- {{name: a, hash: '{_HASH}', tenant: t, scope: admin, expires: 2027-01-31, cache_salt: s,"
            f" requests_per_minute: 5, tokens_per_minute: 100, max_concurrent: 2}}\n"
            f"- {{name: b, hash: 'sha256:{'0' * 64}', tenant: u, expires: '2027-01-31T18:00:00+02:00'}}\n".encode(),
        )

    def run(self, case: bytes) -> None:
        """Parse the file."""
        text = case.decode("utf-8", "replace")
        try:
            callers = callers_of(parse_keys(text))
        except KeysFileError as error:
            if "ab" * 8 in re.sub(r"^entry \d+ \([^)]*\)", "", str(error)):  # it is named, whatever its name
                raise Misjudged("an error quotes a hash") from error
            raise
        if any(len(entry.digest) != 32 or not entry.name for entry, _ in callers):
            raise Misjudged("an entry without a name or a whole digest")


class ObjectivesFile(YamlTarget):
    """Objectives in a YAML file and as JSON in calls."""

    name = "objectives"
    covers: tuple[str, ...] = ("conductor/policy/objectives.py", "moonpool/config/sources.py")
    allowed: tuple[type[BaseException], ...] = (ObjectivesError, ConfigError)
    words = (
        "classes",
        "tenants",
        "models",
        "default",
        "ttft",
        "tbt",
        "weight",
        "5x",
        "2s",
        "300ms",
        "p99",
        "off",
        "none",
    )

    def open(self) -> None:
        """Make the folder of the file."""
        self._folder = scratch_folder()
        self._path = Path(self._folder.name) / "objectives.yaml"

    def seeds(self) -> Sequence[bytes]:
        return (b"{}\n", _OBJECTIVES)

    def run(self, case: bytes) -> None:
        """Parse the file, and the same text as JSON; a valid record must survive its own encoding."""
        self._path.write_bytes(case)
        try:
            record = parse_record(read_yaml(self._path, "file"))
        except (ObjectivesError, ConfigError):
            record = record_from_text(case.decode("utf-8", "replace"))
        if record_from_text(record_text(record)) != record:
            raise Misjudged("a record is another one after it was encoded and decoded")

    def close(self) -> None:
        """Remove the file."""
        self._folder.cleanup()


_OBJECTIVES = b"""\
cluster: {ttft: 2s, tbt: 200ms p95}
models: {m: {ttft: 5x}}
classes: {chat: {ttft: 500ms, priority: -1}, batch: {ttft: off, tbt: 0}}
tenants: {acme: {class: chat, weight: 2.5, headers: tighten}, other: {tbt: 1}}
default_class: batch
headers: ignore
"""
