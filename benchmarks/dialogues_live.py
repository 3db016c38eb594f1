"""Reuse in dialogues of 180 messages with two conductors, one of which is killed: paced engines, the real protocol.

    python -m benchmarks.dialogues_live [--dialogues N] [--at-once N] [--turns N] [--memory SHARE] [--ssd SHARE]
                                        [--unharmed] [--store]

The cluster stands for two hosts, each with a pool node, a prefill and a decode node (2P+2D), and has two conductors and
two frontends, each of which prefers another conductor. Half of the dialogues use either frontend, `--at-once` dialogues
at a time. The pools' memory together holds `--memory` of the KV of all dialogues; with `--ssd`, they also have SSDs for
that share of it. A prefill node's own slots hold one dialogue. When half of the turns have ended, one conductor is
killed (SIGKILL): its frontend continues with the other one, and it starts again without any state.

`dialogue_reuse` is the share of all prompt tokens, those of first turns included, whose KV was reused, with the 95 %
interval of this ratio over the dialogues. Every answer is verified token by token. The last line of output is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.frontend.processes import Served, another_frontend, cluster, frontend_preferring, long_folder
from benchmarks.stored import store
from loadtest.dialogue_config import DialogueConfig
from loadtest.dialogue_turns import Talk, TurnRecord, planned_turns, system_text, talk
from loadtest.http import open_session
from loadtest.server import ServerInfo, discover
from loadtest.tokens import ModelTokens, load_model_tokens
from loadtest.validity import clock_from
from loadtest.verify import Verification, load_reference, verify_records
from simulator.serving.confidence import Estimate, mean_of

HOSTS = CONDUCTORS = 2
BLOCK_TOKENS = 16
KV_BYTES = 256  # per token, about
QUESTION_TOKENS, ANSWER_TOKENS, SYSTEM_TOKENS = 15, 25, 64
TEMPLATE_TOKENS = 10  # of the chat template around a question and its answer
READY_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dialogues", type=int, default=40, help="number of dialogues")
    parser.add_argument("--at-once", type=int, default=4, help="number of concurrent dialogues")
    parser.add_argument("--turns", type=int, default=90, help="questions of each dialogue")
    parser.add_argument("--memory", type=float, default=0.2, help="share of the dialogues' KV that fits into memory")
    parser.add_argument("--ssd", type=float, default=0.0, help="share of it that fits on SSDs in addition")
    parser.add_argument("--think", type=float, default=0.05, help="mean seconds between an answer and a question")
    parser.add_argument("--unharmed", action="store_true", help="kill no conductor")
    parser.add_argument("--store", action="store_true", help="write the result")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        result = measure(args, Path(name))
    if args.store:
        store("dialogues-live", result)
    print(json.dumps(result, allow_nan=False))


def measure(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Run the cluster and the dialogues, verify the answers, and return the figures."""
    dialogue_tokens = args.turns * (QUESTION_TOKENS + ANSWER_TOKENS + TEMPLATE_TOKENS) + SYSTEM_TOKENS
    # Lengths are random: the longest of many dialogues exceeds the mean by less than a quarter.
    slots_tokens = -(-dialogue_tokens * 5 // 4 // BLOCK_TOKENS) * BLOCK_TOKENS
    all_tokens = args.dialogues * dialogue_tokens
    pool_tokens = round(args.memory * all_tokens / HOSTS)
    folder = long_folder(work / "dialogues", slots_tokens)
    flags = ["--engine", "paced", "--paced-profile", "instant", "--paced-kv-bytes", str(KV_BYTES)]
    flags += ["--paced-answer-tokens", "0", "--prefill-nodes", str(HOSTS), "--decode-nodes", str(HOSTS)]
    flags += ["--pool-nodes", str(HOSTS), "--conductors", str(CONDUCTORS), "--frontends", "1"]
    flags += ["--block-tokens", str(BLOCK_TOKENS), "--capacity-tokens", str(slots_tokens)]
    flags += ["--pool-bytes", str(pool_tokens * KV_BYTES)]
    if args.ssd:
        (work / "ssd").mkdir()
        flags += ["--pool-ssd-dir", str(work / "ssd")]
        flags += ["--pool-ssd-bytes", str(max(64 << 20, round(args.ssd * all_tokens / HOSTS) * KV_BYTES))]
    config = DialogueConfig(
        url="http://127.0.0.1",
        out=work,
        model_path=folder,
        dialogues=args.at_once,
        total=args.dialogues,
        turns=args.turns,
        think_time_s=args.think,
        system_tokens=SYSTEM_TOKENS,
        turn_tokens=QUESTION_TOKENS,
        answer_tokens=ANSWER_TOKENS,
    )
    names = [frontend_preferring(conductor, CONDUCTORS) for conductor in range(CONDUCTORS)]
    other = next(name for name in names if name != "frontend")
    with (
        cluster(folder, work, *flags) as served,
        another_frontend(folder, work, other, "--block-tokens", str(BLOCK_TOKENS)) as (url, _),
    ):
        began = time.monotonic()
        records, server, killed_at = asyncio.run(converse(config, [served.url, url], served, harmed=not args.unharmed))
        took_s = time.monotonic() - began
    return figures(args, records, folder, server, slots_tokens, pool_tokens) | {
        "seconds": took_s,
        "killed_at": killed_at,
    }


async def converse(
    config: DialogueConfig, urls: Sequence[str], served: Served, *, harmed: bool
) -> tuple[list[TurnRecord], ServerInfo, int]:
    """Run all dialogues; return their turns, the server, and the number of turns that had ended at the kill."""
    tokens = load_model_tokens(config.model_path)
    records: list[TurnRecord] = []
    async with open_session(api_key="") as session:
        talks = []
        for url in urls:
            server = await discover(session, url, model="", deadline_s=READY_S)
            talks.append(
                Talk(
                    session=session,
                    server=server,
                    clock=clock_from(time.monotonic()),
                    timeout_s=config.request_timeout_s,
                    temperature=config.temperature,
                    truncation=config.truncation,
                    cache_salt="dialogues",
                    max_model_len=server.max_model_len or 0,
                    records=records,
                )
            )
        talking = asyncio.create_task(_all(config, talks, tokens))
        killed_at = 0
        while not talking.done():
            ended = sum(record.completed for record in records)
            print(f"\r{ended} turns", end="", file=sys.stderr, flush=True)
            if harmed and not killed_at and ended >= config.num_dialogues * config.turns // 2:
                preferred = next(i for i in range(CONDUCTORS) if frontend_preferring(i, CONDUCTORS) == "frontend")
                victim = ("conductor", "conductor-1")[preferred]
                os.kill(served.pids[victim], signal.SIGKILL)
                killed_at = ended
            await asyncio.sleep(0.2)
        await talking
    return records, talks[0].server, killed_at


async def _all(config: DialogueConfig, talks: Sequence[Talk], tokens: ModelTokens) -> None:
    """Run the dialogues, `config.dialogues` at a time, with the frontends in turn."""
    system = system_text(config, tokens)
    waiting = iter(range(config.num_dialogues))

    async def one_after_another() -> None:
        for dialogue in waiting:
            await talk(talks[dialogue % len(talks)], dialogue, system, planned_turns(config, dialogue, tokens))

    async with asyncio.TaskGroup() as group:
        for _ in range(config.dialogues):
            group.create_task(one_after_another())


def figures(
    args: argparse.Namespace,
    turns: Sequence[TurnRecord],
    folder: Path,
    server: ServerInfo,
    slots_tokens: int,
    pool_tokens: int,
) -> dict[str, Any]:
    """Verify the answers and return the figures of the run."""
    done = [turn for turn in turns if turn.completed]
    prompts = {turn.request.index: np.array(turn.request.prompt_ids, np.int32) for turn in done}
    reference = load_reference(server, folder, device="cpu", threads=None)
    checked = verify_records(reference, [turn.request for turn in done], prompts, Verification())
    last = {turn.dialogue: turn.request.prompt_tokens + turn.request.output_tokens for turn in done}
    history = sum(turn.history_tokens for turn in done)
    return {
        "dialogue_reuse": asdict(reuse(done)),
        "of_history": sum(turn.request.cached_tokens for turn in done) / history,
        "dialogues": args.dialogues,
        "at_once": args.at_once,
        "turns_per_dialogue": args.turns,
        "turns": args.dialogues * args.turns,
        "completed": len(done),
        "lost": args.dialogues * args.turns - len(done),
        "reasons": sorted({turn.request.reason for turn in turns if not turn.completed}),
        "prompt_tokens": sum(turn.request.prompt_tokens for turn in done),
        "verified": checked.verified_requests,
        "wrong_tokens": checked.wrong_tokens,
        "kv_tokens": sum(last.values()),
        "pool_share": HOSTS * pool_tokens / sum(last.values()),
        "slots_share": HOSTS * slots_tokens / sum(last.values()),
        "ssd_share": args.ssd,
        "less_reused": worst(done),
    }


def reuse(turns: Sequence[TurnRecord]) -> Estimate:
    """Return reused over prompt tokens, with the interval of a ratio estimate over dialogues (linearised)."""
    prompts: dict[int, int] = {}
    cached: dict[int, int] = {}
    for turn in turns:
        prompts[turn.dialogue] = prompts.get(turn.dialogue, 0) + turn.request.prompt_tokens
        cached[turn.dialogue] = cached.get(turn.dialogue, 0) + turn.request.cached_tokens
    ratio, mean = sum(cached.values()) / sum(prompts.values()), fmean(prompts.values())
    residuals = mean_of([(cached[each] - ratio * prompts[each]) / mean for each in prompts])
    return Estimate(ratio, ratio + residuals.low, ratio + residuals.high)


def worst(turns: Sequence[TurnRecord]) -> list[dict[str, int]]:
    """Return the turns whose history was reused least, in tokens lost."""
    lost = sorted(turns, key=lambda turn: turn.request.cached_tokens - turn.history_tokens)[:20]
    return [
        {
            "dialogue": turn.dialogue,
            "turn": turn.turn,
            "index": turn.request.index,
            "lost": turn.history_tokens - turn.request.cached_tokens,
        }
        for turn in lost
    ]


if __name__ == "__main__":
    main()
