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

from moonpool.cluster_view.locate import api_url, locate
from moonpool.config import ServeConfig, all_settings, load
from moonpool.errors import ClusterNotFound, ConfigError, ModelFolderError, RunDirInUse
from moonpool.model_files import check_model_folder
from moonpool.supervision.child import LogFile
from moonpool.supervision.ready_file import ReadyFile, ReadyModel, ReadyNode
from moonpool.supervision.run_dir import RunDirLock, make_run_dir
from moonpool.supervision.terminal import record_level
from moonpool.supervision.threads import engine_threads, usable_cores
from moonpool_proto.v1 import conductor_pb2
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


@pytest.fixture
def run_dirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Write the ready file of a cluster of this user, whose conductor is at unix:/PORT."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def write(port: int, *, age_s: float = 0, pid: int | None = None, url: str | None = None) -> None:
        run_dir = tmp_path / f"moonpool-{os.getuid()}" / str(port)
        run_dir.mkdir(parents=True)
        url = f"http://127.0.0.1:{port}" if url is None else url
        own = replace(READY, url=url, supervisor_pid=pid or os.getpid(), conductor=f"unix:/{port}")
        own.write(run_dir / "serve.json")
        os.utime(run_dir / "serve.json", (1e9 - age_s, 1e9 - age_s))

    return write


_DEAD = 2**22 + 1  # above the largest process id that a kernel gives


def test_without_arguments_it_is_this_users_cluster_at_the_default_port_or_the_newest(
    run_dirs: Callable[..., None],
) -> None:
    with pytest.raises(ClusterNotFound, match="give --url URL"):
        locate(environ={})
    run_dirs(8002, age_s=0, pid=_DEAD)
    run_dirs(8003, age_s=1)
    run_dirs(8004, age_s=2)
    assert locate(environ={}).conductor == "unix:/8003"
    run_dirs(8000, age_s=3)
    found = locate(environ={})
    assert (found.conductor, found.urls) == ("unix:/8000", ("http://127.0.0.1:8000",))
    assert found.ready is not None


def test_a_url_is_an_api_servers_even_if_it_names_a_cluster_of_this_machine(run_dirs: Callable[..., None]) -> None:
    run_dirs(8000)
    found = locate(url="http://127.0.0.1:8000/v1/", environ={"MOONPOOL_CONDUCTOR": "head:7000"})
    assert (found.gateway, found.urls, found.ready) == ("http://127.0.0.1:8000", ("http://127.0.0.1:8000",), None)
    assert found.conductor == "http://127.0.0.1:8000/admin/conductor"
    node = conductor_pb2.Node(node_id="pool 1", target="10.0.0.1:7000")
    assert found.target_of(node) == "http://127.0.0.1:8000/admin/nodes/pool%201"
    with pytest.raises(ConfigError, match="--url"):
        locate(url="http://127.0.0.1:notaport")


def test_arguments_come_before_the_environment_and_conductors_before_the_url(
    tmp_path: Path, run_dirs: Callable[..., None]
) -> None:
    run_dirs(8000)
    both = {"MOONPOOL_CONDUCTOR": "a:7000, b:7000", "MOONPOOL_URL": "head:8000"}
    found = locate(environ=both)
    assert (found.conductor, found.others, found.gateway) == ("a:7000", ("b:7000",), "")
    assert locate(conductor=["c:1", "d:2"], environ=both).others == ("d:2",)
    assert locate(environ={"MOONPOOL_URL": "head:8000"}).gateway == "http://head:8000"
    READY.write(tmp_path / "ready.json")
    found = locate(ready_file=tmp_path / "ready.json", environ=both)
    assert (found.conductor, found.target_of(conductor_pb2.Node(target="x:1"))) == (READY.conductor, "x:1")
    with pytest.raises(ConfigError, match="--url and --conductor name one cluster each"):
        locate(url="head:8000", conductor="head:7000")


def test_the_url_of_commands_is_no_unknown_setting() -> None:
    loaded = load(
        ServeConfig, flags={}, environ={"MOONPOOL_URL": "http://head:8000"}, config_file=None, known=all_settings()
    )
    assert loaded.http.port == 8000


def test_a_chat_goes_to_the_default_port_or_to_the_newest_cluster_that_lives(run_dirs: Callable[..., None]) -> None:
    assert api_url("", {}) == "http://127.0.0.1:8000"
    run_dirs(3, age_s=3)
    run_dirs(4, age_s=2)
    run_dirs(5, age_s=1, pid=_DEAD)
    run_dirs(6, url="")  # workers that joined another cluster
    assert api_url("", {}) == "http://127.0.0.1:4"
    run_dirs(8000, age_s=9, url="http://10.0.0.1:8000")
    assert api_url("", {}) == "http://10.0.0.1:8000"
    assert api_url("", {"MOONPOOL_URL": "https://api:1/v1"}) == "https://api:1"
    assert api_url("head:80/v1/", {"MOONPOOL_URL": "https://api:1"}) == "http://head:80"
    assert api_url("https://head/x/", {}) == "https://head/x"
    for wrong in ("ftp://x", "http://", "http://x:0", "http://x:nine"):
        with pytest.raises(ConfigError, match="--url"):
            api_url(wrong)


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
