"""Settings for which a word stands for a choice made at start, such as `capacity_tokens: auto`."""

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from moonpool.config import ServeConfig, WorkerRole, all_settings, flatten, load
from moonpool.config.roles import KvAgentRole
from moonpool.config.schema import file_schema
from moonpool.errors import ConfigError
from moonpool.plan import Planner
from moonpool.role_configs import worker_config
from settings.worker import BUNDLED_MODEL

REQUIRED = {"pool": "h:1", "conductor": "h:2"}


def served(flags: dict[str, Any] | None = None, file: Path | None = None, **environ: str) -> ServeConfig:
    return load(ServeConfig, flags=flags or {}, environ=environ, config_file=file, known=all_settings())


def test_the_word_is_accepted_from_flags_variables_and_files(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("capacity_tokens: auto\nmemory_fraction: 0.8\n")
    found = [served({"capacity_tokens": "auto"}), served(MOONPOOL_CAPACITY_TOKENS="auto"), served(file=file)]
    assert [config.engine.capacity_tokens for config in found] == [None] * 3
    assert found[2].engine.memory_fraction == 0.8
    assert served({"capacity_tokens": "64"}, file).engine.capacity_tokens == 64
    assert served().engine.capacity_tokens == 32768


def test_the_word_survives_what_serve_writes_for_its_workers(tmp_path: Path) -> None:
    entry = f"other={BUNDLED_MODEL},capacity_tokens=auto,aggregated=1"
    config = served({"model": str(BUNDLED_MODEL), "models": entry, "prefill_nodes": "1", "decode_nodes": "1"})
    path = tmp_path / "again.yaml"
    path.write_text(yaml.safe_dump(flatten(config)))
    assert served(file=path) == config
    planned = Planner(config, run_dir=tmp_path, port=1, cores=2).cluster()
    workers = {plan.node_id: plan.settings for plan in planned if plan.model}
    capacities = {name: settings["capacity_tokens"] for name, settings in workers.items()}
    assert capacities == {"prefill-0": 32768, "decode-0": 32768, "other-aggregated-0": "auto"}
    assert {settings["host_workers"] for settings in workers.values()} == {3}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("automatic", "--capacity-tokens must be an integer or auto, got 'automatic'"),
        ("", "--capacity-tokens must be an integer or auto, got ''"),
        ("0", "--capacity-tokens must be at least 1, or auto, got 0"),
    ],
)
def test_other_words_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        served({"capacity_tokens": text})


def test_an_empty_value_in_the_file_is_not_the_word(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("capacity_tokens:\n")
    with pytest.raises(ConfigError, match="capacity_tokens must be an integer or auto, got null"):
        served(file=file)


def test_the_schema_accepts_numbers_and_the_word_alone() -> None:
    validator = jsonschema.Draft202012Validator(file_schema())
    assert [validator.is_valid({"capacity_tokens": value}) for value in ("auto", 64)] == [True, True]
    assert not any(validator.is_valid({"capacity_tokens": value}) for value in ("much", 0, None))


def test_engines_that_do_not_choose_their_capacity_refuse_it_by_name() -> None:
    for engine in ("paced", "vllm"):
        with pytest.raises(ConfigError, match=f"capacity_tokens must be a number with --engine {engine}, got auto: "):
            served({"capacity_tokens": "auto", "engine": engine})
    with pytest.raises(ConfigError, match="model 'a': capacity_tokens must be a number with --engine paced"):
        served({"models": f"a={BUNDLED_MODEL},engine=paced,capacity_tokens=auto"})
    flags = {"capacity_tokens": "auto", "pool": "h:1"}
    with pytest.raises(ConfigError, match="capacity_tokens must be a number with --engine vllm"):
        load(KvAgentRole, flags=flags, environ={}, config_file=None, known=all_settings())


@pytest.mark.parametrize(
    ("device", "gpus", "expected"),
    [("cpu", 2, (3, 3)), ("cuda", 2, (2, 3)), ("auto", 0, (3, 3)), ("cuda:1", 2, (3, 3))],
)
def test_workers_know_with_how_many_they_share_device_and_host(
    short_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, gpus: int, expected: tuple[int, int]
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    flags = {**REQUIRED, "socket_dir": str(short_path), "device": device, "host_workers": "3"}
    config = worker_config(load(WorkerRole, flags=flags, environ={}, config_file=None, known=all_settings()), "w")
    assert (config.num_device_workers, config.num_host_workers) == expected


def test_a_worker_may_share_its_gpu_with_fewer_workers_than_its_host(short_path: Path) -> None:
    flags = {**REQUIRED, "socket_dir": str(short_path), "device": "cpu", "host_workers": "8", "device_workers": "1"}
    config = worker_config(load(WorkerRole, flags=flags, environ={}, config_file=None, known=all_settings()), "w")
    assert (config.num_device_workers, config.num_host_workers) == (1, 8)
