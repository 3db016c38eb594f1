"""The cluster as last seen: readiness, fit, limits, hanging nodes, samples. Looked at once per interval."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Final

from frontend.conductor import ConductorClient
from frontend.errors import ServiceUnavailable
from frontend.fit import is_served, misfit
from frontend.roles import ROLE_NAMES
from moonpool_proto.v1 import conductor_pb2
from rpc.control import ControlError
from rpc.versions import own_software, why_not_together
from telemetry import ConductorSample, NodeSample

_log = logging.getLogger(__name__)
_LOOK_S: Final = 2.0


class ClusterWatch:
    """Keeps the conductor's last Cluster reply; what it says is at most one interval and one call old.

    `on_suspect(node_id, incarnation)` is called, at every look, for each node that the conductor knows and that has
    stopped reporting to it. A node that the conductor does not know may be well: the conductor may have restarted.
    """

    def __init__(
        self,
        conductor: ConductorClient,
        interval_s: float,
        *,
        models: Sequence[str],
        block_tokens: int,
        on_suspect: Callable[[str, int], None],
    ) -> None:
        self._conductor = conductor
        self._interval_s = interval_s
        self._models = tuple(models)
        self._block_tokens = block_tokens
        self._on_suspect = on_suspect
        self._was_served: set[str] = set()  # models of which a worker was seen
        self._misfits: dict[str, str] = {}  # by model
        self._reply = conductor_pb2.ClusterReply()
        self._problem: str | None = "the conductor was not asked yet"
        self._seen_s: float | None = None  # the monotonic clock
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Look once, whatever comes of it, then keep looking."""
        await self._look()
        self._task = asyncio.create_task(self._keep_looking(), name="cluster watch")

    async def close(self) -> None:
        """Stop looking."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def reply(self) -> conductor_pb2.ClusterReply:
        """The last one. Read it only."""
        return self._reply

    @property
    def problem(self) -> str | None:
        """Why it is an old one; None: it is as new as can be."""
        return self._problem

    @property
    def age_s(self) -> float | None:
        """Of the last reply; None: there was none yet."""
        return None if self._seen_s is None else monotonic() - self._seen_s

    def not_ready(self) -> str | None:
        """Why the cluster cannot serve; None when it can."""
        if self._problem is not None:
            return self._problem
        if self._misfits:
            return "; ".join(self._misfits.values())
        waiting = [repr(model) for model in self._models if model not in self._reply.ready_models]
        if not waiting:
            return None
        return f"the cluster has no place that can serve a request of {' or '.join(waiting)} yet"

    async def check_fit(self, model: str) -> None:
        """Raises ServiceUnavailable while the blocks of the model's workers, or its name, are not this front door's."""
        if model not in self._was_served and self._problem is None:
            await self._look()  # its first worker may have joined since the last look
        if model in self._misfits:
            raise ServiceUnavailable(self._misfits[model], code="misconfigured")

    def incarnation(self, node_id: str) -> int:
        """The node's incarnation; 0 when it is not in the cluster."""
        return next((s.node.incarnation for s in self._reply.nodes if s.node.node_id == node_id), 0)

    def max_model_len(self, model: str, own_limit: int) -> int:
        """Longest sequence every worker of the model takes; `own_limit` (0 = none) bounds it, and stands in for it
        while no worker is known."""
        limits = [node.max_model_len for node in self._workers(model) if node.max_model_len]
        return min([*limits, own_limit] if own_limit else limits, default=0)

    def fingerprint(self, model: str) -> str:
        """Hex, over the weights that the model's workers compute with; "" while no worker is known."""
        return next((node.model_fingerprint for node in self._workers(model) if node.model_fingerprint), "")

    def engines(self, model: str) -> list[str]:
        """What stands in for the model on workers that do not compute it, each once."""
        return sorted({node.engine for node in self._workers(model) if node.engine})

    def samples(self) -> Sequence[NodeSample]:
        """The nodes' last reports, for export."""
        return [_sample(status) for status in self._reply.nodes]

    def conductor_samples(self) -> Sequence[ConductorSample]:
        """The conductor's own numbers, for export."""
        return [ConductorSample(each.name, each.value, dict(each.labels)) for each in self._reply.samples]

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self._look()

    async def _look(self) -> None:
        try:
            self._reply = await self._conductor.cluster(deadline_s=_LOOK_S)
        except ControlError as error:
            if self._problem is None:
                _log.warning("cluster state unknown: %s", error)
            self._problem = f"the conductor does not answer: {error}"
            return
        self._problem, self._seen_s = None, monotonic()
        self._judge_fit()
        for status in self._reply.nodes:
            if status.suspect:
                self._on_suspect(status.node.node_id, status.node.incarnation)

    def _judge_fit(self) -> None:
        nodes = [status.node for status in self._reply.nodes]
        apart = why_not_together(own_software(), "this front door", self._reply.software, "the conductor")
        for model in self._models:
            if is_served(nodes, model):
                self._was_served.add(model)
            found = apart or misfit(
                nodes,
                model,
                self._block_tokens,
                was_served=model in self._was_served,
                front_door=self._models,
            )
            if found and found != self._misfits.get(model):
                _log.error("%s", found)
            if found:
                self._misfits[model] = found
            else:
                self._misfits.pop(model, None)

    def _workers(self, model: str) -> list[conductor_pb2.Node]:
        return [status.node for status in self._reply.nodes if status.node.model == model]


def _sample(status: conductor_pb2.NodeStatus) -> NodeSample:
    node, report = status.node, status.report
    return NodeSample(
        node_id=node.node_id,
        role=ROLE_NAMES.get(node.role, "unknown"),
        model=node.model,
        num_running=report.num_running,
        num_waiting=report.num_waiting,
        capacity_tokens=node.capacity_tokens,
        free_tokens=report.free_tokens,
        draining=report.draining,
        suspect=status.suspect,
        engine=node.engine,
        counters=dict(report.counters),
    )
