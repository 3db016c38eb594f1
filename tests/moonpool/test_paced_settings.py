"""Paced engines by flag, variable, file and model; what cannot be is refused before any process starts."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from moonpool.config import ServeConfig, WorkerRole, all_settings, load
from moonpool.errors import ConfigError, ModelFolderError
from moonpool.model_files import check_model_folder, check_paced_profile
from moonpool.plan import Planner, describe
from moonpool.role_configs import worker_config
from settings.worker import BUNDLED_MODEL

RUN_DIR = Path("/run/moonpool-test")


def served(flags: dict[str, str], environ: dict[str, str] | None = None, file: Path | None = None) -> ServeConfig:
    return load(ServeConfig, flags=flags, environ=environ or {}, config_file=file, known=all_settings())


def worker_settings(config: ServeConfig) -> list[dict[str, Any]]:
    planned = Planner(config, run_dir=RUN_DIR, port=8123, cores=2).cluster()
    return [plan.settings for plan in planned if plan.role.endswith(("prefill-node", "decode-node"))]


def test_flags_variables_and_files_reach_every_worker(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("engine: paced\npaced_kv_bytes: 1KiB\npaced_answer_tokens: 7\n")
    config = served({"paced_profile": "mooncake-70b-8xa800"}, {"MOONPOOL_PACED_ANSWER_TOKENS": "9"}, file)
    for settings in worker_settings(config):
        given = {key: str(value) for key, value in settings.items() if key == "engine" or key.startswith("paced")}
        assert given == {
            "engine": "paced",
            "paced_profile": "mooncake-70b-8xa800",
            "paced_kv_bytes": "1024",
            "paced_answer_tokens": "9",
        }
    assert "paced engines, which compute nothing" in describe(config)


def test_one_model_of_several_may_be_paced() -> None:
    config = served({"models": f"stand-in={BUNDLED_MODEL},engine=paced"} | {"model": str(BUNDLED_MODEL)})
    assert [settings["engine"] for settings in worker_settings(config)] == ["transformer"] * 2 + ["paced"] * 2


def test_a_paced_worker_takes_no_gpu(short_path: Path) -> None:
    flags = {"engine": "paced", "device": "cuda", "pool": "h:1", "conductor": "h:2", "socket_dir": str(short_path)}
    role = load(WorkerRole, flags=flags, environ={}, config_file=None, known=all_settings())
    config = worker_config(role, "w")
    assert (config.engine.engine, config.engine.device, config.messenger.gpu) == ("paced", "cpu", None)


def test_an_approximation_of_checked_kv_is_refused() -> None:
    with pytest.raises(ConfigError, match="--kv-storage must be exact with --engine paced, got int8"):
        served({"engine": "paced", "kv_storage": "int8"})
    with pytest.raises(ConfigError, match="--kv-dtype must be auto with --engine paced, got int8"):
        served({"engine": "paced", "kv_dtype": "int8"})


def test_a_folder_without_weights_is_enough_for_a_paced_engine_alone(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        shutil.copyfile(BUNDLED_MODEL / name, tmp_path / name)
    check_model_folder(tmp_path, "paced")
    with pytest.raises(ModelFolderError, match=r"model\.safetensors"):
        check_model_folder(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelFolderError):
        check_model_folder(tmp_path, "paced")


@pytest.mark.parametrize(("name", "told"), [("fast", "one of instant, mooncake"), ("/none/x.json", "cannot be read")])
def test_a_profile_that_is_not_there_is_refused_by_its_setting(name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=f"--paced-profile: .*{told}"):
        check_paced_profile(name)
