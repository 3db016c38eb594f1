"""Small KV in a live cluster: dialogues in a pool of fixed bytes, reuse, bytes moved and TTFT, for each model.

    python -m benchmarks.small_kv_live [--models NAME=FOLDER ...] [--turns N] [--dialogues N] [--fill N]
                                       [--pool-bytes BYTES] [--store]

The cluster has two prefill, two decode and two pool nodes. By default three models with random weights, of the sizes of
the bundled one, are served in turn: grouped-query attention; one KV head, windows of 1,024 tokens in 10 of 12 layers,
shared KV and learned sinks; and the same with KV, weights and activations in int8. The stored result is that of the
bundled model and its sibling in tests/data/small-kv-model, both trained.

    held        `--fill` histories of `--turns` turns are stored, two at a time, so that they go to both hosts, then
                continued from the newest to the oldest: the number of them of whose history at least nine tenths are
                reused. The workers' own slots have room for one each.
    dialogues   `--dialogues` at a time of 2 * `--turns` messages: the share of prompt tokens that are reused, bytes
                moved, TTFT, and the time per further token (TPOT) in the last half
    cold        every tenth of their turns again under a cache salt of its own, so that nothing is reused: TTFT, and
                the log-probabilities of the answer compared with those of the first time

The last line of output is JSON. `--store` writes benchmarks/results/small-kv-live-DATE.json.
"""

import argparse
import asyncio
import json
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import aiohttp
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.frontend.processes import BUNDLED, Served, cluster
from benchmarks.sse import completion_events
from benchmarks.stored import store
from engine.random_model import RandomModelSpec, write_random_model
from tools.training.export import config_of
from tools.training.model import PRESETS

HOSTS = 2
SYSTEM_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS, PROBE_TOKENS = 64, 15, 25, 4
HELD_SHARE = 0.9
COLD_EVERY = 10
FIRST_TEXT_ID = 8  # ids below are special


def main() -> None:
    args = _arguments()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folders = dict(args.models) or random_models(Path(name))
        for model, folder in folders.items():
            found[model] = measure(folder, Path(name) / f"cluster of {len(found)}", args)
            print(model, json.dumps(found[model]), file=sys.stderr, flush=True)
    result = {
        "pool_bytes": args.pool_bytes,
        "messages": 2 * args.turns,
        "history_tokens": history_tokens(args.turns),
        "random_weights": not args.models,
        "models": found,
    }
    show(result)
    if args.store:
        store("small-kv-live", result)
    print(json.dumps(result, allow_nan=False))


def random_models(work: Path) -> dict[str, Path]:
    """Write the three models of the module's docstring; return their folders."""
    small = config_of(PRESETS["small"])
    in_floats = {key: small[key] for key in ("sliding_window", "layer_types", "kv_owners", "attention_sinks")}
    in_int8 = {key: small[key] for key in ("kv_dtype", "kv_scale_group", "quantization_config")}
    shape = PRESETS["base"]

    def write(name: str, family: str, kv_heads: int, extra: dict[str, object]) -> Path:
        spec = RandomModelSpec(
            family=family, layers=shape.layers, hidden=shape.hidden, heads=shape.heads, kv_heads=kv_heads,
            head_dim=shape.head_dim, intermediate=shape.intermediate, vocab=shape.vocabulary, max_len=shape.positions,
            scale=2.0, extra=extra,
        )  # fmt: skip
        return write_random_model(work / name, spec, tokenizer=BUNDLED)

    return {
        "grouped-query attention": write("gqa", "llama", shape.kv_heads, {}),
        "small KV without int8": write("small", "moonpool", 1, in_floats),
        "small KV": write("int8", "moonpool", 1, in_floats | in_int8),
    }


def history_tokens(turns: int) -> int:
    """Return the tokens of a dialogue after so many turns."""
    return SYSTEM_TOKENS + turns * (QUESTION_TOKENS + ANSWER_TOKENS)


def measure(folder: Path, work: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Serve the model and return its figures."""
    flags = [flag for role in ("prefill", "decode", "pool") for flag in (f"--{role}-nodes", str(HOSTS))]
    flags += ["--pool-bytes", str(args.pool_bytes // HOSTS), "--capacity-tokens", str(PRESETS["base"].positions)]
    flags += ["--max-batch", "4"]
    with cluster(folder, work, *flags) as served:
        return asyncio.run(_measure(served, args))


async def _measure(served: Served, args: argparse.Namespace) -> dict[str, Any]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        client = CompletionsClient(session, served.url, served.model)
        await client.ask(_tokens(0, 64), 4, "warm-up")
        held = await count_held(client, args)
        before, began = await client.moved(), time.monotonic()
        async with asyncio.TaskGroup() as group:
            talks = [group.create_task(dialogue(client, i, args.turns)) for i in range(args.dialogues)]
        seconds = time.monotonic() - began
        moved = {path: nbytes - before.get(path, 0.0) for path, nbytes in (await client.moved()).items()}
        turns = [turn for talk in talks for turn in talk.result()]
        cold = [
            (turn, await client.ask(turn.prompt, ANSWER_TOKENS, f"cold {i}"))
            for i, turn in enumerate(talks[0].result()[COLD_EVERY - 1 :: COLD_EVERY])
        ]
    return {
        "held": held,
        "dialogue_reuse": sum(turn.cached for turn in turns) / sum(len(turn.prompt) for turn in turns),
        "moved_bytes_per_turn": {path: nbytes / len(turns) for path, nbytes in sorted(moved.items()) if nbytes},
        "ttft_p50_s": median(turn.ttft_s for turn in turns),
        "last_tpot_p50_s": median(turn.tpot_s for talk in talks for turn in talk.result()[args.turns // 2 :]),
        "last_ttft_p50_s": median(warm.ttft_s for warm, _ in cold[len(cold) // 2 :]),
        "last_ttft_cold_p50_s": median(again.ttft_s for _, again in cold[len(cold) // 2 :]),
        "same_tokens": fmean(float(a == b) for pair in cold for a, b in zip(*(p.answer for p in pair), strict=True)),
        "logprob_difference": max(
            (abs(warm.logprobs[i] - again.logprobs[i]) for warm, again in cold for i in range(_equal(warm, again))),
            default=0.0,
        ),
        "turns": len(turns),
        "cold_turns": len(cold),
        "seconds": seconds,
    }


def _equal(one: "AskedTurn", other: "AskedTurn") -> int:
    """Return the number of leading tokens that are equal; only their log-probabilities can be compared."""
    pairs = enumerate(zip(one.answer, other.answer, strict=True))
    return next((i for i, (a, b) in pairs if a != b), len(one.answer))


@dataclass(frozen=True)
class AskedTurn:
    """One request and its greedy answer."""

    prompt: list[int]
    answer: list[int]
    logprobs: list[float]
    cached: int
    sibling: int  # tokens whose KV a sibling computed
    ttft_s: float
    tpot_s: float


@dataclass(frozen=True)
class CompletionsClient:
    """Sender of completions with token ids."""

    session: aiohttp.ClientSession
    url: str
    model: str

    async def ask(self, prompt: list[int], max_tokens: int, salt: str = "") -> AskedTurn:
        """Return the answer. Raises RuntimeError if there is none."""
        body: dict[str, Any] = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "return_token_ids": True, "logprobs": 1}
        body |= {"stream_options": {"include_usage": True}} | ({"cache_salt": salt} if salt else {})
        answer, logprobs, cached, sibling, ttft_s = list[int](), list[float](), 0, 0, 0.0
        began = time.perf_counter()
        async with self.session.post(f"{self.url}/v1/completions", json=body) as reply:
            async for event in completion_events(reply):
                for choice in event["choices"]:
                    ttft_s = ttft_s or time.perf_counter() - began
                    answer += choice["token_ids"] or []
                    logprobs += (choice["logprobs"] or {}).get("token_logprobs", [])
                cached = ((event.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens", cached)
                sibling = (event.get("moonpool") or {}).get("sibling_tokens", sibling)
        tpot_s = (time.perf_counter() - began - ttft_s) / max(1, max_tokens - 1)
        if len(answer) != max_tokens or len(logprobs) != max_tokens:
            raise RuntimeError(f"{len(answer)} tokens and {len(logprobs)} log-probabilities instead of {max_tokens}")
        return AskedTurn(prompt, answer, logprobs, cached, sibling, ttft_s, tpot_s)

    async def stored(self) -> None:
        """Return when no node has stored KV for a second: answers end before their KV is stored."""
        before, now = -1.0, 0.0
        while now > before:
            await asyncio.sleep(1.0)
            before, now = now, (await self.moved()).get("store", 0.0)

    async def moved(self) -> dict[str, float]:
        """Return the bytes of KV that all nodes have moved, by path."""
        async with self.session.get(f"{self.url}/metrics") as reply:
            text = await reply.text()
        found: dict[str, float] = {}
        for path, value in re.findall(r'^moonpool:kv_bytes_moved_total\{.*path="(\w+)".*\} (\S+)$', text, re.MULTILINE):
            found[path] = found.get(path, 0.0) + float(value)
        return found


async def count_held(client: CompletionsClient, args: argparse.Namespace) -> int:
    """Store histories, as many at a time as there are hosts; return how many of the newest are reused later."""
    prompts, stored = [_tokens(1000 + i, history_tokens(args.turns)) for i in range(args.fill)], list[AskedTurn]()
    for at in range(0, len(prompts), HOSTS):
        stored += await asyncio.gather(*(client.ask(prompt, PROBE_TOKENS) for prompt in prompts[at : at + HOSTS]))
        print(f"\r{len(stored)} of {args.fill} histories stored", end="", file=sys.stderr, flush=True)
    await client.stored()
    for held, turn in enumerate(reversed(stored)):
        question = [*turn.prompt, *turn.answer, *_tokens(2000 + held, QUESTION_TOKENS)]
        if (await client.ask(question, PROBE_TOKENS)).cached < HELD_SHARE * len(turn.prompt):
            return held
    return len(stored)


async def dialogue(client: CompletionsClient, number: int, turns: int) -> list[AskedTurn]:
    """Run one dialogue; return its turns."""
    found, history = list[AskedTurn](), _tokens(0, SYSTEM_TOKENS)
    for turn in range(turns):
        history = [*history, *_tokens(10_000 * (number + 1) + turn, QUESTION_TOKENS)]
        found.append(await client.ask(history, ANSWER_TOKENS))
        history = [*history, *found[-1].answer]
    return found


def _tokens(seed: int, count: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(FIRST_TEXT_ID, PRESETS["base"].vocabulary, count).tolist()
    return ids


def show(result: dict[str, Any]) -> None:
    """Print a row for each model."""
    table = Table(title=f"{result['messages']} messages, {result['history_tokens']:,} tokens")
    for heading in ("model", "dialogues held", "reuse", "moved per turn", "TTFT", "last", "last, cold", "last TPOT"):
        table.add_column(heading)
    for name, row in result["models"].items():
        moved = ", ".join(f"{path} {nbytes / 1e3:,.0f} kB" for path, nbytes in row["moved_bytes_per_turn"].items())
        keys = ("ttft_p50_s", "last_ttft_p50_s", "last_ttft_cold_p50_s", "last_tpot_p50_s")
        times = (f"{1e3 * row[key]:,.1f} ms" for key in keys)
        table.add_row(name, str(row["held"]), f"{row['dialogue_reuse']:.3f}", moved, *times)
    Console(file=sys.stderr, width=150).print(table)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", type=_named, default=[], metavar="NAME=FOLDER", help="other models")
    parser.add_argument("--turns", type=int, default=90, help="questions of each dialogue")
    parser.add_argument("--dialogues", type=int, default=2, help="number of dialogues, all at a time")
    parser.add_argument("--fill", type=int, default=48, help="histories with which the pool is filled")
    parser.add_argument("--pool-bytes", type=int, default=24 << 20, help="of both pool nodes together")
    parser.add_argument("--store", action="store_true", help="store the result")
    return parser.parse_args()


def _named(text: str) -> tuple[str, Path]:
    name, is_given, folder = text.partition("=")
    if not is_given or not Path(folder).is_dir():
        raise argparse.ArgumentTypeError(f"must be NAME=FOLDER with an existing folder, got {text!r}")
    return name, Path(folder)


if __name__ == "__main__":
    main()
