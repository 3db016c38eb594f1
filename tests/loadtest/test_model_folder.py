"""The load tests take a Hugging Face id in place of a model folder, from a hub that is a real server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner, Result

from loadtest.bench.cli import app as bench
from loadtest.cli import app as replay
from loadtest.dialogue_cli import app as dialogues
from loadtest.errors import ModelUnavailable, VerificationError
from loadtest.model_folder import local_model_folder, parse_model_path
from settings.worker import BUNDLED_MODEL
from tests.hub_server import COMMIT, Hub, running_hub, store_snapshot

DESCRIPTION = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
WEIGHTS = {"model.safetensors"}
TINY = Path("org/tiny")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's empty cache; the working directory is an empty folder."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "hub"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with the bundled model as org/tiny."""
    with running_hub() as hub:
        hub.files["org/tiny"] = {name: (BUNDLED_MODEL / name).read_bytes() for name in DESCRIPTION | WEIGHTS}
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield hub


def invoke(app: Any, *arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments])


def short_bench(url: str, out: Path) -> tuple[Any, ...]:
    lengths = ("--num-prompts", 4, "--random-input-len", 16, "--random-output-len", 4)
    return ("serve", "--base-url", url, *lengths, "--save-result", "--result-dir", out, "--result-filename", "r.json")


def short_replay(url: str, out: Path) -> tuple[Any, ...]:
    return ("conversation", "--url", url, "--out", out, "--limit", 5, "--speed", 2000, "--no-unloaded")


def short_dialogues(url: str, out: Path) -> tuple[Any, ...]:
    return ("--url", url, "--out", out, "--dialogues", 1, "--turns", 1, "--think-time", 0)


def test_a_replay_downloads_the_tokenizer_without_the_weights(
    hub: Hub, cache: Path, serve: Any, tmp_path: Path
) -> None:
    arguments = short_replay(serve().url, tmp_path / "out")
    done = invoke(replay, *arguments, "--max-send-lag", 60, "--model-path", "org/tiny@main")
    assert done.exit_code == 0, done.output
    assert set(hub.downloads) == DESCRIPTION
    settings = json.loads((tmp_path / "out" / "report.json").read_text())["settings"]
    assert settings["model_path"] == str(cache / "models--org--tiny" / "snapshots" / COMMIT)


def test_a_benchmark_does_so_and_its_result_names_the_id(hub: Hub, serve: Any, tmp_path: Path) -> None:
    done = invoke(bench, *short_bench(serve().url, tmp_path), "--tokenizer", "org/tiny")
    assert done.exit_code == 0, done.output
    assert set(hub.downloads) == DESCRIPTION
    assert json.loads((tmp_path / "r.json").read_text())["tokenizer_id"] == "org/tiny"


def test_a_cached_model_needs_no_network(cache: Path, offline: None, serve: Any, tmp_path: Path) -> None:
    store_snapshot(cache, "org/tiny", BUNDLED_MODEL)
    done = invoke(bench, *short_bench(serve().url, tmp_path), "--tokenizer", "org/tiny")
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("app", "arguments", "flag"),
    [
        (replay, short_replay, "--model-path"),
        (dialogues, short_dialogues, "--model-path"),
        (bench, short_bench, "--tokenizer"),
        (bench, lambda url, out: (*short_bench(url, out)[:3], "--find-capacity", "--goodput", "ttft:1"), "--tokenizer"),
    ],
    ids=["replay", "dialogues", "bench", "capacity"],
)
def test_offline_an_id_that_is_not_cached_is_refused_before_anything_is_sent(
    cache: Path, offline: None, serve: Any, tmp_path: Path, app: Any, arguments: Callable[..., Any], flag: str
) -> None:
    server = serve()
    done = invoke(app, *arguments(server.url, tmp_path / "out"), flag, "org/tiny")
    assert done.exit_code == 2
    assert f"error: {flag}: org/tiny is not complete in the cache {cache}, and HF_HUB_OFFLINE forbids" in done.output
    assert server.bodies == []


def test_verification_needs_the_weights(hub: Hub) -> None:
    folder = local_model_folder(TINY, flag="--model-path", weights=True)
    assert set(hub.downloads) == DESCRIPTION | WEIGHTS
    assert (folder / "model.safetensors").is_file()


def test_a_family_that_the_engine_lacks_has_a_tokenizer_but_no_verification(hub: Hub) -> None:
    config = json.loads(hub.files["org/tiny"]["config.json"]) | {"architectures": ["OtherForCausalLM"]}
    hub.files["org/tiny"]["config.json"] = json.dumps(config).encode()
    assert (local_model_folder(TINY, flag="--model-path", weights=False) / "tokenizer.json").is_file()
    with pytest.raises(VerificationError, match=r"cannot verify: org/tiny: .*OtherForCausalLM.*; omit --verify"):
        local_model_folder(TINY, flag="--model-path", weights=True)
    assert set(hub.downloads) == DESCRIPTION


def test_an_unknown_id_names_the_flag_the_hub_and_the_remedy(hub: Hub) -> None:
    with pytest.raises(ModelUnavailable) as refused:
        local_model_folder(Path("org/absent"), flag="--tokenizer", weights=False)
    for word in ("--tokenizer: ", f"{hub.url} has no public model org/absent", "no folder org/absent", "HF_TOKEN"):
        assert word in str(refused.value)


def test_a_misspelt_folder_is_not_downloaded(hub: Hub) -> None:
    Path("models/right").mkdir(parents=True)
    with pytest.raises(ModelUnavailable, match=r"--model-path: there is no folder models/wrong; .* a folder models: "):
        local_model_folder(Path("models/wrong"), flag="--model-path", weights=False)
    assert not hub.downloads


def test_a_folder_wins_over_an_id_and_a_dot_makes_a_path(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = parse_model_path("./org/tiny")
    assert local_model_folder(missing, flag="--tokenizer", weights=False) == tmp_path / "work" / "org" / "tiny"
    TINY.mkdir(parents=True)
    assert local_model_folder(TINY, flag="--tokenizer", weights=False) == TINY.absolute()
    assert "Using the local folder org/tiny, not the model with this id" in capsys.readouterr().err
    assert not hub.downloads


def test_a_missing_folder_is_named_with_what_is_expected(cache: Path, serve: Any, tmp_path: Path) -> None:
    done = invoke(replay, *short_replay(serve().url, tmp_path / "out"), "--model-path", tmp_path / "absent")
    assert done.exit_code == 2
    assert f"no tokenizer at {tmp_path}/absent/tokenizer.json; give the folder or the Hugging Face id" in done.output
