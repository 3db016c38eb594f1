"""The cluster's state as polled from the conductor: readiness, configuration mismatches, limits, samples."""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from time import monotonic
from typing import Final

from frontend.conductor import ConductorClient
from frontend.errors import ServiceUnavailable
from moonpool_proto.v1 import conductor_pb2
from moonpool_proto.v1.common_pb2 import Software
from rpc.control import ControlError
from rpc.metric_samples import conductor_samples, node_samples
from rpc.versions import own_software, why_not_together
from telemetry import ConductorSample, NodeSample

_log = logging.getLogger(__name__)


def is_served(nodes: Iterable[conductor_pb2.Node], model: str) -> bool:
    """Return True if a worker of the model is among the nodes."""
    return any(node.model == model for node in nodes)


def configuration_mismatch(
    nodes: Iterable[conductor_pb2.Node],
    model: str,
    block_tokens: int,
    *,
    was_served: bool,
    frontend_models: Collection[str] = (),
) -> str | None:
    """Return an error text if the workers of `model` do not match this frontend's configuration, else None.

    Chain keys, and so every request, depend on the model and on the block size. A model that was served before
    (`was_served`) has only lost its workers temporarily, which is not a mismatch. Workers of the frontend's other
    models (`frontend_models`) do not indicate one either: this model's workers may still be starting.
    """
    nodes = list(nodes)
    mine = [node for node in nodes if node.model == model]
    unknown = {node.model for node in nodes if node.model} - {model, *frontend_models}  # pool nodes have no model
    if unknown and not mine and not was_served:
        others = ", ".join(repr(name) for name in sorted(unknown))
        return (
            f"misconfigured: this frontend serves model {model!r}, but the cluster's workers serve {others}; "
            "start both with the same model folder or --served-model-name"
        )
    for node in mine:
        if node.spec.block_tokens != block_tokens:
            return (
                f"misconfigured: this frontend has block_tokens {block_tokens}, but node {node.node_id!r} and the "
                f"other workers of model {model!r} have {node.spec.block_tokens}; start both with one --block-tokens"
            )
    return None


_POLL_S: Final = 2.0


class ClusterWatch:
    """Poller of the cluster's state; the last reply is at most one interval and one call old.

    At every poll, `on_suspect(node_id, incarnation)` is called for each node that has stopped reporting to the
    conductor. A node that the conductor does not list may be healthy: the conductor may have restarted.
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
        self._was_served: set[str] = set()  # models that had a worker at some poll
        self._mismatches: dict[str, str] = {}  # error text by model
        self._reply = conductor_pb2.ClusterReply()
        self._problem: str | None = "the conductor has not been polled yet"
        self._seen_s: float | None = None  # time of the last reply, monotonic clock
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Poll once, successfully or not, then start polling in the background."""
        await self._poll()
        self._task = asyncio.create_task(self._keep_polling(), name="cluster watch")

    async def close(self) -> None:
        """Stop polling."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def reply(self) -> conductor_pb2.ClusterReply:
        """The conductor's last reply; read-only."""
        return self._reply

    @property
    def problem(self) -> str | None:
        """Reason why the last poll failed; None if it succeeded."""
        return self._problem

    @property
    def age_s(self) -> float | None:
        """Age of the last reply in seconds; None if there was none yet."""
        return None if self._seen_s is None else monotonic() - self._seen_s

    def not_ready(self) -> str | None:
        """Return the reason why the cluster cannot serve; None if it can."""
        if self._problem is not None:
            return self._problem
        if self._mismatches:
            return "; ".join(self._mismatches.values())
        waiting = [repr(model) for model in self._models if model not in self._reply.ready_models]
        if not waiting:
            return None
        return f"the cluster has no nodes yet that can serve requests for {' or '.join(waiting)}"

    async def check_compatible(self, model: str) -> None:
        """Raise ServiceUnavailable if the model's name or block size does not match that of the workers."""
        if model not in self._was_served and self._problem is None:
            await self._poll()  # its first worker may have joined since the last poll
        if model in self._mismatches:
            raise ServiceUnavailable(self._mismatches[model], code="misconfigured")

    def incarnation(self, node_id: str) -> int:
        """Return the node's incarnation; 0 if it is not in the cluster."""
        return next((s.node.incarnation for s in self._reply.nodes if s.node.node_id == node_id), 0)

    def software(self, node_id: str, incarnation: int) -> Software:
        """Return the versions that this incarnation of the node reported to the conductor; empty if unknown."""
        nodes = (status.node for status in self._reply.nodes)
        found = (n.software for n in nodes if (n.node_id, n.incarnation) == (node_id, incarnation))
        return next(found, Software())

    def max_model_len(self, model: str, own_limit: int) -> int:
        """Return the longest sequence, in tokens, that every worker of the model accepts.

        At most `own_limit` (0: no limit), which is also the result while no worker is known.
        """
        limits = [node.max_model_len for node in self._workers(model) if node.max_model_len]
        return min([*limits, own_limit] if own_limit else limits, default=0)

    def fingerprint(self, model: str) -> str:
        """Return the hexadecimal fingerprint of the weights that the model's workers use; "" while none is known."""
        return next((node.model_fingerprint for node in self._workers(model) if node.model_fingerprint), "")

    def kv_scale_group(self, model: str) -> int:
        """Return how many values of the model's KV share a scale in int8; 0 if it is not in int8, or not known."""
        groups = (group for node in self._workers(model) for group in node.spec.groups)
        return max((group.scale_group for group in groups), default=0)

    def engines(self, model: str) -> list[str]:
        """Return the names of the stand-in engines of workers that do not run the model, sorted."""
        return sorted({node.engine for node in self._workers(model) if node.engine})

    def samples(self) -> Sequence[NodeSample]:
        """Return the nodes' last reports for the metrics."""
        return node_samples(self._reply.nodes)

    def conductor_samples(self) -> Sequence[ConductorSample]:
        """Return the conductor's own samples for the metrics."""
        return conductor_samples(self._reply.samples)

    async def _keep_polling(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self._poll()

    async def _poll(self) -> None:
        try:
            self._reply = await self._conductor.cluster(deadline_s=_POLL_S)
        except ControlError as error:
            if self._problem is None:
                _log.warning("cluster state unknown: %s", error)
            self._problem = f"the conductor does not answer: {error}"
            return
        self._problem, self._seen_s = None, monotonic()
        self._check_mismatches()
        for status in self._reply.nodes:
            if status.suspect:
                self._on_suspect(status.node.node_id, status.node.incarnation)

    def _check_mismatches(self) -> None:
        nodes = [status.node for status in self._reply.nodes]
        apart = why_not_together(own_software(), "this frontend", self._reply.software, "the conductor")
        for model in self._models:
            if is_served(nodes, model):
                self._was_served.add(model)
            found = apart or configuration_mismatch(
                nodes,
                model,
                self._block_tokens,
                was_served=model in self._was_served,
                frontend_models=self._models,
            )
            if found and found != self._mismatches.get(model):
                _log.error("%s", found)
            if found:
                self._mismatches[model] = found
            else:
                self._mismatches.pop(model, None)

    def _workers(self, model: str) -> list[conductor_pb2.Node]:
        return [status.node for status in self._reply.nodes if status.node.model == model]
