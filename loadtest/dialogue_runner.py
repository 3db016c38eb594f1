"""Run of dialogues, from plan to report."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import uvloop
from rich.console import Console

from loadtest.dialogue_config import DialogueConfig
from loadtest.dialogue_report import DialogueReport, summarise_dialogues
from loadtest.dialogue_turns import Talk, TurnRecord, planned_turns, share_cached, system_text, talk
from loadtest.http import open_session
from loadtest.model_folder import local_model_folder
from loadtest.progress import ProgressDisplay, background, interrupts, run_until
from loadtest.report import check_writable
from loadtest.server import ServerInfo, check_tokenizer, discover
from loadtest.tokens import ModelTokens, load_model_tokens
from loadtest.validity import clock_from
from loadtest.verify import Reference, Verification, choose_sample, load_reference, paced_notice, verify_records

_ASK_DEADLINE_S = 15.0
_REFRESH_S = 0.25


def run(config: DialogueConfig, console: Console | None = None) -> DialogueReport:
    """Run the dialogues, verify the answers if configured, write the report's files and return the report.

    Ctrl-C ends the dialogues and gives the report so far. Raises ReplayError. `console` None disables output.
    """
    folder = local_model_folder(config.model_path, flag="--model-path", weights=config.verify)
    config = replace(config, model_path=folder)
    tokens = load_model_tokens(folder)
    with ProgressDisplay(console) as display:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            live = runner.run(_live(config, tokens, display))
        verification = _verify(config, live.reference, live, display) if live.reference else None
    figures = {
        "interrupted": live.interrupted,
        "settings": _settings(config, live.server),
        **summarise_dialogues(config, live.turns, verification=verification),
        "notices": live.notices,
    }
    report = DialogueReport(config.out, figures, live.turns)
    # Imported only now: matplotlib takes a second to import, which the first turn need not wait for.
    from loadtest.dialogue_page import dialogue_page

    report.write(dialogue_page(report.figures, report.turns))
    return report


@dataclass
class _LiveDialogues:
    """Results of the dialogues."""

    server: ServerInfo
    reference: Reference | None
    turns: Sequence[TurnRecord]
    notices: list[str]
    interrupted: bool


async def _live(config: DialogueConfig, tokens: ModelTokens, display: ProgressDisplay) -> _LiveDialogues:
    stop = asyncio.Event()
    with interrupts(stop):
        async with open_session(api_key=config.api_key) as session:
            server = await discover(session, config.base_url, model=config.model, deadline_s=_ASK_DEADLINE_S)
            notice = await check_tokenizer(session, server, tokens, deadline_s=_ASK_DEADLINE_S)
            # Loaded before the dialogues, so that a reference that cannot be loaded is detected early.
            reference = _reference(config, server) if config.verify else None
            check_writable(config.out)
            common = Talk(
                session=session,
                server=server,
                clock=clock_from(time.monotonic()),
                timeout_s=config.request_timeout_s,
                temperature=config.temperature,
                truncation=config.truncation,
                cache_salt=f"dialogues-{secrets.token_hex(8)}",
                max_model_len=server.max_model_len or tokens.max_model_len or 0,
            )
            async with background(_show(config, common, display)):
                await _all(config, common, tokens, stop)
            _tell(config, common, display)
    notices = [*paced_notice(server.stand_ins), *([notice] if notice else [])]
    return _LiveDialogues(server, reference, common.records, notices, stop.is_set())


async def _all(config: DialogueConfig, common: Talk, tokens: ModelTokens, stop: asyncio.Event) -> None:
    """Run all dialogues, `config.dialogues` at a time, until they end or `stop` is set."""
    system = system_text(config, tokens)
    waiting = iter(range(config.num_dialogues))

    async def one_after_another() -> None:
        for dialogue in waiting:
            await talk(common, dialogue, system, planned_turns(config, dialogue, tokens))

    async def all_dialogues() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(config.dialogues):
                group.create_task(one_after_another())

    await run_until(stop, all_dialogues())


async def _show(config: DialogueConfig, common: Talk, display: ProgressDisplay) -> None:
    while True:
        _tell(config, common, display)
        await asyncio.sleep(_REFRESH_S)


def _tell(config: DialogueConfig, common: Talk, display: ProgressDisplay) -> None:
    share = share_cached(common.records)
    done = sum(turn.completed for turn in common.records)
    detail = f"{len(common.records) - done} in flight or failed" + (f", cached {share:.1%}" if share else "")
    display.show("dialogues", done, config.num_dialogues * config.turns, detail)


def _reference(config: DialogueConfig, server: ServerInfo) -> Reference:
    return load_reference(server, config.model_path, device=config.verify_device, threads=None)


def _verify(
    config: DialogueConfig, reference: Reference, live: _LiveDialogues, display: ProgressDisplay
) -> Verification:
    """Re-score a sample of the answers, each after the prompt ids that the server reported."""
    records = [turn.request for turn in live.turns if turn.completed]
    checkable = [record for record in records if record.prompt_ids and record.token_ids]
    if len(checkable) < len(records):
        missing = len(records) - len(checkable)
        live.notices.append(f"{missing} answers lack prompt_token_ids or token_ids and cannot be re-scored")
    sample = choose_sample(checkable, config.verify_sample, seed=config.seed)
    prompts = {record.index: np.array(record.prompt_ids, np.int32) for record in sample}
    result = Verification(tolerance=config.verify_tolerance)
    try:
        verify_records(
            reference, sample, prompts, result, on_done=lambda done: display.show("verify", done, len(sample))
        )
    except KeyboardInterrupt:
        live.interrupted = True
    return result


def _settings(config: DialogueConfig, server: ServerInfo) -> dict[str, Any]:
    """Return the configuration for the report, without the API key."""
    kept = {name: value for name, value in vars(config).items() if name not in ("api_key", "out")}
    return {**kept, "model": server.model, "model_path": str(config.model_path), "stand_ins": server.stand_ins}
