"""Reading traces: containers, and rows that are not what the format says."""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from traces import TraceFormatError, TraceNotFound, TraceRow, read_trace
from traces.reader import parse_row

GOOD = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}


def lines_of(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "plain": lambda data: data,
    "xz": lzma.compress,
    "gz": gzip.compress,
    "zst": zstandard.ZstdCompressor().compress,
    "zst_frames": lambda data: zstandard.ZstdCompressor().compress(data[:20]) + zstandard.compress(data[20:]),
}


@pytest.mark.parametrize("kind", PACKERS)
def test_every_container_is_known_by_its_bytes(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "trace.bin"
    path.write_bytes(PACKERS[kind](lines_of([GOOD, GOOD | {"timestamp": 7, "hash_ids": [0, 2]}])))
    trace = read_trace(path)
    assert trace.rows == (TraceRow(0, 0, 600, 5, (0, 1)), TraceRow(1, 7, 600, 5, (0, 2)))
    assert trace.notices == ()


@pytest.mark.parametrize(
    ("change", "found", "expected"),
    [
        ({"timestamp": -1}, "timestamp -1", "at least 0"),
        ({"timestamp": 1.5}, "timestamp 1.5", "an integer"),
        ({"timestamp": True}, "timestamp True", "an integer"),
        ({"input_length": 0}, "input_length 0", "at least 1"),
        ({"input_length": "600"}, "input_length '600'", "an integer"),
        ({"output_length": -5}, "output_length -5", "at least 0"),
        ({"hash_ids": [0]}, "1 hash_ids for an input_length of 600", "2: one id per 512 tokens"),
        ({"hash_ids": [0, 1, 2]}, "3 hash_ids for an input_length of 600", "2: one id per 512 tokens"),
        ({"hash_ids": [0, -1]}, "hash_ids [0, -1]", "non-negative"),
        ({"hash_ids": [0, "1"]}, "hash_ids [0, '1']", "integers"),
        ({"hash_ids": [3, 3]}, "a repeated id", "different within a row"),
        ({"hash_ids": 5}, "hash_ids 5", "a list"),
    ],
)
def test_a_wrong_value_is_reported_with_line_finding_and_expectation(
    tmp_path: Path, change: dict[str, Any], found: str, expected: str
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(lines_of([GOOD, GOOD, GOOD | change]))
    with pytest.raises(TraceFormatError) as caught:
        read_trace(path)
    assert caught.value.line == 3
    assert found in caught.value.found
    assert expected in caught.value.expected
    assert str(caught.value).startswith(f"{path}, line 3: found ")


@pytest.mark.parametrize("missing", GOOD)
def test_a_missing_field_is_named(missing: str) -> None:
    row = {key: value for key, value in GOOD.items() if key != missing}
    with pytest.raises(TraceFormatError, match=f"line 9: found no '{missing}'"):
        parse_row(json.dumps(row).encode(), index=0, source="t", line=9)


@pytest.mark.parametrize("text", [b"{", b"[1, 2]", b"null", b"\xff\xfe", b'{"timestamp": 0,}', b"[" * 100_000])
def test_a_line_that_is_no_object_is_refused(text: bytes) -> None:
    with pytest.raises(TraceFormatError, match=r"line 4: .*JSON object"):
        parse_row(text, index=0, source="t", line=4)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_row_or_a_format_error(text: bytes) -> None:
    with suppress(TraceFormatError):
        assert isinstance(parse_row(text, index=0, source="t", line=1), TraceRow)


def test_blank_lines_keep_the_count_of_lines_right(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(lines_of([GOOD]) + b"\n  \n" + lines_of([GOOD | {"timestamp": None}]))
    with pytest.raises(TraceFormatError, match="line 4"):
        read_trace(path)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"")
    with pytest.raises(TraceFormatError, match="no row"):
        read_trace(path)


@pytest.mark.parametrize("kind", ["xz", "gz", "zst"])
def test_a_truncated_container_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "trace"
    rows = [GOOD | {"timestamp": i, "hash_ids": [i, 7 * i + 1]} for i in range(500)]
    packed = PACKERS[kind](lines_of(rows))
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(TraceFormatError):
        read_trace(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceNotFound, match=r"nowhere\.jsonl"):
        read_trace(tmp_path / "nowhere.jsonl")
    with pytest.raises(TraceNotFound):
        read_trace(tmp_path)


def test_rows_out_of_order_are_sorted_with_a_notice(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(lines_of([GOOD | {"timestamp": at} for at in (5, 1, 9, 3)]))
    trace = read_trace(path)
    assert [row.timestamp_ms for row in trace] == [1, 3, 5, 9]
    assert [row.index for row in trace] == [1, 3, 0, 2]
    assert "2 rows" in trace.notices[0]
    assert "line 2" in trace.notices[0]


def test_ids_that_are_not_chained_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(lines_of([GOOD, GOOD | {"hash_ids": [2, 1]}]))
    assert "1 rows use an id with a different predecessor" in read_trace(path).notices[0]
