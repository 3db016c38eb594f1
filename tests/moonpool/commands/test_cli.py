"""The command as its user meets it: a real process each time."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moonpool.cli import app
from moonpool.commands.lazy import every_command
from moonpool.commands.serve_flags import SHOWN, SUBSTITUTES
from moonpool.config import ServeConfig, composite_settings
from rpc.versions import package_version

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
        "node": "conductor pool prefill decode aggregated frontend endpoint-picker scale drain switch",
        "trace": "replay",
    }.items():
        shown = run(group, "--help")
        assert [name for name in commands.split() if f" {name} " not in shown.stdout] == []


def test_serves_help_shows_the_usual_flags_with_their_defaults_and_help_all_every_flag(run: Run) -> None:
    shown, everything = run("serve", "--help").stdout, run("serve", "--help-all").stdout
    assert "--prefill-nodes" in shown
    assert "Port to listen on; 0 selects a free one [8000]" in shown
    assert "moonpool serve ./my-llama" in shown
    flags = {declared.flag for key, declared in composite_settings(ServeConfig).items() if key != "model"}
    usual = {flag for flag in flags if f"{flag} " in shown or f"{flag}," in shown}
    assert 20 <= len(usual) <= 25
    assert [flag for flag in flags if flag not in everything] == []
    assert "--undivided" not in everything  # an earlier name


def test_every_flag_of_the_short_help_is_one_of_serve() -> None:
    assert set(SHOWN) - composite_settings(ServeConfig).keys() == {"config"}


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--tensor-parallel-size=2", "--vllm-args '--tensor-parallel-size"),
        ("--gpu_memory_utilization=0.9", "--memory-fraction"),
        ("--enable-prefix-caching", "omit it, since prefixes are always reused"),
    ],
)
def test_a_flag_of_vllm_without_an_equal_names_the_substitute(run: Run, flag: str, said: str) -> None:
    done = run("serve", flag)
    assert done.returncode == 2
    assert said in done.stderr
    assert "is a flag of vLLM" in done.stderr


def test_flags_of_vllm_with_an_equal_set_the_same() -> None:
    params = {opt: param.name for param in every_command(app)["serve"].params for opt in param.opts}
    for theirs, ours in {
        "--max-num-seqs": "max_batch",
        "--max-num-batched-tokens": "prefill_chunk_tokens",
        "--max-model-len": "max_model_len",
        "--block-size": "block_tokens",
        "--served-model-name": "served_model_name",
        "--ssl-certfile": "http_tls_cert",
        "--ssl-keyfile": "http_tls_key",
        "--api-key": "api_key",
        "--host": "host",
        "--port": "port",
        "--dtype": "dtype",
    }.items():
        assert params[theirs] == ours
    assert [flag for flag in SUBSTITUTES if flag in params] == []


@pytest.mark.parametrize("command", ["trace replay", "replay", "simulate overload", "simulate tune"])
def test_objectives_have_one_spelling_and_the_earlier_one_is_accepted_but_hidden(command: str) -> None:
    shown = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "200"}).output
    assert "--ttft-slo" in shown
    assert "--tbt-slo" in shown
    earlier = ("--slo-ttft", "--slo-tbt") if "replay" in command else ("--ttft", "--tbt")
    assert [flag for flag in earlier if f"{flag} " in shown or f",{flag}" in shown] == []
    flags = {flag for param in every_command(app)[command].params for flag in param.opts}
    assert set(earlier) <= flags


def test_the_version_is_the_packages(run: Run) -> None:
    assert run("--version").stdout == f"moonpool {package_version()}\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("moonpool sta", ["status"]),
        ("moonpool node dr", ["drain"]),
        ("moonpool serve --prefill-n", ["--prefill-nodes"]),
        ("moonpool pool ver", ["verify"]),  # imported only when it is used
        ("moonpool slo set --expect", ["--expect-version"]),
    ],
)
def test_the_shell_completes_commands_and_flags(run: Run, line: str, words: list[str]) -> None:
    script = "import sys; sys.argv = ['moonpool']; from moonpool.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={
            **os.environ,
            "_MOONPOOL_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(line.split()) - 1),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == words, done.stderr


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
        assert "no cluster of this user runs on this machine" in ended.stderr


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
