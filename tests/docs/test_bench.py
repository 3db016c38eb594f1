"""Flags and result keys of `bench serve` named in the documentation are those of the code, and the other way round."""

from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest
import typer.main

from loadtest.bench.cli import app
from loadtest.bench.config import BenchConfig
from loadtest.bench.results import Saving, result_of
from loadtest.bench.runner import BenchResult

BENCH, CAPACITY = "Bench: any prompts, any server, any rate", "The highest rate that a server sustains"
# Said of the run rather than found by it; documented with the flags.
SETTINGS = {
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate"),
    *("burstiness", "max_concurrency"),
}
QUIET = {"--disable-tqdm", "--help"}


@pytest.fixture(scope="module")
def flags() -> set[str]:
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    return {option for parameter in command.params for option in parameter.opts} - QUIET


def test_every_flag_of_the_benchmark_is_documented(page: Callable[[str], Any], flags: set[str]) -> None:
    text = page("replay.md").section(BENCH) + page("replay.md").section(CAPACITY)
    assert sorted(flag for flag in flags if f"`{flag}`" not in text and flag != "--find-capacity") == []


def test_every_key_of_the_result_is_documented_and_no_other(
    page: Callable[[str], Any], documented: Callable[[str], list[str]]
) -> None:
    result = BenchResult("m", [], [], 1, False, [])
    config = BenchConfig(percentile_metrics=("ttft",))
    keys = set(result_of(result, config, Saving(), datetime(2026, 1, 1))) - SETTINGS
    named = {name for name in documented(page("replay.md").section(BENCH)) if not name.startswith("-")}
    assert named == keys
