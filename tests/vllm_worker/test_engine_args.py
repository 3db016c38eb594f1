"""vLLM's arguments, as they follow from Moonpool's settings. Needs vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import vllm_worker.engine_args
from engine import load_model
from settings.node import ListenSettings, NodeSettings
from settings.worker import BUNDLED_MODEL, BlockSettings, EngineSettings, ModelSettings
from vllm_worker.engine import computation, kv_spec, weights_fingerprint
from vllm_worker.engine_args import engine_args, require_vllm
from worker.config import WorkerConfig
from worker.errors import StartupError


def config_of(**engine: Any) -> WorkerConfig:
    settings = EngineSettings(**{"engine": "vllm", "device": "cpu", "threads": 1, **engine})
    return WorkerConfig(
        node=NodeSettings(node_id="a0"),
        listen=ListenSettings(),
        conductor_targets=("unix:/nobody",),
        pool_target="",
        model=ModelSettings(BUNDLED_MODEL),
        engine=settings,
        blocks=BlockSettings(32),
    )


def test_settings_and_further_arguments_become_vllms() -> None:
    args = engine_args(
        config_of(max_batch=7, max_model_len=512, capacity_tokens=6400, vllm_args="--seed 5"), Path("/copies")
    )
    found = args.create_engine_config()
    assert (found.scheduler_config.max_num_seqs, found.model_config.max_model_len) == (7, 512)
    assert (found.cache_config.block_size, found.cache_config.num_gpu_blocks_override) == (32, 201)
    assert (str(found.model_config.dtype), found.model_config.seed) == ("torch.float32", 5)
    assert kv_spec(found).block_tokens == 32
    transfer = found.kv_transfer_config
    assert (transfer.kv_connector, transfer.kv_connector_extra_config) == (
        "MoonpoolConnector",
        {"moonpool_socket": "/copies"},
    )


def test_a_local_model_is_used_while_the_hub_is_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert engine_args(config_of(), Path("/copies")).model == str(BUNDLED_MODEL)


@pytest.mark.parametrize("text", ["--no-such-argument 1", "--tensor-parallel-size two"])
def test_arguments_that_vllm_does_not_know_are_refused_with_its_reason(text: str) -> None:
    with pytest.raises(StartupError, match=r"--vllm-args: vLLM does not accept them: .*(no-such|two)"):
        engine_args(config_of(vllm_args=text), Path("/copies"))


def test_a_version_that_was_not_tested_is_named_in_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = require_vllm()
    assert not caplog.records
    monkeypatch.setattr(vllm_worker.engine_args, "TESTED_VERSIONS", ("9.9",))
    assert require_vllm() == version
    assert version in caplog.text
    assert "9.9" in caplog.text


def test_the_model_has_the_native_engines_fingerprint_and_the_computation_its_own(tmp_path: Path) -> None:
    assert weights_fingerprint(BUNDLED_MODEL) == load_model(BUNDLED_MODEL).fingerprint
    found = engine_args(config_of(), Path("/copies")).create_engine_config()
    half = engine_args(config_of(dtype="bfloat16"), Path("/copies")).create_engine_config()
    assert len({computation("1", found), computation("2", found), computation("1", half)}) == 3


def test_a_family_that_only_vllm_knows_has_a_fingerprint_of_its_files(tmp_path: Path) -> None:
    for file in BUNDLED_MODEL.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    own = weights_fingerprint(tmp_path)
    weights = next(tmp_path.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert weights_fingerprint(tmp_path) != own
