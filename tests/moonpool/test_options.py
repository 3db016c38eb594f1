"""The command line made of configuration keys: lists given in either of the ways that users know."""

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from moonpool.config import ServeConfig
from moonpool.options import configured_command


def served(*words: str) -> tuple[Path | None, tuple[str, ...], tuple[str, ...]]:
    """(model, served names, API keys) as `serve` gets them."""
    seen: list[Any] = []
    app = typer.Typer()
    app.callback()(lambda: None)
    configured_command(app, "serve", ServeConfig, lambda config: seen.append(config) or 0, help="", argument="model")
    result = CliRunner().invoke(app, ["serve", *words])
    assert result.exit_code == 0, result.output
    return seen[0].model.model, seen[0].model.served_model_name, seen[0].http.api_key


@pytest.mark.parametrize(
    "words",
    [
        ("./m", "--served-model-name", "a", "b", "--port", "1"),
        ("./m", "--port", "1", "--served-model-name", "a", "b"),
        ("./m", "--served-model-name", "a", "--served-model-name", "b"),
        ("--served-model-name", "a", "--served-model-name", "b", "./m"),
        ("--verbose", "--served-model-name=a", "./m", "--served-model-name", "b"),
    ],
)
def test_a_list_is_given_by_one_flag_or_by_several(words: tuple[str, ...]) -> None:
    assert served(*words) == (Path("m"), ("a", "b"), ())


def test_before_the_argument_a_list_flag_takes_one_word() -> None:
    assert served("--served-model-name", "a", "./m", "--api-key", "x", "y") == (Path("m"), ("a",), ("x", "y"))
