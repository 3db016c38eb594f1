"""Cases by which the fuzzer found defects: each is refused by name now, or has its proper outcome."""

import json
import struct
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest

from conductor.errors import JoinRefused
from conductor.registry import Registry
from kvpool.errors import PoolRefused, SpecError
from kvpool.service import _nanoseconds, _wait_s
from kvpool.spec import KvSpec
from kvpool.ssd.journal import FRAME, FRAME_MAGIC, checksum
from kvpool.ssd.records import PAGE_NBYTES
from messenger.errors import ProtocolError
from messenger.frames import MAGIC
from messenger.rdma import handshake
from moonpool.config import COMPOSITES, ServeConfig, WorkerRole
from moonpool_proto.v1 import common_pb2, conductor_pb2, worker_pb2
from rpc.versions import own_software
from tools.fuzz.process import load
from tools.fuzz.target import FuzzTarget
from tools.fuzz.targets import TARGETS
from tools.fuzz.targets.models import _LLAMA, _TOKENIZER
from worker.errors import RequestRefused
from worker.request import Request

DEEP = b"[" * 3000
HUGE = 10**400
TICK = b'{"now_ns":%d,"event":{"type":"Tick"},"decisions":[]}\n'
HEAD = b'{"version":2,"life":1,"part":1,"config":{}}\n'


def _config(**changes: Any) -> bytes:
    return json.dumps({"config": _LLAMA | changes}).encode()


def _index(weight_map: Any) -> bytes:
    index = json.dumps({"weight_map": weight_map}).encode() if not isinstance(weight_map, bytes) else weight_map
    return struct.pack("<I", len(index)) + index


def _header(header: bytes) -> bytes:
    return bytes(4) + struct.pack("<Q", len(header)) + header


def _tokenizer(**files: Any) -> bytes:
    config = {"vocab_size": 5, "max_position_embeddings": 64}
    return json.dumps({"tokenizer.json": _TOKENIZER, "config.json": config} | files).encode()


_WITHOUT_UNKNOWN = _TOKENIZER["model"] | {"unk_token": "absent", "end_of_word_suffix": "absent"}


def _for_role(kind: type, text: bytes) -> bytes:
    """Return the text with a length that selects the role."""
    return text.ljust(len(text) + (COMPOSITES.index(kind) - len(text)) % len(COMPOSITES), b"\n")


_NODE = {"node_id": "a", "role": "pool", "target": "t", "incarnation": 1, "host_id": "h", "conductor": 1}
_POINTER = {"path": "/s", "host": "h", "written_at": 1.5, "positions": {"p": [1, 2]}}


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _snapshot(nodes: Any, targets: Any = None) -> bytes:
    facts = {"cluster": "c", "written_at": 1.5, "nodes": nodes, "targets": {} if targets is None else targets}
    text = json.dumps(facts).encode()
    return b"\0MOONDIR1" + struct.pack("<II", 0, len(text)) + text


REFUSED = [
    ("model-config", _config(vocab_size=HUGE)),
    ("model-config", _config(rms_norm_eps=HUGE)),
    ("model-config", _config(rope_scaling={"rope_type": "linear", "factor": HUGE})),
    ("model-config", _config(bos_token_id="x")),
    ("model-config", _config(eos_token_id=[True])),
    ("model-config", DEEP),
    ("checkpoint", _index({"a": 1})),
    ("checkpoint", _index({"a": "x" * 300})),
    ("checkpoint", _index({"a": "../config.json"})),
    ("checkpoint", _index(DEEP)),
    ("checkpoint", _header(DEEP)),
    ("tokenizer", _tokenizer(**{"config.json": (DEEP).decode()})),
    ("tokenizer", _tokenizer(**{"chat_template.jinja": "{% break %}"})),
    ("tokenizer", _tokenizer(**{"chat_template.jinja": "\ud800"})),
    ("tokenizer", _tokenizer(**{"tokenizer.json": _TOKENIZER | {"model": _WITHOUT_UNKNOWN}})),
    ("keys", b"[" * 3000),
    ("keys", b"keys: " + b"[" * 200 + b"]" * 200),
    ("config", b"listen: " + b"[" * 3000),
    ("config", _for_role(WorkerRole, b'model: "a\\0"')),
    ("config", _for_role(ServeConfig, b'models: [{path: "a\\0"}]')),
    ("config", _for_role(ServeConfig, b"models: [{path: ~no.such.user/a}]")),
    ("objectives", b"classes: " + b"[" * 3000),
    ("shared-store", b"0" + DEEP),
    ("shared-store", b"0" + _json(_NODE | {"incarnation": 1.5})),
    ("shared-store", b"0" + _json(_NODE | {"host_id": None})),
    ("shared-store", b"1" + DEEP),
    ("shared-store", b"1" + _json(_POINTER | {"positions": {"p": [float("inf"), 0]}})),
    ("shared-store", b"1" + _json(_POINTER | {"written_at": HUGE})),
    ("shared-store", b"2" + _json({"version": 1, "content": "{}", "author": "a", "reason": "b", "at_s": HUGE,
                                   "origin": "admin", "peer": "", "digest": ""})),
    ("shared-store", b"3" + DEEP),
    ("shared-store", b"3" + _json({"node_id": 1, "incarnation": 1, "version": 1, "digest": ""})),
    ("shared-store", b"4" + DEEP),
    ("shared-store", b"5" + DEEP),
    ("decision-log", HEAD.replace(b"{}", b'{"replica_idle_s":1e300}') + TICK % 1),
    ("decision-log", HEAD + TICK % (1 << 63)),
]  # fmt: skip

ACCEPTED = [
    ("tokenizer", _tokenizer(**{"tokenizer_config.json": {"chat_template": [1.5]}})),
    ("tokenizer", _tokenizer(**{"tokenizer_config.json": {"eos_token": "\ud800"}})),
    ("decision-files", b'=\n{"open":5}\n'),
    ("decision-files", b'=\n{"open":{"request_id":"r","at":1}}\n'),
    ("decision-files", b'=\n{"open":{"request_id":[1],"at":1,"attempts":[]}}\n'),
    # A snapshot that cannot be used is ignored, and pool nodes send all their contents.
    ("snapshot", _snapshot(5)),
    ("snapshot", _snapshot([[1, 1, 1, [1, 1], 1]], {"1": "t"})),
    ("snapshot", _snapshot([["a", -1, 1, [1, 1], 1]], {"a": "t"})),
    ("snapshot", _snapshot([["a", 1 << 40, 1, [1, 1], 1]], {"a": "t"})),
    ("snapshot", _snapshot([["a", 1, 1, [float("inf"), 1], 1]], {"a": "t"})),
    ("snapshot", _snapshot([["a", 1, 1, [1, 1], 1], ["a", 2, 1, [1, 1], 1]], {"a": "t"})),
    ("snapshot", _snapshot([], {"a": 5})),
    ("snapshot", b"\0MOONDIR1"),
    ("snapshot", b"\0MOONDIR1" + struct.pack("<II", 0, len(DEEP)) + DEEP),
    ("sse", b'\1data: {"choices": [{"text": "a"}], "usage": {"completion_tokens": true}}\n\ndata: [DONE]\n\n'),
    ("sse", bytes([9]) + b"data: " + b"x" * 20_000),
]  # fmt: skip


@pytest.fixture(scope="module")
def targets() -> Iterator[dict[str, FuzzTarget]]:
    opened: dict[str, FuzzTarget] = {}
    for name in sorted({name for name, _ in (*REFUSED, *ACCEPTED)} | {"ssd-journal"}):
        opened[name] = load(TARGETS[name])
        opened[name].open()
    yield opened
    for target in opened.values():
        target.close()


@pytest.mark.parametrize(("name", "case"), REFUSED, ids=[f"{name}-{at}" for at, (name, _) in enumerate(REFUSED)])
def test_a_malformed_input_is_refused_by_name(targets: dict[str, FuzzTarget], name: str, case: bytes) -> None:
    with pytest.raises(targets[name].allowed):
        targets[name].run(case)


@pytest.mark.parametrize(("name", "case"), ACCEPTED, ids=[f"{name}-{at}" for at, (name, _) in enumerate(ACCEPTED)])
def test_a_malformed_input_is_ignored_or_tolerated(targets: dict[str, FuzzTarget], name: str, case: bytes) -> None:
    targets[name].run(case)


BLOCK = [0, bytes(16), bytes(16), bytes(16), 0, 0, [bytes(8), bytes(8)], 0.5, 1]
SPEC = {
    "groups": [
        {"kind": "full", "window": 0, "layers": [0], "kv_heads": 1, "head_dim": 256, "dtype": "uint8"},
        {"kind": "window", "window": 8, "layers": [1], "kv_heads": 1, "head_dim": 128, "dtype": "uint8"},
    ],
    "block_tokens": 4,
}


@pytest.mark.parametrize(
    "body",
    [
        msgpack.packb([[], [msgpack.packb([[SPEC], [[*BLOCK[:at], value, *BLOCK[at + 1 :]]]])]])
        for at, value in (
            *((0, -4096), (0, 5), (0, "x"), (1, b"short"), (2, None), (3, 7), (4, 9), (4, -1), (5, 4), (5, "x")),
            *((6, [bytes(8)]), (6, 5), (7, float("inf")), (7, -1.0), (8, -1), (8, 1 << 63)),
        )
        if (at, value) != (8, 1 << 63)
    ]
    + [
        msgpack.packb([[5], []]),
        msgpack.packb([5, []]),
        msgpack.packb([[], [b"\xc1"]]),
        msgpack.packb([[], [msgpack.packb([[{}], []])]]),
        msgpack.packb([[], [msgpack.packb([[SPEC | {"block_tokens": "x"}], []])]]),
        msgpack.packb(5),
        b"\xc1",
        b"",
    ],
)
def test_a_frame_of_the_journal_with_a_right_checksum_and_invalid_contents_is_lost(
    targets: dict[str, FuzzTarget], body: bytes
) -> None:
    (whole,) = targets["ssd-journal"].seeds()
    magic, journal_id, sequence, nbytes, zero, _ = FRAME.unpack_from(whole, PAGE_NBYTES)
    del nbytes
    start = FRAME.pack(magic, journal_id, sequence, len(body), zero, b"")[:-16]
    frame = start + checksum(start, body) + body
    case = whole[:PAGE_NBYTES] + frame.ljust(PAGE_NBYTES, b"\0") + whole[2 * PAGE_NBYTES :]
    targets["ssd-journal"].run(case)


@pytest.mark.parametrize("nbytes", [len(FRAME_MAGIC), FRAME.size - 1, FRAME.size])
def test_a_journal_that_ends_within_the_head_of_a_frame_has_a_torn_end(
    targets: dict[str, FuzzTarget], nbytes: int
) -> None:
    (whole,) = targets["ssd-journal"].seeds()
    targets["ssd-journal"].run(whole[: PAGE_NBYTES + nbytes])


@pytest.mark.parametrize("change", [{"window": 1.5}, {"kv_heads": 2.0}, {"head_dim": "8"}, {"layers": ["x"]}])
def test_a_spec_with_fields_of_wrong_types_is_refused_by_name(change: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        KvSpec.from_json({"groups": [SPEC["groups"][0] | change], "block_tokens": 4})  # type: ignore[index]


def test_a_plain_frame_that_is_cut_off_is_refused_by_a_tls_listener(caplog: pytest.LogCaptureFixture) -> None:
    target = load(TARGETS["messenger-tls"])
    target.open()
    try:
        target.run(b"\1" + MAGIC + b"\5\0\1")
    finally:
        target.close()
    assert "does not speak TLS" in caplog.text
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("end", [[1 << 24, 5, 9], [17, 1 << 24, 9], [17, 5, 1 << 32], [-1, 5, 9]])
def test_numbers_that_no_rdma_device_has_are_refused(end: list[int]) -> None:
    with pytest.raises(ProtocolError, match="no valid end"):
        handshake.check_ends(handshake.HandshakeConfirm(b"n" * 16, 1 << 40, [end]), 1)


@pytest.mark.parametrize("seconds", [1e300, float("inf"), float("nan")])
def test_a_pool_call_with_an_endless_time_is_refused(seconds: float) -> None:
    with pytest.raises(PoolRefused, match="lease_s"):
        _nanoseconds("lease_s", seconds)
    with pytest.raises(PoolRefused, match="wait_s"):
        _wait_s(seconds)


@pytest.mark.parametrize("target", ["\n", "host", "host:99999", ":1"])
def test_a_node_that_cannot_be_called_cannot_join(target: str) -> None:
    node = conductor_pb2.Node(node_id="p", role=common_pb2.ROLE_POOL, target=target, software=own_software())
    with pytest.raises(JoinRefused, match="cannot be called"):
        Registry().admit(node)


def test_a_request_for_a_decode_node_that_cannot_be_called_is_refused() -> None:
    submit = worker_pb2.Submit(prompt_ids=bytes(8), chain_seed=bytes(16), timeout_s=1.0)
    submit.sampling.MergeFrom(common_pb2.Sampling(max_tokens=2, top_p=1.0))
    limits = {"vocab_size": 8, "max_model_len": 64, "block_tokens": 8}
    Request.from_proto(submit, **limits)
    submit.placement.decode.node_id = "d"
    with pytest.raises(RequestRefused, match="cannot be called"):
        Request.from_proto(submit, **limits)
    submit.placement.decode.target = "unix:/d.sock"
    submit.placement.helpers.add(node_id="h", target="\n")
    with pytest.raises(RequestRefused, match="cannot be called"):
        Request.from_proto(submit, **limits)
