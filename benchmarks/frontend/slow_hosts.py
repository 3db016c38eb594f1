"""Cluster of several hosts on one machine, with links of bounded rate between them: a process per role, and a proxy
before the listener of every node that moves KV.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.frontend.processes import START_S, Served, ready_line, running
from benchmarks.throttle import ThrottledProxy

_OPEN_ADDRESS, _PROXIED_ADDRESS = "127.0.0.2", "127.0.0.3"
_READY = "MOONPOOL_READY "


@dataclass(frozen=True, slots=True)
class SlowHosts:
    """Hosts with a pool node and a prefill node each, and further ones with a decode node; flags by role.

    Decode nodes use the pool nodes of the others in turn.
    """

    hosts: int
    decode_nodes: int
    link_bytes_per_s: float  # to every node, in each direction
    model: Path
    conductor: Sequence[str]
    pool: Sequence[str]
    prefill: Sequence[str]
    decode: Sequence[str]
    frontend: Sequence[str]


@contextlib.contextmanager
def slow_hosts(plan: SlowHosts, work: Path) -> Iterator[tuple[Served, dict[str, ThrottledProxy]]]:
    """Run the cluster; yield it and the proxies by the name of the node behind them."""
    work.mkdir(0o700, parents=True, exist_ok=True)
    counts = {"pool": plan.hosts, "prefill": plan.hosts, "decode": plan.decode_nodes}
    nodes = {f"{role}-{number}": (role, number) for role, count in counts.items() for number in range(count)}
    join = ["--conductor", _target(work, "conductor")]
    commands = {"conductor": ["conductor", *_own(work, "conductor"), *plan.conductor]}
    with contextlib.ExitStack() as stack:
        proxies = {}
        for name, (role, number) in nodes.items():
            port = _free_port()
            proxies[name] = proxy = ThrottledProxy(_PROXIED_ADDRESS, _OPEN_ADDRESS, port)
            proxy.bytes_per_s = plan.link_bytes_per_s
            stack.callback(proxy.close)
            data = ["--data-host", _OPEN_ADDRESS, "--data-port", str(port), "--data-advertise", _PROXIED_ADDRESS]
            host_id = name if role == "decode" else f"host-{number}"
            flags = list(getattr(plan, role))
            if role != "pool":
                flags += ["--model", str(plan.model), "--pool", _target(work, f"pool-{number % plan.hosts}")]
            commands[name] = [role, *_own(work, name), *join, *data, "--host-id", host_id, *flags]
        model = ["--model", str(plan.model), "--port", "0", "--metrics-scope", "cluster"]
        named = ["--node-id", "frontend", "--socket-dir", str(work)]
        commands["frontend"] = ["frontend", *named, *join, *model, *plan.frontend]
        processes = {
            name: stack.enter_context(running([sys.executable, "-m", "moonpool", "node", *words], work / f"{name}.log"))
            for name, words in commands.items()
        }
        told = {
            name: json.loads(ready_line(process, _READY, work / f"{name}.log")) for name, process in processes.items()
        }
        served = Served(told["frontend"]["target"], "", {name: process.pid for name, process in processes.items()})
        _wait_ready(served.url)
        yield served, proxies


def _own(work: Path, name: str) -> list[str]:
    return ["--node-id", name, "--listen", _target(work, name), "--socket-dir", str(work), "--log-level", "warning"]


def _target(work: Path, name: str) -> str:
    return f"unix:{work}/{name}.sock"


def _free_port() -> int:
    """Return a port that is free at both addresses."""
    with socket.socket() as one, socket.socket() as two:
        one.bind((_OPEN_ADDRESS, 0))
        two.bind((_PROXIED_ADDRESS, one.getsockname()[1]))
        return int(one.getsockname()[1])


def _wait_ready(url: str) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(f"{url}/ready", timeout=10):
            return
        time.sleep(0.1)
    raise SystemExit(f"the cluster at {url} does not become ready")
