"""Folders load as they should, and broken ones fail with an error that says what was expected and what was found."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import (
    BackendUnavailable,
    CacheMismatch,
    CheckpointDamaged,
    ConfigInvalid,
    DeviceUnavailable,
    ForwardBatch,
    InvalidBatch,
    KvGroupShape,
    ModelFolderMissing,
    TensorMismatch,
    TokenizerMissing,
    UnsupportedModel,
    find_tokenizer,
    load_model,
)
from engine.backends.registry import BATCH_INVARIANT
from engine.config import parse_config
from engine.model import fingerprint_of
from engine.random_model import RandomModelSpec, write_random_model


@pytest.fixture
def folder(model_folder, tmp_path):
    """A copy of a model folder that a test may damage."""
    return shutil.copytree(model_folder("llama-untied-biases"), tmp_path / "model")


def rewrite_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_a_missing_folder_config_or_weights_is_named(folder, tmp_path):
    with pytest.raises(ModelFolderMissing, match="nowhere does not exist"):
        load_model(tmp_path / "nowhere")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFolderMissing, match=r"neither model\.safetensors nor"):
        load_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelFolderMissing, match=r"no config\.json"):
        load_model(folder)


def test_a_missing_tokenizer_is_named(folder):
    with pytest.raises(TokenizerMissing, match=r"no tokenizer\.json"):
        find_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{}")
    assert find_tokenizer(folder) == folder / "tokenizer.json"


@pytest.mark.parametrize("text", ["{", "[1]", "\x00"])
def test_a_config_that_is_no_json_object_is_refused(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(ConfigInvalid, match=r"config\.json"):
        load_model(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None, "model_type": "bert"}, "bert"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["linear_attention"] * 2}, "linear_attention"),
        ({"architectures": ["Gemma2ForCausalLM"], "hidden_activation": "gelu"}, "hidden_activation .* 'gelu'"),
        ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(folder, changes, message):
    rewrite_config(folder, **changes)
    with pytest.raises(UnsupportedModel, match=message):
        load_model(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size must be a positive integer, got None"),
        ({"vocab_size": "many"}, "vocab_size .* got 'many'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "must be a multiple"),
        ({"head_dim": 7}, "even"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"eos_token_id": "stop"}, "eos_token_id"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": -1.0}, "attn_logit_softcapping"),
        ({"architectures": ["Gemma2ForCausalLM"], "query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ({"architectures": ["Gemma3ForCausalLM"], "rope_parameters": {"full_attention": 3}}, "full_attention"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": -4}, "sliding_window"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention"]}, "got 1$"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["sliding_attention"] * 2}, "sliding windows are off"),
    ],
)
def test_values_that_make_no_sense_are_refused(folder, changes, message):
    (folder / "generation_config.json").unlink()
    rewrite_config(folder, **changes)
    with pytest.raises(ConfigInvalid, match=message):
        load_model(folder)


def test_tensor_differences_are_all_reported(folder):
    def change(tensors):
        tensors["model.layers.7.extra.weight"] = torch.zeros(2)
        del tensors["model.layers.1.self_attn.q_proj.bias"]
        tensors["model.norm.weight"] = torch.zeros(65)

    rewrite_tensors(folder, change)
    with pytest.raises(TensorMismatch, match=r"model\.norm\.weight: expected \[64\], found \[65\]") as caught:
        load_model(folder)
    assert caught.value.missing == ("model.layers.1.self_attn.q_proj.bias",)
    assert caught.value.unexpected == ("model.layers.7.extra.weight",)
    assert caught.value.wrong_shape == {"model.norm.weight": ((64,), (65,))}


def test_integer_weights_are_refused_by_name(folder):
    rewrite_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}))
    with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight is stored as I8"):
        load_model(folder)


def test_a_truncated_file_says_how_much_is_missing(folder):
    path = folder / "model.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointDamaged, match=f"truncated: expected {size} bytes, got {size - 100}"):
        load_model(folder)
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(CheckpointDamaged, match="header does not fit"):
        load_model(folder)
    path.write_bytes(b"")
    with pytest.raises(CheckpointDamaged, match="header does not fit"):
        load_model(folder)


def test_a_malformed_header_is_refused(folder):
    path = folder / "model.safetensors"
    path.write_bytes((2).to_bytes(8, "little") + b"{x")
    with pytest.raises(CheckpointDamaged, match="malformed"):
        load_model(folder)
    path.write_bytes((2).to_bytes(8, "little") + b"{}" + b"more")
    with pytest.raises(CheckpointDamaged, match="longer than its header specifies"):
        load_model(folder)


def shard(folder):
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "model.safetensors").unlink()


def test_shards_load_like_a_single_file(folder, model_folder):
    shard(folder)
    whole, sharded = load_model(model_folder("llama-untied-biases")), load_model(folder)
    ids = np.arange(9, dtype=np.int32)
    assert np.array_equal(whole.score(ids), sharded.score(ids))
    assert whole.fingerprint == sharded.fingerprint


def test_a_missing_shard_or_broken_index_is_named(folder):
    shard(folder)
    (folder / "b.safetensors").unlink()
    with pytest.raises(ModelFolderMissing, match=r"b\.safetensors"):
        load_model(folder)
    (folder / "model.safetensors.index.json").write_text('{"weights": 1}')
    with pytest.raises(CheckpointDamaged, match="not a weight index"):
        load_model(folder)


def test_the_fingerprint_follows_what_is_computed_and_nothing_else(folder):
    before = load_model(folder).fingerprint
    rewrite_config(folder, transformers_version="9.9", eos_token_id=3)
    assert load_model(folder).fingerprint == before
    rewrite_config(folder, rope_theta=20000.0)
    assert load_model(folder).fingerprint != before
    rewrite_config(folder, rope_theta=10000.0)
    rewrite_tensors(folder, lambda tensors: tensors["model.norm.weight"].mul_(1.001))
    assert load_model(folder).fingerprint != before


def test_end_tokens_come_from_the_generation_config_first(folder):
    rewrite_config(folder, eos_token_id=3)
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert load_model(folder).config.eos_token_ids == (5, 6)
    (folder / "generation_config.json").unlink()
    assert load_model(folder).config.eos_token_ids == (3,)


def test_a_tied_checkpoint_may_still_hold_a_head(model_folder, tmp_path):
    folder = shutil.copytree(model_folder("llama"), tmp_path / "tied")
    rewrite_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    load_model(folder)


def test_layers_are_grouped_by_window(models):
    config = models("qwen3-layer-types").config
    assert config.kv_groups("float16") == (
        KvGroupShape("full", 0, (1, 2), 2, 16, "float16"),
        KvGroupShape("window", 11, (0, 3), 2, 16, "float16"),
    )


def test_absent_keys_mean_what_transformers_takes_them_to_mean():
    raw = {
        "architectures": ["MistralForCausalLM"],
        "vocab_size": 10,
        "hidden_size": 64,
        "intermediate_size": 8,
        "num_attention_heads": 8,
        "num_hidden_layers": 1,
    }
    config = parse_config(raw, {}, where="test")
    assert (config.num_kv_heads, config.head_dim, config.layer_windows, config.ropes[0].theta) == (
        8,
        8,
        (4096,),
        10000.0,
    )
    gemma = parse_config(raw | {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 7}, {}, where="test")
    assert (gemma.num_kv_heads, gemma.head_dim, gemma.attention_scale) == (4, 256, 256**-0.5)
    assert gemma.layer_windows == (4096,) * 5 + (0, 4096)
    assert [gemma.ropes[rope].theta for rope in gemma.layer_ropes] == [1e4] * 5 + [1e6, 1e4]
    assert gemma.tie_word_embeddings
    gemma = parse_config(raw | {"architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": 3}, {}, where="test")
    assert (gemma.attention_softcap, gemma.logits_softcap, gemma.layer_windows) == (50.0, 30.0, (4096, 0, 4096))


def test_models_without_newer_features_keep_their_fingerprints():
    """Blocks that earlier releases stored under them stay readable."""
    nano = Path(__file__).parents[1] / "data" / "nano-model"
    assert fingerprint_of(nano) == "091d3d12e3197d88eaa4c2a710bc377b"


@pytest.mark.parametrize("device", ["tpu", "meta", "cuda:99"])
def test_devices_that_are_not_there_are_refused(folder, device):
    with pytest.raises(DeviceUnavailable, match=device):
        load_model(folder, device=device)


def test_unknown_dtypes_are_refused(folder):
    with pytest.raises(DeviceUnavailable, match="float8"):
        load_model(folder, dtype="float8")


def test_unknown_and_unsuitable_backends_are_refused(folder):
    with pytest.raises(BackendUnavailable, match=r"one of auto, compiled, triton, flash-attn, torch, got 'cuda'"):
        load_model(folder, backend="cuda")
    with pytest.raises(
        BackendUnavailable, match=r"compiled runs on cpu in float32, not on cpu in bfloat16; use auto or"
    ):
        load_model(folder, backend="compiled", dtype="bfloat16")
    with pytest.raises(BackendUnavailable, match="batch-invariant runs on cpu in float32, not on cpu in bfloat16"):
        load_model(folder, dtype="bfloat16", backend=BATCH_INVARIANT)
    with pytest.raises(BackendUnavailable, match="flash-attn runs on CUDA, not on cpu"):
        load_model(folder, backend="flash-attn")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c: {"token_ids": np.array([1, 256], np.int32)}, "token ids must be in 0..255"),
        (lambda c: {"token_ids": np.array([], np.int32)}, "at least one"),
        (lambda c: {"start": -1}, "must start at 0 or later"),
        (lambda c: {"start": 2047}, "must end by position 2048"),
        (lambda c: {"start": 20}, "slots of group 0 up to position 29"),
        (lambda c: {"slot_tables": c.slot_tables * 2}, "must have 1 slot tables, got 2"),
        (lambda c: {"slot_tables": (np.full(3, -1, np.int32),)}, r"must be in 0\.\.5, got -1"),
        (lambda c: {"slot_tables": (np.full(3, 6, np.int32),)}, r"must be in 0\.\.5, got \d\.\.6"),
    ],
)
def test_impossible_batches_are_refused_with_the_cache_untouched(models, runner, damage, message):
    run = runner(models("llama"), [9])
    good = run.chunk(0, 0, 9)
    with pytest.raises(InvalidBatch, match=message):
        run.model.forward(ForwardBatch([good, replace(good, **damage(good))]), run.cache)
    assert run.cache.views[0].isnan().all()


def test_an_empty_batch_and_an_empty_sequence_are_refused(models, runner):
    run = runner(models("llama"), [1])
    with pytest.raises(InvalidBatch, match="at least one chunk"):
        run.model.forward(ForwardBatch([]), run.cache)
    with pytest.raises(InvalidBatch, match="at least one"):
        run.model.score(np.array([], np.int32))
    with pytest.raises(InvalidBatch, match=r"0\.\.255"):
        run.model.score(np.array([256], np.int32))


def test_a_cache_of_another_shape_is_refused(models, runner):
    run = runner(models("qwen3"), [4])
    with pytest.raises(CacheMismatch, match="must have the model's groups"):
        models("llama").forward(ForwardBatch([run.chunk(0, 0, 4)]), run.cache)


def test_the_command_writes_the_folder_that_the_function_writes(tmp_path):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    numbers = {"layers": 3, "hidden": 32, "heads": 2, "kv_heads": 1, "window": 8, "full_layers": 1, "eos": 2}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in numbers.items()] + ["--family=qwen2", "--untied"]
    command = [
        sys.executable,
        "-m",
        "engine.random_model",
        str(tmp_path / "a"),
        *flags,
        "--tokenizer",
        str(tmp_path / "tokenizer"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == str(tmp_path / "a")
    write_random_model(
        tmp_path / "b", RandomModelSpec(family="qwen2", tied=False, **numbers), tokenizer=tmp_path / "tokenizer"
    )
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert [group.layers for group in load_model(tmp_path / "a").kv_groups] == [(0,), (1, 2)]
