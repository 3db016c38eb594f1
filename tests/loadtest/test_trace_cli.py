"""The commands `trace convert`, `check` and `stats`: files, exit codes, messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from loadtest import trace_cli
from loadtest.cli import bundled_model
from loadtest.trace_cli import app
from traces import read_trace

DATA = Path(__file__).parents[1] / "traces" / "data"

Invoke = Callable[..., Result]


@pytest.fixture
def invoke() -> Invoke:
    return lambda *arguments: CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.mark.parametrize(
    ("name", "requests"),
    [
        ("azure.csv", 3),
        ("burstgpt.csv", 4),
        ("bailian.jsonl", 4),
        ("sharegpt.json", 3),
        ("aiperf.jsonl", 8),
        ("weka.json", 4),
    ],
)
def test_every_format_becomes_a_trace_without_problems(
    invoke: Invoke, tmp_path: Path, name: str, requests: int
) -> None:
    output = tmp_path / "out.jsonl.zst"
    done = invoke("convert", DATA / name, output)
    assert done.exit_code == 0, done.output
    assert f"{requests} requests from {DATA / name} ({Path(name).stem})" in done.output
    trace = read_trace(output)
    assert len(trace) == requests
    assert trace.notices == ()
    assert trace.rows[0].timestamp_ms == 0
    assert invoke("check", output).exit_code == 0
    again = tmp_path / "again.jsonl"
    assert invoke("convert", output, again).exit_code == 0
    assert read_trace(again).rows == trace.rows


def test_texts_are_measured_with_the_model_s_tokenizer(invoke: Invoke, tmp_path: Path) -> None:
    for model in ([], ["--model-path", bundled_model()]):
        assert invoke("convert", DATA / "sharegpt.json", tmp_path / "out", "--overwrite", *model).exit_code == 0
        assert [row.input_length for row in read_trace(tmp_path / "out")] == [18, 28, 44]
    done = invoke("convert", DATA / "sharegpt.json", tmp_path / "new", "--model-path", tmp_path)
    assert done.exit_code == 2
    assert "--model-path" in done.output
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["azure.csv", "burstgpt.csv"])
def test_unknown_reuse_is_said_so(invoke: Invoke, tmp_path: Path, name: str) -> None:
    for command in ("convert", "stats"):
        assert "contain no prompts" in " ".join(invoke(command, "--help").output.replace("│", "").split())
    assert "whether they repeat earlier ones is unknown" in invoke("convert", DATA / name, tmp_path / "out").output
    assert "reuse          unknown" in invoke("stats", DATA / name).output
    assert json.loads(invoke("stats", DATA / name, "--json").stdout)["reuse"] is None


def test_an_error_names_file_and_line_and_leaves_nothing(invoke: Invoke, tmp_path: Path) -> None:
    source = tmp_path / "bad.csv"
    source.write_text((DATA / "azure.csv").read_text().replace(",512,", ",many,"))
    done = invoke("convert", source, tmp_path / "out.jsonl")
    assert done.exit_code == 2
    assert f"error: {source}, line 3: found ContextTokens 'many'; expected an integer" in done.output
    assert [each.name for each in tmp_path.iterdir()] == ["bad.csv"]
    done = invoke("convert", source, tmp_path / "out.jsonl", "--skip-invalid")
    assert done.exit_code == 0
    assert "1 records with problems were left out: 1 value" in done.output
    assert len(read_trace(tmp_path / "out.jsonl")) == 2


def test_a_damaged_file_is_never_converted_in_part(invoke: Invoke, tmp_path: Path) -> None:
    source = tmp_path / "bad.json"
    source.write_text((DATA / "sharegpt.json").read_text().rstrip().removesuffix("]"))
    done = invoke("convert", source, tmp_path / "out.jsonl", "--skip-invalid")
    assert done.exit_code == 2
    assert "the end of the file" in done.output
    assert [each.name for each in tmp_path.iterdir()] == ["bad.json"]


def test_an_existing_file_is_kept_unless_replaced(invoke: Invoke, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("mine")
    done = invoke("convert", DATA / "azure.csv", output)
    assert (done.exit_code, output.read_text()) == (2, "mine")
    assert "--overwrite" in done.output
    assert invoke("convert", DATA / "azure.csv", output, "--overwrite").exit_code == 0
    assert len(read_trace(output)) == 3


def test_check_lists_problems_with_lines_and_counts(invoke: Invoke, tmp_path: Path) -> None:
    source = tmp_path / "bad.csv"
    source.write_text((DATA / "azure.csv").read_text() + "\n2023-11-16 18:00:00,1,1\nx,1,1\n2023-11-16 18:02:00,0,1\n")
    done = invoke("check", source, "--most", 2)
    assert done.exit_code == 1
    assert f"order: {source}, line 5: found a time" in done.output
    assert f"value: {source}, line 6: found TIMESTAMP 'x'" in done.output
    assert "1 more problems" in done.output
    assert "4 valid requests, 3 problems: 2 value, 1 order" in done.output
    figures = json.loads(invoke("check", source, "--json").stdout)
    assert figures["counts"] == {"order": 1, "value": 2}
    assert [each["line"] for each in figures["problems"]] == [5, 6, 7]
    assert invoke("check", tmp_path / "none").exit_code == 2


def test_stats_of_the_bundled_trace(invoke: Invoke) -> None:
    done = invoke("stats", "conversation")
    assert done.exit_code == 0, done.output
    for text in ("12,031 in 3,537.0 s", "3.40 per second", "37.3% of the prompt tokens were seen before", "none named"):
        assert text in done.output
    figures = json.loads(invoke("stats", "conversation", "--json").stdout)
    assert figures["reuse"]["token_hit_rate"] == pytest.approx(0.37338, abs=5e-6)
    assert figures["prompt_tokens"]["p50"] == 6909


def test_stats_of_sessions_and_of_finer_blocks(invoke: Invoke) -> None:
    figures = json.loads(invoke("stats", DATA / "bailian.jsonl", "--json").stdout)
    assert figures["reuse"]["block_tokens"] == 16
    assert figures["reuse"]["token_hit_rate"] == pytest.approx((512 + 1024) / (521 + 1030 + 20 + 1056))
    assert figures["sessions"] == {
        "sessions": 2,
        "turns": {"sum": 4, "mean": 2.0, "p50": 1, "p90": 3, "p99": 3, "max": 3},
        "requests_without_session": 0,
    }


def test_progress_of_long_files_is_shown(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_cli, "_QUIET_S", -1.0)
    source = tmp_path / "long.csv"
    header, row = (DATA / "azure.csv").read_text().splitlines()[:2]
    source.write_text("\n".join([header, *[row] * 1000]))
    done = invoke("convert", source, tmp_path / "out.jsonl")
    assert "KiB read: " in done.stderr
    assert " 256 requests" in done.stderr
    assert "requests: 256 of 1000" in done.stderr
    assert "KiB" not in done.stdout
    assert "KiB read: " in invoke("check", source).stderr
