"""`moonpool demo`: run a cluster on this machine under a replayed production trace, and check the result."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from moonpool.errors import ConfigError, DemoFailed
from moonpool.options import reported_errors
from moonpool.python_path import module_command
from moonpool.supervision.parent_death import SUPERVISOR_VARIABLE
from moonpool.supervision.ready_file import ReadyFile
from moonpool.supervision.run_dir import default_run_dir

BLOCK_TOKENS = 8
# The replay computes about 390 MB of KV. The workers' pages and the pool's memory each hold a small part of it, the SSD
# all of it: the ideal hit rate is that of an infinite cache.
CAPACITY_TOKENS = 12288
POOL_BYTES = "64MiB"
POOL_SSD_BYTES = "1GiB"
MAX_QUEUE_S = 600  # a slow machine takes longer, but must not reject
MIN_VERIFIED = 50
MIN_SHARE_OF_IDEAL_HITS = 0.9
_SSD_NAME = f".moonpool-demo-ssd-{os.getuid()}"
_STARTUP_S = 180.0
_STOP_S = 60.0
_POLL_S = 0.05
_MOONPOOL = module_command("moonpool")


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("out/demo"),
    speed: Annotated[
        float, typer.Option(min=0.01, help="Factor by which arrivals are closer together than in the trace.")
    ] = 20.0,
    duration: Annotated[
        float, typer.Option(min=0, help="Seconds of the trace to replay from its start; 0: all.")
    ] = 1500.0,
    sample_families: Annotated[
        float, typer.Option(min=0.001, max=1.0, help="Fraction of the trace's prefix families.")
    ] = 0.1,
) -> None:
    """Run a small cluster of the bundled model under a replayed trace, verify its answers, and plot the results.

    It starts 1 prefill, 1 decode and 1 pool node with memory and SSD, and stops them at the end. Exits with 1 if a
    request failed or was rejected, a token was wrong, or the hit rate is too low. Uses 1 GiB in the report's folder, or
    in /var/tmp if that folder is in memory, and frees it at the end.

    Example: moonpool demo --out out/demo
    """
    with reported_errors():
        _check_writable(out)
        report = out / "report.json"
        report.unlink(missing_ok=True)
        with ssd_folder(out) as ssd, _cluster(ssd) as cluster:
            status = _replay(cluster.url, out, speed, duration, sample_families)
            leaks = subprocess.run(
                [*_MOONPOOL, "validate", "--ready-file", str(Path(cluster.run_dir) / "serve.json"), "--wait", "15"],
                check=False,
            ).returncode
        if not report.is_file():
            raise DemoFailed(f"the replay ended with exit code {status} and wrote no report")
        problems = shortcomings(json.loads(report.read_text(encoding="utf-8")))
        problems += ["the idle cluster still holds resources"] if leaks else []
        print(f"Report with pictures: {(out / 'report.html').absolute()}")
        if problems:
            raise DemoFailed("the demo failed: " + "; ".join(problems))
        print("Passed: no request failed, no token is wrong, the cache hit rate is as expected, nothing leaks.")


def shortcomings(figures: dict[str, Any]) -> list[str]:
    """Return the failures in a replay's figures; empty for a good run."""
    problems = [
        f"{key} is {figures[key]}, expected 0"
        for key in ("failed", "rejected", "wrong_tokens", "digest_mismatches")
        if figures[key] != 0
    ]
    if figures["interrupted"]:
        problems.append("it was interrupted")
    if figures["verified_requests"] < MIN_VERIFIED:
        problems.append(f"verified_requests is {figures['verified_requests']}, less than {MIN_VERIFIED}")
    hits, ideal = figures["prefix_hit_rate"] or 0.0, figures["ideal_prefix_hit_rate"] or 0.0
    if hits < MIN_SHARE_OF_IDEAL_HITS * ideal or not ideal:
        problems.append(f"prefix_hit_rate is {hits:.3f}, less than {MIN_SHARE_OF_IDEAL_HITS} of the ideal {ideal:.3f}")
    if not (figures["reuse_by_tier"] or {}).get("ssd", {}).get("tokens"):
        problems.append("no token came from the pool's SSD")
    if not figures["kv_bytes_moved"]:
        problems.append("kv_bytes_moved is 0: no KV went from prefill to decode")
    return problems


def _check_writable(out: Path) -> None:
    """Raise ConfigError before the cluster starts if the report cannot be written."""
    from loadtest import OutputUnwritable
    from loadtest.report import check_writable

    try:
        check_writable(out)
    except OutputUnwritable as error:
        raise ConfigError(str(error)) from error


@contextmanager
def ssd_folder(out: Path) -> Iterator[Path]:
    """Yield an empty folder on a disk, removed at the end; an earlier demo's left-over is removed first."""
    from kvpool.ssd.folder import on_disk

    parent = next((folder for folder in (out.absolute(), Path("/var/tmp")) if on_disk(folder)), None)
    if parent is None:
        raise ConfigError(f"{out} is in memory, and so is /var/tmp: choose a folder on a disk with --out")
    folder = parent / _SSD_NAME
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir()
    except OSError as error:
        raise ConfigError(f"cannot create {folder}: {error.strerror}") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _cluster(ssd: Path) -> Iterator[ReadyFile]:
    """Yield a running cluster on a free port; it is stopped at the end, and killed if this process is killed."""
    with tempfile.TemporaryDirectory(prefix="moonpool-demo-") as folder:
        ready_path = Path(folder) / "ready.json"
        flags = {
            "prefill-nodes": 1,
            "decode-nodes": 1,
            "pool-nodes": 1,
            "block-tokens": BLOCK_TOKENS,
            "capacity-tokens": CAPACITY_TOKENS,
            "pool-bytes": POOL_BYTES,
            "pool-ssd-dir": ssd,
            "pool-ssd-bytes": POOL_SSD_BYTES,
            "max-queue": MAX_QUEUE_S,
            "port": 0,
            "run-dir": default_run_dir("demo"),
            "frontends": 1,
            "ready-file": ready_path,
            "startup-timeout": _STARTUP_S,
        }
        server = subprocess.Popen(
            [*_MOONPOOL, "serve", *(f"--{flag}={value}" for flag, value in flags.items())],
            env={**os.environ, SUPERVISOR_VARIABLE: str(os.getpid())},
            process_group=0,  # Ctrl-C first ends the replay, with a report, then the cluster
        )
        try:
            yield _wait_ready(server, ready_path)
        finally:
            _stop(server)


def _wait_ready(server: subprocess.Popen[bytes], ready_path: Path) -> ReadyFile:
    deadline_s = time.monotonic() + _STARTUP_S + _STOP_S
    while time.monotonic() < deadline_s:
        if ready_path.is_file():
            return ReadyFile.read(ready_path)
        if server.poll() is not None:
            raise DemoFailed(f"the cluster did not start (exit code {server.returncode})")
        time.sleep(_POLL_S)
    raise DemoFailed(f"the cluster was not ready within {_STARTUP_S + _STOP_S:g} s")


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def _replay(url: str, out: Path, speed: float, duration: float, sample_families: float) -> int:
    """Run the replay in the foreground, where it receives the terminal's Ctrl-C; return its exit code."""
    flags = {
        "url": url,
        "out": out,
        "tokens-per-block": BLOCK_TOKENS,
        "sample-families": sample_families,
        "duration": duration,
        "speed": speed,
    }
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        command = [
            *_MOONPOOL,
            "trace",
            "replay",
            "conversation",
            *(f"--{flag}={value}" for flag, value in flags.items()),
        ]
        # The child would inherit SIG_IGN, with which Python ignores Ctrl-C.
        return subprocess.run([*command, "--verify"], check=False, preexec_fn=_default_sigint).returncode
    finally:
        signal.signal(signal.SIGINT, before)


def _default_sigint() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
