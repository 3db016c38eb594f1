"""Writing traces in order of time, and checking and summarising them."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces import EmptySelection, TraceFormatError, TraceNotFound, TraceRow, read_trace, reuse_statistics
from traces.check import check_trace
from traces.errors import TraceUnwritable
from traces.formats import SourceSettings
from traces.overview import TraceOverview
from traces.source import AUTO, TraceSource, open_source
from traces.time_order import in_time_order
from traces.writer import row_line, write_trace

ROOT = Path(__file__).parents[2]
ROWS = st.lists(
    st.builds(
        lambda at, length, output, session: (at, length, output, session),
        st.integers(-1000, 1000),
        st.integers(1, 2000),
        st.integers(0, 50),
        st.sampled_from(["", "a", "b"]),
    ),
    min_size=1,
    max_size=30,
)


def rows_of(found: list[tuple[int, int, int, str]]) -> list[TraceRow]:
    return [
        TraceRow(i, at, length, output, tuple(range(-(-length // 512))), session)
        for i, (at, length, output, session) in enumerate(found)
    ]


@given(ROWS, st.integers(1, 2000))
def test_rows_come_in_order_of_time_whatever_fits_in_memory(
    found: list[tuple[int, int, int, str]], memory_bytes: int
) -> None:
    rows = rows_of(found)
    ordered = list(in_time_order(rows, memory_bytes=memory_bytes))
    assert ordered == sorted(rows, key=lambda row: row.timestamp_ms)


@pytest.mark.parametrize("suffix", ["", ".xz", ".gz", ".zst"])
def test_a_written_trace_is_read_again(tmp_path: Path, suffix: str) -> None:
    rows = rows_of([(700, 600, 5, "a"), (700, 1, 0, ""), (900, 1500, 7, "b")])
    path = tmp_path / f"trace.jsonl{suffix}"
    assert write_trace(rows, path) == 3
    expected = [
        TraceRow(r.index, r.timestamp_ms - 700, r.input_length, r.output_length, r.hash_ids, r.session) for r in rows
    ]
    trace = read_trace(path)
    assert list(trace) == expected
    assert trace.notices == ()


def damaged_after(rows: list[TraceRow], error: BaseException) -> Iterator[TraceRow]:
    yield from rows
    raise error


@pytest.mark.parametrize("suffix", ["", ".xz", ".gz", ".zst"])
@pytest.mark.parametrize("error", [TraceFormatError("t", 3, found="x", expected="y"), KeyboardInterrupt()])
def test_after_a_failure_nothing_is_written_and_the_old_file_stays(
    tmp_path: Path, suffix: str, error: BaseException
) -> None:
    path = tmp_path / f"trace.jsonl{suffix}"
    with pytest.raises(type(error)):
        write_trace(damaged_after(rows_of([(0, 5, 1, "")]), error), path)
    assert list(tmp_path.iterdir()) == []
    path.write_text("old")
    with pytest.raises(type(error)):
        write_trace(damaged_after(rows_of([(0, 5, 1, "")]), error), path, overwrite=True)
    assert [(each, each.read_text()) for each in tmp_path.iterdir()] == [(path, "old")]


def test_what_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    rows = rows_of([(0, 5, 1, "")])
    path = tmp_path / "trace.jsonl"
    with pytest.raises(EmptySelection, match=r"trace\.jsonl"):
        write_trace([], path)
    path.write_text("old")
    with pytest.raises(TraceUnwritable, match=r"exists; .*--overwrite"):
        write_trace(rows, path)
    assert write_trace(rows, path, overwrite=True) == 1
    with pytest.raises(TraceUnwritable, match="not a regular file"):
        write_trace(rows, tmp_path, overwrite=True)
    with pytest.raises(TraceUnwritable, match=r"cannot write .*No such file"):
        write_trace(rows, tmp_path / "none" / "trace.jsonl")
    assert [each.name for each in tmp_path.iterdir()] == ["trace.jsonl"]


FULL_DISK = """
import resource, sys
from pathlib import Path
from traces import TraceError, TraceRow
from traces.time_order import in_time_order
from traces.writer import write_trace
rows = [TraceRow(i, -i, 10, 1, (i,)) for i in range(9000)]
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    write_trace(in_time_order(rows, memory_bytes=int(sys.argv[2])), Path(sys.argv[1]))
except TraceError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("memory_bytes", "message"), [(1 << 30, "cannot write {path}: "), (1 << 21, "cannot write a temporary file in ")]
)
def test_files_that_cannot_grow_are_named(tmp_path: Path, memory_bytes: int, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    command = [sys.executable, "-c", FULL_DISK, path, str(memory_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, cwd=ROOT)
    assert done.stdout.startswith(message.format(path=path)), done.stdout
    assert list(tmp_path.iterdir()) == []


def test_memory_does_not_grow_with_the_trace(tmp_path: Path) -> None:
    def many() -> Iterator[TraceRow]:
        for i in range(40_000):
            yield TraceRow(i, -i, 100, 1, (10**15 + i,), f"session {i}")

    tracemalloc.start()
    try:
        write_trace(in_time_order(many(), memory_bytes=1 << 20), tmp_path / "trace.jsonl")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20
    assert (tmp_path / "trace.jsonl").read_bytes().count(b"\n") == 40_000


def open_text(text: bytes) -> TraceSource:
    return TraceSource(io.BytesIO(text), "t", AUTO, SourceSettings(block_tokens=0))


GOOD = {"timestamp": 10, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}


def lines(*rows: object) -> bytes:
    return b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)


def test_a_check_finds_every_problem_and_lists_the_first_ones() -> None:
    text = lines(
        GOOD,
        GOOD | {"timestamp": -1},
        b"{",
        GOOD | {"hash_ids": [0]},
        GOOD | {"timestamp": 5},
        GOOD | {"hash_ids": [7, 1]},
        {"timestamp": 9},
        GOOD,
    )
    found = check_trace(open_text(text), most=4)
    assert [(each.line, each.kind) for each in found.problems] == [
        (2, "value"),
        (3, "syntax"),
        (4, "ids"),
        (5, "order"),
    ]
    assert found.counts == {"value": 1, "syntax": 1, "ids": 1, "order": 1, "chain": 1, "missing": 1}
    assert found.requests == 4
    assert "found a time 5 ms earlier" in str(found.problems[3])


def test_a_check_of_a_sound_trace_finds_nothing() -> None:
    found = check_trace(open_text(lines(GOOD, GOOD)), most=4)
    assert (found.requests, found.problems, found.counts) == (2, [], {})


def test_a_check_ends_where_nothing_more_can_be_read() -> None:
    text = b'[{"conversations": []}, {"conversations": 1}, {"conversations" []}, 5]'
    found = check_trace(open_text(text), most=9)
    assert [(each.line, each.kind) for each in found.problems] == [(1, "value"), (1, "file")]


@given(ROWS)
def test_an_overview_agrees_with_plain_restatements(found: list[tuple[int, int, int, str]]) -> None:
    rows = sorted(rows_of(found), key=lambda row: row.timestamp_ms)
    overview = TraceOverview(512, counts_reuse=True)
    for row in rows:
        overview.add(row)
    figures = overview.figures()
    lengths = sorted(row.input_length for row in rows)
    assert figures["requests"] == len(rows)
    assert figures["duration_s"] == (rows[-1].timestamp_ms - rows[0].timestamp_ms) / 1000
    for percent in (50, 90, 99):
        assert figures["prompt_tokens"][f"p{percent}"] == lengths[-(-len(lengths) * percent // 100) - 1]
    assert figures["prompt_tokens"]["mean"] == pytest.approx(sum(lengths) / len(lengths))
    assert figures["output_tokens"]["sum"] == sum(row.output_length for row in rows)
    if figures["duration_s"]:
        assert figures["requests_per_s"] == pytest.approx(len(rows) / figures["duration_s"])
    named = [row.session for row in rows if row.session]
    if named:
        assert figures["sessions"]["sessions"] == len(set(named))
        assert figures["sessions"]["turns"]["max"] == max(map(named.count, named))
        assert figures["sessions"]["requests_without_session"] == len(rows) - len(named)
    else:
        assert figures["sessions"] is None


def test_the_overview_counts_the_same_reuse_as_a_replay(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [TraceRow(i, i, 1200, 1, (0, 1, 2 + i)) for i in range(5)]
    path.write_bytes(b"".join(map(row_line, rows)))
    overview = TraceOverview(512, counts_reuse=True)
    with open_source(path, AUTO, SourceSettings()) as source:
        for row in source.rows():
            overview.add(row)
    assert overview.figures()["reuse"]["token_hit_rate"] == reuse_statistics(read_trace(path)).token_hit_rate > 0.6


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(TraceNotFound, match=r"nowhere\.csv"),
        open_source(tmp_path / "nowhere.csv", AUTO, SourceSettings()),
    ):
        pass
