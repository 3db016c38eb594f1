"""A cluster of production roles in the simulated world, and the clients' requests. Loaded after `imports.install`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from conductor.policy.objectives import SloClass, SloRecord
from conductor.server import ConductorConfig, serve_conductor
from frontend.api.request_models import CompletionBody
from frontend.callers import ApiCaller, Quota
from frontend.config import FrontendConfig, ServedModelConfig
from frontend.errors import ApiError
from frontend.prepare import RequestContext
from frontend.request import GenerationRequest
from frontend.service import Service
from frontend.tokenizer import Tokenizer
from kvpool.config import PoolNodeConfig
from kvpool.server import serve_pool_node
from messenger import MessengerConfig
from moonpool.role_process.worker import serve_worker
from settings.keys import assemble
from settings.node import NodeSettings
from settings.worker import BUNDLED_MODEL, BlockSettings
from tools.prove.paths import BATCH, URGENT
from tools.prove.schedule import BLOCK_TOKENS
from tools.prove.world.clock import time
from tools.prove.world.disk import SimDisk
from tools.prove.world.disk_modules import MODULES
from tools.prove.world.network import SimNetwork
from tools.prove.world.process import Process
from tools.prove.world.scheduler import World
from worker.config import WorkerConfig

SimPath = MODULES["pathlib"].Path
log = logging.getLogger(__name__)

STEP_TIMEOUT_S = 5.0  # of workers; their steps take up to a second
_CALLER = ApiCaller("tenant", quota=Quota(requests_per_minute=10**6, tokens_per_minute=10**9, max_concurrent=1000))


@dataclass(frozen=True)
class SimShape:
    """Number of processes of each role, and the sizes of caches. Host i has a pool node and one worker of each role."""

    conductors: int = 1
    frontends: int = 1
    hosts: int = 2
    capacity_tokens: int = 512
    pool_bytes: int = 1 << 20
    ssd_bytes: int = 0  # 0: pools have no SSD
    windows: tuple[int, ...] = (0, 0, 0)  # number of tokens that each layer of the model sees; 0: all
    window_slots: int = 0
    overrun: float = 0.0  # probability that an answer needs more slots than are reserved

    @property
    def model(self) -> str:
        """Name of the model, which `hash_model` understands."""
        return "-".join(["hash", *(map(str, self.windows) if any(self.windows) else ())])


@dataclass
class Node:
    """One node of the cluster, which is started again under the same name."""

    name: str
    host: str
    role: str
    begin: Callable[[Node], Callable[[], Coroutine[Any, Any, Any]]]
    process: Process | None = None
    stop: asyncio.Event | None = None
    service: Any = None  # what the invariants look at
    is_ready: bool = False
    starts: int = 0

    @property
    def is_alive(self) -> bool:
        """True while its process lives."""
        return self.process is not None and not self.process.is_dead


class SimCluster:
    """All nodes. Everything is called by the scheduler, not by a simulated thread."""

    def __init__(self, world: World, network: SimNetwork, shape: SimShape, tokenizer: Tokenizer) -> None:
        self.world, self.network, self.shape = world, network, shape
        self._tokenizer = tokenizer
        self.nodes: dict[str, Node] = {}
        self.conductor_targets = tuple(f"c{i}:7000" for i in range(shape.conductors))
        for i in range(shape.conductors):
            self._add(f"conductor-{i}", f"c{i}", "conductor", self._conductor)
        self.disks: dict[str, SimDisk] = {}
        for i in range(shape.hosts):
            self._add(f"pool-{i}", f"h{i}", "pool", self._pool)
            if shape.ssd_bytes:
                self.disks[f"h{i}"] = SimDisk(world, f"h{i}")
        for i in range(shape.hosts):
            self._add(f"prefill-{i}", f"h{i}", "prefill", self._worker)
            self._add(f"decode-{i}", f"h{i}", "decode", self._worker)
        for i in range(shape.frontends):
            self._add(f"frontend-{i}", f"f{i}", "frontend", self._frontend)

    def _add(self, name: str, host: str, role: str, begin: Any) -> None:
        self.nodes[name] = Node(name, host, role, begin)

    def start(self, node: Node) -> None:
        """Start a node's process."""
        assert not node.is_alive
        node.starts += 1
        node.is_ready, node.service = False, None
        process = node.process = Process(self.world, node.name, node.host)
        process.at_death.append(lambda: self.network.close_all(process))
        self.world.tell(node.name, "starts")
        process.start(node.begin(node))

    def kill(self, node: Node) -> None:
        """Kill a node's process, as SIGKILL does."""
        if node.process is not None:
            node.process.end("is killed")

    def shut_down(self, node: Node) -> None:
        """Ask a node to end, as SIGTERM does."""
        process, stop = node.process, node.stop
        if process is not None and process.loop is not None and stop is not None and not process.is_dead:
            process.loop.call_soon_threadsafe(stop.set)

    def held(self, node: Node) -> list[str]:
        """Return what a node holds that it should not hold at rest, by its own `Validate`."""
        assert node.process is not None
        return [problem for look in node.process.objects.get("validate", []) for problem in look()]

    # The roles' main coroutines

    def _stop(self, node: Node) -> asyncio.Event:
        node.stop = asyncio.Event()
        return node.stop

    def _ready(self, node: Node) -> Callable[[str], None]:
        def ready(target: str) -> None:
            node.is_ready = True
            self.world.tell(node.name, f"is ready at {target}")

        return ready

    def _conductor(self, node: Node) -> Callable[[], Coroutine[Any, Any, Any]]:
        config = assemble(
            ConductorConfig,
            node_id=node.name,
            listen=f"{node.host}:7000",
            objectives=SloRecord(classes={URGENT: SloClass(priority=-1), BATCH: SloClass(priority=1)}),
            overrun_probability=self.shape.overrun,
        )
        return lambda: serve_conductor(config, self._stop(node), self._ready(node))

    def _messenger(self, node: Node, port: int) -> MessengerConfig:
        return assemble(
            MessengerConfig,
            transport="tcp",
            data_host=node.host,
            data_port=port,
            host_id=node.host,
        )

    def _pool(self, node: Node) -> Callable[[], Coroutine[Any, Any, Any]]:
        config = assemble(
            PoolNodeConfig,
            node_id=node.name,
            listen=f"{node.host}:7100",
            conductor_targets=self.conductor_targets,
            pool_bytes=self.shape.pool_bytes,
            **({"pool_ssd_dir": SimPath("/disk"), "pool_ssd_bytes": self.shape.ssd_bytes} if self.disks else {}),
            host_id=node.host,
            messenger=self._messenger(node, 7101),
        )
        return lambda: serve_pool_node(config, self._stop(node), self._ready(node))

    def _worker(self, node: Node) -> Callable[[], Coroutine[Any, Any, Any]]:
        port = {"prefill": 7200, "decode": 7300}[node.role]
        config = assemble(
            WorkerConfig,
            node_id=node.name,
            listen=f"{node.host}:{port}",
            conductor_targets=self.conductor_targets,
            pool_target=f"{node.host}:7100",
            model=BUNDLED_MODEL,
            served_model_name=(self.shape.model,),
            threads=1,
            device="cpu",
            block_tokens=BLOCK_TOKENS,
            capacity_tokens=self.shape.capacity_tokens,
            window_slots=self.shape.window_slots,
            prefill_chunk_tokens=32,
            step_timeout_s=STEP_TIMEOUT_S,
            host_id=node.host,
            messenger=self._messenger(node, port + 1),
        )
        return lambda: serve_worker(config, node.role, self._stop(node), self._ready(node))

    def _frontend(self, node: Node) -> Callable[[], Coroutine[Any, Any, Any]]:
        config = FrontendConfig(
            models=(ServedModelConfig(Path(BUNDLED_MODEL), self.shape.model),),
            conductor_targets=self.conductor_targets,
            blocks=BlockSettings(block_tokens=BLOCK_TOKENS),
            node=NodeSettings(node.name),
        )

        async def serve() -> None:
            stop = self._stop(node)
            service = node.service = Service(config, [self._tokenizer])
            await service.start()
            self._ready(node)(node.name)
            await stop.wait()
            await service.drain()
            await service.close()

        return serve


@dataclass(frozen=True)
class ClientBehaviour:
    """When a client leaves: after so many tokens, and after so many seconds; -1: never. How long it pauses per read."""

    after_tokens: int = -1
    after_s: float = -1.0
    pause_s: float = 0.0


@dataclass
class AskedRequest:
    """One request of a client, and what it got. `tokens` and `finished` are by choice."""

    name: str
    body: Mapping[str, Any]
    requests: list[GenerationRequest] = field(default_factory=list)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, str] = field(default_factory=dict)
    finish: str = ""
    error: str = ""
    ended: bool = False
    ends: int = 0
    attempts: int = 0  # placements, over all choices
    sent_ns: int = 0  # of the world; 0: not sent yet
    leave: Callable[[], None] | None = None  # lets the client leave; any thread

    @property
    def prompt(self) -> list[int]:
        """Ids of the prompt."""
        return list(self.body["prompt"])


async def ask(
    service: Service, asked: AskedRequest, client: ClientBehaviour, on_end: Callable[[AskedRequest], None]
) -> None:
    """Send a request to a frontend; its connection breaks after `client.after_s`, if that is not negative."""
    asking, loop = asyncio.create_task(_ask(service, asked, client)), asyncio.get_running_loop()
    asked.leave = lambda: loop.call_soon_threadsafe(asking.cancel)  # type: ignore[assignment]
    await asyncio.wait([asking], timeout=client.after_s if client.after_s >= 0 else None)
    if not asking.done():
        asking.cancel()
        await asyncio.wait([asking])
    if not asking.cancelled() and (error := asking.exception()) is not None:
        asked.error = f"{type(error).__name__}: {error}"
    asked.ended = True
    asked.ends += 1
    on_end(asked)


async def _ask(service: Service, asked: AskedRequest, client: ClientBehaviour) -> None:
    """Send a request to a frontend, and record the tokens as the client reads them."""
    reservation = service.quotas.enter(_CALLER)
    try:
        try:
            body = CompletionBody.model_validate(asked.body)
            model = await service.admit(body.model)
            context = RequestContext(time.monotonic(), _CALLER)
            context = replace(context, slo_class=context.class_beside(body.slo_class))
            requests = asked.requests = await model.preparer.completion(body, context)
            reservation.reserve(requests)
        except BaseException:
            reservation.leave(used_tokens=0, counts=False)
            raise
        session = service.open_session(model, requests, reservation)
        try:
            while not session.is_over and not 0 <= client.after_tokens <= sum(map(len, asked.tokens.values())):
                choice, chunk = await session.next()
                asked.tokens.setdefault(choice, []).extend(chunk.token_ids)
                if chunk.finish_reason is not None:
                    asked.finished[choice] = chunk.finish_reason
                elif client.pause_s:
                    await asyncio.sleep(client.pause_s)
            if session.is_over:
                asked.finish = ",".join(asked.finished.values())
        finally:
            asked.attempts = sum(generation.stats.attempts for generation in session.generations)
            await asyncio.shield(service.close_session(session))  # as the HTTP handlers do
    except ApiError as error:
        asked.error = f"{type(error).__name__}: {error}"
