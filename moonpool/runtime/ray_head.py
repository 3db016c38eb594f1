"""A Ray of our own on this machine: a process that starts it, says where it is, and ends it when told or orphaned.

A process apart, in a process group of its own: what is sent to the group of `serve` (Ctrl-C, a service manager's stop)
must not reach Ray before `serve` has ended the roles in it.
"""

import json
import logging
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from moonpool.errors import RayUnusable

_PREFIX = "MOONPOOL_RAY "
_START_S = 180.0
_STOP_S = 20.0
_OBJECT_STORE_NBYTES = 80 << 20  # near Ray's least: nothing of ours goes through it


@contextmanager
def ray_head(num_cpus: int, resources: Mapping[str, float]) -> Iterator[str]:
    """The address of a running Ray, whose processes all end on exit, or with this process. Raises RayUnusable."""
    options = {"num_cpus": num_cpus, "resources": dict(resources), "object_store_memory": _OBJECT_STORE_NBYTES}
    head = _begun([sys.executable, "-m", "moonpool.runtime.ray_head", json.dumps(options)])
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


def _begun(command: list[str]) -> "subprocess.Popen[bytes]":
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
    """Run until standard input is closed, which the kernel does when `serve` dies."""
    import ray

    ray.init("local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, **options)
    print(_PREFIX + ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
    # Clean, since Ray's agents outlive a killed Ray by a minute; but not for ever: what it started is tied to us.
    threading.Timer(_STOP_S, os._exit, (1,)).start()
    ray.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
