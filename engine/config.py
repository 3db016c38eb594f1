"""Model configuration, read from a Hugging Face folder and validated once.

Needs neither the weights nor torch. Absent keys have the defaults of `transformers` for the family. Features that the
engine does not support raise `UnsupportedModel`, invalid values `ConfigInvalid`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from engine.config_values import MAX_COUNT, ConfigReader, positive, read_json, shown
from engine.errors import ConfigInvalid, ModelFolderMissing, TokenizerMissing, UnsupportedModel
from engine.families import FAMILIES, OF_ARCHITECTURE, ModelFamily
from engine.quantisation import PackedIntegers, read_quantisation
from engine.rope_config import LAYER_TYPES, RopeConfig, read_ropes

FULL = "full"
WINDOW = "window"

SILU = "silu"
GELU_TANH = "gelu_tanh"

_MAX_LAYERS = 10_000
_MAX_EXPERTS = 10_000


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
class ExpertShape:
    """A mixture of experts: `count` MLPs, of which each token uses the `per_token` to which the router gives the most.

    A token's experts have the shares that the router's softmax gives them, divided by their sum if they are `scaled`.
    """

    count: int
    per_token: int
    intermediate_size: int  # of each expert
    scaled: bool


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
    experts: ExpertShape | None
    sparse_layers: tuple[int, ...]  # layers that have experts instead of an MLP
    kv_owners: tuple[int, ...]  # per layer; the layer whose keys and values it attends to, itself if it computes them
    attention_scale: float  # of the products of queries and keys
    attention_softcap: float  # scores become cap * tanh(score / cap); 0 = they do not
    int8_linears: bool  # weights and activations of linear layers are rounded to int8 (`engine.int8_linear`)
    packed_weights: PackedIntegers | None  # weights of linear layers are stored as packed integers
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

    @cached_property
    def mlp_places(self) -> tuple[int, ...]:
        """Return each layer's number among the layers with an MLP, or among those with experts."""
        sparse, places, counts = set(self.sparse_layers), list[int](), [0, 0]
        for layer in range(self.num_layers):
            places.append(counts[layer in sparse])
            counts[layer in sparse] += 1
        return tuple(places)

    @property
    def mlp_sizes(self) -> tuple[int, ...]:
        """Return the intermediate values of a token in each layer, those of all its experts together."""
        of_experts = self.experts.per_token * self.experts.intermediate_size if self.experts else 0
        sparse = set(self.sparse_layers)
        return tuple(of_experts if layer in sparse else self.intermediate_size for layer in range(self.num_layers))

    @cached_property
    def kv_layers(self) -> tuple[int, ...]:
        """Return the layers that own KV; a KV layer's number is its index here."""
        return tuple(layer for layer, owner in enumerate(self.kv_owners) if owner == layer)

    @cached_property
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
    generation = read_json(generation_path) if generation_path.is_file() else {}
    return parse_config(read_json(folder / "config.json"), generation, where=str(folder / "config.json"))


def parse_config(raw: Mapping[str, Any], generation: Mapping[str, Any], *, where: str) -> ModelConfig:
    """Return the configuration in the two JSON objects; `where` names the file in errors.

    Raises `ConfigInvalid` or `UnsupportedModel`.
    """
    read = ConfigReader(raw, where)
    of = _family(read)
    family = of.name
    _refuse_features(read, family)
    hidden = read.count("hidden_size")
    heads = read.count("num_attention_heads")
    kv_heads = read.count("num_key_value_heads", of.kv_heads or heads)
    head_dim = read.count("head_dim", of.head_dim or max(hidden // heads, 1))
    num_layers = read.count("num_hidden_layers", most=_MAX_LAYERS)
    if heads % kv_heads:
        raise ConfigInvalid(
            f"{where}: num_attention_heads must be a multiple of num_key_value_heads ({kv_heads}), got {heads}"
        )
    if head_dim % 2:
        raise ConfigInvalid(f"{where}: head_dim must be even for rotary embedding, got {head_dim}")
    attention_bias = of.attention_bias and read.typed("attention_bias", bool, False)
    gemma = of.is_gemma
    windows = _layer_windows(read, family, num_layers)
    ropes = read_ropes(read, by_layer_type=family == "gemma3_text")
    experts, sparse_layers = _experts(read, family, num_layers)
    intermediate = read.count("intermediate_size")
    int8_linears, packed = read_quantisation(read, _routers(family, sparse_layers))
    inputs = [hidden, heads * head_dim, *([intermediate] if len(sparse_layers) < num_layers else [])]
    inputs += [experts.intermediate_size] if experts else []
    return ModelConfig(
        family=family,
        vocab_size=read.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=read.count("max_position_embeddings", of.max_positions),
        rms_norm_eps=read.positive("rms_norm_eps", 1e-6),
        ropes=ropes,
        layer_ropes=tuple(len(ropes) - 1 if window else 0 for window in windows),
        layer_windows=windows,
        experts=experts,
        sparse_layers=sparse_layers,
        kv_owners=_kv_owners(read, family, windows),
        int8_linears=int8_linears,
        packed_weights=_packed(packed, where, *inputs),
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
        mlp_bias=of.mlp_bias and read.typed("mlp_bias", bool, False),
        qk_norm=of.qk_norm,
        tie_word_embeddings=read.typed("tie_word_embeddings", bool, gemma),
        checkpoint_dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
        eos_token_ids=_eos(generation.get("eos_token_id", raw.get("eos_token_id")), where),
        bos_token_id=_bos(raw.get("bos_token_id"), where),
    )


def _packed(packed: PackedIntegers | None, where: str, *inputs: int) -> PackedIntegers | None:
    """Return `packed` if its groups divide the inputs of all linear layers."""
    if packed and packed.group and any(size % packed.group for size in inputs):
        raise UnsupportedModel(
            f"{where}: group_size of quantization_config must divide the inputs of all linear layers "
            f"({', '.join(map(str, inputs))}), got {packed.group}"
        )
    return packed


def _family(read: ConfigReader) -> ModelFamily:
    where = read.where
    names = read.typed("architectures", list, [])
    for name in names:
        if isinstance(name, str) and name in OF_ARCHITECTURE:
            return OF_ARCHITECTURE[name]
    supported = ", ".join(OF_ARCHITECTURE)
    advice = f"(supported: {supported}); --engine vllm serves what vLLM supports"
    if names:
        raise UnsupportedModel(
            f"{where}: architecture {', '.join(map(str, names))} is not supported by the native engine {advice}"
        )
    model_type = read.raw.get("model_type")
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    raise UnsupportedModel(
        f"{where}: neither architectures nor model_type ({model_type!r}) names one that the native engine supports "
        f"{advice}"
    )


def _refuse_features(read: ConfigReader, family: str) -> None:
    where = read.where
    if FAMILIES[family].is_gemma:
        if (activation := read.raw.get("hidden_activation") or "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
            raise UnsupportedModel(f"{where}: hidden_activation must be gelu_pytorch_tanh, got {activation!r}")
        if read.typed("use_bidirectional_attention", bool, False):
            raise UnsupportedModel(f"{where}: use_bidirectional_attention is not supported")
        if family == "gemma3_text" and read.raw.get("attn_logit_softcapping") is not None:
            raise UnsupportedModel(f"{where}: attn_logit_softcapping is not supported for gemma3_text")
    elif (activation := read.raw.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise UnsupportedModel(f"{where}: hidden_act must be silu, got {activation!r}")


def _softcap(read: ConfigReader, key: str, default: float) -> float:
    """Return the cap, 0 if the key is null or, without a default, absent."""
    value = read.raw.get(key, default) or 0.0
    return positive(value, f"{read.where}: {key}") if value else 0.0


def _layer_windows(read: ConfigReader, family: str, num_layers: int) -> tuple[int, ...]:
    """Return the sliding window of each layer, 0 for full attention, by the rules of the family in transformers."""
    if family == "llama":
        return (0,) * num_layers
    where = read.where
    window = read.raw.get("sliding_window", None if family in ("moonpool", "mixtral") else 4096)
    if family in ("qwen2", "qwen3", "qwen3_moe") and not read.typed("use_sliding_window", bool, False):
        window = None
    if window is not None and not (type(window) is int and 0 < window <= MAX_COUNT):
        raise ConfigInvalid(f"{where}: sliding_window must be a positive integer or null, got {shown(window)}")
    if family in ("mistral", "mixtral", "qwen3_moe"):
        return (window or 0,) * num_layers
    if read.raw.get("layer_types") is None:
        if FAMILIES[family].is_gemma:
            pattern = 2 if family == "gemma2" else read.count("sliding_window_pattern", 6)
            return tuple(window or 0 if (i + 1) % pattern else 0 for i in range(num_layers))
        first = 0 if family == "moonpool" else read.typed("max_window_layers", int, 28)
        return tuple(window if window and i >= first else 0 for i in range(num_layers))
    types = read.typed("layer_types", list, [])
    if len(types) != num_layers:
        raise ConfigInvalid(
            f"{where}: layer_types must have num_hidden_layers ({num_layers}) entries, got {len(types)}"
        )
    if unknown := {str(kind) for kind in types} - set(LAYER_TYPES):
        raise UnsupportedModel(f"{where}: layer_types {', '.join(sorted(unknown))} are not supported")
    if "sliding_attention" in types and window is None:
        raise ConfigInvalid(f"{where}: layer_types has sliding_attention but sliding windows are off")
    return tuple(window or 0 if kind == "sliding_attention" else 0 for kind in types)


def _experts(read: ConfigReader, family: str, num_layers: int) -> tuple[ExpertShape | None, tuple[int, ...]]:
    """Return the experts and the layers that have them, by the rules of the family in transformers."""
    if family not in ("mixtral", "qwen3_moe"):
        return None, ()
    where, qwen = read.where, family == "qwen3_moe"
    named = "num_experts" if "num_experts" in read.raw else "num_local_experts"
    count = read.count(named, 128 if qwen else 8, most=_MAX_EXPERTS)
    per_token = read.count("num_experts_per_tok", 8 if qwen else 2)
    if per_token > count:
        raise ConfigInvalid(f"{where}: num_experts_per_tok must be at most {named} ({count}), got {per_token}")
    if not qwen:
        return ExpertShape(count, per_token, read.count("intermediate_size"), scaled=True), tuple(range(num_layers))
    every = read.count("decoder_sparse_step", 1)
    dense = read.typed("mlp_only_layers", list, [])
    if not all(type(layer) is int and 0 <= layer < num_layers for layer in dense):
        raise ConfigInvalid(f"{where}: mlp_only_layers must hold layer numbers below {num_layers}, got {shown(dense)}")
    with_mlp = set(dense)
    sparse = tuple(layer for layer in range(num_layers) if layer not in with_mlp and (layer + 1) % every == 0)
    size, scaled = read.count("moe_intermediate_size", 768), read.typed("norm_topk_prob", bool, False)
    return (ExpertShape(count, per_token, size, scaled) if sparse else None), sparse


def _routers(family: str, sparse_layers: tuple[int, ...]) -> list[str]:
    """Return the names of the layers that choose experts."""
    block = "block_sparse_moe" if family == "mixtral" else "mlp"
    return [f"model.layers.{layer}.{block}.gate" for layer in sparse_layers]


def _kv_scale_group(read: ConfigReader, family: str, head_dim: int) -> int:
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
    group = read.count("kv_scale_group", default_scale_group(head_dim))
    if head_dim % group:
        raise ConfigInvalid(f"{where}: kv_scale_group must divide head_dim ({head_dim}), got {group}")
    return group


def default_scale_group(head_dim: int) -> int:
    """Return the values of a row in int8 that share a scale by default: half of the row."""
    return max(head_dim // 2, 1)


_SCALE_GROUP = "--kv-int8-group (kv_scale_group)"


def with_int8_kv(config: ModelConfig, scale_group: int) -> ModelConfig:
    """Return the model with its KV in int8, of which `scale_group` values share a scale (0: the default, or its own).

    Raises ConfigInvalid.
    """
    own, head_dim = config.kv_scale_group, config.head_dim
    if own and scale_group not in (0, own):
        raise ConfigInvalid(f"{_SCALE_GROUP} must be that of the model, {own}, or omitted, got {scale_group}")
    group = own or scale_group or default_scale_group(head_dim)
    if head_dim % group:
        fitting = ", ".join(str(size) for size in range(1, head_dim + 1) if not head_dim % size)
        raise ConfigInvalid(
            f"{_SCALE_GROUP} must divide the model's head_dim ({head_dim}), got {group}: use one of {fitting}"
        )
    return replace(config, kv_scale_group=group)


def _kv_owners(read: ConfigReader, family: str, windows: tuple[int, ...]) -> tuple[int, ...]:
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
        raise ConfigInvalid(f"{where}: eos_token_id must be an id or a list of ids, got {shown(value)}")
    return tuple(ids)


def _bos(value: Any, where: str) -> int | None:
    if value is not None and not _is_token_id(value):
        raise ConfigInvalid(f"{where}: bos_token_id must be an id or null, got {shown(value)}")
    return value  # type: ignore[no-any-return]


def _is_token_id(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_COUNT
