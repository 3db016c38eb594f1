"""The decision log's files: how they are bounded, searched, and what damage costs."""

import os
from pathlib import Path

import pytest

from conductor.config import ConductorConfig
from conductor.core import Core
from conductor.decision_log import find_records, record_search
from conductor.decision_log.files import LineFiles, LinesLost, numbered, read_lines
from conductor.errors import ConductorConfigError
from conductor.policy.events import RequestCompleted
from settings.keys import assemble


def test_files_are_turned_over_compressed_and_bounded(tmp_path, start, make, records):
    core = start(log={"decision_log_size_bytes": 4096, "decision_log_files": 3})
    for i in range(60):
        core.handle(make.request(f"r{i}"))
        core.handle(RequestCompleted(f"r{i}", 0, "finished"))
    core.close()
    files = numbered(tmp_path / "log", "decisions")
    assert len(files) == 4
    assert min(files) > 1
    assert [path.suffix for path in files.values()] == [".zst", ".zst", ".zst", ".jsonl"]
    for path in files.values():
        lines = [line for _, line in read_lines(path)]
        assert 0 < sum(map(len, lines)) + len(lines) <= 4096
        assert path.stat().st_mode & 0o077 == 0
    names = [row["request_id"] for row in records()]
    assert names == [f"r{i}" for i in range(60 - len(names), 60)]
    found = find_records(tmp_path / "log", "r0")
    assert (found.records, found.num_removed_files) == ([], min(files) - 1)
    assert [row["request_id"] for row in find_records(tmp_path / "log", "r59").records] == ["r59"]


def test_a_file_that_is_removed_while_it_is_searched_is_no_damage(tmp_path, start, make, monkeypatch):
    core = start(log={"decision_log_size_bytes": 4096, "decision_log_files": 3})
    for i in range(60):
        core.handle(make.request(f"r{i}"))
        core.handle(RequestCompleted(f"r{i}", 0, "finished"))
    core.close()

    def numbered_before_the_oldest_went(folder: Path, stem: str) -> dict[int, Path]:
        files = numbered(folder, stem)
        min(files.items())[1].unlink()
        return files

    monkeypatch.setattr(record_search, "numbered", numbered_before_the_oldest_went)
    found = find_records(tmp_path / "log", "r59")
    assert [row["request_id"] for row in found.records] == ["r59"]
    assert found.damaged == ()


def test_a_torn_last_line_is_no_line(tmp_path, start, make, records):
    core = start()
    for name in "ab":
        core.handle(make.request(name))
        core.handle(RequestCompleted(name, 0, "finished"))
    core.close()
    path = numbered(tmp_path / "log", "decisions")[1]
    path.write_bytes(path.read_bytes()[:-20])
    assert [row["request_id"] for row in records()] == ["a"]
    assert find_records(tmp_path / "log", "b").records == []
    core = start()
    core.handle(make.request("c"))
    core.handle(RequestCompleted("c", 0, "finished"))
    core.close()
    assert [row["request_id"] for row in records()] == ["a", "c"]


def test_two_conductors_do_not_write_the_same_log(start):
    start()
    with pytest.raises(ConductorConfigError, match="another conductor uses this folder"):
        start()


def test_a_folder_that_cannot_be_used_is_refused_by_name(tmp_path):
    (tmp_path / "log").write_text("")
    with pytest.raises(ConductorConfigError, match=r"decision_log is '.*log', which cannot be used"):
        Core(assemble(ConductorConfig, listen="none", decision_log=tmp_path / "log"))


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", "[" * 100_000, '{"secret": "zz", "started_ms": 1}', '{"secret": "", "started_ms": 1}'),
        '{"secret": "%s", "started_ms": 1}' % ("00" * 65),
        '{"secret": "00", "started_ms": 1e999}',
    ],
)
def test_a_damaged_identity_is_said(tmp_path, text):
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "log.json").write_text(text)
    for _ in range(2):  # the folder is not held by one that could not begin
        with pytest.raises(ConductorConfigError, match=r"log\.json is damaged"):
            Core(assemble(ConductorConfig, listen="none", decision_log=tmp_path / "log"))


def test_lines_that_could_not_be_written_are_told_by_number_and_leave_no_torn_line(tmp_path):
    files = LineFiles(tmp_path, "x", 1 << 20, 2)
    files.write([b"a\n"])
    path = numbered(tmp_path, "x")[1]
    files.close()
    files._fd, files._path, files._nbytes = os.open("/dev/full", os.O_WRONLY), path, 2
    with pytest.raises(LinesLost) as error:
        files.write([b"b\n", b"c\n"])
    assert error.value.count == 2
    files.close()
    files.write([b"d\n"])
    files.close()
    assert [line for path in numbered(tmp_path, "x").values() for _, line in read_lines(path)] == [b"a", b"d"]


def test_a_file_that_is_compressed_while_it_is_found_is_read_all_the_same(tmp_path):
    files = LineFiles(tmp_path, "x", 1 << 20, 5)
    files.write([b"a\n"])
    before = numbered(tmp_path, "x")[1]
    files.turn_over()
    files.close()
    assert before.suffix == ".jsonl"
    assert not before.exists()
    assert [line for _, line in read_lines(before)] == [b"a"]


def test_a_damaged_file_is_named_and_the_others_are_searched(tmp_path, start, make):
    core = start(log={"decision_log_size_bytes": 4096})
    for i in range(12):
        core.handle(make.request(f"r{i}"))
        core.handle(RequestCompleted(f"r{i}", 0, "finished"))
    core.close()
    first, *_ = numbered(tmp_path / "log", "decisions").values()
    first.write_bytes(first.read_bytes()[:30] + b"x" * 30)
    found = find_records(tmp_path / "log", "r11")
    assert [row["request_id"] for row in found.records] == ["r11"]
    assert found.damaged[0].startswith(first.name)
