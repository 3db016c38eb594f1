"""Puts of this host's processes: the pool node copies out of their memory, verifies on the way, and seals at once.

The caller's memory stays its own and the arena the pool node's: nobody else writes to it, so nothing needs fencing when
a caller dies. The digest is of the bytes that were copied, whatever the caller does to its memory meanwhile: what they
are is certain by the digests that the caller told, or by its waiting for the answer.
"""

import asyncio
import functools
import itertools
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from kvpool.address import KEY_NBYTES
from kvpool.errors import AddressError, PoolRefused, SpecError
from kvpool.local.frames import Put, PutStatus
from kvpool.local.layout import SpecPlan
from kvpool.local.mapping import Mapped, copy_blocks
from kvpool.node import PoolNode
from kvpool.policy import SlotStatus
from kvpool.spec import KvSpec
from moonpool_proto.v1 import common_pb2

__all__ = ["Caller", "Intake"]

# Up to so many bytes a copy is over sooner than a thread has begun it.
_QUICK_NBYTES = 1 << 20
_PUT_TTL_NS = 60 * 10**9  # the longest that copying may take


@dataclass(frozen=True)
class Caller:
    """Whose puts these are, for accounting."""

    owner: str
    owner_incarnation: int


class _Request(NamedTuple):
    """A Put, checked but for its offsets."""

    plan: SpecPlan
    chain: list[bytes]
    parents: list[bytes]
    offsets: NDArray[np.int64]  # [groups, n]
    digests: NDArray[np.uint64] | None  # [n, layers of all groups]; None: those of the bytes as they are copied
    num_tokens: NDArray[np.uint32]  # [n], 0 for a full block


class _Copy(NamedTuple):
    """What is left to do of a Put once slots were given: indices of its NEW blocks, and where they go."""

    put_id: str
    new: list[int]
    targets: NDArray[np.int64]  # [groups, new]


class Intake:
    """Carries puts out at one pool node, in its event loop and `threads`."""

    def __init__(self, node: PoolNode, arena: Mapped, threads: Executor) -> None:
        self._node = node
        self._arena = arena
        self._threads = threads

    def put(
        self, caller: Caller, message: Put, source: Mapped, is_there: Callable[[], bool]
    ) -> bytes | Awaitable[bytes]:
        """A PutStatus per block, at once or, where there is much to copy, later. Raises KvPoolError.

        `is_there()`: whether the caller still waits; what it told no digests of is not stored else.
        """
        request = _checked(message)
        allocation = self._node.allocate(
            message.kv_namespace,
            request.plan.spec,
            request.chain,
            request.parents,
            owner=caller.owner,
            owner_incarnation=caller.owner_incarnation,
            ttl_ns=_PUT_TTL_NS,
            num_tokens=request.num_tokens.tolist(),
            compute_s=message.compute_s,
        )
        status = bytearray(allocation.status)  # PutStatus begins with SlotStatus's values
        if not allocation.new_blocks:
            return bytes(status)
        new = [i for i, each in enumerate(allocation.status) if each is SlotStatus.NEW]
        targets = np.array(list(zip(*[block.offsets for block in allocation.new_blocks], strict=True)), np.int64)
        copy = _Copy(allocation.put_id, new, targets)
        if len(new) * request.plan.block_nbytes > _QUICK_NBYTES:
            return self._put_later(request, copy, source, status, is_there)
        try:
            right, digests = self._copy(request, copy, source)
            _check_certain(request, is_there)
        except BaseException:
            self._node.drop_now(copy.put_id)
            raise
        self._node.seal_now(copy.put_id, digests, right)
        return self._told(status, new, right)

    async def _put_later(
        self, request: _Request, copy: _Copy, source: Mapped, status: bytearray, is_there: Callable[[], bool]
    ) -> bytes:
        submit = functools.partial(self._threads.submit, self._copy, request, copy, source)
        copying = asyncio.wrap_future(self._node.own_read(copy.put_id, submit))
        try:
            await asyncio.wait([copying])
            right, digests = copying.result()
            _check_certain(request, is_there)
            self._node.seal_now(copy.put_id, digests, right)
        except BaseException:
            await self._node.abort(copy.put_id)
            raise
        return self._told(status, copy.new, right)

    def _copy(self, request: _Request, copy: _Copy, source: Mapped) -> tuple[list[bool], list[tuple[bytes, ...]]]:
        """(whether each NEW block is right, their digests as a seal wants them)."""
        starts, expected, num_tokens = request.offsets, request.digests, request.num_tokens
        if len(copy.new) < len(request.chain):
            starts, num_tokens = np.ascontiguousarray(starts[:, copy.new]), num_tokens[copy.new]
            expected = None if expected is None else expected[copy.new]
        right, digests = copy_blocks(source, starts, self._arena, copy.targets, request.plan, num_tokens, expected)
        return right.tolist(), _by_group(request.plan, digests)

    def _told(self, status: bytearray, new: list[int], right: list[bool]) -> bytes:
        for i, good in zip(new, right, strict=True):
            status[i] = PutStatus.STORED if good else PutStatus.WRONG
        wrong = len(right) - sum(right)
        if wrong:
            self._node.core.counters["digest_mismatches"] += wrong
        return bytes(status)


def _check_certain(request: _Request, is_there: Callable[[], bool]) -> None:
    """Raises PoolRefused when the bytes may have been others than were to be put: who has hung up may write there."""
    if request.digests is None and not is_there():
        raise PoolRefused("the caller hung up while its memory was being copied, and had told no digests")


def _checked(message: Put) -> _Request:
    plan = _plan(message.spec)
    if len(message.kv_namespace) != KEY_NBYTES or len(message.chain) % KEY_NBYTES:
        raise AddressError(f"a namespace of {len(message.kv_namespace)} bytes, keys of {len(message.chain)}")
    n, groups = len(message.chain) // KEY_NBYTES, plan.spec.num_groups
    told = [len(message.parents), len(message.offsets), len(message.digests), len(message.num_tokens)]
    digests_nbytes = 8 * plan.num_layers * n if message.digests else 0
    want = [KEY_NBYTES * n, 8 * groups * n, digests_nbytes, 4 * n]
    if told != want:
        raise SpecError(f"a put of {n} blocks has parents, offsets, digests, lengths of {told} bytes: expected {want}")
    offsets = np.frombuffer(message.offsets, np.int64).reshape(groups, n)
    digests = np.frombuffer(message.digests, np.uint64).reshape(n, plan.num_layers) if message.digests else None
    num_tokens = np.frombuffer(message.num_tokens, np.uint32)
    return _Request(plan, _keys(message.chain), _keys(message.parents), offsets, digests, num_tokens)


def _by_group(plan: SpecPlan, digests: NDArray[np.uint64]) -> list[tuple[bytes, ...]]:
    """Per block, the digests of each group."""
    data, nbytes = digests.tobytes(), 8 * plan.num_layers
    if len(plan.ends) == 1:
        return [(data[at : at + nbytes],) for at in range(0, len(data), nbytes)]
    spans = list(itertools.pairwise((0, *plan.ends)))
    return [tuple(data[at + a : at + b] for a, b in spans) for at in range(0, len(data), nbytes)]


@functools.lru_cache(maxsize=64)
def _plan(spec: bytes) -> SpecPlan:
    message = common_pb2.KvSpec()
    try:
        message.ParseFromString(spec)
    except DecodeError as error:
        raise SpecError(f"not a KvSpec: {error}") from error
    return SpecPlan(KvSpec.from_proto(message))


def _keys(data: bytes) -> list[bytes]:
    return [data[i : i + KEY_NBYTES] for i in range(0, len(data), KEY_NBYTES)]
