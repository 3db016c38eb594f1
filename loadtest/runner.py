"""Run of a replay, from trace to report."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import uvloop
from rich.console import Console

from loadtest.client import CompletionClient
from loadtest.cluster_metrics import ClusterHistory, MetricsPoller
from loadtest.config import ReplayConfig
from loadtest.errors import PromptPlanError, SenderUnusable, SettingInvalid, VerificationError
from loadtest.http import RetryPolicy, allow_many_connections, open_session
from loadtest.model_folder import local_model_folder
from loadtest.objectives import ReplayObjectives, Unloaded, measure_unloaded
from loadtest.plan import PlannedRequest, PlanSettings, plan_requests
from loadtest.progress import ProgressDisplay, background, detail_of, ignored_interrupts, interrupts, show_tally
from loadtest.record import RequestRecord
from loadtest.report import Report, check_writable
from loadtest.sender import LoadPlan, SendTally
from loadtest.senders import choose_senders, open_senders, send_watched, start_soon
from loadtest.server import ServerInfo, check_tokenizer, discover
from loadtest.summary import summarise
from loadtest.tokens import ModelTokens, TextBook, load_model_tokens
from loadtest.validity import ValidityEvidence, clock_from, invalid_reasons
from loadtest.verify import Reference, Verification, choose_sample, load_reference, paced_notice, verify_records
from traces import Trace, first_requests, first_seconds, load_trace, reuse_statistics, sample_families

_ASK_DEADLINE_S = 15.0
_SETTLE_S = 6.0


def run(config: ReplayConfig, console: Console | None = None) -> Report:
    """Replay the trace, verify the answers if configured, write the report's files and return the report.

    Once requests may have been sent, every end gives a report, which counts what failed: unloaded requests, requests,
    senders, the verification. Ctrl-C ends sending and gives the report so far. Raises TraceError, ReplayError before.
    `console` None disables output.
    """
    allow_many_connections()
    trace = select_rows(config)
    folder = local_model_folder(config.model_path, flag="--model-path", weights=config.verify)
    config = replace(config, model_path=folder)
    tokens = load_model_tokens(folder)
    with ProgressDisplay(console) as display:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            live = runner.run(_live(config, trace, tokens, display))
        verification = _verify(config, live.reference, live, display) if live.reference else None
    with ignored_interrupts():
        return _write_report(config, trace, live, verification)


def _write_report(config: ReplayConfig, trace: Trace, live: _Live, verification: Verification | None) -> Report:
    figures = {
        "valid": not live.invalid_reasons,
        "invalid_reasons": live.invalid_reasons,
        "interrupted": live.interrupted,
        "senders": live.senders,
        "settings": _settings(config, trace, live.server),
        "trace": _trace_figures(trace),
        **summarise(
            live.records,
            live.requests,
            tokens_per_block=config.tokens_per_block,
            objectives=live.objectives,
            history=live.history,
            verification=verification,
        ),
        "unloaded_failed": len(live.unloaded_failures),
        "verification_failed": live.verification_failure or None,
        "notices": [*trace.notices, *live.notices],
    }
    report = Report(
        config.out, figures, live.records, live.requests, live.history, live.objectives, interrupted=live.interrupted
    )
    report.write()
    return report


def select_rows(config: ReplayConfig) -> Trace:
    """Load the trace and select the configured rows. Raises TraceError."""
    trace = load_trace(config.trace)
    if config.sample_families < 1:
        trace = sample_families(trace, config.sample_families, seed=config.sample_seed)
    if config.duration_s > 0:
        trace = first_seconds(trace, config.duration_s)
    if config.limit > 0:
        trace = first_requests(trace, config.limit)
    return trace


@dataclass
class _Live:
    """Results of the phases against the server."""

    server: ServerInfo
    reference: Reference | None
    requests: dict[int, PlannedRequest]
    objectives: ReplayObjectives
    records: Sequence[RequestRecord]
    invalid_reasons: list[str]
    senders: int
    history: ClusterHistory
    notices: list[str]
    interrupted: bool
    unloaded_failures: list[str]
    verification_failure: str = ""


async def _live(config: ReplayConfig, trace: Trace, tokens: ModelTokens, display: ProgressDisplay) -> _Live:
    stop = asyncio.Event()
    with interrupts(stop):
        async with open_session(api_key=config.api_key) as session:
            url = config.base_url
            server = await discover(session, url, model=config.model, deadline_s=_ASK_DEADLINE_S)
            notice = await check_tokenizer(session, server, tokens, deadline_s=_ASK_DEADLINE_S)
            # Loaded before the replay, so that a reference that cannot be loaded is detected early.
            reference = _reference(config, server) if config.verify else None
            check_writable(config.out)
            settings = _plan_settings(config, server, tokens)
            requests = plan_requests(trace, _book(config, tokens), settings)
            run_salt = "" if config.reuse_earlier else f"replay-{secrets.token_hex(8)}"
            unloaded, failures = await _unloaded(config, settings, session, server, requests, stop, display)
            # Bytes moved by the unloaded requests must not count as the replay's.
            before = MetricsPoller(session, url, clock=time.monotonic, every_s=config.poll_every_s)
            await before.settle(at_most_s=_SETTLE_S if unloaded else 0.0)
            load = _load(config, server, requests, run_salt)
            senders = config.senders or choose_senders(requests, speed=config.speed, cores=os.cpu_count() or 1)
            tally = SendTally(len(requests))
            poller = MetricsPoller(session, url, clock=time.monotonic, every_s=config.poll_every_s)
            try:
                async with open_senders(load, senders) as opened:
                    start = start_soon()
                    poller = MetricsPoller(session, url, clock=clock_from(start), every_s=config.poll_every_s)
                    async with background(poller.run(), show_tally("replay", tally, display)):
                        evidence = await send_watched(opened, load, start=start, stop=stop, tally=tally)
            except SenderUnusable as error:  # raised before the start: no request was sent
                evidence = ValidityEvidence(len(requests), [], [str(error)], [], stop.is_set())
            display.show("replay", sum(tally.ended.values()), tally.total, detail_of(tally))
            await poller.settle(at_most_s=0.0 if stop.is_set() else _SETTLE_S)
    notices = [*paced_notice(server.stand_ins), *([notice] if notice else [])]
    notices += [f"{count} × {failure}" for failure, count in Counter(failures).most_common()]
    if poller.history.failed_polls:
        notices.append(f"{poller.history.failed_polls} polls of /metrics failed")
    return _Live(
        server=server,
        reference=reference,
        requests={r.index: r for r in requests},
        objectives=ReplayObjectives(config.slo_ttft_s, config.slo_tbt_s, unloaded),
        records=evidence.records,
        invalid_reasons=invalid_reasons(evidence, max_send_lag_s=config.max_send_lag_s),
        senders=min(senders, len(requests)) or 1,
        history=poller.history,
        notices=notices,
        interrupted=stop.is_set(),
        unloaded_failures=failures,
    )


async def _unloaded(
    config: ReplayConfig,
    settings: PlanSettings,
    session: aiohttp.ClientSession,
    server: ServerInfo,
    requests: Sequence[PlannedRequest],
    stop: asyncio.Event,
    display: ProgressDisplay,
) -> tuple[Unloaded | None, list[str]]:
    if not config.measure_unloaded:
        return None, []
    client = CompletionClient(session, server, timeout_s=config.request_timeout_s, clock=time.monotonic)
    return await measure_unloaded(
        client,
        requests,
        clock=time.monotonic,
        salt=f"unloaded-{secrets.token_hex(8)}",
        max_model_len=settings.max_model_len,
        stop=stop,
        on_done=lambda done, of: display.show("unloaded", done, of),
    )


def _verify(config: ReplayConfig, reference: Reference, live: _Live, display: ProgressDisplay) -> Verification:
    sample = choose_sample(live.records, config.verify_sample, seed=config.seed)
    prompts = {record.index: live.requests[record.index].prompt for record in sample}
    result = Verification(tolerance=config.verify_tolerance)
    try:
        verify_records(
            reference, sample, prompts, result, on_done=lambda done: display.show("verify", done, len(sample))
        )
    except KeyboardInterrupt:
        live.interrupted = True
    except VerificationError as error:
        live.verification_failure = str(error)
        live.notices.append(str(error))
    return result


def _reference(config: ReplayConfig, server: ServerInfo) -> Reference:
    return load_reference(server, config.model_path, device=config.verify_device, threads=config.verify_threads or None)


def _book(config: ReplayConfig, tokens: ModelTokens) -> TextBook:
    return TextBook(tokens, tokens_per_block=config.tokens_per_block, seed=config.seed)


def _plan_settings(config: ReplayConfig, server: ServerInfo, tokens: ModelTokens) -> PlanSettings:
    if server.max_model_len and config.max_model_len > server.max_model_len:
        raise SettingInvalid(
            f"--max-model-len is {config.max_model_len}; the server accepts at most {server.max_model_len} tokens"
        )
    max_model_len = config.max_model_len or server.max_model_len or tokens.max_model_len
    if not max_model_len:
        raise PromptPlanError(
            "the context length is given neither by the server nor by the model's config.json; give --max-model-len"
        )
    return PlanSettings(
        tokens_per_block=config.tokens_per_block,
        max_model_len=max_model_len,
        bos=tokens.bos,
        seed=config.seed,
        sampled_fraction=config.sampled_fraction,
        temperature=config.temperature,
    )


def _settings(config: ReplayConfig, trace: Trace, server: ServerInfo) -> dict[str, Any]:
    """Return the configuration for the report, without the API key."""
    left_out = {"api_key", "out"}
    kept = {name: value for name, value in vars(config).items() if name not in left_out}
    return {
        **kept,
        "trace": trace.source,
        "model": server.model,
        "model_path": str(config.model_path),
        "stand_ins": server.stand_ins,
    }


def _trace_figures(trace: Trace) -> dict[str, Any]:
    found = reuse_statistics(trace)
    return {
        "source": trace.source,
        "requests": found.requests,
        "duration_s": trace.duration_s,
        "block_references": found.block_references,
        "unique_blocks": found.unique_blocks,
        "block_hit_rate": found.block_hit_rate,
        "full_block_hit_rate": found.full_block_hit_rate,
        "token_hit_rate": found.token_hit_rate,
    }


def _load(config: ReplayConfig, server: ServerInfo, requests: Sequence[PlannedRequest], salt: str) -> LoadPlan:
    return LoadPlan(
        server=server,
        requests=requests,
        timeout_s=config.request_timeout_s,
        speed=config.speed,
        retry=RetryPolicy() if config.on_429 == "retry" else None,
        cache_salt=salt,
        api_key=config.api_key,
    )
