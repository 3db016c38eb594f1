"""The JSON Schema of the configuration file: current, and as strict as the file's reader."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from moonpool.config import ServeConfig, flatten
from moonpool.config.schema import file_schema

ROOT = Path(__file__).resolve().parents[2]
VALIDATOR = jsonschema.Draft202012Validator(file_schema())


def examples() -> list[Any]:
    """Every YAML block of the pages that shows a configuration file, not values of the chart."""
    blocks = [
        document
        for page in sorted((ROOT / "docs").glob("*.md"))
        for block in re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        if not block.startswith("# values.yaml\n")
        for document in yaml.safe_load_all(block)
    ]
    known = file_schema()["properties"].keys()
    return [block for block in blocks if isinstance(block, dict) and block.keys() <= known]


def test_the_stored_schema_is_current() -> None:
    stored = ROOT / "deploy" / "cluster.schema.json"
    assert json.loads(stored.read_text(encoding="utf-8")) == file_schema(), "run `make chart`"


def test_examples_of_the_pages_are_accepted() -> None:
    found = examples()
    assert found
    for example in found:
        VALIDATOR.validate(example)


def test_an_earlier_name_is_accepted_and_deprecated() -> None:
    VALIDATOR.validate({"undivided": "act"})
    assert not VALIDATOR.is_valid({"undivided": "perhaps"})
    assert not VALIDATOR.is_valid({"undivided": "act", "colocated_prefill": "act"})
    properties = file_schema()["properties"]
    assert [name for name, schema in properties.items() if schema.get("deprecated")] == ["undivided"]


def test_all_defaults_are_accepted() -> None:
    VALIDATOR.validate({key: value for key, value in flatten(ServeConfig()).items() if value is not None})


@pytest.mark.parametrize(
    "wrong",
    [
        "prot: 80",
        "port: 70000",
        "transport: ucx",
        "verbose: perhaps",
        "models: [{path: /m, prefil_nodes: 1}]",
        "models: [{name: a}]",
    ],
)
def test_a_file_that_the_reader_rejects_is_rejected(wrong: str) -> None:
    assert not VALIDATOR.is_valid(yaml.safe_load(wrong))


@pytest.mark.parametrize(
    "right", ["admission: off", "pool_bytes: 4GiB", "api_key: a,b", "runtime: null", "models: [a=/m, {path: /n}]"]
)
def test_the_forms_that_the_reader_accepts_are_accepted(right: str) -> None:
    VALIDATOR.validate(yaml.safe_load(right))
