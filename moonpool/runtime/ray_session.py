"""Ray's part of a cluster's life: its own Ray is started and stopped with it, an existing one is joined and left."""

import importlib.util
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moonpool.config import ServeConfig
from moonpool.errors import RayUnusable
from moonpool.runtime.ray_head import ray_head
from moonpool.runtime.ray_hosts import GPU, RayHost, check_offer, hosts, local_resources
from moonpool.supervision.http_port import claim_port
from moonpool.supervision.threads import usable_cores

if TYPE_CHECKING:
    from moonpool.runtime.ray_runtime import RayRuntime

_LOOPBACK = "127.0.0.1"
_LEAVE_S = 20.0
_KNOCK_S = 10.0
# Ray reads these at import: no telemetry, no warning about GPUs of actors without one, and the seconds that a process
# waits for Ray's head to return before Ray ends it (a minute by default).
_DEFAULTS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
}


@contextmanager
def ray_session(config: ServeConfig, run_dir: Path, listener: socket.socket | None) -> "Iterator[RayRuntime]":
    """Connect, check Ray's resources, and release everything on exit. Raises RayUnusable."""
    if importlib.util.find_spec("ray") is None:
        raise RayUnusable("the runtime ray needs the package ray, which is not installed: pip install 'moonpool[ray]'")
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    given = config.runtime.ray_address
    with ExitStack() as stack:
        if not given:  # with its own secret, since Ray's ports are open to the network
            os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
            print("Starting Ray on this machine", file=sys.stderr, flush=True)
        address = given or stack.enter_context(ray_head(usable_cores(), local_resources()))
        ray = _connect(address)
        stack.callback(_bounded, ray.shutdown)
        from moonpool.runtime.ray_runtime import RayRuntime

        here = ray.util.get_node_ip_address() if given else _LOOPBACK
        gpus = wait_for_offer(config, ray.nodes)
        conductor = config.runtime.join[0] if config.runtime.join else _own_conductor(here)
        runtime = RayRuntime(
            run_dir,
            listener=listener,
            conductor=conductor,
            gpus=gpus,
            only_address="" if given else _LOOPBACK,
            orphan_s=config.runtime.ray_orphan_grace_s,
        )
        runtime.find()
        stack.callback(_bounded, runtime.close)
        yield runtime


def wait_for_offer(
    config: ServeConfig, nodes: Callable[[], Sequence[Mapping[str, Any]]], every_s: float = 1.0
) -> float:
    """Wait until Ray's hosts can hold the workers; return how many GPUs each takes. Raises RayUnusable.

    Only a `serve` that joins a cluster waits, for the start-up timeout, since it starts together with Ray's hosts.
    """
    until_s = time.monotonic() + (config.supervisor.startup_timeout_s if config.runtime.join else 0.0)
    printed = ""
    while True:
        found = hosts(nodes())
        gpus = _gpus_of_each(config, found.values())
        try:
            check_offer(_bundles(config, gpus=gpus), found)
            return gpus
        except RayUnusable as lack:
            if time.monotonic() >= until_s:
                raise
            if str(lack) != printed:
                print(f"Waiting for hosts: {lack}", file=sys.stderr, flush=True)
            printed = str(lack)
        time.sleep(every_s)


def _own_conductor(here: str) -> str:
    port = claim_port(here, 0)
    return f"[{here}]:{port}" if ":" in here else f"{here}:{port}"


def _connect(address: str) -> Any:
    """Connect, and return the ray module."""
    import ray

    _knock(address)
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, namespace="moonpool")
    except (ConnectionError, OSError, RuntimeError, ValueError, TimeoutError) as error:
        raise RayUnusable(
            f"cannot join the Ray cluster at {address}: {error}; check that its Ray version is {ray.__version__}, "
            "and that RAY_AUTH_TOKEN or the token file matches its hosts"
        ) from error
    return ray


def _knock(address: str) -> None:
    """Fail fast if the address does not answer; Ray itself would try for two minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _KNOCK_S).close()
    except OSError as error:
        raise RayUnusable(
            f"nothing answers at the Ray address {address}: {error}; start it with `ray start --head --port={port}`"
        ) from error


def _bounded(work: Callable[[], None]) -> None:
    """Run `work`, or end the process if Ray does not return from it in time."""
    worker = threading.Thread(target=work, name="leave-ray", daemon=True)
    worker.start()
    worker.join(_LEAVE_S)
    if worker.is_alive():
        print("Ray does not answer; exiting without releasing its resources", file=sys.stderr, flush=True)
        os._exit(1)


def _gpus_of_each(config: ServeConfig, found: Collection[RayHost]) -> float:
    """Return how many GPUs of Ray each worker takes: none unless it is configured, or there are enough for all."""
    each = config.runtime.ray_gpus
    if config.engine.device.startswith("cuda"):
        return each
    has_gpus = any(host.resources.get(GPU) for host in found)
    is_enough = sum(host.num_workers(each) for host in found) >= len(_bundles(config, gpus=0.0))
    return each if config.engine.device == "auto" and has_gpus and is_enough else 0.0


def _bundles(config: ServeConfig, *, gpus: float) -> list[dict[str, float]]:
    """Return the resources of each initial worker."""
    gpu = {GPU: gpus} if gpus else {}
    found: list[dict[str, float]] = []
    for entry in config.served:
        topology = entry.topology(config.topology)
        counts = {"prefill": topology.num_prefill, "decode": topology.num_decode, "aggregated": topology.aggregated}
        for role, count in counts.items():
            found += [{f"moonpool_{role}": 1.0, **gpu}] * count
    return found
