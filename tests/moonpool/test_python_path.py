"""Modules come from the program's own code, whatever lies in the working directory."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moonpool.python_path import child_environment, module_command
from tests.long_cases import others_long

ROOT = Path(__file__).parents[2]
DEADLINE_S = 150.0


def test_children_search_neither_an_empty_nor_a_relative_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    environ = child_environment({"PYTHONPATH": os.pathsep.join(["", "lib", "/opt/x", ""]), "HOME": "/h"})
    own = [str(ROOT), str(ROOT / "proto")]
    assert environ["PYTHONPATH"].split(os.pathsep) == [*own, str(tmp_path / "lib"), "/opt/x"]
    assert (environ["PYTHONSAFEPATH"], environ["HOME"]) == ("1", "/h")


def test_a_module_command_leaves_the_working_directory_out(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('from the working directory')")
    command = module_command("json.tool", "--help")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "path_prefix", others_long(["", os.pathsep], [""]), ids=["as it is", "with an empty entry in PYTHONPATH"]
)
def test_modules_in_the_working_directory_do_not_break_a_cluster(path_prefix: str, tmp_path: Path) -> None:
    marker = tmp_path / "imported"
    trap = f"open({str(marker)!r}, 'a').write(__name__ + '\\n'); raise ImportError('from the working directory')\n"
    for name in ("worker.py", "json.py", "yaml.py", "multiprocessing.py"):
        (tmp_path / name).write_text(trap)
    for package in ("engine", "conductor", "grpc"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(trap)
    ready = tmp_path / "ready.json"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MOONPOOL_")}
    environ["PYTHONPATH"] = path_prefix + os.pathsep.join([str(ROOT), str(ROOT / "proto")])
    command = [sys.executable, "-m", "moonpool", "serve", "--port=0", "--engine=paced", f"--ready-file={ready}"]
    log = tmp_path / "log"
    with (
        log.open("wb") as output,
        subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=output, stderr=output) as serve,
    ):
        give_up = time.monotonic() + DEADLINE_S
        while not ready.exists() and serve.poll() is None and time.monotonic() < give_up:
            time.sleep(0.1)
        was_ready = ready.exists()
        serve.terminate()
        assert serve.wait(60) == 0, log.read_text()
    assert was_ready, log.read_text()
    assert not marker.exists(), marker.read_text()
