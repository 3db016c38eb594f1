"""Conductor with all components of the server except the network."""

import itertools

from benchmarks.conducting.chains import NAMESPACE, Keys, name
from conductor import wire
from conductor.config import ConductorConfig
from conductor.core import Core
from conductor.persistence import Persistence, SharedStoreConnection
from conductor.policy.events import NodeJoined, RequestCompleted
from conductor.pools import PoolNodes
from conductor.registry import Registry
from conductor.service import ConductorService
from conductor.slo.service import slo_keeper
from conductor.worker_memory import WorkerMemory
from kvpool import KvGroup, KvSpec
from moonpool_proto.v1 import common_pb2, conductor_pb2
from settings.keys import assemble
from telemetry import LoopWatch

__all__ = ["Bench"]


class Bench:
    """Conductor without network, with workers that have a pool node each, and `live` placed requests."""

    def __init__(self, workers: int, block_tokens: int, live: int) -> None:
        self.spec = KvSpec((KvGroup("full", 0, tuple(range(8)), 2, 64, "float16"),), block_tokens)
        config = assemble(ConductorConfig, listen="none", max_queue_s=1e9, max_copies=0, report_timeout_s=0)
        self.core = Core(config)
        self.pools = PoolNodes(self.core, 1, 1.0)
        self.workers = WorkerMemory()
        self.registry = Registry()
        contact = SharedStoreConnection(None, 1)
        continuity = Persistence(config, contact, self.pools.directory_updater, self.registry)
        slo = slo_keeper(config, contact, self.core)
        self.service = ConductorService(
            self.core, self.registry, self.pools, self.workers, continuity, slo, 1, LoopWatch()
        )
        for number in range(workers):
            self._join(name(number), common_pb2.ROLE_POOL)
            self._join(f"w-{number:04}", (common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE)[number % 2], name(number))
        self.live = live
        self._numbers = itertools.count()

    def request(self, chain: bytes, prompt_tokens: int, max_new_tokens: int) -> conductor_pb2.ScheduleRequest:
        return conductor_pb2.ScheduleRequest(
            request_id=f"r{next(self._numbers)}",
            frontend_id="f",
            model="m",
            prompt_tokens=prompt_tokens,
            max_new_tokens=max_new_tokens,
            chain=chain,
        )

    def decide(self, request: conductor_pb2.ScheduleRequest, keys: Keys) -> None:
        """Match and place a request with these block keys; complete the request placed `live` requests ago."""
        matches, own = self.pools.match(NAMESPACE, keys), self.workers.match(NAMESPACE, keys)
        self.core.handle(wire.request_arrived(request, NAMESPACE, matches, keys, {}, own))
        self.complete(request.request_id)

    def schedule(self, message: bytes) -> None:
        """Handle a serialised Schedule call up to the serialised reply; complete the request `live` requests ago."""
        request = conductor_pb2.ScheduleRequest.FromString(message)
        reply = conductor_pb2.ScheduleReply()
        self.service.scheduling.schedule(request, reply)
        reply.SerializeToString()
        assert reply.HasField("placement"), reply
        self.complete(request.request_id)

    def complete(self, request_id: str) -> None:
        self.core.handle(RequestCompleted(f"r{int(request_id[1:]) - self.live}", 0, "finished"))

    def _join(self, node_id: str, role: int, pool: str = "") -> None:
        # Bypasses Join, because the pool nodes do not exist; the directory is filled directly.
        member = self.registry.admit(
            conductor_pb2.Node(
                node_id=node_id,
                role=role,  # type: ignore[arg-type]
                incarnation=1,
                target=f"unix:/nowhere/{node_id}",
                pool_node_id=pool,
                model="m" if pool else "",
                kv_namespace=NAMESPACE if pool else b"",
                spec=self.spec.to_proto() if pool else None,
                capacity_tokens=1 << 22,
                max_model_len=1 << 18,
                max_batch=256,
                kv_bytes_per_token=self.spec.bytes_per_token,
            )
        )
        self.core.handle(NodeJoined(wire.node_view(member.node)))
        if not pool:
            self.pools.add(member.node)
