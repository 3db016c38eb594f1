"""Model configuration, read from a Hugging Face folder and validated once.

Needs neither the weights nor torch. Absent keys have the defaults of `transformers` for the family. Features that the
engine does not support raise `UnsupportedModel`, invalid values `ConfigInvalid`.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from engine.errors import ConfigInvalid, ModelFolderMissing, TokenizerMissing, UnsupportedModel

FULL = "full"
WINDOW = "window"

SILU = "silu"
GELU_TANH = "gelu_tanh"

_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "MoonpoolForCausalLM": "moonpool",
}
_GEMMAS = ("gemma2", "gemma3_text")
_DEFAULT_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32, "gemma2": 4, "gemma3_text": 4}
_DEFAULT_HEAD_DIM = {"qwen3": 128, "gemma2": 256, "gemma3_text": 256}
_DEFAULT_POSITIONS = {"gemma2": 8192, "gemma3_text": 131072}
_LAYER_TYPES = ("full_attention", "sliding_attention")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
T = TypeVar("T")
_KIND_NAMES: dict[type, str] = {bool: "true or false", dict: "an object", list: "a list", int: "an integer"}
_MAX_LAYERS = 10_000
_MAX_COUNT = 2**31 - 1  # largest number of tokens, positions or dimensions


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding; `scaling` holds the parameters of its `rope_type` under their names in config.json."""

    rope_type: str
    theta: float
    scaling: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class KvGroupShape:
    """KV layers that share a page table: those with the same kind, window, kv_heads, head_dim and dtype.

    KV layers are the layers that own KV, numbered from 0 in their order in the model.
    """

    kind: str
    window: int  # tokens visible to a query, including itself; 0 = all
    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    dtype: str
    scale_group: int = 0  # of dtype int8: values of a row that share a scale (`engine.int8_rows`)


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Llama kind, described by what it computes instead of by its architecture's name."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    ropes: tuple[RopeConfig, ...]
    layer_ropes: tuple[int, ...]  # per layer; index into `ropes`
    layer_windows: tuple[int, ...]  # per layer; 0 = full attention
    kv_owners: tuple[int, ...]  # per layer; the layer whose keys and values it attends to, itself if it computes them
    attention_scale: float  # of the products of queries and keys
    attention_softcap: float  # scores become cap * tanh(score / cap); 0 = they do not
    int8_linears: bool  # weights and activations of linear layers are rounded to int8 (`engine.int8_linear`)
    kv_scale_group: int  # > 0: KV is rounded to int8, of which so many values of a row share a scale
    attention_sinks: bool  # each head has a learned score that takes a share of the softmax and adds nothing
    logits_softcap: float
    activation: str
    norm_offset: float  # norms multiply by this plus their weights
    post_norms: bool  # the outputs of attention and MLP are normalised before they are added
    embedding_scale: float
    qkv_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    checkpoint_dtype: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """Return the layers that own KV; a KV layer's number is its index here."""
        return tuple(layer for layer, owner in enumerate(self.kv_owners) if owner == layer)

    @property
    def used_kv_layers(self) -> tuple[int, ...]:
        """Return the number of the KV layer that each layer uses."""
        numbers = {layer: number for number, layer in enumerate(self.kv_layers)}
        return tuple(numbers[owner] for owner in self.kv_owners)

    def kv_groups(self, dtype: str) -> tuple[KvGroupShape, ...]:
        """Return the KV layers grouped by window: full attention first, then windows from large to small."""
        owned = [self.layer_windows[layer] for layer in self.kv_layers]
        windows = sorted(set(owned), key=lambda window: (window != 0, -window))
        return tuple(
            KvGroupShape(
                kind=WINDOW if window else FULL,
                window=window,
                layers=tuple(i for i, own in enumerate(owned) if own == window),
                kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                dtype="int8" if self.kv_scale_group else dtype,
                scale_group=self.kv_scale_group,
            )
            for window in windows
        )


def find_tokenizer(folder: Path) -> Path:
    """Return the path of the folder's tokenizer.json. Raises `TokenizerMissing`."""
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise TokenizerMissing(f"{folder} has no tokenizer.json: save the model's fast tokenizer into the folder")
    return path


def read_config(folder: Path) -> ModelConfig:
    """Return the configuration in config.json; end-of-sequence ids come from generation_config.json if it has any.

    Raises `ModelFolderMissing`, `ConfigInvalid` or `UnsupportedModel`.
    """
    if not folder.is_dir():
        raise ModelFolderMissing(f"model folder {folder} does not exist or is not a folder")
    if not (folder / "config.json").is_file():
        raise ModelFolderMissing(f"{folder} has no config.json: it is not a Hugging Face model folder")
    generation_path = folder / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.is_file() else {}
    return parse_config(_read_json(folder / "config.json"), generation, where=str(folder / "config.json"))


def parse_config(raw: Mapping[str, Any], generation: Mapping[str, Any], *, where: str) -> ModelConfig:
    """Return the configuration in the two JSON objects; `where` names the file in errors.

    Raises `ConfigInvalid` or `UnsupportedModel`.
    """
    read = _Reader(raw, where)
    family = _family(read)
    _refuse_features(read, family)
    hidden = read.count("hidden_size")
    heads = read.count("num_attention_heads")
    kv_heads = read.count("num_key_value_heads", _DEFAULT_KV_HEADS.get(family, heads))
    head_dim = read.count("head_dim", _DEFAULT_HEAD_DIM.get(family, max(hidden // heads, 1)))
    num_layers = read.count("num_hidden_layers", most=_MAX_LAYERS)
    if heads % kv_heads:
        raise ConfigInvalid(
            f"{where}: num_attention_heads must be a multiple of num_key_value_heads ({kv_heads}), got {heads}"
        )
    if head_dim % 2:
        raise ConfigInvalid(f"{where}: head_dim must be even for rotary embedding, got {head_dim}")
    attention_bias = family not in ("mistral", "qwen2") and read.typed("attention_bias", bool, False)
    gemma = family in _GEMMAS
    windows = _layer_windows(read, family, num_layers)
    ropes = _ropes(read, family)
    return ModelConfig(
        family=family,
        vocab_size=read.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.count("intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=read.count("max_position_embeddings", _DEFAULT_POSITIONS.get(family, 2048)),
        rms_norm_eps=read.positive("rms_norm_eps", 1e-6),
        ropes=ropes,
        layer_ropes=tuple(len(ropes) - 1 if window else 0 for window in windows),
        layer_windows=windows,
        kv_owners=_kv_owners(read, family, windows),
        int8_linears=_int8_linears(read),
        kv_scale_group=_kv_scale_group(read, family, head_dim),
        attention_scale=(read.positive("query_pre_attn_scalar", 256) if gemma else head_dim) ** -0.5,
        attention_softcap=_softcap(read, "attn_logit_softcapping", 50.0) if family == "gemma2" else 0.0,
        attention_sinks=family == "moonpool" and read.typed("attention_sinks", bool, False),
        logits_softcap=_softcap(read, "final_logit_softcapping", 30.0 if family == "gemma2" else 0.0) if gemma else 0.0,
        activation=GELU_TANH if gemma else SILU,
        norm_offset=1.0 if gemma else 0.0,
        post_norms=gemma,
        embedding_scale=hidden**0.5 if gemma else 1.0,
        qkv_bias=attention_bias or family == "qwen2",
        attention_out_bias=attention_bias,
        mlp_bias=family in ("llama", "moonpool") and read.typed("mlp_bias", bool, False),
        qk_norm=family in ("qwen3", "gemma3_text"),
        tie_word_embeddings=read.typed("tie_word_embeddings", bool, gemma),
        checkpoint_dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
        eos_token_ids=_eos(generation.get("eos_token_id", raw.get("eos_token_id")), where),
        bos_token_id=_bos(raw.get("bos_token_id"), where),
    )


class _Reader:
    """Typed access to config.json. Errors name the file, the key and the value."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    def typed(self, key: str, kind: type[T], default: T) -> T:
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ConfigInvalid(f"{self.where}: {key} must be {_KIND_NAMES[kind]}, got {value!r}")
        return value

    def count(self, key: str, default: int | None = None, *, most: int = _MAX_COUNT) -> int:
        value = self.raw.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ConfigInvalid(f"{self.where}: {key} must be a positive integer, got {value!r}")
        if value > most:
            raise ConfigInvalid(f"{self.where}: {key} must be at most {most}, got {_rounded(value)}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.raw.get(key)
        value = default if value is None else value
        return _positive(value, f"{self.where}: {key}")


def _positive(value: Any, what: str) -> float:
    """Return `value` as a float. Raises `ConfigInvalid`, naming `what`, unless it is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise ConfigInvalid(f"{what} must be a positive number, got {_shown(value)}")
    return float(value)


def _rounded(value: int) -> str:
    return f"{value:.3g}" if value <= sys.float_info.max else _shown(value)


def _shown(value: object) -> str:
    """Return a value for an error, shortened: a file may hold integers that Python does not convert to decimal."""
    return _shortened(hex(value) if isinstance(value, int) and value.bit_length() > 64 else repr(value))


def _shortened(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:80]}..."


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigInvalid(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigInvalid(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _family(read: _Reader) -> str:
    where = read.where
    names = read.typed("architectures", list, [])
    supported = ", ".join(_ARCHITECTURES)
    for name in names:
        if isinstance(name, str) and name in _ARCHITECTURES:
            return _ARCHITECTURES[name]
    if names:
        raise UnsupportedModel(
            f"{where}: architecture {', '.join(map(str, names))} is not supported (supported: {supported})"
        )
    model_type = read.raw.get("model_type")
    if model_type in _ARCHITECTURES.values():
        return str(model_type)
    raise UnsupportedModel(f"{where}: neither architectures nor model_type ({model_type!r}) names one of {supported}")


def _refuse_features(read: _Reader, family: str) -> None:
    where = read.where
    if family in _GEMMAS:
        if (activation := read.raw.get("hidden_activation") or "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
            raise UnsupportedModel(f"{where}: hidden_activation must be gelu_pytorch_tanh, got {activation!r}")
        if read.typed("use_bidirectional_attention", bool, False):
            raise UnsupportedModel(f"{where}: use_bidirectional_attention is not supported")
        if family == "gemma3_text" and read.raw.get("attn_logit_softcapping") is not None:
            raise UnsupportedModel(f"{where}: attn_logit_softcapping is not supported for gemma3_text")
    elif (activation := read.raw.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise UnsupportedModel(f"{where}: hidden_act must be silu, got {activation!r}")


def _softcap(read: _Reader, key: str, default: float) -> float:
    """Return the cap, 0 if the key is null or, without a default, absent."""
    value = read.raw.get(key, default) or 0.0
    return _positive(value, f"{read.where}: {key}") if value else 0.0


def _ropes(read: _Reader, family: str) -> tuple[RopeConfig, ...]:
    """Return the rotary parameters: of full attention first, then of windows if they are different ones.

    They are read from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (earlier).
    """
    given = read.typed("rope_scaling", dict, {}) | read.typed("rope_parameters", dict, {})
    if family != "gemma3_text":
        return (_rope(read, given, read.raw.get("rope_theta")),)
    of_type = [_Reader(given, f"{read.where}: rope_parameters").typed(key, dict, {}) for key in _LAYER_TYPES]
    if not any(of_type):
        of_type[0] = given
    thetas = read.raw.get("rope_theta") or 1e6, read.raw.get("rope_local_base_freq") or 1e4
    return tuple(_rope(read, dict(each), theta) for each, theta in zip(of_type, thetas, strict=True))


def _rope(read: _Reader, given: dict[str, Any], theta: Any) -> RopeConfig:
    """Return the rotary parameters in `given`, whose base is `theta` unless it has one."""
    raw, where = read.raw, read.where
    rope_type = given.pop("rope_type", None) or given.pop("type", None) or "default"
    given.pop("type", None)
    if any(isinstance(value, dict) for value in given.values()):
        raise UnsupportedModel(f"{where}: rotary parameters per layer type are not supported")
    theta = _positive(given.pop("rope_theta", None) or theta or 10000.0, f"{where}: rope_theta")
    partial = given.pop("partial_rotary_factor", None) or raw.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise UnsupportedModel(f"{where}: partial_rotary_factor must be 1.0, got {partial}")
    if rope_type not in _ROPE_TYPES:
        raise UnsupportedModel(f"{where}: rope_type must be one of {', '.join(_ROPE_TYPES)}, got {rope_type!r}")
    if rope_type == "default":
        return RopeConfig("default", theta)
    if given.get("original_max_position_embeddings") is None:
        given["original_max_position_embeddings"] = raw.get("max_position_embeddings", 2048)
    needed = {"linear": ["factor"], "yarn": ["factor"], "llama3": ["factor", "low_freq_factor", "high_freq_factor"]}
    for key in needed[rope_type]:
        _positive(given.get(key), f"{where}: {key} of rope_type {rope_type!r}")
    numbers = {
        key: float(value)
        for key, value in given.items()
        if isinstance(value, int | float) and abs(value) <= sys.float_info.max
    }
    return RopeConfig(rope_type, theta, tuple(sorted(numbers.items())))


def _layer_windows(read: _Reader, family: str, num_layers: int) -> tuple[int, ...]:
    """Return the sliding window of each layer, 0 for full attention, by the rules of the family in transformers."""
    if family == "llama":
        return (0,) * num_layers
    where = read.where
    window = read.raw.get("sliding_window", None if family == "moonpool" else 4096)
    if family in ("qwen2", "qwen3") and not read.typed("use_sliding_window", bool, False):
        window = None
    if window is not None and not (type(window) is int and 0 < window <= _MAX_COUNT):
        raise ConfigInvalid(f"{where}: sliding_window must be a positive integer or null, got {_shown(window)}")
    if family == "mistral":
        return (window or 0,) * num_layers
    if read.raw.get("layer_types") is None:
        if family in _GEMMAS:
            pattern = 2 if family == "gemma2" else read.count("sliding_window_pattern", 6)
            return tuple(window or 0 if (i + 1) % pattern else 0 for i in range(num_layers))
        first = 0 if family == "moonpool" else read.typed("max_window_layers", int, 28)
        return tuple(window if window and i >= first else 0 for i in range(num_layers))
    types = read.typed("layer_types", list, [])
    if len(types) != num_layers:
        raise ConfigInvalid(
            f"{where}: layer_types must have num_hidden_layers ({num_layers}) entries, got {len(types)}"
        )
    if unknown := {str(kind) for kind in types} - set(_LAYER_TYPES):
        raise UnsupportedModel(f"{where}: layer_types {', '.join(sorted(unknown))} are not supported")
    if "sliding_attention" in types and window is None:
        raise ConfigInvalid(f"{where}: layer_types has sliding_attention but sliding windows are off")
    return tuple(window or 0 if kind == "sliding_attention" else 0 for kind in types)


_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
INT8_WEIGHTS: dict[str, object] = {**_INT8, "strategy": "channel"}
INT8_ACTIVATIONS: dict[str, object] = {**_INT8, "strategy": "token", "dynamic": True}
"""Schemes in compressed-tensors' `quantization_config` for linear layers in int8."""


def _int8_linears(read: _Reader) -> bool:
    """Return whether `quantization_config` says that all linear layers but the head are in int8; False if absent."""
    given = read.typed("quantization_config", dict, {})
    if not given:
        return False

    def require(key: str, value: object, wanted: object) -> None:
        if value != wanted:
            found = _shortened(json.dumps(value))
            raise UnsupportedModel(
                f"{read.where}: quantization_config.{key} must be {json.dumps(wanted)}, got {found}: of "
                "quantized weights, only compressed-tensors in int8 is supported, per channel, with activations in "
                "int8, per token and dynamic"
            )

    require("quant_method", given.get("quant_method"), "compressed-tensors")
    require("format", given.get("format"), "int-quantized")
    require("kv_cache_scheme", given.get("kv_cache_scheme"), None)
    groups = _Reader(given, f"{read.where}: quantization_config").typed("config_groups", dict, {})
    require("config_groups", len(groups), 1)
    (name, group), *_ = groups.items()
    group = group if isinstance(group, dict) else {}
    require(f"config_groups.{name}.targets", group.get("targets"), ["Linear"])
    for part, wanted in (("weights", INT8_WEIGHTS), ("input_activations", INT8_ACTIVATIONS)):
        scheme = group.get(part)
        for key, value in wanted.items():
            found = scheme.get(key) if isinstance(scheme, dict) else None
            require(f"config_groups.{name}.{part}.{key}", found, value)
    require(f"config_groups.{name}.output_activations", group.get("output_activations"), None)
    ignored = given.get("ignore") or []
    if ignored or not read.typed("tie_word_embeddings", bool, False):
        require("ignore", ignored, ["lm_head"])
    return True


def _kv_scale_group(read: _Reader, family: str, head_dim: int) -> int:
    """Return `kv_scale_group`, by default two groups per row, if `kv_dtype` is int8; 0 otherwise."""
    where = read.where
    if family != "moonpool":
        return 0
    dtype = read.typed("kv_dtype", str, "auto")
    if dtype not in ("auto", "int8"):
        raise ConfigInvalid(f"{where}: kv_dtype must be int8, or auto for the dtype of the computation, got {dtype!r}")
    if dtype == "auto":
        if read.raw.get("kv_scale_group") is not None:
            raise ConfigInvalid(f"{where}: kv_scale_group is for kv_dtype int8, got kv_dtype auto")
        return 0
    group = read.count("kv_scale_group", max(head_dim // 2, 1))
    if head_dim % group:
        raise ConfigInvalid(f"{where}: kv_scale_group must divide head_dim ({head_dim}), got {group}")
    return group


def _kv_owners(read: _Reader, family: str, windows: tuple[int, ...]) -> tuple[int, ...]:
    """Return the layer whose KV each layer uses: from `kv_owners`, or by Gemma 3n's rule from `num_kv_shared_layers`.

    By that rule, each of the last layers uses the KV of the last layer before them that has the same window.
    """
    where, count = read.where, len(windows)
    if family != "moonpool" or not {"kv_owners", "num_kv_shared_layers"} & read.raw.keys():
        return tuple(range(count))
    shared = read.typed("num_kv_shared_layers", int, 0)
    if read.raw.get("kv_owners") is None:
        if not 0 <= shared < count:
            raise ConfigInvalid(f"{where}: num_kv_shared_layers must be 0 to {count - 1}, got {shared}")
        last = {window: layer for layer, window in enumerate(windows[: count - shared])}
        if missing := {windows[layer] for layer in range(count - shared, count)} - last.keys():
            raise ConfigInvalid(
                f"{where}: num_kv_shared_layers is {shared}, but none of the layers before the last {shared} has "
                f"{_window_name(max(missing))}"
            )
        return tuple(layer if layer < count - shared else last[windows[layer]] for layer in range(count))
    owners = read.typed("kv_owners", list, [])
    if len(owners) != count or not all(type(owner) is int for owner in owners):
        raise ConfigInvalid(f"{where}: kv_owners must have num_hidden_layers ({count}) layer numbers, got {owners!r}")
    for layer, owner in enumerate(owners):
        if not 0 <= owner <= layer or owners[owner] != owner:
            raise ConfigInvalid(
                f"{where}: kv_owners[{layer}] must be {layer} or an earlier layer that owns its KV, got {owner}"
            )
        if windows[owner] != windows[layer]:
            raise ConfigInvalid(
                f"{where}: kv_owners[{layer}] is {owner}, which has {_window_name(windows[owner])}, but layer {layer} "
                f"has {_window_name(windows[layer])}"
            )
    return tuple(owners)


def _window_name(window: int) -> str:
    return f"a window of {window}" if window else "full attention"


def _eos(value: Any, where: str) -> tuple[int, ...]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(map(_is_token_id, ids)):
        raise ConfigInvalid(f"{where}: eos_token_id must be an id or a list of ids, got {_shown(value)}")
    return tuple(ids)


def _bos(value: Any, where: str) -> int | None:
    if value is not None and not _is_token_id(value):
        raise ConfigInvalid(f"{where}: bos_token_id must be an id or null, got {_shown(value)}")
    return value  # type: ignore[no-any-return]


def _is_token_id(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_COUNT
