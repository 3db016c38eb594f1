"""Pulls of reused KV from pool nodes to a decode node under the prefill node's lease, verified before use."""

from __future__ import annotations

import logging
import time

import numpy as np
from numpy.typing import NDArray

from decode_node.reservation import Reservation
from kvpool import KvPoolError, Lease
from messenger import Priority
from moonpool_proto.v1.worker_pb2 import PullRange
from rpc.errors import NetworkError
from telemetry.tracing import Span
from worker.node import WorkerNode
from worker.prefix_blocks import StoredPart
from worker.shielded_wait import in_thread, shielded

log = logging.getLogger(__name__)


class PoolPuller:
    """Reader of reservations' blocks from pool nodes."""

    def __init__(self, node: WorkerNode) -> None:
        self._node = node

    async def pull(self, reservation: Reservation, pulls: list[PullRange], span: Span) -> None:
        """Read reused blocks that are not held here from their pool nodes; traced as children of `span`.

        Blocks that cannot be read or fail verification stay missing, and the prefill node is asked to push them. This
        happens only after the last range has ended, since a push and a pull of one block must never overlap.
        """
        reservation.announce()
        try:
            await self._pull_ranges(reservation, pulls, span)
        finally:
            reservation.over()

    async def _pull_ranges(self, reservation: Reservation, pulls: list[PullRange], span: Span) -> None:
        part = self._node.stored_parts.lasting
        if part is None:  # the prefill node pushes all that is seen
            return
        for proto in pulls:
            try:
                lease = Lease.from_pull_range(proto, part.spec)
            except (KvPoolError, NetworkError) as error:
                log.error("a range of reused blocks is malformed, the prefill node will push it: %s", error)
                continue
            if proto.first_block + lease.num_blocks > reservation.num_blocks:
                log.error("a range of reused blocks is longer than the prompt of %d blocks", reservation.num_blocks)
                continue
            skip = max(0, reservation.held_blocks - proto.first_block)
            if skip >= lease.num_blocks:
                continue
            peer, blocks = lease.endpoint.node_id, lease.num_blocks - skip
            with span.child("messenger pull", "client", peer=peer, blocks=blocks):
                await self._pull_range(reservation, part, lease, proto.first_block, skip)

    async def _pull_range(
        self, reservation: Reservation, part: StoredPart, lease: Lease, first: int, skip: int
    ) -> None:
        memory = self._node.stored
        blocks = np.arange(first + skip, first + lease.num_blocks, dtype=np.int64)
        slots = reservation.slots[first + skip : first + lease.num_blocks]
        groups = part.groups
        right = np.zeros(len(blocks), dtype=bool)
        began = time.perf_counter()
        reservation.announce()
        try:
            peer = self._node.messenger.connect(lease.endpoint)
            done = await shielded(
                peer.read(
                    lease.key,
                    memory.region,
                    memory.slot_slices(slots, groups, list(lease.offsets[:, skip:])),
                    deadline_s=min(self._node.config.kv.lease_s, max(0.1, reservation.request.time_left_s)),
                    priority=Priority.URGENT,
                )
            )
            self._node.counters.add_transfer("pull", done.nbytes, time.perf_counter() - began)
            verified = await in_thread(self._rows_right, groups, slots, [d[skip:] for d in lease.digests])
            if memory is not self._node.memory:  # pulled blocks must be converted before the engine can read them
                await in_thread(memory.to_device_now, [slot for slot, ok in zip(slots, verified, strict=True) if ok])
            right = verified
            if not right.all():
                reservation.corrupt_blocks.update(blocks[~right].tolist())
                self._node.counters.add("digest_mismatches", int((~right).sum()))
                log.error("%d blocks pulled from %s failed verification", int((~right).sum()), lease.endpoint.node_id)
        except NetworkError as error:
            log.warning("reused blocks could not be pulled, the prefill node will push them: %s", error)
        finally:
            reservation.landed(memory.spec.layers_of(groups), blocks, right)

    def _rows_right(
        self, groups: tuple[int, ...], slots: list[int], expected: list[NDArray[np.uint64]]
    ) -> NDArray[np.bool_]:
        valid = np.full(len(slots), self._node.config.block_tokens, dtype=np.int32)
        right = np.ones(len(slots), dtype=bool)
        for group, want in zip(groups, expected, strict=True):
            right &= (self._node.stored.slot_digests(group, slots, valid) == want).all(axis=1)
        return right
