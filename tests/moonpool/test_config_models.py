"""Which models a cluster serves, from flags, variables and files; and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.config import FrontendRole, ModelEntry, ServeConfig, WorkerRole, all_settings, load
from moonpool.config.models import model_settings
from moonpool.errors import ConfigError
from moonpool.role_configs import frontend_config
from settings.conductor import Objectives
from settings.worker import BUNDLED_MODEL

FILE = """
prefill_nodes: 2
ttft_slo: 2
models:
  - name: large
    path: /m/large
    aliases: [gpt-4, "{alias}"]
    decode_nodes: 3
    max_batch: 8
    tbt_slo: 0.5
  - path: /m/small
"""


def loaded(composite: type = ServeConfig, *, file: Path | None = None, environ: Any = None, **flags: Any) -> Any:
    return load(composite, flags=flags, environ=environ or {}, config_file=file, known=all_settings())


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE.format(alias="big"))
    return path


def named(config: Any) -> list[tuple[str, ...]]:
    return [entry.names for entry in config.served]


def test_without_any_the_bundled_model_is_served_under_its_own_name() -> None:
    (entry,) = loaded().served
    assert (entry.name, entry.path, entry.aliases) == ("moonpool", BUNDLED_MODEL, ())


def test_the_first_served_name_is_the_name_and_the_others_are_aliases() -> None:
    assert named(loaded(model="/m/x", served_model_name=["a", "b", "c"])) == [("a", "b", "c")]
    assert named(loaded(environ={"MOONPOOL_MODEL": "/m/x", "MOONPOOL_SERVED_MODEL_NAME": "a,b"})) == [("a", "b")]
    assert named(loaded(model="/m/x")) == [("x",)]


def test_a_model_has_an_endless_window_of_its_own_or_the_clusters() -> None:
    config = loaded(models=["a=/m/a,endless-window=512", "b=/m/b"], endless_window=1024)
    assert [entry.endless_window for entry in config.served] == [512, None]
    assert config.http.endless_window == 1024


def test_a_model_has_parsers_of_its_own_or_the_clusters(tmp_path: Path) -> None:
    config = loaded(models=["a=/m/a,reasoning-parser=qwen3", "b=/m/b"], reasoning_parser="off")
    assert [entry.parsers for entry in config.served] == [("qwen3", None), (None, None)]
    assert (config.http.reasoning_parser, config.http.tool_call_parser) == ("off", "auto")
    file = tmp_path / "cluster.yaml"
    file.write_text("models: [{path: /m/a, reasoning_parser: off, tool_call_parser: mistral}]")
    assert loaded(file=file).served[0].parsers == ("off", "mistral")
    front = frontend_config(loaded(FrontendRole, file=file, conductor="head:1"), "fe").models[0]
    assert (front.own_reasoning_parser, front.own_tool_call_parser) == ("off", "mistral")
    with pytest.raises(ConfigError, match=r"reasoning_parser must be one of auto, off, .*, got 'deepseek'"):
        loaded(models=["a=/m/a,reasoning_parser=deepseek"])


def test_a_file_names_models_with_settings_of_their_own(config_file: Path) -> None:
    config = loaded(file=config_file)
    large, small = config.served
    assert (large.names, small.names) == (("large", "gpt-4", "big"), ("small",))
    assert small.path == Path("/m/small")
    topology = large.topology(config.topology)
    assert (topology.num_prefill, topology.num_decode) == (1, 3), "who names any of the three names all"
    assert small.topology(config.topology).num_prefill == 2
    assert large.engine(config.engine).max_batch == 8
    assert small.engine(config.engine).max_batch == 64
    assert large.objectives == Objectives(None, 0.5)
    assert small.objectives == Objectives(), "those of the cluster, whatever they become"


def test_a_model_given_beside_the_files_comes_first(config_file: Path) -> None:
    assert named(loaded(file=config_file, model="/m/first")) == [("first",), ("large", "gpt-4", "big"), ("small",)]


def test_flags_and_variables_name_the_same_models_as_a_file(config_file: Path) -> None:
    flags = ["large=/m/large,alias=gpt-4,alias=big,decode-nodes=3,max_batch=8,tbt_slo=0.5", "/m/small"]
    want = loaded(file=config_file).served
    assert loaded(models=flags).served == want
    assert loaded(environ={"MOONPOOL_MODELS": "; ".join(flags)}).served == want


def test_a_frontend_reads_the_models_of_a_clusters_file_and_a_worker_only_its_own(config_file: Path) -> None:
    assert named(loaded(FrontendRole, file=config_file, conductor="head:1")) == [("large", "gpt-4", "big"), ("small",)]
    worker = loaded(WorkerRole, file=config_file, conductor="head:1", pool="here:1", model="/m/small")
    assert worker.model.name == "small"


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (["a=/m/1", "a=/m/2"], r"'a' is given twice: to the model in /m/1 and to the model in /m/2"),
        (["a=/m/1", "b=/m/2,alias=a"], r"'a' is given twice: .* to the model in /m/2 \('b'\) as an alias"),
        (["a=/m/1,alias=a"], "'a' is given twice"),
        (["=/m/1"], "must have a name before the ="),
        (["a="], "must have a path"),
        (["a=/m/1,alias="], "names and aliases must not be empty"),
        (["a=/m/1,fast"], "must have parts key=value, got 'fast' in"),
        (
            ["a=/m/1,prefil_nodes=1"],
            r"model 'a': 'prefil_nodes' is not a setting of a model; did you mean prefill_nodes\?",
        ),
        (["a=/m/1,block_tokens=8"], "'block_tokens' is not a setting of a model"),
        (["a=/m/1,max_batch=0"], r"--add-model: model 'a': max_batch must be from 1 to 65536, got 0"),
        (["a=/m/1,max_batch=many"], "model 'a': max_batch must be an integer, got 'many'"),
        (["a=/m/1,max_batch=1,max_batch=2"], "max_batch is given twice"),
        (["a=/m/1,prefill_nodes=0"], "model 'a': .* must both be at least 1 or both 0"),
        (["a=/m/1,device=tpu"], "model 'a': --device must be .* got 'tpu'"),
        (
            ["a=/m/1,capacity_tokens=1000"],
            "model 'a': capacity_tokens must be a multiple .* for example 1008, got 1000",
        ),
    ],
)
def test_models_that_cannot_be_are_refused_by_name(models: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded(models=models)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: 5", "models must be a list, got int"),
        ("models: [5]", "models must be NAME=PATH or a mapping with path, got 5"),
        ("models: [{name: a}]", "models must have a path"),
        ("models: [{path: /m, aliases: [1]}]", "model 'm': name must be a string, and aliases a list of strings"),
        ("models: [{path: /m, name: 5}]", "model 5: name must be a string"),
        ("models: [{path: /m, max_batch: 1.5}]", "max_batch must be an integer, got 1.5"),
        ("models: [{path: /m}]\nserved_model_name: x", "--served-model-name 'x' needs MODEL"),
    ],
)
def test_a_file_with_models_that_cannot_be_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        loaded(file=path)


names = st.text(st.characters(codec="utf-8", categories=["L", "N"]), min_size=1, max_size=8)


@given(
    name=names,
    aliases=st.lists(names, max_size=3),
    settings=st.fixed_dictionaries({}, optional={"decode_nodes": st.integers(1, 9), "tbt_slo": st.floats(0, 9)}),
)
def test_an_entry_written_out_is_read_back(name: str, aliases: list[str], settings: dict[str, Any]) -> None:
    entry = ModelEntry(name, Path("/m/x"), tuple(aliases), settings)
    assert ModelEntry.parse(entry.plain(), "test") == entry


def test_every_key_of_a_model_is_one_of_the_clusters() -> None:
    assert model_settings().keys() < all_settings().keys()
