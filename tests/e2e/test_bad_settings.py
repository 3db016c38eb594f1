"""Settings that cannot be: refused by name with what to do, before anything starts. No cluster is needed for it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Moonpool = Callable[..., subprocess.CompletedProcess[str]]
AssertRefused = Callable[..., None]


@pytest.fixture(scope="module")
def damaged_models(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The random model, broken in one way each."""
    folder = tmp_path_factory.mktemp("damaged")

    def copy(name: str, **config: Any) -> Path:
        shutil.copytree(random_model, folder / name)
        path = folder / name / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
        return folder / name

    models = {
        "architecture": copy("architecture", architectures=["MambaForCausalLM"], model_type="mamba"),
        "tokenizer": copy("tokenizer"),
        "weights": copy("weights"),
    }
    (models["tokenizer"] / "tokenizer.json").unlink()
    (models["weights"] / "model.safetensors").unlink()
    return models


# The model folder


def test_a_model_folder_that_is_not_there_is_named(
    moonpool: Moonpool, assert_refused: AssertRefused, tmp_path: Path
) -> None:
    assert_refused(moonpool("serve", tmp_path / "nowhere"), f"model folder {tmp_path / 'nowhere'} does not exist")


def test_a_folder_that_holds_no_model_is_told_what_it_lacks(
    moonpool: Moonpool, assert_refused: AssertRefused, tmp_path: Path
) -> None:
    assert_refused(moonpool("serve", tmp_path), str(tmp_path), "no config.json", "not a Hugging Face model folder")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("tokenizer", ["no tokenizer.json", "save the model's fast tokenizer"]),
        ("weights", ["no weights in the safetensors format"]),
        ("architecture", ["MambaForCausalLM is not supported", "LlamaForCausalLM", "Qwen3ForCausalLM"]),
    ],
)
def test_a_folder_that_cannot_be_served_is_refused_before_anything_starts(
    moonpool: Moonpool, assert_refused: AssertRefused, damaged_models: dict[str, Path], damage: str, said: list[str]
) -> None:
    done = moonpool("serve", damaged_models[damage])
    assert_refused(done, str(damaged_models[damage]), *said)
    assert "Starting" not in done.stderr


# Configuration


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prot", "80"], ["No such option: --prot", "--port"]),
        (["--port", "many"], ["--port must be an integer, got 'many'"]),
        (["--port", "70000"], ["--port must be from 0 to 65535, got 70000"]),
        (["--transport", "ether"], ["--transport must be one of auto, rdma, tcp, shm, got 'ether'"]),
        (["--device", "tpu"], ["--device must be", "got 'tpu'", "cuda:N"]),
        (["--capacity-tokens", "1000", "--block-tokens", "16"], ["capacity_tokens", "1000", "multiple", "16"]),
        (["--prefill-nodes", "0"], ["prefill_nodes and decode_nodes must both", "got 0 and 1", "--aggregated"]),
        (["--api-key", ""], ["--api-key", "empty"]),
        (["--host", "192.0.2.1"], ["cannot listen at 192.0.2.1"]),
    ],
)
def test_a_bad_flag_is_refused_before_anything_starts(
    moonpool: Moonpool, assert_refused: AssertRefused, arguments: list[str], said: list[str]
) -> None:
    done = moonpool("serve", *arguments)
    assert_refused(done, *said)
    assert "Starting" not in done.stderr


def test_an_unknown_key_of_the_file_is_refused_with_the_nearest(
    moonpool: Moonpool, assert_refused: AssertRefused, tmp_path: Path
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("prefil_nodes: 2\n")
    assert_refused(moonpool("serve", "--config", path), str(path), "'prefil_nodes'", "did you mean prefill_nodes?")


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("MOONPOOL_PREFIL_NODES", "2", "did you mean MOONPOOL_PREFILL_NODES?"),
        ("MOONPOOL_TTFT_SLO", "soon", "MOONPOOL_TTFT_SLO must be a number, got 'soon'"),
    ],
)
def test_a_bad_variable_is_refused_by_name(
    moonpool: Moonpool, assert_refused: AssertRefused, variable: str, value: str, said: str
) -> None:
    assert_refused(moonpool("serve", **{variable: value}), variable, said)


def test_a_replay_against_a_dead_url_says_how_to_start_a_server(
    moonpool: Moonpool, assert_refused: AssertRefused, tmp_path: Path, unused_tcp_port: int
) -> None:
    url = f"http://127.0.0.1:{unused_tcp_port}"
    done = moonpool("replay", "conversation", "--url", url, "--out", tmp_path / "out")
    assert_refused(done, f"no usable server at {url}", "moonpool serve")
