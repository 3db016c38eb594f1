"""A whole replay against a small real server: figures, files, verification."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web
from rich.console import Console

from loadtest import OutputUnwritable, ReplayConfig, Report, ServerUnusable, SettingInvalid, run
from loadtest.client import CompletionClient
from loadtest.errors import VerificationError
from loadtest.report import print_report
from tests.chromium import look_at
from traces import Trace

ISSUE_KEYS = {
    *("requests", "completed", "rejected", "failed", "prefix_hit_rate", "ideal_prefix_hit_rate", "ttft_s", "tbt_s"),
    *("tbt_worst10_s", "unloaded_ttft_s", "unloaded_tbt_s", "slo_attainment", "goodput_rps", "send_lateness_s"),
    *("kv_bytes_moved", "verified_requests", "wrong_tokens", "near_ties", "overlong_prompts"),
}


@pytest.fixture
def trace_file(tmp_path: Path, small_trace: Trace) -> Path:
    path = tmp_path / "small.jsonl"
    path.write_text(
        "".join(
            json.dumps(
                {
                    "timestamp": row.timestamp_ms,
                    "input_length": row.input_length,
                    "output_length": row.output_length,
                    "hash_ids": row.hash_ids,
                }
            )
            + "\n"
            for row in small_trace
        )
    )
    return path


@pytest.fixture
def replay(tmp_path: Path, model_path: Path, trace_file: Path) -> Callable[..., Report]:
    def start(url: str, **changes: Any) -> Report:
        values: dict[str, Any] = {
            "trace": str(trace_file),
            "url": url,
            "out": tmp_path / "out",
            "model_path": model_path,
            "speed": 20.0,
            "poll_every_s": 0.05,
        }
        return run(ReplayConfig(**(values | changes)))

    return start


class _Page(HTMLParser):
    """Collects what a browser would fetch, and the ids."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.ids: list[str] = []
        self.svgs = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.svgs += tag == "svg"
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "action", "data", "srcset") and not (value or "").startswith("#"):
                self.fetched.append(f"{tag} {name}={value}")
            if name == "id":
                self.ids.append(value or "")


def test_replay_reports_every_key_and_verifies_the_servers_own_tokens(serve, replay, generate, small_trace) -> None:
    server = serve(answer=generate)
    report = replay(server.url, verify=True, verify_sample=12)
    figures = json.loads(report.json_path.read_text())
    assert set(figures) >= ISSUE_KEYS
    assert figures["requests"] == figures["completed"] == len(small_trace)
    assert (figures["rejected"], figures["failed"], figures["wrong_tokens"]) == (0, 0, 0)
    assert figures["verified_requests"] == 12
    assert figures["verification"]["sampled_requests"] > 0
    assert figures["verification"]["requests_with_reuse"] > 0
    assert figures["prefix_hit_rate"] == figures["ideal_prefix_hit_rate"] > 0.2
    for key in ("ttft_s", "tbt_s", "tbt_worst10_s", "send_lateness_s"):
        assert 0 <= figures[key]["p50"] <= figures[key]["p90"] <= figures[key]["p99"]
    assert figures["unloaded_ttft_s"] > 0
    assert figures["kv_bytes_moved"] == 100 * figures["prompt_tokens"]
    assert report.ok
    assert len((report.out / "requests.jsonl").read_text().splitlines()) == len(small_trace)


def test_one_altered_token_is_found_by_the_verification(serve, replay, generate) -> None:
    def altered(body: dict[str, Any]) -> list[int]:
        ids = generate(body)
        if len(server.bodies) == 17:
            ids[-1] = (ids[-1] + 1) % 2048
        return ids

    server = serve(answer=altered)
    report = replay(server.url, verify=True, verify_sample=24, measure_unloaded=False)
    assert report.figures["wrong_tokens"] == 1
    assert not report.ok
    (wrong,) = report.figures["verification"]["wrong"]
    assert wrong["margin"] > 1e-3
    assert wrong["token"] == (wrong["expected"] + 1) % 2048


def test_the_page_stands_alone(serve, replay) -> None:
    server = serve()
    report = replay(server.url)
    text = report.html_path.read_text()
    page = _Page()
    page.feed(text)
    assert page.fetched == []
    assert not re.search(r"https?://(?!127\.0\.0\.1)", text)
    assert not re.search(r"@import|url\((?!#)", text)
    assert page.svgs == 10
    look_at(report.html_path)
    assert len(page.ids) == len(set(page.ids))
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"#0[0-9]0[0-9]0[0-9]", text), "a placeholder colour was left in"


def test_rejections_and_failures_are_counted_apart_with_reasons(serve, replay) -> None:
    async def behave(server: Any, request: Any, body: dict[str, Any]) -> Any:
        number = len(server.bodies)
        if number % 3 == 0:
            error = {"error": {"message": "too busy", "type": "overloaded"}}
            return web.json_response(error, status=429, headers={"Retry-After": "2"})
        if number % 3 == 1:
            return web.json_response({"error": {"message": "prefill node lost"}}, status=503)
        return None

    server = serve(behave=behave)
    report = replay(server.url, measure_unloaded=False, limit=12, slo_ttft_s=10.0, slo_tbt_s=10.0)
    figures = report.figures
    assert (figures["completed"], figures["rejected"], figures["failed"]) == (4, 4, 4)
    assert figures["slo_attainment"] == pytest.approx(4 / 12)
    assert {(entry["outcome"], entry["reason"], entry["count"]) for entry in figures["reasons"]} == {
        ("rejected", "HTTP 429: too busy", 4),
        ("failed", "HTTP 503: prefill node lost", 4),
    }
    rejected = [r for r in report.records if r.outcome == "rejected"]
    assert all(r.retry_after_s == 2 for r in rejected)
    assert "prefill node lost" in report.html_path.read_text()


def test_lone_requests_leave_nothing_warm(serve, replay) -> None:
    server = serve()
    report = replay(server.url)
    salts = [body.get("cache_salt", "") for body in server.bodies]
    alone = salts[: -len(report.records)]
    assert len(set(alone)) == len(alone)
    assert len(set(salts[len(alone) :])) == 1
    assert not set(alone) & set(salts[len(alone) :])
    assert report.figures["prefix_hit_rate"] == report.figures["ideal_prefix_hit_rate"]


def test_a_second_run_starts_cold_unless_told_otherwise(serve, replay) -> None:
    server = serve()
    first, salted, warm = (
        replay(server.url, measure_unloaded=False, reuse_earlier=reuse).figures["prefix_hit_rate"]
        for reuse in (True, False, True)
    )
    assert salted == first < 0.9
    assert warm > 0.9


def test_an_interrupt_gives_the_report_so_far(serve, replay) -> None:
    async def behave(server: Any, request: Any, body: dict[str, Any]) -> None:
        if len(server.bodies) == 6:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()

    server = serve(behave=behave)
    report = replay(server.url, measure_unloaded=False, speed=0.5)
    assert report.interrupted
    assert 5 <= report.figures["completed"] < 24
    assert report.figures["requests"] < 24
    assert json.loads(report.json_path.read_text())["interrupted"] is True
    assert "interrupted" in report.html_path.read_text()


def test_an_interrupt_before_the_load_gives_an_empty_report(serve, replay) -> None:
    async def behave(server: Any, request: Any, body: dict[str, Any]) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(5)

    report = replay(serve(behave=behave).url)
    assert report.interrupted
    assert report.figures["requests"] == report.figures["completed"] == 0
    assert report.figures["ttft_s"]["p50"] is None
    assert report.html_path.is_file()


def refused(message: str, status: int = 503) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


def written(report: Report) -> dict[str, Any]:
    """Return report.json, after checking that the other files are there."""
    assert report.html_path.is_file()
    assert len((report.out / "requests.jsonl").read_text().splitlines()) == len(report.records)
    figures: dict[str, Any] = json.loads(report.json_path.read_text())
    return figures


@pytest.mark.parametrize("fails", [1, 4])
def test_a_lone_request_that_fails_is_counted_and_the_replay_goes_on(serve, replay, fails: int, small_trace) -> None:
    async def behave(server: Any, request: Any, body: dict[str, Any]) -> web.Response | None:
        return refused("no decode node") if len(server.bodies) == fails else None

    report = replay(serve(behave=behave).url)
    figures = written(report)
    assert figures["unloaded_failed"] == 1
    assert any(
        re.fullmatch(r"1 × an unloaded request of \d+ prompt tokens was failed: HTTP 503: no decode node", notice)
        for notice in figures["notices"]
    )
    assert figures["completed"] == len(small_trace)
    assert figures["unloaded_ttft_s"] > 0
    assert figures["slo_attainment"] is not None
    assert not report.ok


def test_after_three_failed_lone_requests_in_a_row_the_replay_begins(serve, replay, small_trace) -> None:
    async def behave(server: Any, request: Any, body: dict[str, Any]) -> web.Response:
        return refused("no decode node")

    server = serve(behave=behave)
    report = replay(server.url)
    figures = written(report)
    assert len(server.bodies) == 3 + len(small_trace)
    assert (figures["unloaded_failed"], figures["failed"], figures["completed"]) == (3, len(small_trace), 0)
    assert figures["unloaded"] is figures["slo_attainment"] is None
    assert figures["slo_rule"].startswith("not evaluated")
    assert not report.ok
    assert "HTTP 503: no decode node" in report.html_path.read_text()


def test_a_server_that_dies_in_the_middle_gives_a_report_that_counts_every_request(serve, replay, small_trace) -> None:
    async def behave(server: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse | None:
        if len(server.bodies) < 8:
            return None
        server.answer_metrics = False
        assert request.transport is not None
        request.transport.abort()
        return refused("never sent")

    server = serve(behave=behave)
    report = replay(server.url, measure_unloaded=False)
    figures = written(report)
    assert figures["completed"] == 7
    assert figures["failed"] == len(small_trace) - 7
    assert figures["requests"] == len(small_trace)
    assert any("connection lost" in each["reason"] for each in figures["reasons"])
    assert any("polls of /metrics failed" in notice for notice in figures["notices"])
    assert not report.ok


def test_a_server_that_dies_after_the_lone_requests_gives_a_report_too(serve, replay, small_trace) -> None:
    async def behave(server: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse | None:
        assert request.transport is not None
        request.transport.abort()
        return refused("never sent")

    figures = written(replay(serve(behave=behave).url))
    assert (figures["failed"], figures["unloaded_failed"]) == (len(small_trace), 3)


def test_an_unexpected_error_of_one_request_is_its_failure_alone(serve, replay, monkeypatch, small_trace) -> None:
    follow = CompletionClient._follow

    async def breaks_once(self: Any, response: Any, record: Any, request: Any) -> None:
        if record.index == 3:
            raise RuntimeError("no more memory for this answer")
        await follow(self, response, record, request)

    monkeypatch.setattr(CompletionClient, "_follow", breaks_once)
    report = replay(serve().url, measure_unloaded=False)
    figures = written(report)
    assert (figures["failed"], figures["completed"]) == (1, len(small_trace) - 1)
    assert "no more memory for this answer" in figures["reasons"][0]["reason"]
    assert not report.ok


def test_metrics_that_cannot_be_read_are_counted_and_the_replay_goes_on(
    serve, replay, monkeypatch, small_trace
) -> None:
    def fails(text: str, at_s: float) -> None:
        raise KeyError("label")

    monkeypatch.setattr("loadtest.cluster_metrics.parse_metrics", fails)
    figures = written(replay(serve().url, measure_unloaded=False))
    assert figures["completed"] == len(small_trace)
    assert any("polls of /metrics failed" in notice for notice in figures["notices"])


def test_a_server_with_the_clusters_metrics_at_a_path_of_its_own_is_asked_there(serve, replay, small_trace) -> None:
    figures = written(replay(serve(metrics_path="/metrics/cluster").url, measure_unloaded=False))
    assert figures["completed"] == len(small_trace)
    assert figures["kv_bytes_moved"] == 100 * figures["prompt_tokens"]


def test_senders_that_do_not_start_give_a_report_of_what_there_is(serve, replay, monkeypatch, small_trace) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    report = replay(serve().url, senders=2)
    figures = written(report)
    assert figures["valid"] is False
    assert "did not start" in figures["invalid_reasons"][0]
    assert f"{len(small_trace)} of {len(small_trace)} requests have no record" in figures["invalid_reasons"][1]
    assert figures["unloaded_ttft_s"] > 0
    assert not report.ok


def test_a_sender_that_dies_in_the_middle_gives_a_report_that_names_it(serve, replay, small_trace) -> None:
    killed = threading.Event()

    async def behave(server: Any, request: web.Request, body: dict[str, Any]) -> None:
        if len(server.bodies) > 4 and not killed.is_set():
            killed.set()
            peer = request.transport.get_extra_info("peername") if request.transport else None
            (sender,) = [p for p in psutil.Process().children() if any(c.laddr == peer for c in p.net_connections())]
            sender.kill()

    report = replay(serve(behave=behave).url, senders=2, measure_unloaded=False, speed=2.0)
    figures = written(report)
    assert killed.is_set()
    assert "was killed by SIGKILL" in figures["invalid_reasons"][0]
    assert "requests have no record" in figures["invalid_reasons"][1]
    assert len(small_trace) // 2 <= figures["completed"] < len(small_trace)
    assert figures["valid"] is False


def test_a_verification_that_cannot_go_on_is_in_the_report(serve, replay, generate, small_trace) -> None:
    server = serve(answer=generate, token_ids=False)
    report = replay(server.url, verify=True, measure_unloaded=False)
    figures = written(report)
    assert "the answers have no token_ids" in figures["verification_failed"]
    assert figures["completed"] == len(small_trace)
    assert not report.ok


def test_ctrl_c_while_the_report_is_written_does_not_lose_it(serve, replay, monkeypatch) -> None:
    write = Report.write

    def interrupted(self: Report) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        write(self)

    monkeypatch.setattr(Report, "write", interrupted)
    figures = written(replay(serve().url, measure_unloaded=False, limit=2))
    assert figures["completed"] == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_server_with_another_tokenizer_is_refused(serve, replay, tokens) -> None:
    class Shifted:
        def encode_all(self, texts: list[str]) -> list[list[int]]:
            return [[i + 1 for i in ids] for ids in tokens.encode_all(texts)]

    server = serve()
    server.tokens = Shifted()
    with pytest.raises(ServerUnusable, match="uses a different tokenizer"):
        replay(server.url)


def test_a_server_with_other_weights_is_refused_before_anything_is_sent(serve, replay, generate, model) -> None:
    server = serve(answer=generate, fingerprint="ab" * 16)
    with pytest.raises(VerificationError, match=rf"'tiny' has fingerprint {'ab' * 16}, .* has {model.fingerprint}"):
        replay(server.url, verify=True)
    assert server.bodies == []
    server.fingerprint = model.fingerprint
    report = replay(server.url, verify=True, verify_sample=1, limit=1, measure_unloaded=False)
    assert report.figures["verification"]["verified_requests"] == 1


def test_a_server_without_tokenize_is_used_with_a_notice(serve, replay) -> None:
    server = serve(tokenize=False)
    report = replay(server.url, measure_unloaded=False, limit=3)
    assert any("was not compared" in notice for notice in report.figures["notices"])


def test_requests_of_a_session_of_the_trace_carry_its_id(serve, replay, tmp_path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": i, "input_length": 600, "output_length": 2, "hash_ids": [i, i + 9]} for i in range(4)]
    for row, name in zip(rows, ["a", "b\n", "a", None], strict=True):
        row |= {} if name is None else {"session": name}
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    seen: dict[str, set[str | None]] = {}

    async def behave(server: Any, request: web.Request, body: Any) -> None:
        seen.setdefault(str(body["prompt"]), set()).add(request.headers.get("x-session-id"))

    server = serve(behave=behave)
    replay(server.url, trace=str(trace), measure_unloaded=False, limit=4)
    ids = [next(iter(found)) for found in seen.values()]
    assert all(len(found) == 1 for found in seen.values())
    assert sorted(ids.count(each) for each in set(ids)) == [1, 1, 2]
    assert ids.count(None) == 1


def test_a_missing_key_is_named(serve, replay) -> None:
    server = serve(api_key="secret")
    with pytest.raises(ServerUnusable, match=r"401.*--api-key"):
        replay(server.url)
    report = replay(server.url, api_key="secret", measure_unloaded=False, limit=2)
    assert report.figures["completed"] == 2
    assert "secret" not in report.json_path.read_text() + report.html_path.read_text()


def test_no_server_is_a_clear_error(replay, unused_tcp_port) -> None:
    with pytest.raises(ServerUnusable, match="moonpool serve"):
        replay(f"http://127.0.0.1:{unused_tcp_port}")


def test_the_url_may_be_the_one_that_openais_clients_are_given(serve, replay) -> None:
    report = replay(serve().url + "/v1/", measure_unloaded=False, limit=2)
    assert report.figures["completed"] == 2


def test_a_longer_context_than_the_servers_is_refused(serve, replay) -> None:
    with pytest.raises(SettingInvalid, match=r"--max-model-len is 4096; the server accepts at most 2048"):
        replay(serve().url, max_model_len=4096)


def test_a_folder_that_cannot_be_written_is_found_out_before_the_load(serve, replay, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    server = serve()
    with pytest.raises(OutputUnwritable, match=r"cannot write to the folder .*file/out.*--out"):
        replay(server.url, out=tmp_path / "file" / "out")
    assert server.bodies == []


def test_prompts_over_the_servers_context_keep_their_head_and_are_counted(serve, replay) -> None:
    server = serve(max_model_len=64)
    report = replay(server.url, measure_unloaded=False)
    assert 0 < report.figures["overlong_prompts"] < report.figures["requests"]
    assert max(len(body["prompt"]) + body["max_tokens"] for body in server.bodies) == 64


def test_the_table_shows_the_figures(serve, replay) -> None:
    report = replay(serve().url, limit=5, measure_unloaded=False)
    console = Console(width=140, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        print_report(report, console)
    text = console.export_text()
    for word in ("completed", "prefix hit rate", "time to first token", "KV bytes moved", "report.html"):
        assert word in text
