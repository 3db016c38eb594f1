"""Decoder weights: read from safetensors checkpoints, stacked and fused in memory.

A checkpoint's files are checked before use, mapped, and hashed while they are read. A tensor goes from the mapped file
to its place, on a GPU without a copy in host memory, and its pages are given back before the next one is read: loading
takes the memory of the weights and of about one tensor. Afterwards no weight refers to the files.

All layers of one kind of weight form one tensor [layer, in, out], so that a kernel can index layers; q, k and v are one
matrix, gate and up are one matrix. Matrices are stored [in, out] and multiplied from the left by row vectors. Packed
words, and integers in int8 except for kernels on CPUs, have their inputs contiguous, as tensor cores read them.
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
from engine.folder import EMBEDDING, FINAL_NORM, HEAD, SCALE_SUFFIX, StoredTensor, TensorPart, layer_parts
from engine.packed_weights import PackedMatrices, unpacked

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
    scales hold the integers of `engine.int8_linear`, in int8, and those in `packed` have 0 inputs here. Other matrices
    have the dtype of the computation, or for a computation in float32 perhaps the checkpoint's 16 bits. Norms contain
    the family's offset. Layers that use the KV of another one have only the first Q columns of `qkv`; the others are
    unset.
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
    experts_gate_up_scale: torch.Tensor  # [S, E, 2G | 0]
    experts_down: torch.Tensor  # [S, E, G, d]
    experts_down_scale: torch.Tensor  # [S, E, d | 0]
    final_norm: torch.Tensor  # [d]
    head: torch.Tensor  # [V, d]; `embedding` itself if they are tied
    packed: Mapping[str, PackedMatrices]  # by field: matrices that are held as packed integers

    def linear(
        self, name: str, place: int | tuple[int, int], width: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (matrix, scale, bias) at a place of the field `name`, of it the first `width` columns.

        Places of `experts_gate_up` and `experts_down` are pairs. A packed matrix is unpacked by each call.
        """
        weight, scale, bias = self.stored(name, place, width)
        if isinstance(weight, PackedMatrices):
            weight = weight.floats().to(self.embedding.dtype)
        return weight, scale, bias

    def stored(
        self, name: str, place: int | tuple[int, int], width: int | None = None
    ) -> tuple[torch.Tensor | PackedMatrices, torch.Tensor, torch.Tensor]:
        """Return what `linear` returns, packed matrices as they are held.

        Of experts, the place may be that of a layer only: those of all of its experts.
        """
        weight, scale = (getattr(self, name + part)[place][..., :width] for part in ("", "_scale"))
        bias = scale[..., :0] if name in EXPERT_MATRICES else getattr(self, f"{name}_bias")[place][..., :width]
        return self.packed[name].at(place, width) if name in self.packed else weight, scale, bias


def load_weights(
    config: ModelConfig,
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    dtype: torch.dtype,
    as_stored: bool = False,
    keep_packed: bool = False,
) -> DecoderWeights:
    """Read, convert and fuse the weights. The checkpoint must have the tensors that the configuration requires.

    Packed integers are unpacked unless `keep_packed`. Scales of linear layers in int8, and norms with an offset, are
    float32 whatever `dtype` is: the sum would lose most of the weight's digits. With `as_stored`, matrices whose
    tensors are all in one type of 16 bits stay in it, and all matrices are contiguous.
    """
    stored = _stored_matrices(config, checkpoint) if as_stored else {}

    def dtype_of(field: str) -> torch.dtype:
        if field.endswith("scale") or (field.endswith("norm") and config.norm_offset):
            return torch.float32
        return torch.int8 if config.int8_linears and field in MATRICES else stored.get(field, dtype)

    def converted(tensor: torch.Tensor, field: str) -> torch.Tensor:
        placed = tensor.to(device).to(dtype_of(field))
        return placed + config.norm_offset if field.endswith("norm") else placed

    def place(name: str, field: str = "") -> torch.Tensor:
        with checkpoint.reading(name) as tensor:
            placed = converted(tensor, field)
            return placed.clone() if placed is tensor else placed

    shapes = _stacked_shapes(config)
    packed = _empty_packed(config, checkpoint, shapes, device) if keep_packed else {}
    stacked = {
        field: _empty_stack(
            (*shape[:-2], 0, shape[-1]) if field in packed else shape, device, dtype_of(field), as_stored
        )
        for field, shape in shapes.items()
    }
    for layer in range(config.num_layers):
        for part in layer_parts(config, layer):
            columns = slice(part.first_column, part.first_column + part.shape[0])
            target = stacked[part.field][part.place][..., columns]
            if part.packed is not None:
                with _reading_packed(checkpoint, part, layer, device) as (words, scales):
                    if part.field in packed:
                        packed[part.field].words[part.place][..., columns] = words.t()
                        packed[part.field].scales[part.place][..., columns] = scales.t()
                    else:
                        target[:] = unpacked(words, scales, part.packed, part.shape[1]).t()
                continue
            with checkpoint.reading(part.in_layer(layer)) as tensor:
                target[:] = converted(tensor, part.field).t()  # t() leaves vectors as they are
    embedding = place(EMBEDDING, "embedding")
    return DecoderWeights(
        dtype=dtype,
        embedding=embedding,
        final_norm=place(FINAL_NORM, "norm"),
        head=embedding if config.tie_word_embeddings else place(HEAD, "head"),
        packed=packed,
        **stacked,
    )


def _stored_matrices(config: ModelConfig, checkpoint: Checkpoint) -> dict[str, torch.dtype]:
    """Return field -> dtype of the matrices whose tensors are all stored in the same type of 16 bits."""
    kinds = {"embedding": {checkpoint.kind(EMBEDDING)}}
    if not config.tie_word_embeddings:
        kinds["head"] = {checkpoint.kind(HEAD)}
    for layer in range(config.num_layers):
        for part in layer_parts(config, layer):
            if part.field in (*MATRICES, "router"):
                kind = torch.int32 if part.packed is not None else checkpoint.kind(part.in_layer(layer))
                kinds.setdefault(part.field, set()).add(kind)
    narrow = {torch.float16, torch.bfloat16}
    return {field: next(iter(found)) for field, found in kinds.items() if len(found) == 1 and found < narrow}


def _empty_stack(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, as_stored: bool) -> torch.Tensor:
    """Return room for stacked weights, those in int8 with contiguous inputs unless they are `as_stored`."""
    if dtype != torch.int8 or as_stored:
        return torch.empty(shape, device=device, dtype=dtype)
    *places, inputs, outputs = shape
    return torch.empty((*places, outputs, inputs), device=device, dtype=dtype).transpose(-1, -2)


def _empty_packed(
    config: ModelConfig, checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], device: torch.device
) -> dict[str, PackedMatrices]:
    """Return room for the matrices that the checkpoint has as packed integers, by field."""
    kinds: dict[str, set[torch.dtype]] = {}  # of the scales
    for layer in range(config.num_layers):
        for part in layer_parts(config, layer):
            if part.packed is not None:
                kinds.setdefault(part.field, set()).add(checkpoint.kind(part.in_layer(layer) + SCALE_SUFFIX))
    found = {}
    for field, of_scales in kinds.items():
        assert config.packed_weights is not None
        *places, inputs, outputs = shapes[field]
        of_part = config.packed_weights.shapes(outputs, inputs)
        dtype = next(iter(of_scales)) if len(of_scales) == 1 else torch.float32
        words = torch.empty((*places, *of_part["_packed"]), device=device, dtype=torch.int32).transpose(-1, -2)
        scales = torch.empty((*places, *of_part["_scale"]), device=device, dtype=dtype)
        found[field] = PackedMatrices(words, scales.transpose(-1, -2), config.packed_weights, inputs)
    return found


@contextmanager
def _reading_packed(
    checkpoint: Checkpoint, part: TensorPart, layer: int, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Context with a packed matrix on the device: words int32 [outputs, words], scales [outputs, groups].

    Raises `CheckpointDamaged`.
    """
    with ExitStack() as stack:
        packed, scales, shape = (stack.enter_context(checkpoint.reading(name)) for name in part.stored(layer))
        if tuple(shape.tolist()) != part.shape:
            raise CheckpointDamaged(
                f"{part.in_layer(layer)}_shape must be {list(part.shape)}, got {shape.tolist()}: the weights are "
                "damaged"
            )
        yield packed.to(device), scales.to(device)


EXPERT_MATRICES = ("experts_gate_up", "experts_down")
MATRICES = ("qkv", "out", "gate_up", "down", *EXPERT_MATRICES)
"""Fields with the matrices of linear layers, which a checkpoint may have quantised."""


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
    with_experts = {
        "router": (d, count),
        "experts_gate_up": (count, d, 2 * size),
        "experts_gate_up_scale": (count, 2 * size * config.int8_linears),
        "experts_down": (count, size, d),
        "experts_down_scale": (count, d * config.int8_linears),
    }
    stacks = ((config.num_layers, each), (config.num_layers - sparse, with_mlp), (sparse, with_experts))
    return {field: (layers, *shape) for layers, shapes in stacks for field, shape in shapes.items()}
