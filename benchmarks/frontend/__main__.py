"""Cost of frontend and conductor with nodes that compute nothing, and stalls of their event loops.

    python -m benchmarks.frontend [--requests N] [--streams N] [--rounds N] [--store]

The conductor (with its decision log) and the frontend are real; the nodes implement the real protocol and compute
nothing. The baseline ("floor") is a bare uvicorn that streams events of the same size. Both alternate:

- requests: short requests, 16 at a time: requests/s and CPU time per request of each process; and sequentially, the
  time to the first token;
- burst: 500 requests at once;
- streams: 1,000 concurrent streams with one token per step: tokens/s, the excess of token intervals over the step,
  memory, and incomplete answers;
- long: prompts of 128k tokens as ids, text and chat, alone and several at once, beside short requests; and the
  scheduling time by prompt length.

Each measurement includes the stalls of the event loops. Wall times depend on the machine's load; CPU times and stalls
by the process's own work do not. The last line of output is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.frontend.load import StreamedAnswer, ask, gaps, many, percentile
from benchmarks.frontend.processes import Served, floor, long_folder, scripted_cluster
from benchmarks.stored import store

Figures = dict[str, Any]
LONG = 128_000
WORDS = ["the", "of", "and", "people", "water", "before", "little", "because", "right", "where", "come", "place"]


def short(model: str, tokens: int, seed: int) -> dict[str, Any]:
    """Return a request with a random prompt of 64 tokens."""
    ids = random.Random(seed).choices(range(5, 2000), k=64)
    return {"model": model, "prompt": ids, "max_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 0}


async def requests(served: Served, count: int, seed: int) -> Figures:
    """Send short requests, 16 at a time, then sequentially."""
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


async def burst(served: Served, count: int, seed: int) -> Figures:
    """Send short requests all at once."""
    began = time.monotonic()
    answers = await many(served.url, [short(served.model, 8, seed + i) for i in range(count)], count)
    took_s = time.monotonic() - began
    check(answers)
    last_s = max(one.at[0] - one.began for one in answers)
    return {"took_s": took_s, "last_first_token_s": last_s, "held_ms": await held(served, began)}


async def streams(served: Served, count: int, tokens: int, step_s: float) -> Figures:
    """Run `count` concurrent streams of `tokens` tokens, one per step."""
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
        "held_ms": await held(served, began),
    }


async def held(served: Served, since_s: float) -> Figures:
    """Return the stalls of each watched event loop."""
    return {name: asdict(each) for name, each in (await asyncio.to_thread(served.held, since_s)).items()}


async def long_prompts(served: Served, each: int) -> Figures:
    """Send long prompts beside short requests."""
    found: Figures = {}
    rng = random.Random(7)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:

        async def long(kind: str, tokens: int = LONG) -> float:
            """Send a long prompt and return its scheduling time in seconds."""
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
            began = time.monotonic()
            beside = asyncio.create_task(many(served.url, [short(served.model, 32, i) for i in range(200)], 4))
            for _ in range(each):
                await long(kind)
            await asyncio.gather(*(long(kind) for _ in range(3)))
            check(await beside)
            found.setdefault("held_ms", {})[kind] = await held(served, began)
    return found


def check(answers: list[StreamedAnswer]) -> None:
    """Check that every answer is complete. An answer may have fewer events than tokens, as tokens are coalesced."""
    wrong = [one for one in answers if not (one.status == 200 and one.is_whole and one.at)]
    if wrong:
        raise SystemExit(f"{len(wrong)} of {len(answers)} answers are incomplete, the first: {wrong[0]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--burst", type=int, default=500)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=24, help="tokens of each stream")
    parser.add_argument("--step", type=float, default=0.5, help="seconds between two tokens of a stream")
    parser.add_argument("--long", type=int, default=3, help="sequential long prompts of each kind")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of requests")
    parser.add_argument("--store", action="store_true", help="write the result")
    args = parser.parse_args()
    result: Figures = {}
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        folder = long_folder(work / "long", 262_144)
        with scripted_cluster(folder, work / "instant", 0) as served, floor(0) as bare:
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
            bursts = [asyncio.run(burst(served, args.burst, 100_000 * turn)) for turn in range(args.rounds)]
            result["burst"] = max(bursts, key=lambda one: float(one["held_ms"]["frontend"]["held_max"]))
            print(json.dumps(result["burst"]), flush=True)
            result["long"] = asyncio.run(long_prompts(served, args.long))
            print(json.dumps(result["long"]), flush=True)
        with scripted_cluster(folder, work / "steps", args.step) as served, floor(args.step) as bare:
            ours = asyncio.run(streams(served, args.streams, args.tokens, args.step))
            theirs = asyncio.run(streams(bare, args.streams, args.tokens, args.step))
            over = ours["cpu_us_per_token"]["frontend"] / theirs["cpu_us_per_token"]["frontend"]
            result["streams"] = {"moonpool": ours, "floor": theirs, "frontend_cpu_over_floor": over}
    print(json.dumps(result, indent=1))
    if args.store:
        store("frontend", result)
    print(json.dumps(result))


def _medians(rounds: list[Figures]) -> Figures:
    """Return the median of each figure over the rounds."""
    first = rounds[0]
    return {
        name: _medians([each[name] for each in rounds])
        if isinstance(first[name], dict)
        else statistics.median(each[name] for each in rounds)
        for name in first
    }


if __name__ == "__main__":
    main()
