"""`moonpool simulate cache`: its last line, its table, its picture, its errors."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvpool.policy.eviction import POLICIES
from moonpool.cli import app

ROWS = [
    {"timestamp": 1000 * n, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}
    for n, ids in enumerate([[1, 2, 3], [1, 2, 4], [5, 6], [1, 2, 3]])
]
Invoke = Callable[..., Any]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture
def invoke() -> Invoke:
    return lambda *arguments: CliRunner().invoke(app, ["simulate", "cache", *map(str, arguments)])


def last_line(done: Any) -> Any:
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout.splitlines()[-1])


def test_the_last_line_is_the_run(invoke: Invoke, trace: Path) -> None:
    figures = last_line(invoke(trace, "--capacity", 10, "--policy", "lfu"))
    assert figures["hit_rate"] == 5 / 11
    assert {name: figures[name] for name in ("hits", "references", "capacity", "policy", "leaf_first")} == {
        "hits": 5,
        "references": 11,
        "capacity": 10,
        "policy": "lfu",
        "leaf_first": False,
    }
    assert figures["hit_rate_first_half"] == 2 / 6
    assert figures["hit_rate_second_half"] == 3 / 5
    assert figures["seconds"] > 0


def test_several_runs_are_a_list_by_capacity_and_policy(invoke: Invoke, trace: Path) -> None:
    done = invoke(trace, "--capacity", "2,1k,inf", "--policy", "all")
    runs = last_line(done)
    assert [(run["capacity"], run["policy"]) for run in runs] == [
        (capacity, policy) for capacity in (2, 1000, 6) for policy in (*POLICIES, "belady")
    ]
    assert "belady, limit" in done.stdout


def test_the_tree_can_be_asked_for(invoke: Invoke, trace: Path) -> None:
    assert last_line(invoke(trace, "--capacity", 3, "--tree"))["leaf_first"]


def test_a_compressed_trace_is_read(invoke: Invoke, trace: Path) -> None:
    packed = trace.with_suffix(".gz")
    packed.write_bytes(gzip.compress(trace.read_bytes()))
    assert last_line(invoke(packed, "--capacity", 10))["hits"] == 5


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_it_draws_what_it_found(invoke: Invoke, trace: Path, tmp_path: Path, kind: str) -> None:
    picture = tmp_path / f"hits.{kind}"
    last_line(invoke(trace, "--capacity", "1,2,4", "--policy", "lru,belady", "--plot", picture))
    assert (b"<svg" if kind == "svg" else b"PNG") in picture.read_bytes()[:2000]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["TRACE", "--capacity", "0"], "--capacity must be a positive number of blocks"),
        (["TRACE", "--capacity", "-5"], "got '-5'"),
        (["TRACE", "--capacity", "10,many"], "got 'many'"),
        (["TRACE", "--capacity", "10", "--policy", "mru"], "--policy must be lru, lfu"),
        (["nowhere.jsonl", "--capacity", "10"], "cannot open the trace nowhere.jsonl"),
        (["TRACE", "--capacity", "10", "--plot", "hits.gif"], "must end in one of .svg, .png"),
        (["TRACE", "--capacity", "10", "--plot", "nowhere/hits.svg"], "the folder nowhere does not exist"),
    ],
)
def test_bad_input_is_named_and_ends_with_two(
    invoke: Invoke, trace: Path, arguments: list[str], complaint: str
) -> None:
    done = invoke(*(trace if word == "TRACE" else word for word in arguments))
    assert done.exit_code == 2
    assert complaint in done.stderr
    assert done.stderr.startswith("error: ")
    assert not done.stdout


def test_a_malformed_row_is_named_by_its_line(invoke: Invoke, trace: Path) -> None:
    trace.write_text(trace.read_text() + '{"timestamp": 9000, "input_length": 512, "output_length": 1}\n')
    done = invoke(trace, "--capacity", 10)
    assert done.exit_code == 2
    assert "line 5: found no 'hash_ids'" in done.stderr
