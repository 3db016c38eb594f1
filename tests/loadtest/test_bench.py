"""`bench serve` against a small real server: vLLM's keys, its definitions, prompts and arrivals as asked for."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from loadtest.bench.cli import app, normalised
from loadtest.bench.config import BenchConfig
from loadtest.bench.prompts import arrival_times, random_prompts, repeated_prefixes
from loadtest.bench.results import bench_figures, busiest_second, most_at_once
from loadtest.record import RequestRecord, SendOutcome
from loadtest.tokens import ordinary_ids

VLLM_KEYS = {
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate"),
    *("burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens"),
    *("request_throughput", "request_goodput", "output_throughput", "total_token_throughput"),
    *("max_output_tokens_per_s", "max_concurrent_requests"),
    *(f"{word}_{metric}_ms" for word in ("mean", "median", "std", "p99") for metric in ("ttft", "tpot", "itl")),
}
VLLM_DETAILS = {
    *("input_lens", "output_lens", "ttfts", "itls", "start_times", "queue_times", "generated_texts", "errors"),
}


@pytest.fixture
def bench(tmp_path: Path):
    """Runs the command; (what it printed and its exit code, the saved result)."""

    def start(server: Any, *arguments: Any) -> tuple[Any, dict[str, Any]]:
        flags = ("--base-url", server.url, "--save-result", "--result-dir", tmp_path, "--result-filename", "r.json")
        done = CliRunner().invoke(app, ["serve", *map(str, flags), *map(str, arguments)])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        path = tmp_path / "r.json"
        return done, json.loads(path.read_text()) if path.is_file() else {}

    return start


def test_the_result_has_vllms_keys_and_counts(serve, bench) -> None:
    server = serve()
    done, result = bench(server, *("--num-prompts", 12, "--random-input-len", 30, "--random-output-len", 5))
    assert done.exit_code == 0, done.output
    assert set(result) >= VLLM_KEYS
    assert not set(result) & VLLM_DETAILS
    assert (result["completed"], result["failed"], result["valid"]) == (12, 0, True)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (12 * 30, 12 * 5)
    assert result["request_throughput"] == pytest.approx(12 / result["duration"])
    assert result["total_token_throughput"] == pytest.approx(12 * 35 / result["duration"])
    assert (result["request_rate"], result["model_id"], result["backend"]) == ("inf", "tiny", "openai")
    assert " Serving Benchmark Result " in done.output
    for label in ("Successful requests:", "Mean TTFT (ms):", "P99 TPOT (ms):", "Total token throughput (tok/s):"):
        assert label in done.output
    for body in server.bodies:
        assert (len(body["prompt"]), body["max_tokens"], body["ignore_eos"]) == (30, 5, True)
        assert "temperature" not in body


def test_details_hold_every_request(serve, bench) -> None:
    _, result = bench(serve(), "--num-prompts", 4, "--random-input-len", 9, "--output-len", 3, "--save-detailed")
    assert set(result) >= VLLM_KEYS | VLLM_DETAILS
    assert result["input_lens"] == [9] * 4
    assert result["output_lens"] == [3] * 4
    assert [len(itl) for itl in result["itls"]] == [2] * 4
    assert result["generated_texts"] == ["xxx"] * 4
    assert result["errors"] == [""] * 4


def record_of(sent: float, events: list[float], tokens: int, **changes: Any) -> RequestRecord:
    record = RequestRecord(0, 0.0, 10, tokens, 0.0, 0, **({"outcome": SendOutcome.COMPLETED} | changes))
    record.sent_s, record.event_times, record.output_tokens = sent, events, tokens
    record.end_s = (events or [sent])[-1] + 0.5
    return record


def test_latencies_are_defined_as_in_vllm() -> None:
    records = [
        record_of(1.0, [1.1, 1.3, 1.3, 1.9], 5),  # two of its tokens came in one event
        record_of(2.0, [2.5], 1),
        record_of(2.0, [], 0, outcome=SendOutcome.REJECTED),
    ]
    found = bench_figures(
        records, metrics=("ttft", "tpot", "itl", "e2el"), percentiles=(50, 99.9), goodput_ms={"ttft": 200, "tpot": 250}
    )
    assert found["mean_ttft_ms"] == pytest.approx((100 + 500) / 2)
    assert found["std_ttft_ms"] == pytest.approx(200)
    # The last event, not the end of the stream; an answer of one token has no TPOT.
    assert found["mean_tpot_ms"] == pytest.approx(1000 * (1.9 - 1.1) / 4)
    assert found["mean_itl_ms"] == pytest.approx(1000 * (0.2 + 0.0 + 0.6) / 3)
    assert found["median_e2el_ms"] == pytest.approx((900 + 500) / 2)
    assert found["p50_itl_ms"] == pytest.approx(200)
    assert found["p99.9_e2el_ms"] == pytest.approx(np.percentile([900, 500], 99.9))
    assert (found["completed"], found["failed"], found["rejected"]) == (2, 1, 1)
    assert found["duration"] == pytest.approx(3.0)
    assert found["request_goodput"] == pytest.approx(1 / 3.0)
    assert found["output_throughput"] == pytest.approx(6 / 3.0)


def test_peaks_are_those_of_completed_requests() -> None:
    records = [record_of(0.0, [0.5, 1.2, 1.4], 3), record_of(0.5, [1.9], 1), record_of(1.4, [1.5], 1)]
    assert busiest_second(records) == 4
    assert most_at_once(records) == 2  # an end comes before a beginning at the same time
    assert (busiest_second([]), most_at_once([])) == (0.0, 0)


def test_latencies_of_nothing_are_null_not_zero(serve, bench) -> None:
    async def behave(server: Any, request: Any, body: Any) -> web.Response:
        return web.json_response({"error": {"message": "no"}}, status=500)

    done, result = bench(serve(behave=behave), "--num-prompts", 2)
    assert done.exit_code == 1
    assert (result["completed"], result["failed"], result["mean_ttft_ms"]) == (0, 2, None)
    assert "not completed: HTTP 500: no" in done.output


def test_rejections_are_counted_apart_and_retried_on_demand(serve, bench) -> None:
    async def behave(server: Any, request: Any, body: Any) -> web.Response | None:
        if len(server.bodies) <= 3:
            return web.json_response({"error": {"message": "busy"}}, status=429, headers={"Retry-After": "0.01"})
        return None

    done, result = bench(serve(behave=behave), "--num-prompts", 6, "--output-len", 2)
    assert (done.exit_code, result["completed"], result["failed"], result["rejected"]) == (0, 3, 3, 3)
    done, result = bench(serve(behave=behave), "--num-prompts", 6, "--output-len", 2, "--on-429", "retry")
    assert (result["completed"], result["failed"], result["retries"]) == (6, 0, 3)


def test_a_lagging_sender_makes_the_run_invalid_everywhere(serve, bench) -> None:
    done, result = bench(serve(), "--num-prompts", 5, "--output-len", 2, "--request-rate", 200, "--max-send-lag", 1e-9)
    assert done.exit_code == 3
    assert result["valid"] is False
    assert "the sender lagged" in result["invalid_reasons"][0]
    assert " INVALID Serving Benchmark Result " in done.output
    assert " Serving Benchmark Result ".center(50, "=") not in done.output


def test_chat_sends_messages_of_the_length_asked_for(serve, bench) -> None:
    server = serve()
    done, result = bench(server, "--backend", "openai-chat", "--num-prompts", 4, "--input-len", 40, "--output-len", 3)
    assert done.exit_code == 0, done.output
    assert [list(body["messages"][0]) for body in server.bodies] == [["role", "content"]] * 4
    assert {body["max_completion_tokens"] for body in server.bodies} == {3}
    assert abs(result["total_input_tokens"] - 160) <= 4
    assert result["total_output_tokens"] == 12


def test_prompts_are_text_where_the_server_may_have_another_tokenizer(serve, bench) -> None:
    server = serve(tokenize=False)
    done, _ = bench(server, "--num-prompts", 2, "--input-len", 20, "--output-len", 2)
    assert all(isinstance(body["prompt"], str) for body in server.bodies)
    assert "note: the server's tokenizer was not compared" in done.output


def test_tokens_are_counted_from_the_text_where_the_server_does_not_tell(serve, bench, tokens) -> None:
    _, result = bench(serve(usage=False), "--num-prompts", 3, "--input-len", 20, "--output-len", 6)
    assert result["completed"] == 3
    assert result["total_output_tokens"] == 3 * len(tokens.encode_all(["x" * 6])[0])
    assert result["total_input_tokens"] == 60


def test_a_limit_of_concurrency_is_kept_and_reported(serve, bench) -> None:
    done, result = bench(
        serve(token_delay_s=0.002), "--num-prompts", 9, "--output-len", 3, "--max-concurrency", 2, "--save-detailed"
    )
    assert result["max_concurrent_requests"] <= 2
    assert max(result["queue_times"]) > 0
    assert "Maximum request concurrency:" in done.output


def test_warm_ups_are_not_counted_and_one_that_fails_ends_it(serve, bench) -> None:
    server = serve()
    _, result = bench(server, "--num-prompts", 3, "--output-len", 2, "--num-warmups", 2)
    assert (len(server.bodies), result["completed"]) == (5, 3)

    async def behave(server: Any, request: Any, body: Any) -> web.Response:
        return web.json_response({"error": {"message": "too long"}}, status=400)

    done, _ = bench(serve(behave=behave), "--num-prompts", 3, "--num-warmups", 1)
    assert done.exit_code == 2
    assert "a warm-up request was failed: HTTP 400: too long" in done.stderr


def test_a_server_that_is_not_ready_yet_is_waited_for(serve, bench) -> None:
    async def behave(server: Any, request: Any, body: Any) -> web.Response | None:
        if len(server.bodies) <= 2:
            return web.json_response({"error": {"message": "no worker yet"}}, status=503)
        return None

    server = serve(behave=behave)
    done, result = bench(server, "--num-prompts", 3, "--output-len", 2, "--ready-check-timeout-sec", 60)
    assert (done.exit_code, len(server.bodies), result["completed"], result["failed"]) == (0, 6, 3, 0)

    async def never(server: Any, request: Any, body: Any) -> web.Response:
        return web.json_response({"error": {"message": "no worker yet"}}, status=503)

    done, _ = bench(serve(behave=never), "--num-prompts", 3, "--ready-check-timeout-sec", 0.01)
    assert done.exit_code == 2
    assert "was not ready within 0.01 s: a request was failed: HTTP 503: no worker yet" in done.stderr


def test_sampling_headers_and_extra_fields_go_with_every_request(serve, bench) -> None:
    seen = []

    async def behave(server: Any, request: web.Request, body: Any) -> None:
        seen.append((request.headers["x-tenant"], body["temperature"], body["min_tokens"], body["model"]))

    bench(
        serve(behave=behave),
        *("--num-prompts", 2, "--output-len", 2, "--temperature", 0.5, "--header", "x-tenant=a", "--model", "tiny"),
        *("--extra-body", '{"min_tokens": 1}', "--metadata", "tp=1", "run=b"),
    )
    assert seen == [("a", 0.5, 1, "tiny")] * 2


def test_custom_lines_and_sharegpt_conversations_are_sent(serve, bench, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(
        '{"prompt": "Tell of millers.", "output_tokens": 2}\n\n{"prompt": "And owls?", "output_tokens": 4}\n'
    )
    server = serve()
    flags = ("--dataset-name", "custom", "--dataset-path", path, "--custom-output-len", -1, "--disable-shuffle")
    _, result = bench(server, *flags, "--num-prompts", 2)
    assert {(body["prompt"], body["max_tokens"]) for body in server.bodies} == {
        ("Tell of millers.", 2),
        ("And owls?", 4),
    }
    _, result = bench(serve(), *flags, "--num-prompts", 5)
    assert result["completed"] == 5
    _, result = bench(serve(), *flags, "--num-prompts", 5, "--no-oversample")
    assert result["completed"] == 2

    words = " ".join(["millers"] * 30)
    rows = [
        {"conversations": [{"from": "human", "value": "Who carries lanterns there?"}, {"from": "gpt", "value": words}]},
        {"conversations": [{"from": "human", "value": "Hm"}, {"from": "gpt", "value": words}]},
        {"conversations": [{"from": "human", "value": "A question without an answer"}]},
    ]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(rows))
    server = serve()
    _, result = bench(server, *("--dataset-name", "sharegpt", "--dataset-path", path, "--num-prompts", 1))
    assert [body["prompt"] for body in server.bodies] == ["Who carries lanterns there?"]
    assert server.bodies[0]["max_tokens"] > 10


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--dataset-name", "burstgpt"), "--dataset-name is burstgpt; expected one of random, sharegpt, custom"),
        (("--dataset-name", "custom"), "--dataset-name custom needs --dataset-path"),
        (("--dataset-path", "x"), "--dataset-name random takes no --dataset-path"),
        (("--dataset-name", "custom", "--dataset-path", "nowhere"), "--dataset-path nowhere cannot be read"),
        (("--backend", "tgi"), "--backend is tgi; expected one of openai"),
        (("--backend", "openai-chat", "--endpoint", "/v1/completions"), "needs one that ends with /chat/completions"),
        (("--request-rate", 0), "--request-rate is 0.0"),
        (("--burstiness", "nan"), "--burstiness is nan"),
        (("--num-prompts", 0), "--num-prompts is 0; expected at least 1"),
        (("--goodput", "ttft"), "--goodput is 'ttft'; expected KEY:MILLISECONDS"),
        (("--goodput", "itl:5"), "--goodput is itl:5; expected KEY:MILLISECONDS pairs of ttft, tpot, e2el"),
        (("--percentile-metrics", "ttft,tbt"), "--percentile-metrics is ttft,tbt"),
        (("--metric-percentiles", "101"), "--metric-percentiles is 101.0"),
        (("--extra-body", "[1]"), "expected a JSON object"),
        (("--header", "x"), "--header is 'x'; expected KEY=VALUE"),
        (("--base-url", "here"), "--base-url is here"),
        (("--find-capacity",), "give --goodput"),
        (
            ("--find-capacity", "--goodput", "ttft:9", "--save-result"),
            "--save-result cannot be combined with --find-capacity",
        ),
    ],
)
def test_what_is_wrong_ends_with_two_and_is_named(serve, bench, arguments: tuple[Any, ...], said: str) -> None:
    done, _ = bench(serve(), *arguments)
    assert done.exit_code == 2
    assert said in done.stderr


def test_a_custom_line_that_does_not_fit_is_named_by_its_number(serve, bench, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    done, _ = bench(serve(), "--dataset-name", "custom", "--dataset-path", path)
    assert done.exit_code == 2
    assert f"{path}, line 2: expected" in done.stderr


def test_lists_and_underscores_are_read_as_vllm_reads_them() -> None:
    given = ["--goodput", "ttft:5", "tpot:6", "--num_prompts", "3", "--metadata=a_b=1", "--header", "x-y=z_w"]
    assert normalised(given) == [
        *("--goodput", "ttft:5", "--goodput", "tpot:6", "--num-prompts", "3", "--metadata=a_b=1"),
        *("--header", "x-y=z_w"),
    ]


@given(st.integers(1, 200), st.floats(0.01, 1e4), st.floats(0.05, 50), st.integers(0, 99))
def test_arrivals_rise_and_end_when_the_rate_says(count: int, rate: float, burstiness: float, seed: int) -> None:
    times = arrival_times(count, rate=rate, burstiness=burstiness, rng=np.random.default_rng(seed))
    assert len(times) == count
    assert (np.diff(times) >= 0).all()
    assert times[-1] == pytest.approx(count / rate)


def test_burstiness_is_the_spread_of_the_intervals() -> None:
    def spread(burstiness: float) -> float:
        gaps = np.diff(arrival_times(20_000, rate=10.0, burstiness=burstiness, rng=np.random.default_rng(1)))
        return float(gaps.std() / gaps.mean())

    assert spread(1.0) == pytest.approx(1.0, rel=0.05)
    assert spread(4.0) == pytest.approx(0.5, rel=0.05)
    assert spread(math.inf) == pytest.approx(0.0, abs=1e-9)
    assert (arrival_times(3, rate=math.inf, burstiness=1.0, rng=np.random.default_rng(0)) == 0).all()


def test_random_lengths_stay_within_the_ratio_and_share_the_prefix(tokens) -> None:
    config = BenchConfig(
        num_prompts=60, random_input_len=40, random_output_len=10, random_range_ratio=0.5, random_prefix_len=7
    )
    prompts = list(random_prompts(config, tokens, np.random.default_rng(0), as_text=False))
    lengths = [len(p.ids) - 7 for p in prompts]
    assert (min(lengths) >= 20, max(lengths) <= 60, len(set(lengths)) > 15) == (True, True, True)
    assert {min(5, p.output_tokens) for p in prompts} == {5}
    assert max(p.output_tokens for p in prompts) <= 15
    assert len({tuple(p.ids[:7]) for p in prompts}) == 1
    assert len({tuple(p.ids[7:20]) for p in prompts}) == 60
    again = list(random_prompts(config, tokens, np.random.default_rng(0), as_text=False))
    assert all((a.ids == b.ids).all() for a, b in zip(prompts, again, strict=True))


def test_prefixes_repeat_equally_often(tokens) -> None:
    config = BenchConfig(
        dataset_name="prefix_repetition",
        num_prompts=12,
        prefix_repetition_prefix_len=20,
        prefix_repetition_suffix_len=5,
        prefix_repetition_num_prefixes=3,
    )
    prompts = list(repeated_prefixes(config, tokens, np.random.default_rng(0), as_text=False))
    heads = [tuple(p.ids[:20]) for p in prompts]
    assert sorted(heads.count(head) for head in set(heads)) == [4, 4, 4]
    assert len({tuple(p.ids) for p in prompts}) == 12
    assert {len(p.ids) for p in prompts} == {25}


def test_special_tokens_are_never_drawn(tokens) -> None:
    special = [i for i, added in tokens.tokenizer.get_added_tokens_decoder().items() if added.special]
    assert special
    assert not set(special) & set(ordinary_ids(tokens).tolist())


def test_the_server_is_that_of_the_environment_unless_a_flag_names_one(serve) -> None:
    flags, environ = ("serve", "--num-prompts", "2", "--random-output-len", "2"), {"MOONPOOL_URL": f"{serve().url}/"}
    assert CliRunner().invoke(app, flags, env=environ).exit_code == 0
    for named, url in ((("--port", "1"), "http://127.0.0.1:1"), (("--base-url", "http://[::1]:1"), "http://[::1]:1")):
        done = CliRunner().invoke(app, (*flags, *named), env=environ)
        assert done.exit_code != 0
        assert f"{url}/" in done.output
