"""A loaded model: the engine's public interface."""

import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from engine.backends.graph_recorder import CudaGraphRecorder, GraphRecorder
from engine.backends.interface import Backend
from engine.backends.registry import AUTO, BackendKind, Placement, choose_backend
from engine.backends.tensors import TensorBackend
from engine.batch import FlatBatch, ForwardBatch, LayerHook, SequenceChunk, flatten_batch
from engine.cache import DTYPES, PagedCache
from engine.config import SILU, KvGroupShape, ModelConfig, read_config, with_int8_kv
from engine.dense import score_dense
from engine.digest_cache import CheckpointState, DigestCache
from engine.errors import CacheMismatch, CheckpointDamaged, DeviceUnavailable, InvalidBatch
from engine.folder import StoredTensor, check_tensors, stored_tensors, tensor_shapes
from engine.int8_rows import read_rows, stored_rows
from engine.rolling import RollingWindow
from engine.rope import RopeTable, rotated
from engine.sampling import SamplingRow, sample
from engine.weights import Checkpoint, DecoderWeights, load_weights, open_checkpoint

T = TypeVar("T")
Dtype = Literal["auto", "float32", "float16", "bfloat16"]


class Model:
    """Weights on a device and two ways to run them: paged steps (`forward`) and the dense reference (`score`).

    Methods may be called from several threads; `forward` runs one step at a time.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        kind: BackendKind,
        backend: Backend,
        rope: RopeTable,
        fingerprint: str,
    ) -> None:
        self.config = config
        self.fingerprint = fingerprint
        self.backend = kind
        self.device = weights.embedding.device
        self.dtype = str(weights.dtype).removeprefix("torch.")
        self.kv_groups: tuple[KvGroupShape, ...] = config.kv_groups(self.dtype)
        self._weights = weights
        self._backend = backend
        self._rope = rope
        self._turn = threading.Lock()

    def new_cache(
        self, num_slots: tuple[int, ...], block_tokens: int = 16, memory: torch.Tensor | None = None
    ) -> PagedCache:
        """Return a cache for this model on its device, with `num_slots` slots per KV group. Raises `CacheMismatch`."""
        return PagedCache(self.kv_groups, num_slots, block_tokens, memory, device=self.device)

    def warm_up(self) -> None:
        """Run a short and a longer step on a scratch cache and sample, so that no request waits for compilation."""
        length = min(64, self.config.max_positions - 1)
        cache = self.new_cache((1,) * len(self.kv_groups), block_tokens=length + 1)
        tables = tuple(np.zeros(1, np.int32) for _ in self.kv_groups)
        for start, size in ((0, length), (length, 1)):
            chunk = SequenceChunk(np.zeros(size, np.int32), start, tables, want_logits=True)
            logits = self.forward(ForwardBatch([chunk]), cache)
        sample(logits, [SamplingRow(temperature=1.0, top_p=0.5, top_k=1, seed=0, choice=0, index=0, min_p=0.5)])

    def record_steps(self, recorder: GraphRecorder | None = None) -> bool:
        """Record decode steps as graphs from now on, if backend, model and device allow; return whether they do.

        `recorder`: how they are recorded; None: as CUDA graphs. Steps that cannot be recorded run as before.
        """
        if not isinstance(self._backend, TensorBackend) or (recorder is None and self.device.type != "cuda"):
            return False
        with self._turn:
            return self._backend.record_steps(recorder or CudaGraphRecorder(self.device))

    def forward(
        self,
        batch: ForwardBatch,
        cache: PagedCache,
        on_layer: LayerHook = None,
        before_layer: LayerHook = None,
    ) -> torch.Tensor:
        """Run one step: write the KV of every token of the batch into the cache.

        Returns logits float32 [rows, vocab] in the order of the chunks, on the model's device: one row per chunk with
        `want_logits`, or one per token if the chunk has `every`. `on_layer(layer)` is called once per KV layer, in
        order, when that layer's KV of the whole batch is in the cache (on CUDA: when the write is queued on the current
        stream). `before_layer(layer)` is called once per KV layer, in order, before its KV is read or written.
        Raises `InvalidBatch` or `CacheMismatch` and leaves the cache unchanged, or what a hook raised.
        """
        return self.run(self.flatten(batch, cache), cache, on_layer, before_layer)

    def flatten(self, batch: ForwardBatch, cache: PagedCache) -> FlatBatch:
        """Validate a batch against the model and the cache, and prepare it for `run`. Raises as `forward`."""
        if cache.groups != self.kv_groups:
            raise CacheMismatch(f"the cache must have the model's groups {self.kv_groups}, got {cache.groups}")
        if cache.memory.device != self.device:
            raise CacheMismatch(f"the cache must be on the model's device {self.device}, got {cache.memory.device}")
        return flatten_batch(batch, self.config, cache)

    def run(
        self,
        plan: FlatBatch,
        cache: PagedCache,
        on_layer: LayerHook = None,
        before_layer: LayerHook = None,
    ) -> torch.Tensor:
        """Run a prepared step, as `forward`, in the cache for which it was prepared."""
        with self._turn, torch.inference_mode():
            return self._backend.run(plan, cache, on_layer, before_layer)

    def release_unused_memory(self) -> None:
        """Return memory that torch keeps for later to the device, after an allocation has failed."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def keep_sinks(
        self, cache: PagedCache, source: tuple[int, ...], target: tuple[int, ...], rolling: RollingWindow, position: int
    ) -> None:
        """Prepare the sinks' slots `target` for chunks from `position` on, which is after a slide.

        `source` are the slots of the sequence's first block, or the sinks' slots so far; one of each per group. Slots
        of window groups are ignored. On CUDA, the work is queued on the current stream.
        """
        count = rolling.sinks
        with self._turn, torch.inference_mode():
            cos, sin = self._rope.turn(rolling.start(position) - count)
            ropes = [self.config.layer_ropes[layer] for layer in self.config.kv_layers]
            for shape, view, old, new in zip(cache.groups, cache.views, source, target, strict=True):
                if shape.window or not count:
                    continue
                rows = view[old, :, :, :, :count].clone()  # [layers, kv_heads, 2, sinks, row]
                turns = [ropes[layer] for layer in shape.layers]
                keys = read_rows(rows[:, :, 0], shape.head_dim, shape.scale_group)
                keys = rotated(keys, cos[turns, None, None], sin[turns, None, None])
                view[new, :, :, :, :count] = rows
                view[new, :, :, 0, -count:] = stored_rows(keys, shape.scale_group)
                view[new, :, :, 1, -count:] = rows[:, :, 1]

    def score(self, token_ids: npt.NDArray[np.int32], rolling: RollingWindow | None = None) -> npt.NDArray[np.float32]:
        """Return the logits of every position, float32 [n, vocab], computed densely as the reference for verification.

        With `rolling`, a token sees only what the window leaves it. Raises `InvalidBatch`.
        """
        if not len(token_ids) or min(token_ids) < 0 or max(token_ids) >= self.config.vocab_size:
            raise InvalidBatch(f"token_ids must hold at least one id, all in 0..{self.config.vocab_size - 1}")
        with torch.inference_mode():
            ids = torch.from_numpy(np.asarray(token_ids, np.int64)).to(self.device)
            scores: npt.NDArray[np.float32] = score_dense(self.config, self._weights, ids, rolling).cpu().numpy()
            return scores


def load_model(
    path: Path | str,
    *,
    device: str = "cpu",
    dtype: Dtype = "auto",
    threads: int | None = None,
    backend: str = AUTO,
    block_tokens: int | None = None,
    kv_scale_group: int | None = None,
    digests: DigestCache | None = None,
) -> Model:
    """Load a Hugging Face folder (config.json, and model.safetensors or its shards).

    With `dtype` "auto" the weights are float32 on the CPU and keep the checkpoint's dtype on CUDA. `threads` sets the
    number of torch's threads for the whole process. `backend` is a name of `engine.backends.registry`; `block_tokens`
    are those of the caches that the model will have, if they are known. With `kv_scale_group`, KV is rounded to int8
    and so many values share a scale (0: half of a row); without, KV is as the model's configuration has it. With
    `digests`, weights that were hashed before and have not changed since are not hashed again. Raises
    `ModelFormatError`, `UnsupportedModel`, `DeviceUnavailable` or `BackendUnavailable`.
    """
    folder = Path(path)
    config, tensors = read_config(folder), stored_tensors(folder)
    check_tensors(folder, config, tensors)
    if kv_scale_group is not None:
        config = with_int8_kv(config, kv_scale_group)
    target = _device(device)
    kind = _dtype(dtype, config, target)
    if threads is not None:
        torch.set_num_threads(threads)
    chosen = choose_backend(backend, Placement(config, target, kind, block_tokens))

    def load(checkpoint: Checkpoint) -> DecoderWeights:
        as_stored, keep_packed = chosen.name == "compiled", chosen.keeps_packed
        return load_weights(config, checkpoint, device=target, dtype=kind, as_stored=as_stored, keep_packed=keep_packed)

    weights, fingerprint = _with_fingerprint(folder, config, tensors, load, digests)
    rope = RopeTable(config.ropes, config.head_dim, config.max_positions, target)
    return Model(config, weights, chosen, chosen.build(config, weights, rope), rope, fingerprint)


def fingerprint_of(folder: Path, digests: DigestCache | None = None) -> str:
    """Return the fingerprint that `load_model` gives the folder's model, from its files alone; `digests` as there.

    Raises `ModelFormatError` and `UnsupportedModel`.
    """
    config, tensors = read_config(folder), stored_tensors(folder)
    check_tensors(folder, config, tensors)

    def read_all(checkpoint: Checkpoint) -> None:
        for name in tensor_shapes(config) if checkpoint.hashes else ():
            with checkpoint.reading(name):
                pass

    return _with_fingerprint(folder, config, tensors, read_all, digests)[1]


def _with_fingerprint(
    folder: Path,
    config: ModelConfig,
    tensors: Mapping[str, StoredTensor],
    read: Callable[[Checkpoint], T],
    digests: DigestCache | None,
) -> tuple[T, str]:
    """Return what `read` makes of the open checkpoint, of which it reads all tensors, and the model's fingerprint."""
    state = found = None
    if digests is not None:
        state = CheckpointState.of({folder / tensor.file for tensor in tensors.values()}, tensor_shapes(config))
        found = digests.find(state)
    with open_checkpoint(folder, tensors, hashes=found is None) as checkpoint:
        result = read(checkpoint)
        digest = found or checkpoint.digest()
    changed = state.changed_file() if state is not None else None
    if changed is not None and found is not None:
        raise CheckpointDamaged(f"{changed} changed while it was read: start again when the model is in place")
    if digests is not None and state is not None and found is None and changed is None:
        digests.store(state, digest)
    return result, _fingerprint(config, digest)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DeviceUnavailable(f"device must be cpu, cuda or cuda:N, got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise DeviceUnavailable(f"device must be cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DeviceUnavailable(f"device {name!r} does not exist: torch finds {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def _dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    wanted = name if name != "auto" else "float32" if device.type == "cpu" else config.checkpoint_dtype
    if wanted not in DTYPES:
        raise DeviceUnavailable(f"dtype must be one of {', '.join(DTYPES)}, got {wanted!r}")
    return DTYPES[wanted]


_PLAIN = {
    "experts": None,
    "sparse_layers": (),
    "int8_linears": False,
    "packed_weights": None,
    "kv_scale_group": 0,
    "attention_softcap": 0.0,
    "attention_sinks": False,
    "logits_softcap": 0.0,
    "activation": SILU,
    "norm_offset": 0.0,
    "post_norms": False,
    "embedding_scale": 1.0,
}


def _fingerprint(config: ModelConfig, weights_digest: bytes) -> str:
    """Return a 16-byte hash, in hex, of the weights and of all configuration that affects the results."""
    computed = asdict(config)
    for key in ("eos_token_ids", "bos_token_id", "max_positions", "checkpoint_dtype"):
        del computed[key]
    for (
        key,
        plain,
    ) in _PLAIN.items():  # a model without a feature keeps the fingerprint that it had before there was one
        if computed[key] == plain:
            del computed[key]
    if config.kv_owners == tuple(range(config.num_layers)):
        del computed["kv_owners"]
    if config.attention_scale == config.head_dim**-0.5:
        del computed["attention_scale"]
    if len(config.ropes) == 1:
        computed["rope"] = computed.pop("ropes")[0]
        del computed["layer_ropes"]
    canonical = json.dumps(computed, sort_keys=True).encode()
    return hashlib.blake2b(canonical + weights_digest, digest_size=16).hexdigest()
