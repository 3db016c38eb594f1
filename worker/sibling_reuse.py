"""Reuse of a sibling model's KV (DroidSpeak): what a sender stores beside its KV, and how a receiver uses it.

A sender stores the hidden states that enter the layers which reuse profiles name. A receiver whose placement says so
loads the sender's KV of all layers but one group, and computes that group's from the hidden states meanwhile. It stores
nothing that follows from such KV, and lends it to no other request. What cannot be loaded is computed as usual.

All methods run on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

from engine import LayerSpan
from messenger import Messenger
from moonpool_proto.v1.conductor_pb2 import NodeRef, Sibling, SiblingPoint, SiblingReuse
from telemetry.tracing import Span
from worker.config import WorkerConfig
from worker.counters import WorkerCounters
from worker.engine_interface import Engine, StepRunner
from worker.errors import ProfileError, StartupError
from worker.hidden_memory import HiddenMemory, hidden_parts, hidden_spec
from worker.kv_connector import KVConnector, PoolCallSettings
from worker.kv_memory import KvMemory
from worker.policy.reuse_profile import ReusePoint, ReuseProfile, load_reuse_profile
from worker.prefix_blocks import PinnedBlocks, PinnedPrefix, PrefixSave, StoredParts
from worker.request import Request
from worker.shielded_wait import shielded
from worker.slot_memory import EngineMemory
from worker.transformer import ModelSteps, Transformer

log = logging.getLogger(__name__)

_CHUNK_TOKENS = 512
"""Tokens of a group that are computed between two steps, so that decoding sequences wait no longer."""


def profiles_of(paths: Sequence[str], model: Transformer, name: str) -> list[ReuseProfile]:
    """Return the profiles in which the model, served as `name`, is the sender or the receiver. Raises StartupError."""
    found = []
    for path in paths:
        try:
            profile = load_reuse_profile(Path(path))
        except ProfileError as error:
            raise StartupError(str(error)) from error
        roles = {
            "sender": (profile.sender, profile.sender_fingerprint),
            "receiver": (profile.receiver, profile.receiver_fingerprint),
        }
        for role, (named, fingerprint) in roles.items():
            if named == name and fingerprint != model.fingerprint:
                raise StartupError(
                    f"reuse profile {path}: {role}_fingerprint is {fingerprint}, but the weights of {name} have "
                    f"{model.fingerprint}: make a profile of these weights with `moonpool droidspeak profile`"
                )
        if model.fingerprint not in (profile.sender_fingerprint, profile.receiver_fingerprint):
            continue
        _check_shape(path, profile, model)
        found.append(profile)
    return found


def _check_shape(path: str, profile: ReuseProfile, model: Transformer) -> None:
    config = model.model.config
    for field, own in (
        ("num_layers", config.num_layers),
        ("hidden_size", config.hidden_size),
        ("dtype", model.model.dtype),
    ):
        if getattr(profile, field) != own:
            raise StartupError(
                f"reuse profile {path}: {field} is {getattr(profile, field)}, but the model's is {own}: "
                "make a profile with the settings of the cluster"
            )
    if any(config.layer_windows):
        raise StartupError(f"reuse profile {path}: models with windows are not supported as sender or receiver")


class SiblingKv:
    """The reuse profiles of one worker's model, the hidden states in its memory, and its access to stored ones."""

    def __init__(
        self,
        model: Transformer,
        memory: KvMemory,
        profiles: Sequence[ReuseProfile],
        messenger: Messenger,
        settings: PoolCallSettings,
        counters: WorkerCounters,
    ) -> None:
        """Raises OSError if there is not enough memory for the hidden states."""
        self._memory = memory
        self._sent = sorted({n for p in profiles if p.sender_fingerprint == model.fingerprint for n in p.input_layers})
        self._received = {p.sender_fingerprint: p for p in profiles if p.receiver_fingerprint == model.fingerprint}
        layers = sorted({*self._sent, *(n for p in self._received.values() for n in p.input_layers)})
        config = model.model.config
        self.hidden: HiddenMemory | None = None
        if layers:
            spec = hidden_spec(layers, config.hidden_size, model.model.dtype, memory.block_tokens)
            self.hidden = HiddenMemory(spec, memory.num_slots, messenger)

        def inputs_of(identity: str, layers: Sequence[int]) -> dict[int, KVConnector]:
            if self.hidden is None:
                return {}
            parts = {layer: hidden_parts(identity, self.hidden.spec, layer) for layer in layers}
            return {n: KVConnector(self.hidden, messenger, part, settings, counters) for n, part in parts.items()}

        self._own_inputs = inputs_of(model.fingerprint, self._sent)
        self._inputs = {sender: inputs_of(sender, p.input_layers) for sender, p in self._received.items()}
        self._kv = {
            sender: KVConnector(memory, messenger, StoredParts.of(sender, memory.spec), settings, counters)
            for sender in self._received
        }
        self._steps: ModelSteps | None = None
        self._between_steps: Callable[[Callable[[], None]], asyncio.Future[None]] | None = None

    @classmethod
    def of(
        cls,
        model: Engine,
        memory: EngineMemory,
        config: WorkerConfig,
        access: tuple[Messenger, PoolCallSettings, WorkerCounters],
    ) -> SiblingKv | None:
        """Return the reuse that the configured profiles allow; None if none names the model. Raises StartupError."""
        assert isinstance(model, Transformer)  # the configuration was checked
        assert isinstance(memory, KvMemory)
        profiles = profiles_of(config.kv.reuse_profile, model, config.model.name)
        return cls(model, memory, profiles, *access) if profiles else None

    def attach(self, steps: StepRunner, between_steps: Callable[[Callable[[], None]], asyncio.Future[None]]) -> None:
        """Set the engine's steps, and what lets its thread call a function between two of them. Before it starts."""
        assert isinstance(steps, ModelSteps)
        self._steps, self._between_steps = steps, between_steps
        if self.hidden is not None:
            steps.keep_inputs(self.hidden, frozenset(self._sent))

    @property
    def num_pinned(self) -> int:
        """Number of leases held."""
        return sum(connector.num_pinned for connector in self._connectors)

    @property
    def _connectors(self) -> list[KVConnector]:
        inputs = [each for of_sender in (self._own_inputs, *self._inputs.values()) for each in of_sender.values()]
        return [*inputs, *self._kv.values()]

    def description(self) -> list[Sibling]:
        """Return the models whose KV this one may reuse, for the conductors."""
        return [self._described(profile) for profile in self._received.values()]

    def _described(self, profile: ReuseProfile) -> Sibling:
        sender = profile.sender_fingerprint

        def described(point: ReusePoint) -> SiblingPoint:
            namespace, nbytes = b"", 0
            if point.first:
                assert self.hidden is not None
                part = hidden_parts(sender, self.hidden.spec, point.first)[False]
                namespace, nbytes = part.kv_namespace, part.spec.bytes_per_token
            return SiblingPoint(
                first_layer=point.first,
                last_layer=point.last,
                cost=point.cost,
                quality_loss=point.quality_loss,
                input_namespace=namespace,
                input_bytes_per_token=nbytes,
            )

        return Sibling(
            model_fingerprint=sender,
            kv_namespace=StoredParts.of(sender, self._memory.spec).kv_namespace,
            points=[described(point) for point in profile.points],
        )

    async def start(self) -> None:
        """Learn the identity of this host's pool node."""
        await asyncio.gather(*(connector.wait_for_own_pool() for connector in self._connectors))

    async def close(self) -> None:
        """Close all connections, and release the memory."""
        await asyncio.gather(*(connector.close() for connector in self._connectors))
        if self.hidden is not None:
            self.hidden.close()

    async def store_inputs(
        self, kept: PrefixSave, slots: Sequence[int], first: int, *, pool: NodeRef | None = None, token_s: float = 0.0
    ) -> None:
        """Store the hidden states of whole blocks from `first` on that were computed here."""
        for layer, connector in self._own_inputs.items():
            assert self.hidden is not None
            blocks = range(first, len(kept.keys))
            whole = self.hidden.whole(layer, [slots[block] for block in blocks])
            for is_whole, run in groupby(zip(blocks, whole.tolist(), strict=True), key=lambda each: each[1]):
                run_blocks = [block for block, _ in run]
                if is_whole:
                    head = kept.head(run_blocks[-1] + 1)
                    await connector.store(head, slots, run_blocks[0], pool=pool, token_s=token_s)

    async def take_up(self, request: Request, slots: Sequence[int], first: int, end: int, span: Span) -> int:
        """Bring the sibling's KV of whole blocks [first, end) of the prompt to `slots`; return the end of those there.

        The placement says from which model, and which layers are computed here.
        """
        asked = request.placement.sibling
        profile = self._received.get(asked.sender_fingerprint)
        end = min(end, asked.num_blocks)
        if profile is None or end <= first or not self._is_point(profile, asked):
            return first
        # A separate task: even if cancelled, the leases that were granted must be returned.
        pinning = asyncio.ensure_future(self._pin(request, asked, range(first, end)))
        try:
            kv, inputs = await asyncio.shield(pinning)
            with span.child("sibling", first_layer=asked.first_layer, last_layer=asked.last_layer) as reusing:
                end = await self._bring(request, asked, slots, (first, end), kv, inputs)
                reusing.note(sibling_blocks=end - first)
            return end
        finally:
            await shielded(asyncio.ensure_future(self._unpin(asked, pinning)))

    @staticmethod
    def _is_point(profile: ReuseProfile, asked: SiblingReuse) -> bool:
        return any((point.first, point.last) == (asked.first_layer, asked.last_layer) for point in profile.points)

    async def _pin(
        self, request: Request, asked: SiblingReuse, blocks: range
    ) -> tuple[list[PinnedBlocks], list[PinnedBlocks]]:
        """Lease the sibling's KV, and the hidden states that enter the group."""
        sender, layer = asked.sender_fingerprint, asked.first_layer
        kv = await self._kv[sender].pin_whole(request, blocks, asked.kv)
        if not layer:
            return kv, []
        return kv, await self._inputs[sender][layer].pin_whole(request, blocks, asked.inputs)

    async def _unpin(
        self, asked: SiblingReuse, pinning: asyncio.Task[tuple[list[PinnedBlocks], list[PinnedBlocks]]]
    ) -> None:
        await asyncio.wait([pinning])
        if pinning.exception() is None:
            kv, inputs = pinning.result()
            await self._kv[asked.sender_fingerprint].unpin(kv)
            if inputs:
                await self._inputs[asked.sender_fingerprint][asked.first_layer].unpin(inputs)

    async def _bring(
        self,
        request: Request,
        asked: SiblingReuse,
        slots: Sequence[int],
        blocks: tuple[int, int],
        kv: list[PinnedBlocks],
        inputs: list[PinnedBlocks],
    ) -> int:
        """Load and compute the blocks; return the end of those that are there."""
        first, end = blocks
        end = min(end, max((pin.end for pin in kv), default=first))
        span = LayerSpan(asked.first_layer, asked.last_layer)
        if span.first:
            end = await self._load(self._inputs[asked.sender_fingerprint][span.first], inputs, slots, (first, end))
        if end <= first:
            return first
        computing = asyncio.ensure_future(self._compute(request, slots[:end], span, first))
        try:
            others = range(span.first, span.last + 1)
            end = await self._load(self._kv[asked.sender_fingerprint], kv, slots, (first, end), without=others)
        finally:  # the engine's thread may be writing to the slots
            await shielded(asyncio.ensure_future(asyncio.wait([computing])))
        if (error := computing.exception()) is not None:
            log.warning("a sibling's KV is not reused, since layers could not be computed: %s", error)
            return first
        return end

    async def _load(
        self,
        connector: KVConnector,
        pinned: list[PinnedBlocks],
        slots: Sequence[int],
        blocks: tuple[int, int],
        *,
        without: range = range(0),
    ) -> int:
        first, end = blocks
        load = connector.begin_load(PinnedPrefix(pinned), slots[first:end], first, without=without)
        good = await load.run() if load.num_blocks else 0
        await connector.quarantine(PinnedPrefix(pinned), load.bad_blocks)
        return first + good

    async def _compute(self, request: Request, slots: Sequence[int], span: LayerSpan, first: int) -> None:
        """Compute the span's KV of the blocks from `first` on, in slots that the engine's thread alone writes to."""
        assert self._steps is not None
        assert self._between_steps is not None
        steps, block_tokens = self._steps, self._memory.block_tokens
        end = len(slots) * block_tokens
        for start in range(first * block_tokens, end, _CHUNK_TOKENS):
            tokens = range(start, min(start + _CHUNK_TOKENS, end))
            await self._between_steps(lambda tokens=tokens: steps.recompute(request, slots, span, tokens))  # type: ignore[misc]
