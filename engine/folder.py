"""Check model folders without reading weights or importing torch: configuration, files, headers and tensor shapes."""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import ModelConfig, read_config
from engine.errors import CheckpointDamaged, ModelFolderMissing, TensorMismatch, UnsupportedModel
from engine.quantisation import PackedIntegers

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
SCALE_SUFFIX = "_scale"  # after the name of a tensor in int8: its scales


@dataclass(frozen=True)
class TensorPart:
    """A checkpoint tensor of one layer and its place in the stacked tensor `field`, which holds it transposed."""

    field: str
    name: str
    shape: tuple[int, ...]  # in the checkpoint
    place: tuple[int, ...]  # leading indices in the stacked tensor: of the layer, or of layer and expert
    first_column: int = 0
    is_int8: bool = False
    packed: PackedIntegers | None = None

    def in_layer(self, layer: int) -> str:
        """Return the tensor's full name in this layer."""
        return f"model.layers.{layer}.{self.name}"

    def stored(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of the tensors that a checkpoint has in its place: three if it is packed."""
        name = self.in_layer(layer)
        if self.packed is None:
            return {name: self.shape}
        outputs, inputs = self.shape
        return {name + suffix: shape for suffix, shape in self.packed.shapes(outputs, inputs).items()}


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every tensor that a checkpoint of this configuration must have."""
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, config.hidden_size),
        FINAL_NORM: (config.hidden_size,),
    }
    for layer in range(config.num_layers):
        for part in layer_parts(config, layer):
            shapes |= part.stored(layer)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def int8_tensors(config: ModelConfig) -> list[str]:
    """Return the names of the tensors that a checkpoint of this configuration has in int8."""
    return [
        part.in_layer(layer)
        for layer in range(config.num_layers)
        for part in layer_parts(config, layer)
        if part.is_int8
    ]


def is_ignored(name: str, config: ModelConfig) -> bool:
    """Return True for a tensor that a checkpoint may have although the engine does not read it."""
    return (name == HEAD and config.tie_word_embeddings) or name.endswith(".rotary_emb.inv_freq")


def layer_parts(config: ModelConfig, layer: int) -> Iterator[TensorPart]:
    """Yield the tensors of one layer. A layer that uses the KV of another one has no weights for keys and values."""
    d, q, kv, here = config.hidden_size, config.q_size, config.kv_size, (layer,)
    yield TensorPart("attention_norm", "input_layernorm.weight", (d,), here)
    if config.post_norms:
        yield TensorPart("attention_post_norm", "post_attention_layernorm.weight", (d,), here)
        yield TensorPart("mlp_norm", "pre_feedforward_layernorm.weight", (d,), here)
        yield TensorPart("mlp_post_norm", "post_feedforward_layernorm.weight", (d,), here)
    else:
        yield TensorPart("mlp_norm", "post_attention_layernorm.weight", (d,), here)
    if config.attention_sinks:
        yield TensorPart("sinks", "self_attn.sinks", (config.num_heads,), here)
    columns = (("q", q, 0), ("k", kv, q), ("v", kv, q + kv))
    for projection, size, column in columns if config.kv_owners[layer] == layer else columns[:1]:
        yield from _matrix(config, "qkv", f"self_attn.{projection}_proj.weight", (size, d), here, column)
        if config.qkv_bias:
            yield TensorPart("qkv_bias", f"self_attn.{projection}_proj.bias", (size,), here, column)
        if config.qk_norm and projection in "qk":
            yield TensorPart(f"{projection}_norm", f"self_attn.{projection}_norm.weight", (config.head_dim,), here)
    yield from _matrix(config, "out", "self_attn.o_proj.weight", (d, q), here)
    if config.attention_out_bias:
        yield TensorPart("out_bias", "self_attn.o_proj.bias", (d,), here)
    mlp = (config.mlp_places[layer],)
    yield from _experts(config, mlp) if layer in config.sparse_layers else _mlp(config, mlp)


def _mlp(config: ModelConfig, here: tuple[int, ...]) -> Iterator[TensorPart]:
    d, f = config.hidden_size, config.intermediate_size
    for projection, column in (("gate", 0), ("up", f)):
        yield from _matrix(config, "gate_up", f"mlp.{projection}_proj.weight", (f, d), here, column)
        if config.mlp_bias:
            yield TensorPart("gate_up_bias", f"mlp.{projection}_proj.bias", (f,), here, column)
    yield from _matrix(config, "down", "mlp.down_proj.weight", (d, f), here)
    if config.mlp_bias:
        yield TensorPart("down_bias", "mlp.down_proj.bias", (d,), here)


def _experts(config: ModelConfig, here: tuple[int, ...]) -> Iterator[TensorPart]:
    assert config.experts is not None
    d, f = config.hidden_size, config.experts.intermediate_size
    block, gate, up, down = "mlp", "gate_proj", "up_proj", "down_proj"
    if config.family == "mixtral":
        block, gate, up, down = "block_sparse_moe", "w1", "w3", "w2"
    yield TensorPart("router", f"{block}.gate.weight", (config.experts.count, d), here)
    for expert in range(config.experts.count):
        name, place = f"{block}.experts.{expert}", (*here, expert)
        yield from _matrix(config, "experts_gate_up", f"{name}.{gate}.weight", (f, d), place)
        yield from _matrix(config, "experts_gate_up", f"{name}.{up}.weight", (f, d), place, f)
        yield from _matrix(config, "experts_down", f"{name}.{down}.weight", (d, f), place)


def _matrix(
    config: ModelConfig, field: str, name: str, shape: tuple[int, int], place: tuple[int, ...], column: int = 0
) -> Iterator[TensorPart]:
    packed = config.packed_weights
    yield TensorPart(field, name, shape, place, column, is_int8=config.int8_linears, packed=packed)
    if config.int8_linears:
        yield TensorPart(f"{field}_scale", name + SCALE_SUFFIX, (shape[0], 1), place, column)


_DTYPES = {"F32", "F16", "BF16"}
_PACKED_DTYPES = {"_packed": {"I32"}, "_shape": {"I64"}}
WEIGHTS = "model.safetensors"
WEIGHT_INDEX = "model.safetensors.index.json"
_MAX_NAME_BYTES = 255  # of file systems
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class StoredTensor:
    """File, dtype and shape of a checkpoint's tensor. `file` is the name within the folder."""

    file: str
    dtype: str  # safetensors' name: F32, BF16, ...
    shape: tuple[int, ...]


def check_folder(folder: Path) -> ModelConfig:
    """Return the folder's configuration if the engine supports the model and the checkpoint has its tensors.

    Raises `ModelFormatError` or `UnsupportedModel` with the same messages as `load_model`.
    """
    config = read_config(folder)
    check_tensors(folder, config, stored_tensors(folder))
    return config


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return name -> tensor of model.safetensors, or of the shards listed in its index. Raises `ModelFormatError`."""
    found: dict[str, StoredTensor] = {}
    for file in _shards(folder):
        for name, entry in _header(folder / file).items():
            found[name] = StoredTensor(file, str(entry["dtype"]), tuple(entry["shape"]))
    return found


def check_tensors(folder: Path, config: ModelConfig, found: dict[str, StoredTensor]) -> None:
    """Compare names, shapes and dtypes of the tensors found with those that `config` requires.

    Raises `TensorMismatch` with every difference, and `UnsupportedModel` for a dtype other than F32, F16 and BF16, or
    that of the integers of quantized weights.
    """
    expected = tensor_shapes(config)
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected and not is_ignored(name, config)]
    wrong = {n: (shape, found[n].shape) for n, shape in expected.items() if n in found and found[n].shape != shape}
    if missing or unexpected or wrong:
        raise TensorMismatch(str(folder), missing=missing, unexpected=unexpected, wrong_shape=wrong)
    in_int8 = set(int8_tensors(config))
    for name in expected:
        dtypes = {"I8"} if name in in_int8 else _PACKED_DTYPES.get(name[name.rfind("_") :], _DTYPES)
        if (dtype := found[name].dtype) not in dtypes:
            supported = ", ".join(sorted(dtypes))
            raise UnsupportedModel(f"{folder}: tensor {name} is stored as {dtype} (supported: {supported})")


def _shards(folder: Path) -> list[str]:
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    if not (folder / WEIGHT_INDEX).is_file():
        raise ModelFolderMissing(
            f"{folder} has neither {WEIGHTS} nor {WEIGHT_INDEX}: no weights in the safetensors format"
        )
    names = indexed_shards(folder)
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise ModelFolderMissing(f"{folder} lacks the shards {', '.join(absent)} listed in {WEIGHT_INDEX}")
    return names


def indexed_shards(folder: Path) -> list[str]:
    """Return the file names listed in the folder's weight index. Raises `CheckpointDamaged`."""
    index = folder / WEIGHT_INDEX
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if strange := [name for name in names if not _is_file_name(name)]:
            raise ValueError(f"{strange[0]!r} is not the name of a file in the folder")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointDamaged(f"{index} is not a weight index: {error!r}") from error
    return names


def _is_file_name(name: object) -> bool:
    if not isinstance(name, str) or not 0 < len(name.encode("utf-8", "surrogatepass")) <= _MAX_NAME_BYTES:
        return False
    return name.isprintable() and "/" not in name and name not in (".", "..")


def _header(path: Path) -> dict[str, dict[str, Any]]:
    """Return the file's table of tensors.

    Raises `CheckpointDamaged` unless the file's length matches its header, since truncated downloads are common.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if len(prefix) < 8 or length > _MAX_HEADER_BYTES or 8 + length > size:
            raise CheckpointDamaged(f"{path} is truncated or not safetensors: its header does not fit in {size} bytes")
        try:
            header = json.loads(file.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            expected = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
            for entry in entries.values():
                _ = entry["dtype"], tuple(entry["shape"])
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise CheckpointDamaged(f"{path} has a malformed safetensors header: {error!r}") from error
    if size != expected:
        kind = "truncated" if size < expected else "longer than its header specifies"
        raise CheckpointDamaged(f"{path} is {kind}: expected {expected} bytes, got {size}")
    return entries
