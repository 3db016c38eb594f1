"""Models come from a hub that is a real server, over its real client."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from engine import HubError, UnsupportedModel, check_folder, load_model
from engine.hub import download
from engine.hub.progress import Reporter
from settings.hub_model import HubModel
from settings.worker import BUNDLED_MODEL
from tests.hub_server import COMMIT, Hub, running_hub, store_snapshot

TINY = HubModel("org/tiny")
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
DOWNLOAD = "from engine.hub import download; from settings.hub_model import HubModel; "


def bundled_files() -> dict[str, bytes]:
    return {name: (BUNDLED_MODEL / name).read_bytes() for name in FILES}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return tmp_path / "hub"


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub() as hub:
        hub.files["org/tiny"] = bundled_files()
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        yield hub


def refused(model: HubModel) -> str:
    with pytest.raises(HubError) as caught:
        download(model, weights=True)
    return str(caught.value)


def test_a_model_is_downloaded_once_and_has_the_same_fingerprint(hub: Hub, cache: Path) -> None:
    folder = download(TINY, weights=True)
    assert folder == cache / "models--org--tiny" / "snapshots" / COMMIT
    assert load_model(folder, threads=1).fingerprint == load_model(BUNDLED_MODEL, threads=1).fingerprint
    assert download(TINY, weights=True) == folder
    assert hub.downloads == dict.fromkeys(FILES, 1)


def test_duplicates_in_other_formats_are_left_out(hub: Hub) -> None:
    more = ("pytorch_model.bin", "tiny.gguf", "consolidated.safetensors", "onnx/model.onnx", "README.md")
    hub.files["org/tiny"] |= dict.fromkeys(more, b"x")
    download(TINY, weights=True)
    assert hub.downloads == dict.fromkeys(FILES, 1)


def test_shards_are_those_of_the_index(hub: Hub) -> None:
    weights = hub.files["org/tiny"].pop("model.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    hub.files["org/tiny"] |= {
        "model.safetensors.index.json": json.dumps(index).encode(),
        "model-00001-of-00001.safetensors": weights,
        "model-00001-of-00009.safetensors": b"of another sharding",
    }
    check_folder(download(TINY, weights=True))
    assert "model-00001-of-00009.safetensors" not in hub.downloads


def test_a_frontend_downloads_no_weights(hub: Hub) -> None:
    download(TINY, weights=False)
    assert hub.downloads == dict.fromkeys(FILES[:-1], 1)


def test_a_broken_connection_is_resumed(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 65536)
    hub.num_broken = 1
    check_folder(download(TINY, weights=True))
    assert hub.ranges == [f"bytes={len(hub.files['org/tiny']['model.safetensors']) // 2 // 65536 * 65536}-"]


def test_files_that_are_complete_survive_a_failed_download(hub: Hub) -> None:
    weights = hub.files["org/tiny"].pop("model.safetensors")
    hub.files["org/tiny"]["model.bin"] = weights
    assert "found model.bin" in refused(TINY)
    hub.files["org/tiny"]["model.safetensors"] = weights
    first = dict(hub.downloads)
    download(TINY, weights=False)
    assert hub.downloads == first


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: Hub) -> None:
    assert download(HubModel("org/tiny", "v1"), weights=False) == download(HubModel("org/tiny", COMMIT), weights=False)
    assert refused(HubModel("org/tiny", "v2")).startswith(f"org/tiny has no revision 'v2' on {hub.url}: give one of")


def test_an_unknown_model_may_be_a_misspelt_folder(hub: Hub) -> None:
    assert refused(HubModel("org/tny")) == (
        f"{hub.url} has no public model org/tny, and there is no folder org/tny: check the spelling, or set HF_TOKEN "
        "if the model is private"
    )


def test_private_models_need_a_valid_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.private.add("org/tiny")
    assert "set HF_TOKEN if the model is private" in refused(TINY)
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    assert "rejects the given token: set HF_TOKEN to a valid one" in refused(TINY)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    download(TINY, weights=False)
    assert "that the account of the given token may read" in refused(HubModel("org/tny"))


def test_gated_models_need_their_conditions_accepted(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated.add("org/tiny")
    accept = f"accept its conditions at {hub.url}/org/tiny"
    assert (
        refused(TINY) == f"org/tiny is gated and needs a token: {accept}, and set HF_TOKEN to a token of that account"
    )
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert refused(TINY) == (
        f"org/tiny is gated, and the account of the given token has no access: {accept} with that account"
    )


def test_a_full_disk_is_detected_before_the_download(hub: Hub, cache: Path) -> None:
    hub.claimed_sizes["model.safetensors"] = 10**18
    message = refused(TINY)
    assert message.startswith("org/tiny needs 1.0 EB for its weights, but only ")
    assert f"are free in the cache {cache}: free some, or set HF_HOME" in message
    assert "model.safetensors" not in hub.downloads


def test_an_unsupported_architecture_is_detected_before_the_download(hub: Hub) -> None:
    hub.files["org/tiny"]["config.json"] = b'{"architectures": ["GPT2LMHeadModel"]}'
    with pytest.raises(UnsupportedModel, match=r"org/tiny: .*architecture GPT2LMHeadModel is not supported"):
        download(TINY, weights=True)
    assert "model.safetensors" not in hub.downloads


def test_a_repository_without_a_config_is_no_model(hub: Hub) -> None:
    del hub.files["org/tiny"]["config.json"]
    assert refused(TINY).startswith("org/tiny is not a model that can be served: ")


def test_without_a_network_the_cache_is_used_if_it_is_complete(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = download(TINY, weights=True)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert download(TINY, weights=True) == folder
    message = refused(HubModel("org/other"))
    assert message.startswith("http://127.0.0.1:1 cannot be reached (")
    assert "check the network and the proxy, set HF_ENDPOINT to a mirror, or give a local folder" in message


def test_offline_the_cache_must_be_complete(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = download(TINY, weights=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert download(TINY, weights=False) == folder
    assert "which lacks model.safetensors, and HF_HUB_OFFLINE forbids downloads" in refused(TINY)
    assert "is not complete in the cache" in refused(HubModel("org/other"))


def test_a_cache_of_another_program_is_used_offline(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = store_snapshot(cache, "org/tiny", BUNDLED_MODEL)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert download(TINY, weights=True) == snapshot


def test_progress_is_reported_in_lines_without_a_terminal(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    download(TINY, weights=True)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Downloading org/tiny: 0 bytes of ")
    assert lines[0].endswith("MB (0 %)")
    assert lines[-1].endswith("MB (100 %)")


def child(hub: Hub, home: Path, code: str) -> subprocess.Popen[str]:
    environ = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(home)}
    return subprocess.Popen([sys.executable, "-c", DOWNLOAD + code], env=environ, stderr=subprocess.PIPE, text=True)


def test_two_processes_download_a_model_once(hub: Hub, tmp_path: Path) -> None:
    code = "download(HubModel('org/tiny'), weights=True)"
    for process in [child(hub, tmp_path, code) for _ in range(2)]:
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said
    assert hub.downloads == dict.fromkeys(FILES, 1)


def test_an_interrupt_ends_the_threads_of_the_download() -> None:
    with Reporter("org/tiny", 2) as reporter:
        reporter.add(1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            reporter.add(1)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
