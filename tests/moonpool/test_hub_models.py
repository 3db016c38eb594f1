"""A model may be given by its Hugging Face id wherever a folder may be."""

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from moonpool.config import FrontendRole, ServeConfig, WorkerRole, all_settings, load
from moonpool.errors import ModelFolderError, ModelNotDownloaded
from moonpool.model_files import check_model_folder, local_model, with_local_models, with_pinned_models
from settings.hub_model import HubModel, hub_model_of, parse_model
from settings.worker import BUNDLED_MODEL
from tests.hub_server import COMMIT, store_snapshot


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The bundled model as org/tiny in a cache that is used offline; the working directory is an empty folder."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return store_snapshot(tmp_path / "hub", "org/tiny", BUNDLED_MODEL)


def loaded(composite: type, **flags: Any) -> Any:
    return load(composite, flags=flags, environ={}, config_file=None, known=all_settings())


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("Qwen/Qwen3-8B", HubModel("Qwen/Qwen3-8B")),
        ("meta-llama/Llama-3.1-8B@v1.0", HubModel("meta-llama/Llama-3.1-8B", "v1.0")),
        ("org/tiny@refs/pr/1", HubModel("org/tiny", "refs/pr/1")),
        ("./org/tiny", None),
        ("org/tiny/", None),
        ("../org/tiny", None),
        ("/org/tiny", None),
        ("~/tiny", None),
        ("tiny", None),
        ("a/b/c", None),
        ("org/tiny@", None),
        ("org/.hidden", None),
    ],
)
def test_an_id_has_two_parts_and_no_spelling_of_a_path(snapshot: Path, text: str, model: HubModel | None) -> None:
    assert hub_model_of(parse_model(text)) == model


def test_a_folder_wins_over_an_id_and_the_choice_is_reported(
    snapshot: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("org/tiny").mkdir(parents=True)
    assert local_model(Path("org/tiny")) == Path("org/tiny").absolute()
    assert capsys.readouterr().err == (
        "Using the local folder org/tiny, not the model with this id on the Hugging Face hub\n"
    )


def test_a_misspelt_folder_is_not_downloaded(snapshot: Path) -> None:
    Path("models/right").mkdir(parents=True)
    path = local_model(Path("models/wrong"))
    with pytest.raises(ModelFolderError, match=r"models/wrong does not exist; .* because there is a folder models: "):
        check_model_folder(path)


def test_roles_get_the_snapshot_under_the_models_id(snapshot: Path) -> None:
    config = with_local_models(loaded(ServeConfig, model="org/tiny@main", models=["x=org/tiny,alias=y"]))
    assert [(entry.names, entry.path) for entry in config.served] == [
        (("org/tiny",), snapshot),
        (("x", "y"), snapshot),
    ]
    worker = {"conductor": ["h:1"], "pool": "h:2", "model": "org/tiny", "served_model_name": ["a", "b"]}
    model = with_local_models(loaded(WorkerRole, **worker)).model
    assert (model.path, model.name, model.aliases) == (snapshot, "a", ("b",))
    (entry,) = with_local_models(loaded(FrontendRole, conductor=["h:1"], model="org/tiny")).served
    assert (entry.path, entry.names) == (snapshot, ("org/tiny",))


def test_local_models_stay_as_they_are(snapshot: Path) -> None:
    config = loaded(ServeConfig, models=["x=/m/x"])
    assert with_local_models(config) == config


def test_other_hosts_get_the_id_with_the_commit(snapshot: Path) -> None:
    config = loaded(ServeConfig, model="org/tiny", models=["x=/m/x"])
    pinned = with_pinned_models(config, with_local_models(config))
    assert [(entry.names, str(entry.path)) for entry in pinned.served] == [
        (("org/tiny",), f"org/tiny@{COMMIT}"),
        (("x",), "/m/x"),
    ]
    assert with_local_models(pinned).served[0].path == snapshot


def test_paced_engines_and_frontends_need_no_weights(snapshot: Path) -> None:
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(ModelNotDownloaded, match="has no weights in the safetensors format"):
        with_local_models(loaded(ServeConfig, model="org/tiny"))
    with_local_models(loaded(ServeConfig, model="org/tiny", engine="paced"))
    with_local_models(loaded(FrontendRole, conductor=["h:1"], model="org/tiny"))
