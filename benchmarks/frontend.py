"""What HTTP and the conductor cost in front of nodes that take no time, and whether anything stops their event loops.

    python -m benchmarks.frontend [--requests N] [--streams N] [--seconds S] [--rounds N]

Beside a bare uvicorn that streams events of the same size from nothing (the floor), in turns:

- requests: short ones, 16 at a time, instant engines: requests/s, CPU time per request of each process, and alone, one
  after another, the time to the first token;
- streams: 1,000 at once whose tokens come one per paced step: tokens/s, and by how much an interval between two of them
  is longer than the step; memory, and answers that did not come whole;
- stalls: prompts of 128k tokens as ids, as text and as a chat, alone and several at once, while short requests run: the
  longest that each event loop was held by its process's own work, and the time of a decision by prompt length.

Wall times are of the machine as it is; CPU time and what is held by own work do not depend on what else it does. One
JSON line at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.front_door.load import Stream, ask, gaps, many, percentile
from benchmarks.front_door.processes import Served, cluster, floor, long_folder
from worker.paced.profiles import profile_of
from worker.policy.cost_profile import save_profile

Figures = dict[str, Any]
LONG = 128_000
WORDS = ["the", "of", "and", "people", "water", "before", "little", "because", "right", "where", "come", "place"]


def short(model: str, tokens: int, seed: int) -> dict[str, Any]:
    """A request of 64 prompt tokens, no two alike."""
    ids = random.Random(seed).choices(range(5, 2000), k=64)
    return {"model": model, "prompt": ids, "max_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 0}


async def requests(served: Served, count: int, seed: int) -> Figures:
    """Short requests: 16 at a time, then one after another."""
    bodies = [short(served.model, 8, seed + i) for i in range(count)]
    await many(served.url, bodies[:16], 16)  # warm: streams to the workers are attached
    cpu, began = served.cpu_s(), time.monotonic()
    answers = await many(served.url, bodies, 16)
    took_s, after = time.monotonic() - began, served.cpu_s()
    check(answers)
    alone = [await ask(served.url, short(served.model, 8, seed + count + i)) for i in range(max(10, count // 10))]
    return {
        "requests_per_s": count / took_s,
        "first_token_ms": 1e3 * statistics.median(one.at[0] - one.began for one in alone),
        "cpu_ms_per_request": {name: 1e3 * (after[name] - cpu[name]) / count for name in after},
    }


async def streams(served: Served, count: int, tokens: int, step_s: float) -> Figures:
    """All at once, each with `tokens` tokens, one per step."""
    await many(served.url, [short(served.model, 2, i) for i in range(8)], 8)
    before, cpu, began = served.rss("frontend"), served.cpu_s(), time.monotonic()
    answers = await many(served.url, [short(served.model, tokens, 100 + i) for i in range(count)], count)
    took_s, after = time.monotonic() - began, served.cpu_s()
    steady = [replace(one, at=one.at[1:]) for one in answers]  # the first interval holds the hand-over
    added = [gap - step_s for gap in gaps(steady)]
    return {
        "lost": sum(not one.is_whole for one in answers),
        "tokens_per_s": sum(tokens for one in answers if one.is_whole) / took_s,
        "added_ms_p50": 1e3 * percentile(added, 0.5),
        "added_ms_p99": 1e3 * percentile(added, 0.99),
        "cpu_us_per_token": {name: 1e6 * (after[name] - cpu[name]) / (count * tokens) for name in after},
        "frontend_kib_per_stream": (served.rss("frontend") - before) / 1024 / count,
        "event_loop_held_ms": {name: 1e3 * s for name, s in await held(served)} if "conductor" in served.pids else {},
    }


async def held(served: Served) -> list[tuple[str, float]]:
    """The longest that each loop was held by own work of late; the conductor's is told once a second."""
    await asyncio.sleep(3)
    return sorted((await asyncio.to_thread(served.metric, "event_loop_held_seconds")).items())


async def stalls(served: Served, each: int) -> Figures:
    """Long prompts beside short requests."""
    found: Figures = {}
    rng = random.Random(7)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:

        async def long(kind: str, tokens: int = LONG) -> float:
            """Seconds that scheduling it took."""
            body = {"model": served.model, "max_tokens": 4, "ignore_eos": True}
            if kind == "ids":
                body |= {"prompt": rng.choices(range(5, 2000), k=tokens)}
            else:
                text = " ".join(rng.choices(WORDS, k=int(tokens * 0.85)))
                body |= {"prompt": text} if kind == "text" else {"messages": [{"role": "user", "content": text}]}
            path = "chat/completions" if kind == "chat" else "completions"
            async with session.post(f"{served.url}/v1/{path}", json=body) as reply:
                answer = await reply.json()
                assert reply.status == 200, answer
            return float(answer["moonpool"]["schedule_s"])

        await many(served.url, [short(served.model, 8, i) for i in range(32)], 8)
        for tokens in (128, 2_000, 16_000, LONG):
            taken = [await long("ids", tokens) for _ in range(5)]
            found.setdefault("schedule_ms", {})[str(tokens)] = 1e3 * statistics.median(taken)
        for kind in ("ids", "text", "chat"):
            beside = asyncio.create_task(many(served.url, [short(served.model, 32, i) for i in range(200)], 4))
            for _ in range(each):
                await long(kind)
            await asyncio.gather(*(long(kind) for _ in range(3)))
            check(await beside)
            found.setdefault("held_ms", {})[kind] = {name: 1e3 * s for name, s in await held(served)}
    counted = await asyncio.to_thread(served.metric, "event_loop_stalls_total")
    return found | {"stalls_of_50_ms": counted}


def check(answers: list[Stream]) -> None:
    """Every answer is whole. (Its events may be fewer than its tokens: those that wait together go out together.)"""
    wrong = [one for one in answers if not (one.status == 200 and one.is_whole and one.at)]
    if wrong:
        raise SystemExit(f"{len(wrong)} of {len(answers)} answers are not whole, the first: {wrong[0]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=24, help="of each stream")
    parser.add_argument("--step", type=float, default=0.5, help="seconds between two tokens of a stream")
    parser.add_argument("--long", type=int, default=3, help="long prompts of each kind, one after another")
    parser.add_argument("--rounds", type=int, default=3, help="of requests, cluster and floor in turns")
    args = parser.parse_args()
    result: Figures = {}
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        folder = long_folder(work / "long", 262_144)
        small = ["--paced-kv-bytes", "64", "--pool-bytes", "256MiB", "--max-queue", "600"]
        with (
            cluster(folder, work / "instant", *small, "--capacity-tokens", "1200000") as served,
            floor(0) as bare,
        ):
            rounds = []
            for turn in range(args.rounds):
                ours = asyncio.run(requests(served, args.requests, 10_000 * turn))
                rounds.append((ours, asyncio.run(requests(bare, args.requests, 10_000 * turn))))
            result["requests"] = {
                "moonpool": _medians([a for a, _ in rounds]),
                "floor": _medians([b for _, b in rounds]),
            }
            ours_cpu = [a["cpu_ms_per_request"]["frontend"] / b["cpu_ms_per_request"]["frontend"] for a, b in rounds]
            result["requests"]["frontend_cpu_over_floor"] = statistics.median(ours_cpu)
            print(json.dumps(result), flush=True)
            result["stalls"] = asyncio.run(stalls(served, args.long))
            print(json.dumps(result["stalls"]), flush=True)
        instant = profile_of("instant")
        profile = replace(instant, name="steps", decode=replace(instant.decode, fixed_s=args.step))
        save_profile(profile, work / "steps.json")
        flags = [*small, "--paced-profile", str(work / "steps.json"), "--max-batch", str(args.streams)]
        capacity = str((args.streams + 16) * 112)
        with cluster(folder, work / "steps", *flags, "--capacity-tokens", capacity) as served, floor(args.step) as bare:
            ours = asyncio.run(streams(served, args.streams, args.tokens, args.step))
            theirs = asyncio.run(streams(bare, args.streams, args.tokens, args.step))
            over = ours["cpu_us_per_token"]["frontend"] / theirs["cpu_us_per_token"]["frontend"]
            result["streams"] = {"moonpool": ours, "floor": theirs, "frontend_cpu_over_floor": over}
    print(json.dumps(result, indent=1))
    print(json.dumps(result))


def _medians(rounds: list[Figures]) -> Figures:
    """Of each figure, over the rounds."""
    first = rounds[0]
    return {
        name: _medians([each[name] for each in rounds])
        if isinstance(first[name], dict)
        else statistics.median(each[name] for each in rounds)
        for name in first
    }


if __name__ == "__main__":
    main()
