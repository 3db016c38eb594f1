"""A model folder is judged before its weights are read: whatever its files hold, the answer is one of the engine's."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import ConfigInvalid, EngineError, UnsupportedModel, check_folder
from engine.config import parse_config
from engine.families import OF_ARCHITECTURE
from engine.quantisation import PackedIntegers, quantization_config
from engine.random_model import RandomModelSpec, write_random_model

ARCHITECTURES = sorted(OF_ARCHITECTURE)
KEYS = [
    "architectures",
    "model_type",
    "hidden_act",
    "quantization_config",
    "rope_scaling",
    "rope_parameters",
    "rope_theta",
    "vocab_size",
    "partial_rotary_factor",
    "sliding_window",
    "sliding_window_pattern",
    "kv_owners",
    "num_kv_shared_layers",
    "attention_sinks",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "query_pre_attn_scalar",
    "hidden_activation",
    "rope_local_base_freq",
    "use_sliding_window",
    "layer_types",
    "max_window_layers",
    "eos_token_id",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "mlp_only_layers",
    "decoder_sparse_step",
    "moe_intermediate_size",
    "norm_topk_prob",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "dtype",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_hidden_layers",
    "rms_norm_eps",
    "max_position_embeddings",
    "intermediate_size",
]
ROPE = {"type": "llama3", "rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0, "low_freq_factor": 0}

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["", "x", "linear", "llama3", "yarn"])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(ROPE)), inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(
        tmp_path_factory.mktemp("m"), RandomModelSpec(layers=1, hidden=8, heads=2, kv_heads=1, vocab=16)
    )


@settings(max_examples=400, deadline=None)
@given(architecture=st.sampled_from(ARCHITECTURES), changes=st.dictionaries(st.sampled_from(KEYS), values, max_size=3))
def test_any_values_in_a_configuration_are_understood_or_refused(
    folder: Path, architecture: str, changes: dict[str, Any]
) -> None:
    raw = json.loads((folder / "config.json").read_text()) | {"architectures": [architecture]} | changes
    try:
        config = parse_config(raw, {}, where="config.json")
    except EngineError:
        return
    assert len(config.layer_windows) == config.num_layers > 0
    assert all(rope.theta > 0 for rope in config.ropes)
    assert all(config.kv_owners[owner] == owner <= layer for layer, owner in enumerate(config.kv_owners))
    assert sum(len(group.layers) for group in config.kv_groups("float32")) == len(config.kv_layers) > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**30}, "num_hidden_layers must be at most 10000, got 1e.30"),
        ({"vocab_size": 2**31}, "vocab_size must be at most .*, got 2.15e.09"),
        ({"quantization_config": "int4"}, "quantization_config must be an object, got 'int4'"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 0}},
            "factor of rope_type 'linear' must be a positive number",
        ),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps must be a positive number, got inf"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, got 'yes'"),
    ],
)
def test_a_value_of_the_wrong_kind_or_size_is_refused_by_key(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    raw = json.loads((folder / "config.json").read_text()) | changes
    with pytest.raises(ConfigInvalid, match=message):
        parse_config(raw, {}, where="config.json")


PACKED = quantization_config(
    {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 4},
    ignore=["model.layers.0.mlp.gate"],
)


@pytest.mark.parametrize("routers", [["model.layers.0.mlp.gate"], ["re:.*mlp.gate$"], ["re:.*gate$"]], ids=str)
def test_routers_of_quantised_mixtures_are_named_or_matched(folder: Path, routers: list[str]) -> None:
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"architectures": ["Qwen3MoeForCausalLM"], "sliding_window": None, "tie_word_embeddings": False}
    config = parse_config(
        raw | {"quantization_config": PACKED | {"ignore": [*routers, "lm_head"]}}, {}, where="config.json"
    )
    assert config.packed_weights == PackedIntegers(4, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, "num_experts must be a positive integer, got 0"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, r"num_experts_per_tok must be at most num_experts \(4\), got 5"),
        ({"mlp_only_layers": [1]}, r"mlp_only_layers must hold layer numbers below 1, got \[1\]"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false, got 1"),
        ({"quantization_config": {"quant_method": "awq"}}, 'quant_method must be "compressed-tensors", got "awq"'),
        ({"moe_intermediate_size": 6, "quantization_config": PACKED}, r"must divide .* \(8, 8, 6\), got 4"),
        ({"quantization_config": PACKED | {"ignore": ["lm_head"]}}, "must name lm_head and all routers"),
        ({"quantization_config": PACKED | {"ignore": ["lm_head", {}]}}, "must name lm_head and all routers"),
        (
            {"quantization_config": PACKED | {"ignore": ["lm_head", "model.layers.0.mlp.gate", "x"]}},
            r"must name lm_head and all routers \(model\.layers\.0\.mlp\.gate, \.\.\.\), got ",
        ),
    ],
)
def test_experts_that_cannot_be_are_refused_by_key(folder: Path, changes: dict[str, Any], message: str) -> None:
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"architectures": ["Qwen3MoeForCausalLM"], "sliding_window": None} | changes
    with pytest.raises((ConfigInvalid, UnsupportedModel), match=message):
        parse_config(raw, {}, where="config.json")


entries = st.fixed_dictionaries({"dtype": values, "shape": values, "data_offsets": values}) | values


@settings(max_examples=150, deadline=None)
@given(
    header=st.dictionaries(st.sampled_from(["model.norm.weight", "__metadata__", "x"]), entries) | values,
    tail=st.binary(max_size=9),
)
def test_any_header_of_a_weights_file_is_understood_or_refused(folder: Path, header: Any, tail: bytes) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    text = json.dumps(header).encode()
    try:
        path.write_bytes(struct.pack("<Q", len(text)) + text + tail)
        with pytest.raises(EngineError):
            check_folder(folder)
    finally:
        path.write_bytes(whole)
    assert check_folder(folder).num_layers == 1
