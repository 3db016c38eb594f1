"""Own Ray instance on this machine, in a process that stops it on request or when `serve` dies.

The process has its own process group: signals to the group of `serve` (Ctrl-C, a service manager's stop) must not reach
Ray before `serve` has stopped the roles in it.
"""

import json
import logging
import os
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moonpool.errors import RayUnusable
from moonpool.python_path import module_command
from moonpool.supervision.run_dir import default_run_dir, make_run_dir

_PREFIX = "MOONPOOL_RAY "
_START_S = 180.0
_STOP_S = 20.0
_MAX_TEMPORARY_NBYTES = 40  # Ray adds up to 66 to the path of a unix socket, which has at most 107
_OBJECT_STORE_NBYTES = 80 << 20  # near Ray's minimum, since we do not use it


@contextmanager
def ray_head(num_cpus: int, resources: Mapping[str, float]) -> Iterator[str]:
    """Yield the address of a running Ray; its processes end on exit, or with this process. Raises RayUnusable."""
    options = {
        "num_cpus": num_cpus,
        "resources": dict(resources),
        "object_store_memory": _OBJECT_STORE_NBYTES,
        "_temp_dir": str(_temporary_folder()),
    }
    head = _started(module_command("moonpool.runtime.ray_head", json.dumps(options)))
    try:
        yield _address(head)
    finally:
        assert head.stdin is not None
        head.stdin.close()
        try:
            head.wait(2 * _STOP_S)
        except subprocess.TimeoutExpired:
            head.kill()
            head.wait()


def _temporary_folder() -> Path:
    """Return the folder of Ray's sockets and logs. Its default, /tmp/ray, is everybody's, and so is what Ray makes."""
    own = make_run_dir(default_run_dir("ray")) / "tmp"
    if len(os.fsencode(own)) <= _MAX_TEMPORARY_NBYTES:
        return own
    return Path(tempfile.mkdtemp(prefix="mp-ray-", dir="/tmp")) / "tmp"


def _started(command: Sequence[str]) -> "subprocess.Popen[bytes]":
    # Unbuffered: a line that was read ahead would be invisible to select.
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, process_group=0)


def _address(head: "subprocess.Popen[bytes]") -> str:
    assert head.stdout is not None
    while select.select([head.stdout], [], [], _START_S)[0]:
        line = head.stdout.readline().decode(errors="replace")
        if line.startswith(_PREFIX):
            return line.removeprefix(_PREFIX).strip()
        if not line:
            raise RayUnusable(f"Ray did not start on this machine (exit code {head.wait()}); see its messages above")
    raise RayUnusable(f"Ray did not start on this machine within {_START_S:g} s")


def main(options: dict[str, Any]) -> None:
    """Run until standard input is closed, which also happens when `serve` dies."""
    import ray

    ray.init("local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, **options)
    print(_PREFIX + ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
    # A clean shutdown, since Ray's agents outlive a killed Ray by a minute; but within a time limit.
    threading.Timer(_STOP_S, os._exit, (1,)).start()
    ray.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
