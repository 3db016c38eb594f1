import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moonpool.cluster_view.locate import chat_url, locate
from moonpool.errors import ClusterNotFound, ConfigError, ModelFolderError, RunDirInUse
from moonpool.model_files import check_model_folder
from moonpool.supervision.child import LogFile
from moonpool.supervision.ready_file import ReadyFile, ReadyModel, ReadyNode
from moonpool.supervision.run_dir import RunDirLock, make_run_dir
from moonpool.supervision.terminal import record_level
from moonpool.supervision.threads import engine_threads, usable_cores
from settings.worker import BUNDLED_MODEL

READY = ReadyFile(
    "http://127.0.0.1:1",
    "m",
    7,
    "/run/x",
    "unix:/run/x/conductor.sock",
    {
        "a": ReadyNode("conductor", 8, "unix:/run/x/conductor.sock", True, 0, "/run/x/a.log"),
        "b": ReadyNode("prefill-node", 9, "unix:/run/x/b.sock", True, 0, "/run/x/b.log", "m"),
    },
    [ReadyModel("m", ["alias"], "/models/m")],
)


def test_a_ready_file_is_read_as_written(tmp_path: Path) -> None:
    READY.write(tmp_path / "ready.json")
    assert ReadyFile.read(tmp_path / "ready.json") == READY
    assert [path.name for path in tmp_path.iterdir()] == ["ready.json"]


@pytest.mark.parametrize("text", ["", "[]", '{"nodes": {}}', '{"nodes": {"a": {}}}', '{"nodes": 1}'])
def test_what_is_no_ready_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ready.json"
    path.write_text(text)
    with pytest.raises(ClusterNotFound, match=r"is not a ready file of `moonpool serve`"):
        ReadyFile.read(path)


def test_a_cluster_is_found_by_its_port_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    run_dir = tmp_path / f"moonpool-{os.getuid()}" / "8000"
    run_dir.mkdir(parents=True)
    READY.write(run_dir / "serve.json")
    assert locate(conductor="", url="http://127.0.0.1:8000", ready_file=None).conductor == READY.conductor
    with pytest.raises(ClusterNotFound, match="give --conductor ADDRESS"):
        locate(conductor="", url="http://127.0.0.1:8001", ready_file=None)
    with pytest.raises(ConfigError, match="--url"):
        locate(conductor="", url="http://127.0.0.1:notaport", ready_file=None)
    assert locate(conductor="head:7000", url="", ready_file=None).urls == ()


def test_a_chat_goes_to_the_default_port_or_to_the_newest_cluster_that_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert chat_url("") == "http://127.0.0.1:8000"
    for age_s, port in enumerate((3, 4, 5)):
        run_dir = tmp_path / f"moonpool-{os.getuid()}" / str(port)
        run_dir.mkdir(parents=True)
        is_dead = port == 5
        pid = 2**22 + 1 if is_dead else os.getpid()  # above the largest a kernel gives
        replace(READY, url=f"http://127.0.0.1:{port}", supervisor_pid=pid).write(run_dir / "serve.json")
        os.utime(run_dir / "serve.json", (1e9 + age_s, 1e9 + age_s))
    assert chat_url("") == "http://127.0.0.1:4"
    usual = tmp_path / f"moonpool-{os.getuid()}" / "8000"
    usual.mkdir()
    replace(READY, url="http://10.0.0.1:8000", supervisor_pid=os.getpid()).write(usual / "serve.json")
    os.utime(usual / "serve.json", (1e9, 1e9))
    assert chat_url("") == "http://10.0.0.1:8000"
    assert chat_url("head:80/v1/") == "http://head:80"
    assert chat_url("https://head/x/") == "https://head/x"
    for wrong in ("ftp://x", "http://", "http://x:0", "http://x:nine"):
        with pytest.raises(ConfigError, match="--url"):
            chat_url(wrong)


def test_a_run_directory_is_its_users_alone(short_path: Path) -> None:
    path = make_run_dir(short_path / "a" / "b")
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_run_directory_too_long_for_unix_sockets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too long for unix sockets"):
        make_run_dir(tmp_path / ("x" * 80))


def test_a_run_directory_that_is_a_file_is_refused() -> None:
    # pytest's own folder may be too long for unix sockets, which is found first.
    with tempfile.NamedTemporaryFile() as file, pytest.raises(ConfigError, match="cannot make the run directory"):
        make_run_dir(Path(file.name))


def test_a_run_directory_in_use_names_its_owner_and_is_free_afterwards(tmp_path: Path) -> None:
    with RunDirLock(tmp_path), pytest.raises(RunDirInUse, match=f"process {os.getpid()}"), RunDirLock(tmp_path):
        pass
    with RunDirLock(tmp_path):
        pass


def test_a_log_is_bounded_and_keeps_the_newest_lines(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "a.log", limit_nbytes=1000)
    for index in range(200):
        log.write(f"line {index:04d}")
    log.close()
    current, previous = tmp_path / "a.log", tmp_path / "a.log.1"
    assert current.stat().st_size + previous.stat().st_size <= 2 * 1010
    lines = (previous.read_text() + current.read_text()).split("\n")[:-1]
    assert lines[-1] == "line 0199"
    assert lines == [f"line {index:04d}" for index in range(200 - len(lines), 200)]


def _config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: shutil.rmtree(folder), "does not exist"),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json cannot be read as JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "must hold a JSON object"),
        (lambda folder: _config(folder, architectures=["MambaForCausalLM"]), "MambaForCausalLM is not supported"),
        (lambda folder: _config(folder, hidden_size=0), "hidden_size must be a positive integer, got 0"),
        (
            lambda folder: _config(folder, hidden_size=256),
            r"wrong shape .*: expected \[2048, 256\], found \[2048, 160\]",
        ),
        (lambda folder: (folder / "model.safetensors").unlink(), "no weights in the safetensors format"),
        (lambda folder: _cut(folder / "model.safetensors"), "is truncated"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer.json"),
    ],
)
def test_a_damaged_model_folder_is_refused_in_the_engines_words(
    tmp_path: Path, damage: Callable[[Path], Any], message: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(BUNDLED_MODEL, folder)
    check_model_folder(folder)
    damage(folder)
    with pytest.raises(ModelFolderError, match=message):
        check_model_folder(folder)


def test_a_model_folder_is_checked_without_torch() -> None:
    code = (
        "import sys; from settings.worker import BUNDLED_MODEL; "
        "from moonpool.model_files import check_model_folder; check_model_folder(BUNDLED_MODEL); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_container_quota_limits_the_cores(tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    quota.write_text("50000 100000\n")
    assert usable_cores(quota) == 1
    quota.write_text("max 100000\n")
    assert usable_cores(quota) == len(os.sched_getaffinity(0))
    assert usable_cores(tmp_path / "missing") == len(os.sched_getaffinity(0))


def test_threads_are_an_equal_share_unless_given() -> None:
    assert [engine_threads(0, engines, 8) for engines in (1, 2, 3, 8, 100)] == [8, 4, 2, 1, 1]
    assert engine_threads(5, 2, 8) == 5


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("12:00:00.123 WARNING node x: y", "WARNING"),
        ("12:00:00.123 INFO    node x: y", "INFO"),
        (json.dumps({"level": "error"}), "ERROR"),
        ("{broken", None),
        ('{"level": 3}', None),
        ("Traceback (most recent call last):", None),
    ],
)
def test_a_records_level_is_read_in_both_formats(line: str, level: str | None) -> None:
    assert record_level(line) == level
