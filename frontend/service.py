"""What lives as long as the front door: its parts, the requests in flight, draining, self-check."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final

from frontend.accepting import Turnstile
from frontend.body_room import BodyRoom
from frontend.cluster import ClusterWatch
from frontend.conductor import ConductorClient
from frontend.config import FrontendConfig
from frontend.console.actions import ConsoleActions
from frontend.console.memory import RequestMemory, told
from frontend.console.watch import ConsoleWatch
from frontend.driver import DriverContext, Generation
from frontend.errors import ServiceUnavailable
from frontend.keys import ApiKeys
from frontend.keys.watched_file import KeysFile
from frontend.quotas import DoorQuotas, Stay
from frontend.request import GenerationRequest
from frontend.served import ServedModel, ServedModels
from frontend.session import Session
from frontend.streams import WorkerStreams
from frontend.tokenizer import Tokenizer
from frontend.work_threads import WorkThreads
from telemetry import (
    ConductorCollector,
    ConductorSample,
    DoorMetrics,
    LoopWatch,
    NodesCollector,
    RequestFamilies,
    new_registry,
    tracing,
)

_log = logging.getLogger(__name__)
_LAST_WORDS_S: Final = 5.0  # for the conductor to hear how requests ended, once no request is left


class Service:
    """The front door without HTTP. `start` before use, `drain` then `close` after it."""

    def __init__(
        self, config: FrontendConfig, tokenizers: Sequence[Tokenizer], on_rest: Callable[[], None] = lambda: None
    ) -> None:
        """`tokenizers`: one per configured model; `on_rest` is called whenever no request is left in flight."""
        self.config = config
        self.turnstile = Turnstile()
        self.body_room = BodyRoom(config.max_bodies_nbytes)
        self._on_rest = on_rest
        self.registry = new_registry()
        self.door_metrics = DoorMetrics(self.registry)
        self.keys = ApiKeys(config.api_keys, asks=config.api_keys_file is not None)
        self._keys_file = (
            None
            if config.api_keys_file is None
            else KeysFile(config.api_keys_file, self.keys, self.door_metrics, self._tell_tenants)
        )
        self.quotas = DoorQuotas(self.door_metrics.quota_rejected)
        self.conductor = ConductorClient(config.conductor_targets, asked_by=config.node_id, tenants=self.keys.tenants)
        self.streams = WorkerStreams(config.node_id, secrets.randbits(63), config.attach_timeout_s)
        self.cluster = ClusterWatch(
            self.conductor,
            config.cluster_interval_s,
            models=[model.name for model in config.models],
            block_tokens=config.block_tokens,
            on_suspect=self.streams.suspect,
        )
        self.registry.register(NodesCollector(self.cluster.samples))
        self.loop_watch = LoopWatch()
        self.registry.register(ConductorCollector(self._samples))
        self.threads = WorkThreads(config.tokenizer_threads)
        families = RequestFamilies(self.registry)
        self.models = ServedModels(
            [
                ServedModel(
                    model, tokenizer, config=config, cluster=self.cluster, threads=self.threads, families=families
                )
                for model, tokenizer in zip(config.models, tokenizers, strict=True)
            ]
        )
        self.console = ConsoleWatch(self.conductor, self.cluster, self._about)
        self.console_actions = ConsoleActions(self.conductor)
        self._memory = RequestMemory()
        self.started_at = int(time.time())
        self.draining = False
        self._sessions: dict[Session, ServedModel] = {}
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._background: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Look at the cluster for the first time; a conductor that is away is no error."""
        if self._keys_file is not None:
            self._keys_file.start()
        await self.cluster.start()

    async def admit(self, name: str | None) -> ServedModel:
        """The model that a request asks for by name or alias; None asks for the first.

        Raises ModelNotFound, and ServiceUnavailable once no new request is taken or while none can be right.
        """
        model = self.models.find(name)
        if self.draining:
            model.metrics.rejected("draining")
            raise ServiceUnavailable("this front door is shutting down", code="draining", retry_after_s=1.0)
        try:
            await self.cluster.check_fit(model.name)
        except ServiceUnavailable:
            model.metrics.rejected("misconfigured")
            raise
        return model

    def open_session(self, model: ServedModel, requests: Sequence[GenerationRequest], stay: Stay) -> Session:
        """Start what `close_session` must end, the stay with it."""
        context = DriverContext(
            self.config,
            self.conductor,
            self.cluster,
            self.streams,
            self.turnstile,
            model.metrics,
            self._spawn,
            model.remember,
            self._memory,
        )
        generations: list[Generation] = []
        for request in requests:
            # A prompt's answers stand side by side, in their order.
            leader = generations[-request.sampling.choice] if request.sampling.choice else None
            generations.append(Generation(context, request, model.output(request), leader))
        session = Session(generations, stay)
        self._sessions[session] = model
        self._is_idle.clear()
        model.count_session(1)
        return session

    async def close_session(self, session: Session) -> None:
        """Whatever became of it: workers and conductor are told."""
        await session.close()
        model = self._sessions.pop(session, None)
        if model is not None:
            model.count_session(-1)
        if not self._sessions:
            self._is_idle.set()
            asyncio.get_running_loop().call_soon(self._rest)

    async def drain(self) -> None:
        """Take no new requests, wait for the running ones for the grace, then end what still runs with an error."""
        self.draining = True
        if await self._idle_within(self.config.drain_grace_s):
            return
        _log.warning("%d requests still run after the grace; they are ended", len(self._sessions))
        for session in self._sessions:
            session.end(ServiceUnavailable("the front door is shutting down", code="draining", retry_after_s=1.0))
        await self._idle_within(_LAST_WORDS_S)

    async def close(self) -> None:
        """End everything that `start` and requests began."""
        for session in list(self._sessions):
            await self.close_session(session)
        await self.streams.close()
        if self._keys_file is not None:
            await self._keys_file.close()
        if self._background:
            await asyncio.wait(self._background, timeout=_LAST_WORDS_S)
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.console.close()
        await self.cluster.close()
        await self.conductor.close()
        await self.loop_watch.close()
        self.threads.close()

    def path_of(self, request_id: str) -> Mapping[str, Any] | None:
        """What this front door knows of an answer, ended or under way; None of another front door's, or an old one."""
        for session in self._sessions:
            for each in session.generations:
                if each.request.request_id == request_id:
                    return told(each.request, each.facts, "open", time.time())
        return self._memory.find(request_id)

    def validate(self) -> dict[str, Any]:
        """What is held now; `ok` when that is nothing."""
        counts = {
            "sessions": len(self._sessions),
            "subscriptions": self.streams.num_subscriptions,
            "outgoing": self.streams.num_outgoing,
            "body_bytes": self.body_room.used_nbytes,
        }
        problems = [f"{count} {name} held" for name, count in counts.items() if count]
        # Neither outlives its purpose: streams are kept for the next request, last words end within their deadline.
        counts |= {"streams": self.streams.num_open, "last_words": len(self._background)}
        return {"ok": not problems, "problems": problems, "counts": counts}

    def _tell_tenants(self) -> None:
        self.conductor.know_tenants(self.keys.tenants)

    def _about(self) -> dict[str, Any]:
        """For the console."""
        return {
            "node_id": self.config.node_id,
            "models": [model.name for model in self.models],
            "not_ready": "draining" if self.draining else self.cluster.not_ready(),
            "in_flight": len(self._sessions),
            "has_admin": self.keys.has_admin,
            "asks_for_key": self.keys.are_asked_for,
            "started_at": self.started_at,
        }

    def _samples(self) -> list[ConductorSample]:
        """The conductor's numbers, and the same of this process."""
        watch, own = self.loop_watch, {"process": "frontend"}
        return [
            *self.cluster.conductor_samples(),
            ConductorSample("event_loop_lag_seconds", watch.lag_s, own),
            ConductorSample("event_loop_held_seconds", watch.own_s, own),
            ConductorSample("event_loop_stalls_total", watch.num_stalls, own),
            *(
                ConductorSample("trace_spans_total", n, own | {"result": result})
                for result, n in tracing.counts().items()
            ),
        ]

    def _rest(self) -> None:
        if not self._sessions:
            self._on_rest()

    async def _idle_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._is_idle.wait()
        except TimeoutError:
            return False
        return True

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
