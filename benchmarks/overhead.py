"""Overhead of the cluster over a single process: TTFT through frontend, conductor and prefill node, and of the engine.

    python -m benchmarks.overhead [--model FOLDER] [--requests N] [--lengths N ...] [--store]

Per prompt length, without load and reuse (a cache salt per request): the client's TTFT, its parts as reported by the
cluster (queue, load, prefill; the rest is HTTP, tokenisation, scheduling, reservation and return), and the TTFT of the
same prompt in `engine` in this process; also the mean time between tokens of both. Both alternate, so that ratios hold
on a busy machine. `--store` writes benchmarks/results/overhead-DATE.json. The last line of output is JSON:
`ttft_ratio_N` and `tbt_ratio`, the cluster's medians divided by those of one process, for prompts of N tokens and over
all lengths.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.stored import store
from engine import ForwardBatch, Model, SamplingRow, SequenceChunk, load_model, sample

BUNDLED = Path(__file__).parents[1] / "moonpool" / "data" / "model"
BLOCK = 16
OUTPUT = 16


def bare(model: Model, prompt: np.ndarray[Any, np.dtype[np.int32]]) -> tuple[float, float]:
    """Return (TTFT, mean time between tokens) in seconds of the engine in this process."""
    blocks = -(-(len(prompt) + OUTPUT) // BLOCK)
    cache = model.new_cache((blocks,) * len(model.kv_groups), BLOCK)
    tables = (np.arange(blocks, dtype=np.int32),) * len(model.kv_groups)
    row = SamplingRow(0.0, 1.0, 0, 0, 0, 0)
    began = time.perf_counter()
    tokens, start, first = prompt, 0, 0.0
    for index in range(OUTPUT):
        logits = model.forward(ForwardBatch([SequenceChunk(tokens, start, tables, True)]), cache)
        start += len(tokens)
        tokens = sample(logits, [row]).astype(np.int32)
        if index == 0:
            first = time.perf_counter()
    return first - began, (time.perf_counter() - first) / (OUTPUT - 1)


async def served(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, float]:
    """Send a streaming request; return the client's TTFT and TBT, and the parts reported by the cluster, in seconds."""
    times: list[float] = []
    own: dict[str, Any] = {}
    began = time.perf_counter()
    async with session.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                times += [time.perf_counter()] * sum(len(c.get("token_ids") or []) for c in event["choices"])
                own = event.get("moonpool") or own
    parts = {name: float(own[name]) for name in ("queue_s", "load_s", "prefill_s")}
    ttft = times[0] - began
    return {"ttft_s": ttft, "tbt_s": (times[-1] - times[0]) / (len(times) - 1), **parts}


async def measure(url: str, model_name: str, model: Model, lengths: list[int], requests: int) -> list[dict[str, float]]:
    rng = np.random.default_rng(0)
    rows = []
    async with aiohttp.ClientSession() as session:
        for length in lengths:
            through: list[dict[str, float]] = []
            alone: list[tuple[float, float]] = []
            for turn in range(requests + 1):
                prompt = rng.integers(10, 2000, length).astype(np.int32)
                body = {
                    "model": model_name,
                    "prompt": prompt.tolist(),
                    "max_tokens": OUTPUT,
                    "ignore_eos": True,
                    "temperature": 0.0,
                    "stream": True,
                    "return_token_ids": True,
                    "stream_options": {"include_usage": True},
                    "cache_salt": f"{length}-{turn}",
                }
                one, two = await served(session, url, body), bare(model, prompt)
                if turn:  # the first round warms up both
                    through.append(one)
                    alone.append(two)
            row = {"prompt_tokens": float(length)}
            row |= {name: statistics.median(r[name] for r in through) for name in through[0]}
            row["bare_ttft_s"] = statistics.median(t for t, _ in alone)
            row["bare_tbt_s"] = statistics.median(t for _, t in alone)
            row["other_s"] = row["ttft_s"] - row["queue_s"] - row["load_s"] - row["prefill_s"]
            rows.append(row)
    return rows


def ratios(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return the cluster's times divided by those of one process."""
    found = {f"ttft_ratio_{row['prompt_tokens']:.0f}": round(row["ttft_s"] / row["bare_ttft_s"], 3) for row in rows}
    return found | {"tbt_ratio": round(statistics.median(row["tbt_s"] / row["bare_tbt_s"] for row in rows), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=BUNDLED)
    parser.add_argument("--requests", type=int, default=9)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--store", action="store_true", help="write the result")
    args = parser.parse_args()
    model = load_model(args.model, threads=1)
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready.json"
        command = [sys.executable, "-m", "moonpool", "serve", str(args.model), "--port", "0", "--threads", "1"]
        command += ["--block-tokens", str(BLOCK), "--ready-file", str(ready)]
        with subprocess.Popen(command, env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}) as cluster:
            try:
                deadline = time.monotonic() + 120
                while not ready.exists():
                    if cluster.poll() is not None or time.monotonic() > deadline:
                        raise SystemExit("the cluster did not start")
                    time.sleep(0.1)
                told = json.loads(ready.read_text())
                rows = asyncio.run(measure(told["url"], told["model"], model, args.lengths, args.requests))
            finally:
                cluster.send_signal(signal.SIGINT)
    table = Table(title="median milliseconds, unloaded, no reuse")
    columns = ["prompt_tokens", "bare_ttft_s", "ttft_s", "queue_s", "load_s", "prefill_s", "other_s"]
    columns += ["bare_tbt_s", "tbt_s"]
    for name in columns:
        table.add_column(name.removesuffix("_s"), justify="right")
    for row in rows:
        table.add_row(f"{row['prompt_tokens']:.0f}", *(f"{row[name] * 1e3:.2f}" for name in columns[1:]))
    Console().print(table)
    result = ratios(rows)
    if args.store:
        run = f"python -m benchmarks.overhead --requests {args.requests}"
        store("overhead", {"command": run, **result, "rows": rows})
    print(json.dumps({**result, "rows": rows}))


if __name__ == "__main__":
    main()
