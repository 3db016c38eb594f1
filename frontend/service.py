"""The frontend's long-lived state: served models, clients of the cluster, requests in flight, draining, self-check."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Final

from prometheus_client import CollectorRegistry

from frontend.answer_memory import AnswerMemory, answer_tokens
from frontend.api.body import BodyBudget
from frontend.api.request_models import ChatBody
from frontend.api_keys import ApiKeys, KeysFileWatcher
from frontend.callers import QuotaReservation, TenantQuotas
from frontend.cluster import ClusterWatch
from frontend.conductor import ConductorClient
from frontend.config import FrontendConfig, ServedModelConfig
from frontend.console.actions import ConsoleActions
from frontend.console.pool_contents import PoolContents
from frontend.console.watch import ConsoleWatch
from frontend.errors import ModelNotServed, ServiceUnavailable
from frontend.event_loop import LoopThrottle, WorkThreads
from frontend.generation import Generation, GenerationContext, RequestSession
from frontend.grammars import GrammarChecker
from frontend.next_turn import NextTurnPrefills
from frontend.output import Output
from frontend.prepare import Preparer, RequestContext
from frontend.request import GenerationRequest
from frontend.request_reports import RecentRequests, answer_record
from frontend.tokenizer import CONTEXT_TOKENS, Tokenizer
from frontend.worker_streams import WorkerStreams
from telemetry import (
    ConductorCollector,
    ConductorSample,
    FrontendMetrics,
    IncludedRegistry,
    LoopWatch,
    NodesCollector,
    RequestFamilies,
    RequestMetrics,
    new_registry,
    tracing,
)

_log = logging.getLogger(__name__)


class ServedModel:
    """One served model: tokenizer, request preparation, metrics, memory of its answers."""

    def __init__(
        self,
        model: ServedModelConfig,
        tokenizer: Tokenizer,
        *,
        config: FrontendConfig,
        cluster: ClusterWatch,
        threads: WorkThreads,
        grammars: GrammarChecker,
        families: RequestFamilies,
    ) -> None:
        self.config = model
        self.name = model.name
        self.tokenizer = tokenizer
        self.metrics = RequestMetrics(families, model.name)
        # Of requests that no client sent: they are not shown.
        self.own_metrics = RequestMetrics(RequestFamilies(new_registry()), model.name)
        self._answers = AnswerMemory(config.http.answer_memory_bytes)
        self.preparer = Preparer(config, model, tokenizer, cluster, threads, self._answers, self.metrics, grammars)
        self._num_sessions = 0

    def output(self, request: GenerationRequest) -> Output:
        """Return fresh detokenisation state for one request."""
        # With an echo the prompt's tokens are fed as well, so no text precedes them.
        context = [] if request.text.echo else request.prompt_ids[-CONTEXT_TOKENS:].tolist()
        options = request.text
        detokenizer = self.tokenizer.detokenizer(
            context, skip_special_tokens=options.skip_special_tokens, shown_ids=options.shown_ids
        )
        return Output(request, detokenizer, self.tokenizer.token_bytes)

    def remember(self, request: GenerationRequest, token_ids: Sequence[int], text: str) -> int:
        """Remember a finished answer, so that its ids are found when a later turn contains it as history.

        Returns how many of its ids that turn will contain; 0 if unknown. With a rolling window, only the first ids are
        remembered: no KV after them is stored.
        """
        text = text.rstrip()  # templates and clients strip it
        if not request.place or not text:
            return 0
        detokenizer = self.tokenizer.detokenizer(request.prompt_ids[-CONTEXT_TOKENS:].tolist())
        most = len(token_ids) if request.rolling is None else request.rolling.window
        answer = answer_tokens(token_ids[:most], text, detokenizer)
        if not len(answer.token_ids):  # as after reasoning, which the history does not contain
            return 0
        self._answers.remember(request.place, text, answer)
        self.metrics.answer_memory_bytes.set(self._answers.nbytes)
        return len(answer.token_ids)

    def count_session(self, change: int) -> None:
        """Add `change` (1 or -1) to the number of HTTP requests in flight."""
        self._num_sessions += change
        self.metrics.in_flight.set(self._num_sessions)


class ServedModels:
    """All served models, in configuration order; a request without a model goes to the first."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = tuple(models)
        self._by_name = {name: model for model in models for name in model.config.names}

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    def find(self, name: str | None) -> ServedModel:
        """Return the model of that name or alias. Raises ModelNotServed, which lists the served names."""
        if name is None:
            return self._models[0]
        if name not in self._by_name:
            served = ", ".join(map(repr, self._by_name))
            raise ModelNotServed(f"the model {name!r} is not served here; served models: {served}", param="model")
        return self._by_name[name]


async def load_tokenizers(models: Sequence[ServedModelConfig]) -> list[Tokenizer]:
    """Load each model's tokenizer in a thread. Raises ModelFilesError."""
    return [await asyncio.to_thread(Tokenizer, model.path) for model in models]


_WARM_UP_AFTER_S: Final = 1.0  # what only structured output needs must not delay the start
_FINAL_REPORTS_S: Final = 5.0  # time to report outcomes to the conductor after the last request


class Service:
    """The frontend without HTTP. Call `start` before use; `drain`, then `close`, after it."""

    def __init__(
        self, config: FrontendConfig, tokenizers: Sequence[Tokenizer], on_rest: Callable[[], None] = lambda: None
    ) -> None:
        """`tokenizers`: one per configured model. `on_rest` is called whenever no request is left in flight."""
        self.config = config
        self.throttle = LoopThrottle()
        self.body_budget = BodyBudget(config.max_bodies_nbytes)
        self._on_rest = on_rest
        self.registry = new_registry()
        self.access_metrics = FrontendMetrics(self.registry)
        self.keys = ApiKeys(config.http.api_key, required=config.http.api_keys_file is not None)
        self._keys_file = (
            None
            if config.http.api_keys_file is None
            else KeysFileWatcher(config.http.api_keys_file, self.keys, self.access_metrics, self._update_tenants)
        )
        self.quotas = TenantQuotas(self.access_metrics.quota_rejected)
        incarnation = secrets.randbits(63)
        self.conductor = ConductorClient(
            config.conductor_targets, asked_by=config.node_id, tenants=self.keys.tenants, incarnation=incarnation
        )
        self.streams = WorkerStreams(config.node_id, incarnation, config.attach_timeout_s)
        self.cluster = ClusterWatch(
            self.conductor,
            config.cluster_interval_s,
            models=[model.name for model in config.models],
            block_tokens=config.block_tokens,
            on_suspect=self.streams.suspect,
        )
        self.loop_watch = LoopWatch()
        self.own_metrics, self.cluster_metrics = self._registries()
        self.threads = WorkThreads(config.tokenizer_threads)
        self.grammars = GrammarChecker(self.access_metrics.grammar)
        families = RequestFamilies(self.registry)
        self.models = ServedModels(
            [
                ServedModel(
                    model,
                    tokenizer,
                    config=config,
                    cluster=self.cluster,
                    threads=self.threads,
                    grammars=self.grammars,
                    families=families,
                )
                for model, tokenizer in zip(config.models, tokenizers, strict=True)
            ]
        )
        self.console = ConsoleWatch(self.conductor, self.cluster, self._about)
        self.console_pool = PoolContents(self.cluster)
        self.console_actions = ConsoleActions(self.conductor)
        self._warming: asyncio.TimerHandle | None = None
        self._memory = RecentRequests()
        self.started_at = int(time.time())
        self.draining = False
        self._sessions: dict[RequestSession, ServedModel] = {}
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._background: set[asyncio.Task[None]] = set()
        self._next_turns = NextTurnPrefills(self.access_metrics.next_turn_prefill)

    async def start(self) -> None:
        """Start polling the cluster; an unreachable conductor is not an error."""
        if self._keys_file is not None:
            self._keys_file.start()
        await self.cluster.start()
        self._warming = asyncio.get_running_loop().call_later(_WARM_UP_AFTER_S, self.grammars.warm_up)

    async def admit(self, name: str | None) -> ServedModel:
        """Return the model named by a request; the first one for None.

        Raises ModelNotServed, and ServiceUnavailable while draining or while the workers' configuration does not match.
        """
        model = self.models.find(name)
        if self.draining:
            model.metrics.rejected("draining")
            raise ServiceUnavailable("this frontend is shutting down", code="draining", retry_after_s=1.0)
        try:
            await self.cluster.check_compatible(model.name)
        except ServiceUnavailable:
            model.metrics.rejected("misconfigured")
            raise
        return model

    def open_session(
        self,
        model: ServedModel,
        requests: Sequence[GenerationRequest],
        reservation: QuotaReservation,
        metrics: RequestMetrics | None = None,
    ) -> RequestSession:
        """Open a session that `close_session` must close, together with its quota reservation.

        It is counted in `metrics`, by default the model's.
        """
        context = GenerationContext(
            self.config,
            self.conductor,
            self.cluster,
            self.streams,
            self.throttle,
            metrics or model.metrics,
            self._spawn,
            model.remember,
            self._memory,
        )
        generations: list[Generation] = []
        for request in requests:
            # The choices of one prompt are adjacent and in order.
            leader = generations[-request.sampling.choice] if request.sampling.choice else None
            generations.append(Generation(context, request, model.output(request), leader))
        session = RequestSession(generations, reservation)
        self._sessions[session] = model
        self._is_idle.clear()
        model.count_session(1)
        return session

    async def close_session(self, session: RequestSession) -> None:
        """Close a session in any state; its outcome is reported to workers and conductor."""
        await session.close()
        model = self._sessions.pop(session, None)
        if model is not None:
            model.count_session(-1)
        if not self._sessions:
            self._is_idle.set()
            asyncio.get_running_loop().call_soon(self._notify_idle)

    def prefill_next_turn(
        self, model: ServedModel, body: ChatBody, context: RequestContext, answered: Generation
    ) -> None:
        """Compute the known part of the prompt after a finished answer in the background, if its request asks for it.

        The request for it is charged to the tenant; one that is over its quota or rejected is not repeated.
        """
        text = answered.finished_text
        if not answered.request.prefills_next_turn or text is None or not self._next_turns.may_begin():
            return

        def begin(request: GenerationRequest) -> RequestSession:
            reservation = self.quotas.enter(context.caller)
            try:
                reservation.reserve([request])
            except BaseException:
                reservation.leave(used_tokens=0, counts=False)
                raise
            return self.open_session(model, [request], reservation, model.own_metrics)

        def prepare() -> Coroutine[Any, Any, GenerationRequest | None]:
            ids = list(answered.stats.token_ids)
            return model.preparer.next_turn(body, context, answered.request, ids, text)

        self._spawn(self._next_turns.run(prepare, begin, self.close_session))

    async def drain(self) -> None:
        """Reject new requests, wait up to the grace period for running ones, then end the remaining ones with
        an error.
        """
        self.draining = True
        self._next_turns.end()
        if await self._idle_within(self.config.http.drain_grace_s):
            return
        _log.warning("%d requests are still running after the grace period; ending them", len(self._sessions))
        for session in self._sessions:
            session.end(ServiceUnavailable("the frontend is shutting down", code="draining", retry_after_s=1.0))
        await self._idle_within(_FINAL_REPORTS_S)

    async def close(self) -> None:
        """Close all sessions, streams and background tasks."""
        for session in list(self._sessions):
            await self.close_session(session)
        await self.streams.close()
        if self._keys_file is not None:
            await self._keys_file.close()
        if self._background:
            await asyncio.wait(self._background, timeout=_FINAL_REPORTS_S)
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.console.close()
        await self.console_pool.close()
        await self.cluster.close()
        await self.conductor.close()
        await self.loop_watch.close()
        if self._warming is not None:
            self._warming.cancel()
        await asyncio.to_thread(self.grammars.close)
        self.threads.close()

    def path_of(self, request_id: str) -> Mapping[str, Any] | None:
        """Return this frontend's record of an answer, running or ended; None if it has none or no longer has it."""
        for session in self._sessions:
            for each in session.generations:
                if each.request.request_id == request_id:
                    return answer_record(each.request, each.stats, "open", time.time())
        return self._memory.find(request_id)

    def validate(self) -> dict[str, Any]:
        """Return the resources held now; `ok` is true if there are none."""
        counts = {
            "sessions": len(self._sessions),
            "subscriptions": self.streams.num_subscriptions,
            "outgoing": self.streams.num_outgoing,
            "body_bytes": self.body_budget.used_nbytes,
            "queued_work": self.threads.num_queued,
        }
        problems = [f"{count} {name} held" for name, count in counts.items() if count]
        # These are not leaks: streams are kept for the next request, and final reports end within their deadline.
        counts |= {"streams": self.streams.num_open, "last_words": len(self._background)}
        return {"ok": not problems, "problems": problems, "counts": counts}

    def _update_tenants(self) -> None:
        self.conductor.set_tenants(self.keys.tenants)

    def _about(self) -> dict[str, Any]:
        """Return the console's data about this frontend."""
        return {
            "node_id": self.config.node_id,
            "models": [model.name for model in self.models],
            "not_ready": "draining" if self.draining else self.cluster.not_ready(),
            "in_flight": len(self._sessions),
            "has_admin": self.keys.has_admin,
            "asks_for_key": self.keys.are_required,
            "started_at": self.started_at,
        }

    @property
    def metrics(self) -> CollectorRegistry:
        """Registry of /metrics."""
        return self.cluster_metrics if self.config.http.metrics_scope == "cluster" else self.own_metrics

    def _registries(self) -> tuple[CollectorRegistry, CollectorRegistry]:
        """Return the registries of this process's own series, and of these with the nodes' and the conductor's."""
        own, cluster = CollectorRegistry(), CollectorRegistry()
        for registry in (own, cluster):
            registry.register(IncludedRegistry(self.registry))
        own.register(ConductorCollector(self._own_samples))
        cluster.register(ConductorCollector(lambda: [*self.cluster.conductor_samples(), *self._own_samples()]))
        cluster.register(NodesCollector(self.cluster.samples))
        return own, cluster

    def _own_samples(self) -> list[ConductorSample]:
        """Return the samples of this process that conductors have as well."""
        watch, own = self.loop_watch, {"process": "frontend"}
        return [
            ConductorSample("event_loop_lag_seconds", watch.lag_s, own),
            ConductorSample("event_loop_held_seconds", watch.own_s, own),
            ConductorSample("event_loop_stalls_total", watch.num_stalls, own),
            *(
                ConductorSample("trace_spans_total", n, own | {"result": result})
                for result, n in tracing.counts().items()
            ),
        ]

    def _notify_idle(self) -> None:
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
