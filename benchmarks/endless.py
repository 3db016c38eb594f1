"""Endless generation: time and memory over a long answer in a live cluster, and the loss of what the window leaves.

    python -m benchmarks.endless [--tokens N] [--window N] [--text-tokens N] [--model FOLDER] [--store]

    live      one answer of `--tokens` tokens through a prefill and a decode node: time per token in the first and in
              the last tenth after the window is full, KV that is free then, resident memory of the decode node
    losses    the repository's documentation, teacher-forced: loss per token by position with everything visible
              (`dense`), with a window that slides by a block and 0, 1 or 4 sinks, with 4 sinks and a window that
              slides by an eighth of its size, as requests have it, and with the window computed again for each token
              (`recompute`, at sampled positions)

The last line of output is JSON, with `time_ratio_last_first`, `memory_growth_bytes` (of KV), `loss_gap_to_recompute`
(4 sinks, sliding by an eighth, less `recompute`, at the same positions) and `window_only_collapse` (no sinks, less 4
sinks), in nats per token behind the window. `--store` writes benchmarks/results/endless-DATE.json and
docs/pictures/endless.svg.
"""

import argparse
import asyncio
import itertools
import json
import re
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

import aiohttp
import matplotlib.pyplot as plt
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer

from benchmarks.frontend.processes import BUNDLED, Served, cluster
from benchmarks.sse import completion_events
from benchmarks.stored import PICTURES, store
from engine import Model, load_model
from engine.rolling import RollingWindow
from frontend.endless import slide_of
from moonpool.sink_check import token_losses

ROOT = Path(__file__).resolve().parents[1]
TEXTS = ("docs/structure.md", "docs/kv-pool.md", "docs/costs.md", "docs/fairness.md", "docs/simulate.md", "docs/slo.md")
BLOCK = 16
SINKS = 4
CAPACITY_TOKENS = 8192  # of each worker
RECOMPUTE_EVERY = 7  # tokens from one sampled position to the next
BINS = 16


def main() -> None:
    args = _arguments()
    model = load_model(args.model, threads=1)
    losses = measure_losses(model, text_ids(args.model, args.text_tokens), args.window)
    with (
        tempfile.TemporaryDirectory() as name,
        cluster(args.model, Path(name), "--capacity-tokens", str(CAPACITY_TOKENS)) as served,
    ):
        live = asyncio.run(measure_live(served, args.tokens, args.window))
    behind = {mode: row["behind_window"] for mode, row in losses.items()}
    result = {
        "window": args.window,
        "sinks": SINKS,
        "live": live,
        "losses": losses,
        "time_ratio_last_first": live["last_token_s"] / live["first_token_s"],
        "memory_growth_bytes": live["kv_growth_bytes"],
        "loss_gap_to_recompute": gap_to_recompute(losses),
        "window_only_collapse": behind["window only"] - behind["4 sinks"],
    }
    show(result)
    if args.store:
        store("endless", result)
        draw(result, PICTURES / "endless.svg")
    print(json.dumps(result, allow_nan=False))


def text_ids(folder: Path, count: int) -> NDArray[np.int32]:
    """Return the documentation's first `count` tokens, after the tokenizer's first one."""
    text = "\n\n".join((ROOT / name).read_text(encoding="utf-8") for name in TEXTS)
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    first = json.loads((folder / "config.json").read_text())["bos_token_id"]
    return np.array([first, *ids][:count], np.int32)


def measure_losses(model: Model, ids: NDArray[np.int32], window: int) -> dict[str, dict[str, Any]]:
    """Return for each mode the loss per token, in bins of positions and behind the window."""
    modes = {
        "dense": None,
        "window only": RollingWindow(0, window, BLOCK, BLOCK),
        "1 sink": RollingWindow(1, window, BLOCK, BLOCK),
        "4 sinks": RollingWindow(SINKS, window, BLOCK, BLOCK),
        "4 sinks, by an eighth": RollingWindow(SINKS, window, slide_of(window, BLOCK), BLOCK),
    }
    positions = np.arange(len(ids) - 1)
    sampled = np.arange(window, len(ids) - 1, RECOMPUTE_EVERY)
    found = {}
    for mode, rolling in track(modes.items(), "losses", console=Console(file=sys.stderr)):
        losses = token_losses(model.score(ids, rolling), ids)
        found[mode] = _by_position(positions, losses, window) | {"where_recomputed": float(losses[sampled].mean())}
    again = np.array([recomputed_loss(model, ids, int(position), window) for position in sampled])
    mean = {"where_recomputed": float(again.mean())}
    return found | {"recompute": _by_position(sampled, again, window) | mean}


def gap_to_recompute(losses: dict[str, dict[str, Any]]) -> float:
    """Return what the sliding window costs, in nats per token, where the window was also computed anew."""
    gap: float = losses["4 sinks, by an eighth"]["where_recomputed"] - losses["recompute"]["where_recomputed"]
    return gap


def recomputed_loss(model: Model, ids: NDArray[np.int32], position: int, window: int) -> float:
    """Return the loss of the token after `position`, of which only the first token and the last ones are computed."""
    seen = np.concatenate([ids[:1], ids[position - window + 2 : position + 2]])
    return float(token_losses(model.score(seen), seen)[-1])


def _by_position(positions: NDArray[np.int64], losses: NDArray[np.float64], window: int) -> dict[str, Any]:
    edges = np.linspace(0, positions[-1] + 1, BINS + 1).astype(int)
    parts = [losses[(positions >= low) & (positions < high)] for low, high in itertools.pairwise(edges)]
    means = [float(part.mean()) if len(part) else None for part in parts]
    return {"by_position": means, "behind_window": float(losses[positions >= window].mean()), "tokens": len(losses)}


async def measure_live(served: Served, tokens: int, window: int) -> dict[str, float]:
    """Return times per token and memory over one answer of `tokens` tokens."""
    times, held = list[float](), list[asyncio.Task[float]]()
    early = max(2 * window, tokens // 10)
    resident = dict[int, int]()
    body: dict[str, Any] = {
        "model": served.model,
        "prompt": "In the beginning",
        "endless": {"sinks": SINKS, "window": window},
    }
    body |= {"stream": True, "return_token_ids": True, "ignore_eos": True, "temperature": 1.0, "seed": 1}
    marks = iter([early, tokens])
    mark = next(marks)
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
        session.post(f"{served.url}/v1/completions", json=body) as reply,
    ):
        async for event in completion_events(reply):
            now = time.perf_counter()
            times += [now] * sum(len(choice.get("token_ids") or ()) for choice in event["choices"])
            if len(times) >= mark:
                resident[mark] = served.rss("decode-0")
                held.append(asyncio.create_task(_held_tokens(session, served)))
                if mark == tokens:
                    break
                mark = next(marks)
            if len(times) % 5000 == 0:
                print(f"\r{len(times):,} of {tokens:,} tokens", end="", file=sys.stderr, flush=True)
        first_held, last_held = await asyncio.gather(*held)
    config = json.loads((BUNDLED / "config.json").read_text())
    row = 4 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    tenth = (len(times) - 2 * window) // 10
    steps = np.diff(np.array(times))[2 * window :]
    return {
        "tokens": len(times),
        "seconds": times[-1] - times[0],
        "first_token_s": fmean(steps[:tenth]),
        "last_token_s": fmean(steps[-tenth:]),
        "first_median_s": median(steps[:tenth]),
        "last_median_s": median(steps[-tenth:]),
        "kv_growth_bytes": row * (last_held - first_held),
        "resident_growth_bytes": resident[tokens] - resident[early],
    }


async def _held_tokens(session: aiohttp.ClientSession, served: Served) -> float:
    """Return the tokens whose slots the decode node holds, once it has reported that it holds some."""
    while True:
        async with session.get(f"{served.url}/metrics") as reply:
            text = await reply.text()
        found = re.findall(r'^vllm:kv_cache_usage_perc\{.*"decode-0".*\} (\S+)$', text, re.MULTILINE)
        if len(found) != 1:
            raise RuntimeError("the decode node does not report its use of KV")
        if share := float(found[0]):
            return share * CAPACITY_TOKENS
        await asyncio.sleep(0.1)


def show(result: dict[str, Any]) -> None:
    """Print the losses and the live figures."""
    table = Table(title=f"nats per token behind a window of {result['window']}")
    table.add_column("visible")
    table.add_column("loss", justify="right")
    for mode, row in result["losses"].items():
        table.add_row(mode, f"{row['behind_window']:.3f}")
    console = Console(file=sys.stderr, width=120)
    console.print(table)
    live = result["live"]
    console.print(
        f"{live['tokens']:,} tokens in {live['seconds']:,.0f} s: {1e3 * live['first_token_s']:.2f} ms per token in the "
        f"first tenth, {1e3 * live['last_token_s']:.2f} ms in the last; KV grew by {live['kv_growth_bytes']:,.0f} bytes"
    )


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the losses by position."""
    figure, axes = plt.subplots(figsize=(8, 4))
    for mode, row in result["losses"].items():
        axes.plot(row["by_position"], label=mode, marker="o", markersize=3)
    axes.set_xlabel("position, in sixteenths of the text")
    axes.set_ylabel("loss, nats per token")
    axes.set_title(f"What a window of {result['window']} tokens costs", loc="left")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, bbox_inches="tight")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000, help="length of the live answer")
    parser.add_argument("--window", type=int, default=256, help="tokens of the window")
    parser.add_argument("--text-tokens", type=int, default=8192, help="length of the text")
    parser.add_argument("--model", type=Path, default=BUNDLED, help="model folder")
    parser.add_argument("--store", action="store_true", help="store the result and its picture")
    return parser.parse_args()


if __name__ == "__main__":
    main()
