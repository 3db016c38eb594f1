"""The command as its user meets it: a real process each time."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run `moonpool ARGUMENTS` to its end."""

    def moonpool(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MOONPOOL_")}
        return subprocess.run(
            [sys.executable, "-m", "moonpool", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**kept, "COLUMNS": "200", **environ},
        )

    return moonpool


def test_help_names_every_command_and_an_example(run: Run) -> None:
    shown = run("--help")
    assert shown.returncode == 0
    groups = "node pool slo trace bench simulate decisions keys"
    for command in f"serve demo chat doctor status top validate config {groups}".split():
        assert f" {command} " in shown.stdout
    assert "moonpool serve" in shown.stdout
    for group, commands in {
        "node": "conductor pool prefill decode aggregated frontend scale drain switch",
        "trace": "replay",
    }.items():
        shown = run(group, "--help")
        assert [name for name in commands.split() if f" {name} " not in shown.stdout] == []


def test_serves_help_shows_every_flag_with_its_default(run: Run) -> None:
    shown = run("serve", "--help").stdout
    assert "--prefill-nodes" in shown
    assert "Port to listen on; 0 selects a free one [8000]" in shown
    assert "moonpool serve ./my-llama" in shown


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; sys.argv = ['moonpool', '--help']\n"
        "from moonpool.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'numba', 'grpc', 'starlette', 'matplotlib', 'aiohttp'} & set(sys.modules)\n"
        "print('heavy:', sorted(heavy))"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines()[-1] == "heavy: []"


def test_a_port_in_use_is_named_before_anything_starts(run: Run, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = run("serve", "--port", str(port), "--run-dir", str(tmp_path / "r"))
    assert ended.returncode == 2
    assert f"port {port} on 127.0.0.1 is in use" in ended.stderr
    assert "--port" in ended.stderr
    assert not (tmp_path / "r").exists()


def test_a_bad_model_folder_is_named_before_anything_starts(run: Run, tmp_path: Path) -> None:
    missing = run("serve", str(tmp_path / "nothing"), "--port", "0")
    assert (missing.returncode, f"{tmp_path}/nothing does not exist" in missing.stderr) == (2, True)
    empty = run("serve", str(tmp_path), "--port", "0")
    assert (empty.returncode, "has no config.json" in empty.stderr) == (2, True)
    added = run("serve", "--add-model", f"x={tmp_path}/nowhere", "--port", "0")
    assert (added.returncode, f"{tmp_path}/nowhere does not exist" in added.stderr) == (2, True)


def test_models_whose_names_clash_are_refused_before_anything_starts(run: Run) -> None:
    clash = run("serve", "--add-model", "x=/m/1", "--add-model", "y=/m/2,alias=x")
    assert clash.returncode == 2
    assert (
        "the name 'x' is given twice: to the model in /m/1 and to the model in /m/2 ('y') as an alias" in clash.stderr
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("serve", "--port", "99999"), "--port must be from 0 to 65535, got 99999"),
        (("serve", "--prefill-nodes", "-1"), "--prefill-nodes must be from 0 to 256, got -1"),
        (("serve", "--transport", "pigeon"), "--transport must be one of auto, rdma, tcp, shm, got 'pigeon'"),
        (("decode-node", "--pool", "x:1"), "--conductor is required"),
        (("serve", "--host", "no.such.host.invalid"), "cannot listen at no.such.host.invalid:8000"),
    ],
)
def test_a_wrong_flag_is_refused_by_name(run: Run, arguments: tuple[str, ...], message: str) -> None:
    ended = run(*arguments)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_role_without_the_rdma_it_was_told_to_use_is_not_tried_again(run: Run) -> None:
    where = "--conductor=127.0.0.1:1", "--listen=127.0.0.1:0", "--pool-bytes=16MiB"
    refused = run("pool-node", *where, "--transport=rdma", "--rdma-devices=none_such")
    assert refused.returncode == 2
    assert "no RDMA port can be used: none_such left out" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_an_unknown_variable_is_refused_with_the_nearest(run: Run) -> None:
    ended = run("serve", MOONPOOL_PREFIL_NODES="2")
    assert ended.returncode == 2
    assert "unknown environment variable MOONPOOL_PREFIL_NODES; did you mean MOONPOOL_PREFILL_NODES?" in ended.stderr


def test_the_printed_configuration_file_is_accepted_as_it_is(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "all.yaml"
    path.write_text(run("config").stdout)
    ended = run("serve", str(tmp_path / "nothing"), "--config", str(path))
    assert "nothing does not exist" in ended.stderr


def test_a_command_without_a_cluster_says_so(run: Run, tmp_path: Path) -> None:
    for command in ("status", "validate"):
        ended = run(command, XDG_RUNTIME_DIR=str(tmp_path))
        assert ended.returncode == 1
        assert "no cluster of this user and machine is known for http://127.0.0.1:8000" in ended.stderr


def test_an_orphan_does_not_start() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "moonpool", "--help"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "MOONPOOL_SUPERVISOR_PID": "1"},
    )
    assert ended.returncode == 1
    assert "the supervisor has ended" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--speed", "0"), "'--speed'"),
        (("--sample-families", "7"), "'--sample-families'"),
        (("--out", "/dev/null/report"), "cannot write to the folder /dev/null/report"),
    ],
)
def test_a_demo_that_cannot_end_well_is_not_begun(run: Run, arguments: tuple[str, str], message: str) -> None:
    ended = run("demo", *arguments)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert "Starting" not in ended.stderr
    assert "Traceback" not in ended.stderr
