"""Cost of a write for the owner of the memory, with the compiled loop and the Python path, idle and busy.

The caller is minimal: a connection on which this script sends prepared Write frames of 64 KiB and waits for each reply.
Owners are separate processes, per transport one with compiled loops and one without, as with TLS and RDMA. `cpu_us`:
CPU time of the owner process per write; `us`, `mean_us`: median and mean time until the reply; `busy`: while the
owner's main thread computes in pure Python. When idle, all alternate in every round, and figures are medians over
rounds. Run: python benchmarks/messenger_owner.py [--rounds N]; the last line of output is JSON.
"""

import argparse
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

# Replace this folder on the path by the repository root: scripts here may have the names of packages.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from messenger import Messenger, MessengerConfig, RemoteKey, SharedMemory  # noqa: E402
from messenger.frames import Hello, Offer, Welcome, Write, encode  # noqa: E402
from messenger.shm.transport import ShmResponder  # noqa: E402
from messenger.sockets import SocketLink  # noqa: E402
from messenger.tcp.transport import TcpResponder  # noqa: E402
from settings.keys import assemble  # noqa: E402

NBYTES = 64 << 10
REGION_NBYTES = 64 << 20
WRITES = 150
ANSWER_NBYTES = 28
BUSY_S, MEASURED_S = 3.0, 2.0


def own(transport: str, path: str, run_dir: str) -> None:
    """Run the owner process: reply to each line with the CPU seconds, then be busy for that many seconds."""
    if path == "python":
        for kind in (TcpResponder, ShmResponder):
            kind.compiled_loop = lambda *_: None  # type: ignore[method-assign]
    config = assemble(MessengerConfig, transport=transport, shm_dir=Path(run_dir))
    messenger = Messenger(config, node_id="owner", incarnation=1)
    messenger.on_notify(lambda *_: None)
    memory = SharedMemory.create(REGION_NBYTES, "owner")
    memory.array[:] = 0
    endpoint = messenger.start()
    key = messenger.grant(messenger.register(memory), 0, REGION_NBYTES, read=True, write=True)
    print(json.dumps({"endpoint": vars(endpoint), "key": key.pack().hex()}), flush=True)
    for line in sys.stdin:
        print(json.dumps(time.process_time()), flush=True)
        until_s = time.monotonic() + float(line)
        while time.monotonic() < until_s:
            pass
    messenger.close()
    memory.close()


class Caller:
    """Connection to a separate owner process."""

    def __init__(self, transport: str, path: str, folder: Path) -> None:
        run_dir = folder / f"{transport}-{path}"
        run_dir.mkdir()
        arguments = ["--own", transport, path, str(run_dir)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, __file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        told = self._answer()
        endpoint, self._key = told["endpoint"], RemoteKey.unpack(bytes.fromhex(told["key"]))
        self._memory = SharedMemory.create(REGION_NBYTES, "caller")
        self._memory.array[:] = 1
        self._view = memoryview(self._memory.array)  # type: ignore[arg-type]
        self._is_tcp = transport == "tcp"
        if self._is_tcp:
            self._sock = socket.create_connection((endpoint["tcp_host"], endpoint["tcp_port"]))
        else:
            self._sock = socket.socket(socket.AF_UNIX)
            self._sock.connect(endpoint["shm_socket"])
        self._link = SocketLink(self._sock, "owner")
        self._link.send(Hello("caller", 1, "owner", 1, secrets.token_bytes(16), transport))
        assert isinstance(self._link.receive(), Welcome)
        if not self._is_tcp:
            self._link.send(Offer(1, REGION_NBYTES), fd=self._memory.fd)
        self._seq = 0

    def idle_turn(self, *, notify: bool) -> dict[str, float]:
        """Measure sequential writes to the idle owner."""
        before_s = self._cpu_s(0.0)
        took_us = [self._write(notify) for _ in range(WRITES)]
        cpu_us = (self._cpu_s(0.0) - before_s) / WRITES * 1e6
        return {"us": statistics.median(took_us), "mean_us": statistics.fmean(took_us), "cpu_us": cpu_us}

    def busy_turn(self, *, notify: bool) -> dict[str, float]:
        """Measure sequential writes for a fixed time while the owner is busy; returns when it is idle again."""
        self._cpu_s(BUSY_S)
        until_s, took_us = time.monotonic() + MEASURED_S, []
        while time.monotonic() < until_s:
            took_us.append(self._write(notify))
        self._cpu_s(0.0)
        return {"us": statistics.median(took_us), "mean_us": statistics.fmean(took_us)}

    def close(self) -> None:
        self._link.close()
        self._process.kill()
        self._process.communicate()
        self._view.release()
        self._memory.close()

    def _write(self, notify: bool) -> float:
        self._seq += 1
        place = self._seq * NBYTES % REGION_NBYTES
        row = (place, NBYTES) if self._is_tcp else (place, place, NBYTES)
        rows, note = np.array(row, np.int64).tobytes(), b"note" if notify else b""
        key, source_id = self._key, 0 if self._is_tcp else 1
        frame = encode(
            Write(self._seq, self._seq, key.region_id, key.token, source_id, NBYTES, rows, notify, note, note)
        )
        began_s = time.perf_counter()
        self._sock.sendall(frame)
        if self._is_tcp:
            self._sock.sendall(self._view[place : place + NBYTES])
        if len(self._sock.recv(ANSWER_NBYTES, socket.MSG_WAITALL)) != ANSWER_NBYTES:
            raise ConnectionError("the owner ended")
        return (time.perf_counter() - began_s) * 1e6

    def _cpu_s(self, busy_s: float) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{busy_s}\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """Return {"tcp compiled write idle": {us, mean_us, cpu_us}, ...}."""
    taken: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        callers = {
            f"{transport} {path}": Caller(transport, path, Path(folder))
            for transport in ("tcp", "shm")
            for path in ("compiled", "python")
        }
        try:
            for number in range(rounds + 1):
                for name, caller in callers.items():
                    for what in ("write", "write+notify"):
                        turn = caller.idle_turn(notify=what != "write")
                        if number:  # the first one faults the pages in
                            taken.setdefault(f"{name} {what} idle", []).append(turn)
            for what in ("write", "write+notify"):
                for name, caller in callers.items():
                    taken[f"{name} {what} busy"] = [caller.busy_turn(notify=what != "write")]
        finally:
            for caller in callers.values():
                caller.close()
    return {
        name: {figure: round(statistics.median(turn[figure] for turn in turns), 1) for figure in turns[0]}
        for name, turns in taken.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--own", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.own:
        own(*arguments.own)
        return
    figures = measure(arguments.rounds)
    for name, row in figures.items():
        print(f"{name:<34}", "  ".join(f"{figure} {value:>9}" for figure, value in row.items()))
    print(json.dumps({"benchmark": "messenger_owner", "load_1m": os.getloadavg()[0], "figures": figures}))


if __name__ == "__main__":
    main()
