"""`moonpool demo`: a whole cluster on this machine under a replayed production trace, and a verdict on what it did."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from moonpool.errors import ConfigError, DemoFailed
from moonpool.options import reported_errors
from moonpool.supervision.parent_death import SUPERVISOR_VARIABLE
from moonpool.supervision.ready_file import ReadyFile
from moonpool.supervision.run_dir import default_run_dir

BLOCK_TOKENS = 8
# The replay computes some 600 MB of KV. Workers' pages and the pool's memory each hold a small part of it, the SSD all:
# the ideal hit rate is that of an infinite cache.
CAPACITY_TOKENS = 12288
POOL_BYTES = "96MiB"
POOL_SSD_BYTES = "1GiB"
MAX_QUEUE_S = 600  # on a slow machine the demo takes longer; it must not begin to reject
MIN_VERIFIED = 50
MIN_SHARE_OF_IDEAL_HITS = 0.9
_SSD_NAME = f".moonpool-demo-ssd-{os.getuid()}"
_STARTUP_S = 180.0
_STOP_S = 60.0
_POLL_S = 0.05
_MOONPOOL = (sys.executable, "-m", "moonpool")


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("out/demo"),
    speed: Annotated[
        float, typer.Option(min=0.01, help="Arrivals this many times closer together than in the trace.")
    ] = 20.0,
    sample_families: Annotated[
        float, typer.Option(min=0.001, max=1.0, help="Fraction of the trace's prefix families.")
    ] = 0.1,
) -> None:
    """See it work: start 1 prefill, 1 decode and 1 pool node with memory and SSD on the bundled model, replay the
    Mooncake conversation trace against them, verify the tokens, draw the pictures, and stop everything again.

    Exits with 1 if a request failed or was rejected, a token was wrong, or the cache was missed where it should not be.
    Takes 1 GiB in the folder of the report, or in /var/tmp where that is no disk, and gives it back at the end.

    Example: moonpool demo --out out/demo
    """
    with reported_errors():
        _check_writable(out)
        report = out / "report.json"
        report.unlink(missing_ok=True)
        with ssd_folder(out) as ssd, _cluster(ssd) as cluster:
            status = _replay(cluster.url, out, speed, sample_families)
            leaks = subprocess.run(
                [*_MOONPOOL, "validate", "--ready-file", str(Path(cluster.run_dir) / "serve.json"), "--wait", "15"],
                check=False,
            ).returncode
        if not report.is_file():
            raise DemoFailed(f"the replay ended with exit code {status} and wrote no report")
        problems = shortcomings(json.loads(report.read_text(encoding="utf-8")))
        problems += ["the cluster still holds something at rest"] if leaks else []
        print(f"Report with pictures: {(out / 'report.html').absolute()}")
        if problems:
            raise DemoFailed("the demo is not as it must be: " + "; ".join(problems))
        print("All as it must be: nothing failed, no token is wrong, the cache is hit, nothing leaks.")


def shortcomings(figures: dict[str, Any]) -> list[str]:
    """What in a replay's figures must not be so; empty for a good run."""
    problems = [
        f"{key} is {figures[key]}, not 0"
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
    """Before the cluster starts, not after."""
    from loadtest import OutputUnwritable
    from loadtest.report import check_writable

    try:
        check_writable(out)
    except OutputUnwritable as error:
        raise ConfigError(str(error)) from error


@contextmanager
def ssd_folder(out: Path) -> Iterator[Path]:
    """An empty folder on a disk for the pool, removed at the end; also what a demo that was killed left of it."""
    from kvpool.ssd.folder import on_disk

    parent = next((folder for folder in (out.absolute(), Path("/var/tmp")) if on_disk(folder)), None)
    if parent is None:
        raise ConfigError(f"{out} is in memory, and so is /var/tmp: give the demo a folder on a disk with --out")
    folder = parent / _SSD_NAME
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir()
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror}") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _cluster(ssd: Path) -> Iterator[ReadyFile]:
    """A running cluster on a free port; stopped at the end, and killed by the kernel should this process be."""
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
            "ready-file": ready_path,
            "startup-timeout": _STARTUP_S,
        }
        server = subprocess.Popen(
            [*_MOONPOOL, "serve", *(f"--{flag}={value}" for flag, value in flags.items())],
            env={**os.environ, SUPERVISOR_VARIABLE: str(os.getpid())},
            process_group=0,  # a Ctrl-C is for the replay, which ends with a report, and then for the cluster
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


def _replay(url: str, out: Path, speed: float, sample_families: float) -> int:
    """Run the replay in the foreground; it gets the terminal's Ctrl-C itself, and its exit code is returned."""
    flags = {
        "url": url,
        "out": out,
        "tokens-per-block": BLOCK_TOKENS,
        "sample-families": sample_families,
        "speed": speed,
    }
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        command = [*_MOONPOOL, "replay", "conversation", *(f"--{flag}={value}" for flag, value in flags.items())]
        # SIG_IGN would be inherited, and Python takes no Ctrl-C when it starts with it.
        return subprocess.run([*command, "--verify"], check=False, preexec_fn=_default_sigint).returncode
    finally:
        signal.signal(signal.SIGINT, before)


def _default_sigint() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
