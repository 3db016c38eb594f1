"""A cluster that the wheel starts serves a replay that the client's wheel sends."""

import json
import subprocess
import time
from pathlib import Path

import pytest

from tests.wheel.environments import bare_variables, run

pytestmark = pytest.mark.long

READY_S = 500  # the first start compiles the kernels


@pytest.mark.timeout(900)
def test_the_client_replays_against_a_cluster_of_the_wheel(
    installed: Path, client_installed: Path, tmp_path: Path
) -> None:
    ready, log = tmp_path / "ready.json", tmp_path / "serve.log"
    command = [str(installed.with_name("moonpool")), "serve", "--port", "0", "--ready-file", str(ready)]
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, cwd=tmp_path, env=bare_variables(installed, tmp_path), stdout=output, stderr=output
        )
    try:
        deadline = time.monotonic() + READY_S
        while not ready.exists():
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        folder = run(installed, "-c", "from settings.worker import BUNDLED_MODEL; print(BUNDLED_MODEL)", cwd=tmp_path)
        url = json.loads(ready.read_text(encoding="utf-8"))["url"]
        replay = run(
            client_installed.with_name("moonpool-client"),
            *("trace", "replay", "conversation", "--limit", "20", "--speed", "20", "--no-unloaded"),
            *("--url", url, "--model-path", folder.stdout.strip(), "--out", str(tmp_path / "replay")),
            *("--tokens-per-block", "8"),
            cwd=tmp_path,
        )
        assert replay.returncode == 0, replay.stdout + replay.stderr
    finally:
        server.terminate()
        assert server.wait(60) == 0
    report = json.loads((tmp_path / "replay" / "report.json").read_text(encoding="utf-8"))
    assert (report["completed"], report["failed"]) == (20, 0)
