"""Decoder weights: read from safetensors checkpoints, stacked and fused in memory.

A checkpoint's files are checked before use, mapped, and hashed while they are read. A tensor goes from the mapped file
to its place, on a GPU without a copy in host memory, and its pages are given back before the next one is read: loading
takes the memory of the weights and of about one tensor. Afterwards no weight refers to the files.

All layers of one kind of weight form one tensor [layer, in, out], so that a kernel can index layers; q, k and v are one
matrix, gate and up are one matrix. Matrices are stored [in, out] and multiplied from the left by row vectors.
"""

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from mmap import MADV_DONTNEED, PAGESIZE
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open

from engine.config import ModelConfig
from engine.errors import CheckpointDamaged
from engine.folder import EMBEDDING, FINAL_NORM, HEAD, StoredTensor, TensorPart, layer_parts
from engine.packed_weights import unpacked

_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}


class Checkpoint:
    """An open checkpoint that hashes every tensor it reads, if it `hashes`."""

    def __init__(self, files: Mapping[str, Any], tensors: Mapping[str, StoredTensor], *, hashes: bool) -> None:
        self.hashes = hashes
        self._files = files
        self._tensors = tensors
        self._hashes: dict[str, bytes] = {}

    @contextmanager
    def reading(self, name: str) -> Iterator[torch.Tensor]:
        """Context with the tensor in its stored dtype, in the mapped file. It must not be used afterwards."""
        tensor: torch.Tensor = self._files[self._tensors[name].file].get_tensor(name)
        raw = tensor.contiguous().view(-1).view(torch.uint8)
        if self.hashes:
            header = f"{name}:{tensor.dtype}:{list(tensor.shape)}".encode()
            self._hashes[name] = blake3(header).update(raw.numpy().data).digest()
        yield tensor
        _give_back_pages(raw)

    def kind(self, name: str) -> torch.dtype:
        """Return the tensor's stored dtype, without reading it."""
        return _DTYPES[self._tensors[name].dtype]

    def digest(self) -> bytes:
        """Return 32 bytes over names, dtypes, shapes and contents of all tensors read, independent of sharding."""
        assert self.hashes
        total = blake3()
        for name in sorted(self._hashes):
            total.update(self._hashes[name])
        return total.digest()


def _give_back_pages(raw: torch.Tensor) -> None:
    """Unmap the whole pages of a tensor, uint8 [n], that nobody uses any more, until they are touched again."""
    first = -(-raw.data_ptr() // PAGESIZE) * PAGESIZE
    nbytes = (raw.data_ptr() + raw.nbytes) // PAGESIZE * PAGESIZE - first
    if nbytes > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(nbytes), MADV_DONTNEED)


@contextmanager
def open_checkpoint(folder: Path, tensors: Mapping[str, StoredTensor], *, hashes: bool = True) -> Iterator[Checkpoint]:
    """Open the files that hold the `tensors` returned by `stored_tensors`. Raises `CheckpointDamaged`."""
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for name in sorted({tensor.file for tensor in tensors.values()}):
            try:
                files[name] = stack.enter_context(safe_open(folder / name, framework="pt", device="cpu"))
            except SafetensorError as error:
                raise CheckpointDamaged(f"{folder / name} is not a well-formed safetensors file: {error}") from error
        yield Checkpoint(files, tensors, hashes=hashes)


@dataclass(frozen=True)
class DecoderWeights:
    """Weights of the decoder: L layers, d hidden, Q = heads * head_dim, K = kv_heads * head_dim, F intermediate, V
    vocab; D of the layers have an MLP, S have E experts with G intermediate (`ModelConfig.mlp_places`).

    Biases, scales, norms and sinks that the model does not have are empty: their last dimension is 0. Matrices with
    scales hold the integers of `engine.int8_linear`, in int8. Other matrices have the dtype of the computation, or for
    a computation in float32 perhaps the checkpoint's 16 bits. Norms contain the family's offset. Layers that use the KV
    of another one have only the first Q columns of `qkv`; the others are unset.
    """

    dtype: torch.dtype  # of the computation
    embedding: torch.Tensor  # [V, d]
    attention_norm: torch.Tensor  # [L, d]
    attention_post_norm: torch.Tensor  # [L, d | 0]
    qkv: torch.Tensor  # [L, d, Q + 2K]
    qkv_scale: torch.Tensor  # [L, Q + 2K | 0]
    qkv_bias: torch.Tensor  # [L, Q + 2K | 0]
    q_norm: torch.Tensor  # [L, head_dim | 0]
    k_norm: torch.Tensor  # [L, head_dim | 0]
    sinks: torch.Tensor  # [L, heads | 0]
    out: torch.Tensor  # [L, Q, d]
    out_scale: torch.Tensor  # [L, d | 0]
    out_bias: torch.Tensor  # [L, d | 0]
    mlp_norm: torch.Tensor  # [L, d]
    mlp_post_norm: torch.Tensor  # [L, d | 0]
    gate_up: torch.Tensor  # [D, d, 2F]
    gate_up_scale: torch.Tensor  # [D, 2F | 0]
    gate_up_bias: torch.Tensor  # [D, 2F | 0]
    down: torch.Tensor  # [D, F, d]
    down_scale: torch.Tensor  # [D, d | 0]
    down_bias: torch.Tensor  # [D, d | 0]
    router: torch.Tensor  # [S, d, E]
    experts_gate_up: torch.Tensor  # [S, E, d, 2G]
    experts_down: torch.Tensor  # [S, E, G, d]
    final_norm: torch.Tensor  # [d]
    head: torch.Tensor  # [V, d]; `embedding` itself if they are tied

    def linear(
        self, name: str, layer: int, width: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (matrix, scale, bias) at place `layer` of the field `name`, of it the first `width` columns."""
        weight, scale, bias = (getattr(self, name + part)[layer][..., :width] for part in ("", "_scale", "_bias"))
        return weight, scale, bias


def load_weights(
    config: ModelConfig,
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    dtype: torch.dtype,
    as_stored: bool = False,
) -> DecoderWeights:
    """Read, convert and fuse the weights. The checkpoint must have the tensors that the configuration requires.

    Scales of linear layers in int8, and norms with an offset, are float32 whatever `dtype` is: the sum would lose most
    of the weight's digits. With `as_stored`, matrices whose tensors are all in one type of 16 bits stay in it.
    """
    stored = _stored_matrices(config, checkpoint) if as_stored else {}

    def dtype_of(field: str) -> torch.dtype:
        if field.endswith("scale") or (field.endswith("norm") and config.norm_offset):
            return torch.float32
        return torch.int8 if config.int8_linears and field in _INT8_MATRICES else stored.get(field, dtype)

    def converted(tensor: torch.Tensor, field: str) -> torch.Tensor:
        placed = tensor.to(device).to(dtype_of(field))
        return placed + config.norm_offset if field.endswith("norm") else placed

    def place(name: str, field: str = "") -> torch.Tensor:
        with checkpoint.reading(name) as tensor:
            placed = converted(tensor, field)
            return placed.clone() if placed is tensor else placed

    stacked = {
        field: torch.empty(shape, device=device, dtype=dtype_of(field))
        for field, shape in _stacked_shapes(config).items()
    }
    for layer in range(config.num_layers):
        for part in layer_parts(config, layer):
            columns = slice(part.first_column, part.first_column + part.shape[0])
            target = stacked[part.field][part.place][..., columns]
            if part.packed is not None:
                target[:] = _unpacked(checkpoint, part, layer, device).t()
                continue
            with checkpoint.reading(part.in_layer(layer)) as tensor:
                target[:] = converted(tensor, part.field).t()  # t() leaves vectors as they are
    embedding = place(EMBEDDING, "embedding")
    return DecoderWeights(
        dtype=dtype,
        embedding=embedding,
        final_norm=place(FINAL_NORM, "norm"),
        head=embedding if config.tie_word_embeddings else place(HEAD, "head"),
        **stacked,
    )


def _unpacked(checkpoint: Checkpoint, part: TensorPart, layer: int, device: torch.device) -> torch.Tensor:
    """Return a packed matrix on the device, float32 [outputs, inputs]. Raises `CheckpointDamaged`."""
    assert part.packed is not None
    with ExitStack() as stack:
        packed, scales, shape = (stack.enter_context(checkpoint.reading(name)) for name in part.stored(layer))
        if tuple(shape.tolist()) != part.shape:
            raise CheckpointDamaged(
                f"{part.in_layer(layer)}_shape must be {list(part.shape)}, got {shape.tolist()}: the weights are "
                "damaged"
            )
        return unpacked(packed.to(device), scales.to(device), part.packed, part.shape[1])


_INT8_MATRICES = ("qkv", "out", "gate_up", "down")
_MATRICES = frozenset((*_INT8_MATRICES, "router", "experts_gate_up", "experts_down"))


def _stored_matrices(config: ModelConfig, checkpoint: Checkpoint) -> dict[str, torch.dtype]:
    """Return field -> dtype of the matrices whose tensors are all stored in the same type of 16 bits."""
    kinds = {"embedding": {checkpoint.kind(EMBEDDING)}}
    if not config.tie_word_embeddings:
        kinds["head"] = {checkpoint.kind(HEAD)}
    for layer in range(config.num_layers):
        for part in layer_parts(config, layer):
            if part.field in _MATRICES and part.packed is None:
                kinds.setdefault(part.field, set()).add(checkpoint.kind(part.in_layer(layer)))
    narrow = (torch.float16, torch.bfloat16)
    return {field: next(iter(found)) for field, found in kinds.items() if len(found) == 1 and found < set(narrow)}


def _stacked_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    d, f = config.hidden_size, config.intermediate_size
    qkv, sparse = config.q_size + 2 * config.kv_size, len(config.sparse_layers)
    each = {
        "attention_norm": (d,),
        "attention_post_norm": (d * config.post_norms,),
        "qkv": (d, qkv),
        "qkv_scale": (qkv * config.int8_linears,),
        "qkv_bias": (qkv * config.qkv_bias,),
        "q_norm": (config.head_dim * config.qk_norm,),
        "k_norm": (config.head_dim * config.qk_norm,),
        "sinks": (config.num_heads * config.attention_sinks,),
        "out": (config.q_size, d),
        "out_scale": (d * config.int8_linears,),
        "out_bias": (d * config.attention_out_bias,),
        "mlp_norm": (d,),
        "mlp_post_norm": (d * config.post_norms,),
    }
    with_mlp = {
        "gate_up": (d, 2 * f),
        "gate_up_scale": (2 * f * config.int8_linears,),
        "gate_up_bias": (2 * f * config.mlp_bias,),
        "down": (f, d),
        "down_scale": (d * config.int8_linears,),
        "down_bias": (d * config.mlp_bias,),
    }
    count, size = (config.experts.count, config.experts.intermediate_size) if config.experts else (0, 0)
    with_experts = {"router": (d, count), "experts_gate_up": (count, d, 2 * size), "experts_down": (count, size, d)}
    stacks = ((config.num_layers, each), (config.num_layers - sparse, with_mlp), (sparse, with_experts))
    return {field: (layers, *shape) for layers, shapes in stacks for field, shape in shapes.items()}
