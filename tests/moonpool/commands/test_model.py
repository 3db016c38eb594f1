"""`moonpool model check` tells models with attention sinks from those without, by measurement."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from engine.random_model import RandomModelSpec, write_random_model
from moonpool.commands.model import app
from settings.worker import BUNDLED_MODEL

BOS = 0
LEARNED = {"attention_sinks": True, "layer_types": ["full_attention"] * 2}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["check", *map(str, arguments)])


def measured(*arguments: object) -> tuple[int, dict[str, Any]]:
    done = run(*arguments, "--json")
    assert done.stdout, done.stderr
    return done.exit_code, json.loads(done.stdout)


def sinkless(folder: Path) -> Path:
    """Return a copy of the bundled model in whose first token is nothing to attend to."""
    shutil.copytree(BUNDLED_MODEL, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][BOS] = weights["model.embed_tokens.weight"][50]  # a token as any other
    save_file(weights, folder / "model.safetensors")
    return folder


def random_model(folder: Path, **spec: Any) -> Path:
    return write_random_model(folder, RandomModelSpec(vocab=2048, max_len=2048, **spec), tokenizer=BUNDLED_MODEL)


def test_the_bundled_model_is_suited() -> None:
    code, found = measured()
    assert (code, found["is_suited"], found["problem"]) == (0, True, "")
    losses = found["losses"]
    assert losses["dense"] < losses["4"] < losses["0"] - 0.1
    assert losses["1"] == pytest.approx(losses["4"], abs=0.05)


def test_without_first_tokens_the_bundled_model_is_unsuited() -> None:
    code, found = measured("--sinks", 0)
    assert (code, found["is_suited"], found["sinks"]) == (1, False, 0)
    assert found["problem"].endswith("keep some with --sinks")


def test_a_model_without_its_sink_is_named(tmp_path: Path) -> None:
    done = run(sinkless(tmp_path / "sinkless"))
    assert done.exit_code == 1
    assert "\nsinkless: unsuited to endless generation: it has no attention sinks: a window of 256 " in done.stdout


def test_a_window_that_costs_nothing_suits_models_without_sinks(tmp_path: Path) -> None:
    code, found = measured(sinkless(tmp_path / "sinkless"), "--window", 1024)
    assert (code, found["problem"]) == (0, "")
    assert found["losses"]["0"] == pytest.approx(found["losses"]["4"], abs=0.01)


def test_the_first_token_is_the_tokenizers(tmp_path: Path) -> None:
    """A model whose prompts do not begin with BOS, whatever config.json says, has no sinks there."""
    folder = Path(shutil.copytree(BUNDLED_MODEL, tmp_path / "bare"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": None}))
    code, found = measured(folder)
    assert code == 1
    assert "it has no attention sinks" in found["problem"]


@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_a_model_that_knows_nothing_is_named(tmp_path: Path, scale: float) -> None:
    code, found = measured(random_model(tmp_path / "random", scale=scale))
    assert code == 1
    assert "it cannot predict such text" in found["problem"]


def test_learned_sinks_need_no_tokens(tmp_path: Path) -> None:
    folder = random_model(tmp_path / "learned", family="moonpool", extra=LEARNED)
    _, found = measured(folder)
    assert found["sinks"] == 0
    assert set(found["losses"]) == {"dense", "0"}
    done = run(folder, "--sinks", 4)
    assert done.exit_code == 2
    assert "--sinks must be 0, since the model has learned sinks, got 4" in done.stderr


def test_windows_in_all_layers_need_no_tokens(tmp_path: Path) -> None:
    folder = random_model(tmp_path / "windows", family="mistral", window=64)
    _, found = measured(folder, "--window", 32)
    assert found["sinks"] == 0
    done = run(folder, "--sinks", 1)
    assert done.exit_code == 2
    assert "--sinks must be 0, since all layers of the model have windows, got 1" in done.stderr


def test_the_window_is_longer_than_the_models_own(tmp_path: Path) -> None:
    spec = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 500}
    folder = random_model(tmp_path / "mixed", family="moonpool", extra=spec)
    _, found = measured(folder)
    assert found["window"] == 528
    done = run(folder, "--window", 512)
    assert done.exit_code == 2
    assert "--window must be at least 516 tokens, a block more than the model's own windows, got 512" in done.stderr


def test_losses_that_are_no_numbers_are_an_error(tmp_path: Path) -> None:
    folder = random_model(tmp_path / "damaged")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, folder / "model.safetensors")
    done = run(folder)
    assert done.exit_code == 2
    assert "its losses are not finite" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--window", 40], "--window must be a multiple of 16, got 40"),
        (["--window", 4000], "--window must be at most 2048, half of the model's positions, got 4000"),
        (["--window", 2000], "the default text has 3842 tokens, expected at least 4000, twice the window"),
        (["--tokens", 100], "--tokens must be at least 512, twice the window, got 100"),
        (["--text", "nowhere.txt"], "nowhere.txt cannot be read"),
        (["--sinks", 9], "--sinks"),
        (["/nonexistent"], "/nonexistent"),
        ([BUNDLED_MODEL.parent], "has no config.json"),
    ],
)
def test_bad_input_is_refused(arguments: list[object], message: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())


def test_a_short_text_is_refused_by_its_name(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("In the beginning")
    done = run("--text", text)
    assert done.exit_code == 2
    assert f"--text {text} has " in done.stderr


def test_the_page_shows_the_output() -> None:
    page = (Path(__file__).parents[3] / "docs" / "endless.md").read_text()
    shown = re.search(r"```console\n\$ moonpool model check\n(.*?)```", page, re.DOTALL)
    assert shown is not None
    command = [sys.executable, "-m", "moonpool", "model", "check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout == shown[1]
