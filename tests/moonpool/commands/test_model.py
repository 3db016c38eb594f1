"""`moonpool model check` tells models with attention sinks from those without, by measurement."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.random_model import RandomModelSpec, write_random_model
from settings.worker import BUNDLED_MODEL

BOS = 0


def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "moonpool", "model", "check", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def measured(*arguments: object) -> tuple[int, dict[str, Any]]:
    done = run(*arguments, "--json")
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_the_bundled_model_is_suited() -> None:
    code, found = measured()
    assert (code, found["is_suited"], found["problem"]) == (0, True, "")
    losses = found["losses"]
    assert losses["dense"] < losses["4"] < losses["0"] - 0.1
    assert losses["1"] == pytest.approx(losses["4"], abs=0.05)


def test_a_model_without_its_sink_is_named(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(BUNDLED_MODEL, tmp_path / "sinkless"))
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][BOS] = weights["model.embed_tokens.weight"][50]  # a token as any other
    save_file(weights, folder / "model.safetensors")
    done = run(folder)
    assert done.returncode == 1
    assert "sinkless: unsuited to endless generation: it has no attention sinks" in " ".join(done.stdout.split())


def test_a_model_that_knows_nothing_is_named(tmp_path: Path) -> None:
    spec = RandomModelSpec(vocab=2048, max_len=2048, scale=3.0)
    code, found = measured(write_random_model(tmp_path / "random", spec, tokenizer=BUNDLED_MODEL))
    assert code == 1
    assert "does not know such text" in found["problem"]


def test_learned_sinks_need_no_tokens(tmp_path: Path) -> None:
    extra = {"attention_sinks": True, "layer_types": ["full_attention"] * 2}
    spec = RandomModelSpec(family="moonpool", vocab=2048, max_len=2048, extra=extra)
    folder = write_random_model(tmp_path / "learned", spec, tokenizer=BUNDLED_MODEL)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"] = torch.zeros_like(weights["model.embed_tokens.weight"]) + 1e-4
    save_file(weights, folder / "model.safetensors")
    _, found = measured(folder)
    assert found["sinks"] == 0
    assert set(found["losses"]) == {"dense", "0"}
    assert "attention sinks" not in found["problem"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--window", 40], "--window must be a multiple of 16, got 40"),
        (["--window", 2000], "expected at least"),
        (["--text", "nowhere.txt"], "nowhere.txt cannot be read"),
        (["/nonexistent"], "/nonexistent"),
    ],
)
def test_bad_input_is_refused(arguments: list[object], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
