"""Peer processes of the soak test, the proxies in front of them, and the injection of faults."""

import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from messenger import Endpoint, Messenger, RemoteKey
from tools.soak.proxy import DOWN, UP, FaultProxy
from tools.soak.rails import break_rail

_ROOT = Path(__file__).resolve().parents[2]
_CERTIFICATES = _ROOT / "tests" / "data" / "tls"


class PeerGone(Exception):
    """The peer's process has ended; it may be replaced by a new generation."""


@dataclass(frozen=True)
class Settings:
    transports: tuple[str, ...]
    """Assigned to the peers round-robin; "tls" is tcp with TLS."""
    run_dir: str
    slots: int
    slot_nbytes: int
    patience: float

    def messenger(self, transport: str) -> dict[str, Any]:
        """Return the messenger configuration for a transport, as JSON-compatible values."""
        common = {"shm_dir": self.run_dir, "handshake_timeout_s": 5.0 * self.patience}
        if transport != "tls":
            return common | {"transport": transport}
        return common | {"transport": "tcp"} | self._tls()

    def _tls(self) -> dict[str, str]:
        """Copy the tests' certificates with permissions for this user only."""
        sources = {"tls_cert": "node.pem", "tls_key": "node.key", "tls_ca": "ca.pem"}
        given = {setting: os.path.join(self.run_dir, name) for setting, name in sources.items()}
        for copy in given.values():
            if not os.path.exists(copy):
                shutil.copyfile(_CERTIFICATES / os.path.basename(copy), copy)
                os.chmod(copy, 0o600)
        return given


@dataclass(frozen=True)
class PeerProcess:
    """One process of a peer."""

    number: int
    endpoint: Endpoint
    keys: tuple[RemoteKey, ...]


class Member:
    """One peer across all generations of its process. Thread-safe."""

    def __init__(self, number: int, settings: Settings) -> None:
        self.node_id = f"peer-{number}"
        self.transport = settings.transports[number % len(settings.transports)]
        self.steady = number < len(settings.transports)
        self._settings = settings
        self._talking = threading.Lock()
        self._changed = threading.Condition()
        self._process: subprocess.Popen[str] | None = None
        self._port = 0
        self._calm_s = 0.0
        self._lately: deque[tuple[str, float]] = deque(maxlen=4)
        self._proxy: FaultProxy | None = None
        self.generation = self._start(1)

    def ask(self, generation: PeerProcess, *command: Any) -> Any:
        """Send a command to that generation's process and return its reply. Raises PeerGone."""
        with self._talking:
            process = self._process
            if process is None or generation is not self.generation:
                raise PeerGone(self.node_id)
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(json.dumps(command) + "\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except OSError as error:
                raise PeerGone(self.node_id) from error
        if not answer:
            raise PeerGone(self.node_id)
        return json.loads(answer)

    def next_generation(self, known: PeerProcess, timeout_s: float) -> PeerProcess:
        """Wait for a newer generation than `known`. Raises PeerGone on timeout."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.generation is not known, timeout_s):
                raise PeerGone(self.node_id)
            return self.generation

    def note(self, kind: str) -> None:
        """Record the start of a fault."""
        self._lately.append((kind, time.monotonic()))

    def lately(self) -> str:
        """Describe the last faults and how long ago they started."""
        now_s = time.monotonic()
        return ", ".join(f"{kind} {now_s - begun_s:.1f} s ago" for kind, begun_s in list(self._lately)) or "nothing"

    def line(self) -> str:
        """Describe the state of the proxy in front of the peer."""
        return "none" if self._proxy is None else self._proxy.describe()

    def ports(self) -> list[int]:
        """Return the ports on both sides of the proxy."""
        return [] if self._proxy is None else [self._proxy.address[1], self._port]

    def pid(self) -> int | None:
        """Return the process id, or None if no process is running."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    @property
    def has_line(self) -> bool:
        """True if there is a proxy in front of the peer."""
        return self._proxy is not None

    def was_disturbed_since(self, moment_s: float) -> bool:
        """Return True if a fault was active after `moment_s`, so that errors are expected."""
        return self._calm_s >= moment_s

    def freeze(self, seconds: float, ended: threading.Event) -> None:
        assert self._process is not None
        with self._disturbed():
            self._process.send_signal(signal.SIGSTOP)
            ended.wait(seconds)
            self._process.send_signal(signal.SIGCONT)

    def replace(self, *, peaceful: bool) -> None:
        """End the process and start a new one on the same port."""
        with self._disturbed():
            process = self._process
            assert process is not None
            if not peaceful:
                process.kill()
            self._finish(process)
            generation = self._start(self.generation.number + 1)
            with self._changed:
                self.generation = generation
                self._changed.notify_all()

    def break_rail(self, caller: Messenger | None, rng: random.Random) -> None:
        """Break a rail of a connection at the caller, or at the peer if `caller` is None."""
        with self._disturbed():
            if caller is not None:
                break_rail(caller, rng)
            else:
                self.ask(self.generation, "break_rail", rng.randrange(1 << 30))

    def trouble(self, kind: str, seconds: float, rng: random.Random, ended: threading.Event) -> None:
        """Inject a fault into the connection for a duration."""
        proxy = self._proxy
        assert proxy is not None
        with self._disturbed():
            self._set(proxy, kind, rng)
            ended.wait(seconds)
            proxy.heal()

    def _set(self, proxy: FaultProxy, kind: str, rng: random.Random) -> None:
        if kind == "reset":
            proxy.reset()
        elif kind == "reset in a frame":
            proxy.reset_after(rng.randrange(200_000), rng.choice((UP, DOWN)))
        elif kind == "half-open":
            proxy.abandon()
        elif kind == "delay":
            proxy.delay(rng.uniform(0.001, 0.05))
        elif kind == "throttle":
            proxy.throttle(rng.uniform(1 << 18, 1 << 23))
        elif kind == "partition":
            proxy.hold(*rng.choice(((UP,), (DOWN,), (UP, DOWN))))
        elif kind == "refuse":
            proxy.refuse()
            proxy.reset()

    def close(self) -> None:
        assert self._process is not None
        self._finish(self._process)
        if self._proxy is not None:
            self._proxy.close()

    def _finish(self, process: subprocess.Popen[str]) -> None:
        """Wait for the process to end, or kill it."""
        assert process.stdin is not None
        assert process.stdout is not None
        with self._talking:
            self._process = None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(30 * self._settings.patience)
            except subprocess.TimeoutExpired:
                process.kill()
                raise RuntimeError(f"{self.node_id} did not exit when requested") from None
            finally:
                process.stdout.close()

    @contextlib.contextmanager
    def _disturbed(self) -> Iterator[None]:
        self._calm_s = float("inf")
        try:
            yield
        finally:
            self._calm_s = time.monotonic() + 2.0 * self._settings.patience

    def _start(self, number: int) -> PeerProcess:
        settings = self._settings
        given = {
            "messenger": settings.messenger(self.transport) | {"data_port": self._port},
            "node_id": self.node_id,
            "incarnation": number,
            "slots": settings.slots,
            "slot_nbytes": settings.slot_nbytes,
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "tools.soak.peer", json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.node_id} did not start: it exited with {process.wait()}")
        self._process = process
        ready = json.loads(line)
        endpoint = Endpoint(**ready["endpoint"])
        self._port = endpoint.tcp_port
        if endpoint.tcp_port and self._proxy is None:
            self._proxy = FaultProxy((endpoint.tcp_host, endpoint.tcp_port))
        if self._proxy is not None:
            host, port = self._proxy.address
            endpoint = dataclasses.replace(endpoint, tcp_host=host, tcp_port=port)
        return PeerProcess(number, endpoint, tuple(RemoteKey.unpack(bytes.fromhex(key)) for key in ready["keys"]))


class Trouble:
    """Thread that repeatedly injects a random fault into a random peer. Steady peers are not replaced."""

    PROCESS = ("freeze", "kill", "end")
    RAIL = ("rail broken by its caller", "rail broken by its owner")
    LINE = ("reset", "reset in a frame", "half-open", "delay", "throttle", "partition", "refuse")

    def __init__(
        self, members: list[Member], callers: Mapping[str, Messenger], pause_s: float, rng: random.Random
    ) -> None:
        """`callers`: the messengers by transport."""
        self._members = members
        self._callers = callers
        self._pause_s = pause_s
        self._rng = rng
        self._ended = threading.Event()
        self.events: Counter[str] = Counter()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="trouble", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._ended.wait(self._rng.uniform(0.2, 1.8) * self._pause_s):
                member = self._rng.choice(self._members)
                kind = self._rng.choice(self._kinds(member))
                seconds = self._rng.uniform(0.05, 1.5) * self._pause_s
                if kind in ("kill", "end"):
                    member = self._rng.choice([one for one in self._members if not one.steady])
                member.note(kind)
                if kind in ("kill", "end"):
                    member.replace(peaceful=kind == "end")
                elif kind == "freeze":
                    member.freeze(seconds, self._ended)
                elif kind in self.RAIL:
                    member.break_rail(self._callers[member.transport] if kind == self.RAIL[0] else None, self._rng)
                else:
                    member.trouble(kind, seconds, self._rng, self._ended)
                self.events[kind] += 1
        except BaseException as error:
            self.failure = error

    def _kinds(self, member: Member) -> tuple[str, ...]:
        """Return the faults that apply to the peer."""
        line = self.LINE if member.has_line else ()
        return self.PROCESS + line + (self.RAIL if member.transport == "rdma" else ())
