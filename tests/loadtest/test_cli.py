"""The command: flags, exit codes, errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loadtest.cli import app, bundled_model


@pytest.fixture
def invoke():
    return lambda *arguments: CliRunner().invoke(app, [str(a) for a in arguments])


def test_help_teaches(invoke) -> None:
    text = invoke("--help").output
    for word in ("--speed", "--sample-families", "--tokens-per-block", "--verify", "Example", "12,031"):
        assert word in text


def test_a_replay_prints_the_table_and_ends_with_zero(invoke, serve, tmp_path: Path) -> None:
    server = serve()
    done = invoke(
        *("conversation", "--url", server.url, "--out", tmp_path, "--limit", 20, "--speed", 2000, "--no-unloaded"),
        *("--max-send-lag", 60),
    )
    assert done.exit_code == 0, done.output
    assert "prefix hit rate" in done.output
    assert "replay: 20 of 20; 20 completed, 0 rejected, 0 failed, 0 in flight, hit rate" in done.output
    assert json.loads((tmp_path / "report.json").read_text())["completed"] == 20


def test_the_server_is_that_of_the_environment_unless_one_is_given(
    invoke, serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONPOOL_URL", serve().url)
    flags = ("conversation", "--out", tmp_path, "--limit", 5, "--speed", 2000, "--no-unloaded", "--max-send-lag", 60)
    assert invoke(*flags).exit_code == 0
    assert "http://127.0.0.1:1" in invoke(*flags, "--url", "http://127.0.0.1:1").output


def test_the_key_is_read_from_a_file(invoke, serve, tmp_path: Path) -> None:
    key, server = tmp_path / "key", serve(api_key="secret")
    key.write_text("secret\n")
    flags = ("conversation", "--url", server.url, "--out", tmp_path, "--limit", 5, "--speed", 2000, "--no-unloaded")
    assert invoke(*flags, "--max-send-lag", 60, "--api-key-file", key).exit_code == 0
    key.write_text("two words")
    done = invoke(*flags, "--api-key-file", key)
    assert done.exit_code == 2
    assert "printable characters" in " ".join(done.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("flags", "tokens"), [((), 8), pytest.param(("--tokens-per-block", 16), 16, marks=pytest.mark.long)]
)
def test_lengths_are_scaled_for_the_bundled_model_only(
    invoke, serve, tmp_path: Path, flags: tuple[object, ...], tokens: int
) -> None:
    url = serve().url
    common = ("conversation", "--url", url, "--limit", 3, "--speed", 2000, "--no-unloaded", "--max-send-lag", 60)
    assert invoke(*common, "--out", tmp_path / "scaled", *flags).exit_code == 0
    own = invoke(*common, "--out", tmp_path / "own", "--model-path", bundled_model())
    assert own.exit_code == 0, own.output
    settings = [json.loads((tmp_path / name / "report.json").read_text())["settings"] for name in ("scaled", "own")]
    assert [each["tokens_per_block"] for each in settings] == [tokens, 512]


def test_several_senders_report_as_one(invoke, serve, tmp_path: Path) -> None:
    server = serve()
    done = invoke(
        *("conversation", "--url", server.url, "--out", tmp_path, "--limit", 20, "--speed", 2000, "--no-unloaded"),
        *("--senders", 2, "--max-send-lag", 60),
    )
    assert done.exit_code == 0, done.output
    figures = json.loads((tmp_path / "report.json").read_text())
    assert (figures["senders"], figures["requests"], figures["completed"]) == (2, 20, 20)
    assert figures["prefix_hit_rate"] > 0
    assert len(set((tmp_path / "requests.jsonl").read_text().splitlines())) == 20


def test_a_run_whose_sender_lagged_is_invalid_everywhere(invoke, serve, tmp_path: Path) -> None:
    server = serve()
    done = invoke(
        *("conversation", "--url", server.url, "--out", tmp_path, "--limit", 20, "--speed", 2000, "--no-unloaded"),
        *("--max-send-lag", 1e-9),
    )
    assert done.exit_code == 3
    assert "Replay: INVALID" in done.output
    figures = json.loads((tmp_path / "report.json").read_text())
    assert figures["valid"] is False
    assert "the sender lagged" in figures["invalid_reasons"][0]
    page = (tmp_path / "report.html").read_text()
    assert "<h1>INVALID: Replay of conversation</h1>" in page
    assert '<div class="invalid" role="alert">' in page
    assert "the sender lagged" in page


def test_wrong_tokens_end_with_one(invoke, serve, tmp_path: Path) -> None:
    server = serve()
    done = invoke(
        *("conversation", "--url", server.url, "--out", tmp_path, "--limit", 5, "--speed", 2000, "--no-unloaded"),
        *("--verify", "--verify-sample", 2),
    )
    assert done.exit_code == 1
    assert json.loads((tmp_path / "report.json").read_text())["wrong_tokens"] > 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": [0]}', "line 1"),
        ("not json", "line 1"),
    ],
)
def test_a_malformed_trace_ends_with_two_and_its_line(invoke, tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(line + "\n")
    done = invoke(path, "--url", "http://127.0.0.1:1")
    assert done.exit_code == 2
    assert said in done.stderr


def test_a_missing_tokenizer_ends_with_two_and_names_the_folder(invoke, tmp_path: Path) -> None:
    done = invoke("conversation", "--model-path", tmp_path, "--url", "http://127.0.0.1:1")
    assert done.exit_code == 2
    assert "--model-path" in done.stderr


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(("--speed", 0), ("--speed", "nan"), ("--sampled-fraction", 1.5), ("--limit", -1), ("--verify-sample", 0)),
        *(("--url", "here"), ("--url", "127.0.0.1:8000"), ("--url", "ftp://here"), ("--url", "http://here:port")),
    ],
)
def test_values_out_of_range_end_with_two_and_name_the_flag(invoke, flag: str, value: object) -> None:
    done = invoke("conversation", "--url", "http://127.0.0.1:1", flag, value)
    assert done.exit_code == 2
    assert flag in done.stderr


def test_what_only_verification_and_pictures_need_is_not_imported_before() -> None:
    script = "import sys, loadtest.cli; print(sorted({'torch', 'numba', 'matplotlib'} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"


def test_the_bundled_model_is_the_applications() -> None:
    assert (bundled_model() / "tokenizer.json").is_file()
