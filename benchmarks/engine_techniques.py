"""Ablation of PPL.LLM's techniques in the native engine, on one trace.

The server (`benchmarks/techniques`) is made of the workers' own parts: engine loop, slots, safe growth, the conductor's
predictor of lengths, the frontend's tokenizer. Requests have the lengths of the bundled conversation trace, scaled
down, and a `max_tokens` far above most answers, as clients send it. The model has random weights and is so large that
decoding waits for them, as on a GPU; the engine has one core and the host's stages the other. Each technique is turned
off by itself:

    stages       tokenise | compute and sample | detokenise and send, against all of it on the engine's thread
    merge        decoding sequences and prompts in one step, against steps of either; and against static batches
    allocation   pages by predicted length, against pages on demand and against reserving for `max_tokens`

QPS and throughput are of requests sent all at once; first-token and token latency (the definitions of PPL.LLM: from
sending to the first token; from there on per token) of requests sent at 60 % of the full server's QPS. Runs of all
variants alternate, and ratios are of medians. `tokens_equal` is the share of requests with the same greedy tokens in
all runs. What needs a GPU is not measured here: W8A8, int4 weights and CUDA graphs (`make gpu-proof`). The last line of
output is JSON. `--store` writes benchmarks/results/engine-techniques-DATE.json.

    python benchmarks/engine_techniques.py [--store]
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

# Replace this folder on the path by the repository root: scripts here may have the names of packages.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.stored import store  # noqa: E402
from benchmarks.techniques.stages import ServerRun, ServerSetting, serve  # noqa: E402
from benchmarks.techniques.workload import Technique, arrivals, pages_of_documentation  # noqa: E402
from engine.random_model import RandomModelSpec, write_random_model  # noqa: E402
from frontend.tokenizer import Tokenizer  # noqa: E402
from settings.worker import BUNDLED_MODEL  # noqa: E402

FULL: Final = "all techniques"
VARIANTS: Final = {
    FULL: Technique(),
    "stages: serial": Technique(stages="serial"),
    "merge: steps of either": Technique(batching="apart"),
    "merge: static batches": Technique(batching="static"),
    "allocation: pages on demand": Technique(allocation="pages"),
    "allocation: reserve-max": Technique(allocation="reserve-max"),
}
CLAIMS: Final = {
    "stages: serial": "+10 to 20 %",
    "merge: static batches": "+100 %",
    "allocation: reserve-max": "+200 %",
}
MODEL: Final = RandomModelSpec(
    layers=8, hidden=512, heads=8, kv_heads=2, intermediate=1536, vocab=2048, max_len=1024, scale=3.0, seed=5
)
LOAD: Final = 0.6
PUBLISHED_STEP_US: Final = 20_180.0


def measured(run: ServerRun) -> dict[str, Any]:
    """Return the figures of a run."""
    tokens = sum(len(one.tokens) for one in run.served)
    return {
        "qps": len(run.served) / run.seconds,
        "tokens_per_s": tokens / run.seconds,
        "max_running": run.max_running,
        "waits_for_pages": run.num_waits,
        "host_us_per_token": 1e6 * run.host_s / tokens,
    }


def latencies(run: ServerRun, sent_s: list[float]) -> dict[str, float]:
    """Return first-token and token latency, seconds."""
    first = [one.first_token_s - at_s for one, at_s in zip(run.served, sent_s, strict=True)]
    each = [(one.end_s - one.first_token_s) / (len(one.tokens) - 1) for one in run.served if len(one.tokens) > 1]
    return {
        "first_token_p50_s": float(np.median(first)),
        "first_token_p99_s": float(np.quantile(first, 0.99)),
        "token_p50_s": float(np.median(each)),
        "token_p99_s": float(np.quantile(each, 0.99)),
    }


def measure(count: int, repetitions: int, setting: ServerSetting) -> dict[str, Any]:
    """Return the result of all variants."""
    tokenizer, text = Tokenizer(setting.model), pages_of_documentation()
    at_once = arrivals(count, tokenizer, text, None)
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in VARIANTS}
    answers: list[set[tuple[int, ...]]] = [set() for _ in range(count)]

    def note(run: ServerRun) -> None:
        for found, one in zip(answers, run.served, strict=True):
            found.add(one.tokens)

    for repetition in range(repetitions):
        for name, technique in VARIANTS.items():
            run = serve(technique, at_once, setting)
            note(run)
            rows[name].append(measured(run))
            qps = rows[name][-1]["qps"]
            print(f"{name}: {qps:.2f} requests/s ({repetition + 1} of {repetitions})", file=sys.stderr, flush=True)
    variants = {
        name: {key: statistics.median(row[key] for row in found) for key in found[0]} for name, found in rows.items()
    }
    paced = arrivals(count, tokenizer, text, LOAD * variants[FULL]["qps"])
    for name, technique in VARIANTS.items():
        run = serve(technique, paced, setting)
        note(run)
        variants[name] |= latencies(run, [request.at_s for request in paced])
        print(f"{name}: first token {variants[name]['first_token_p50_s']:.3f} s", file=sys.stderr, flush=True)

    def ratio(other: str) -> float:
        return float(variants[FULL]["qps"] / variants[other]["qps"])

    return {
        "stages_qps_ratio": ratio("stages: serial"),
        "merge_qps_ratio": ratio("merge: static batches"),
        "merge_to_separate_steps_qps_ratio": ratio("merge: steps of either"),
        "predicted_vs_reserve_qps_ratio": ratio("allocation: reserve-max"),
        "predicted_vs_pages_qps_ratio": ratio("allocation: pages on demand"),
        "tokens_equal": sum(len(found) == 1 for found in answers) / count,
        # What overlapping hides; the share is of a decode step of PPL.LLM's table (64 sequences on an H800).
        "host_us_per_token": variants["stages: serial"]["host_us_per_token"],
        "host_share_of_published_step": 64 * variants["stages: serial"]["host_us_per_token"] / PUBLISHED_STEP_US,
        "requests": count,
        "capacity_tokens": setting.capacity_tokens,
        "variants": variants,
        "claims": CLAIMS,
    }


def show(result: dict[str, Any]) -> None:
    """Print a row for each variant."""
    table = Table(title=f"{result['requests']} requests")
    for heading in ("server", "QPS", "all techniques", "PPL.LLM", "tokens/s", "running", "first token", "p99", "token"):
        table.add_column(heading)
    full = result["variants"][FULL]["qps"]
    for name, row in result["variants"].items():
        table.add_row(
            name,
            f"{row['qps']:.2f}",
            f"{full / row['qps'] - 1:+.0%}",
            CLAIMS.get(name, ""),
            f"{row['tokens_per_s']:.0f}",
            f"{row['max_running']:.0f}",
            f"{1e3 * row['first_token_p50_s']:.0f} ms",
            f"{1e3 * row['first_token_p99_s']:.0f} ms",
            f"{1e3 * row['token_p50_s']:.1f} ms",
        )
    Console(file=sys.stderr, width=150).print(table)


def main() -> None:
    """Measure, print a table and the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64, help="number of requests of a run")
    parser.add_argument("--repetitions", type=int, default=3, help="runs of each server")
    parser.add_argument("--capacity-tokens", type=int, default=1600, help="of the KV cache")
    parser.add_argument("--store", action="store_true", help="store the result")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_random_model(Path(folder) / "model", MODEL, tokenizer=BUNDLED_MODEL)
        result = measure(args.requests, args.repetitions, ServerSetting(model, args.capacity_tokens, threads=1))
    show(result)
    if args.store:
        store("engine-techniques", result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
