"""PPL.LLM's rule for planning hardware: its published row, and what follows from a configuration."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.config import read_config
from engine.random_model import RandomModelSpec, write_random_model
from moonpool.cli import app
from settings.worker import BUNDLED_MODEL
from simulator.hardware import GPUS, KV_FORMATS, MODELS, WEIGHT_FORMATS, plan, planned_model

PLAIN = WEIGHT_FORMATS["16-bit"], KV_FORMATS["16-bit"]
PAGE = Path(__file__).parents[2] / "docs" / "engine.md"


def test_the_published_row_of_llama_7b_on_an_a100_is_met() -> None:
    """272 sequences, 19.9 ms of arithmetic, 49.04 ms of memory, of which a step reads 80e9 bytes instead of 80 GiB."""
    found = plan(GPUS["A100"], MODELS["7B"], 512, *PLAIN)
    assert found.gpus == 1
    assert found.batch == pytest.approx(272, rel=0.015)
    assert found.compute_ms == pytest.approx(19.9, rel=0.03)
    assert found.memory_ms * 80e9 / 2**30 / 80 == pytest.approx(49.04, rel=0.005)
    assert found.tokens_per_s == pytest.approx(found.batch / found.step_ms * 1e3)


def test_halves_of_kv_and_weights_make_room() -> None:
    small = plan(GPUS["A100"], MODELS["7B"], 512, WEIGHT_FORMATS["16-bit"], KV_FORMATS["int8"])
    usual = plan(GPUS["A100"], MODELS["7B"], 512, *PLAIN)
    assert small.batch / usual.batch == pytest.approx(2 / (1 + 2 / 64), rel=0.01)
    quantised = plan(GPUS["A100"], MODELS["7B"], 512, WEIGHT_FORMATS["w8a8"], KV_FORMATS["16-bit"])
    assert quantised.compute_ms / quantised.batch == pytest.approx(usual.compute_ms / usual.batch / 2)
    assert plan(GPUS["RTX 4090"], MODELS["70B"], 512, *PLAIN).gpus == 8
    assert plan(GPUS["RTX 4090"], MODELS["70B"], 512, WEIGHT_FORMATS["int4"], KV_FORMATS["int8"]).gpus == 2
    assert plan(replace(GPUS["A100"], memory_bytes=1e9), MODELS["70B"], 512, *PLAIN).batch == 0


def test_a_model_is_planned_from_its_configuration(tmp_path: Path) -> None:
    bundled = planned_model("bundled", read_config(BUNDLED_MODEL))
    assert bundled.parameters == pytest.approx(3.65e6, rel=0.01)
    scheme = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"}
    packed = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme}},
        "ignore": ["lm_head"],
    }
    plain, quantised = (
        planned_model("", read_config(write_random_model(tmp_path / str(len(extra)), RandomModelSpec(extra=extra))))
        for extra in ({}, {"quantization_config": packed})
    )
    assert quantised == plain  # of the same size, whatever its numbers take on disk
    folder = write_random_model(tmp_path, RandomModelSpec(family="mixtral", layers=2, window=100, experts=8))
    model = planned_model("mixture", read_config(folder))
    assert model.cached_values(1000) == 2 * 2 * 2 * 16 * 100
    expert = 3 * 64 * 192
    assert model.parameters - model.used_parameters == 2 * 6 * expert


def test_the_command_shows_every_gpu_and_names_what_is_wrong(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path / "small", RandomModelSpec())
    done = CliRunner().invoke(app, ["simulate", "hardware", str(folder), "--tokens", "100", "--kv", "int8"])
    assert done.exit_code == 0
    rows = json.loads(done.output.splitlines()[-1])["plans"]
    assert [row["gpu"] for row in rows] == list(GPUS)
    assert all(row["model"] == "small" for row in rows)
    for words, message in (
        (["--kv", "fp4"], "--kv must be 16-bit or int8 or int8-8, got 'fp4'"),
        ([str(tmp_path / "absent")], "absent"),
    ):
        done = CliRunner().invoke(app, ["simulate", "hardware", *words])
        assert done.exit_code == 2
        assert message in done.output


def test_the_table_of_the_page_is_that_of_the_command() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    for model in MODELS.values():
        for gpu in GPUS.values():
            found = plan(gpu, model, 512, *PLAIN)
            figures = f"{found.batch:,} | {found.compute_ms:.1f} | {found.memory_ms:.1f} | {found.tokens_per_s:,.0f}"
            assert f"| {model.name} | {found.gpus} x {gpu.name} | {figures} |" in lines
