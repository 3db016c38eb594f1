"""Comparison of the engine's prefill and decode tokens/s with transformers, with equal weights and threads.

Both sides do the work of serving: greedy decode over a KV cache from a context of 256 tokens on, at batch 1 and 8; and
a prefill of 1,024 tokens that fills the cache and returns the logits of the last position. transformers uses its fast
path (sdpa attention, inference mode, DynamicCache, `logits_to_keep=1`) and direct calls of its model instead of
`generate`. Repetitions of both sides alternate, and ratios are of medians.

`prefill_product_share` and `decode_b8_product_share` are the times that the products of the linear layers alone take by
torch, with the same matrices and as many rows, as shares of the engine's whole time; above 1, the engine computes
everything in less. The last line of output is JSON. `--store` writes
benchmarks/results/engine-cpu-DATE.json.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from benchmarks.stored import store
from engine import FlatBatch, ForwardBatch, Model, PagedCache, SequenceChunk, load_model
from engine.random_model import RandomModelSpec, write_random_model

BUNDLED = Path(__file__).resolve().parent.parent / "moonpool" / "data" / "model"
BLOCK_TOKENS = 16
CONTEXT = 256


class EngineUnderTest:
    """The engine, with one slot table per sequence."""

    def __init__(self, model: Model, batch: int, length: int) -> None:
        self._model = model
        blocks = -(-length // BLOCK_TOKENS)
        self._cache = PagedCache(model.kv_groups, (batch * blocks,) * len(model.kv_groups), BLOCK_TOKENS)
        slots = np.random.default_rng(0).permutation(batch * blocks).astype(np.int32).reshape(batch, blocks)
        self._tables = [tuple(row for _ in model.kv_groups) for row in slots]

    def prefill(self, prompts: np.ndarray) -> np.ndarray:
        """Return the greedy next token of each prompt [batch, n]."""
        return self._model.run(self._plan(prompts.astype(np.int32), 0), self._cache).argmax(dim=-1).numpy()

    def decode(self, tokens: np.ndarray, context: int, steps: int) -> None:
        """Greedy decode from `context` on; each step is made from the last one, as by workers."""
        plan = self._plan(tokens.astype(np.int32)[:, None], context)
        for step in range(steps):
            if step:
                plan = plan.advanced(tokens.astype(np.int32), self._model.config)
            tokens = self._model.run(plan, self._cache).argmax(dim=-1).numpy()

    def _plan(self, tokens: np.ndarray, start: int) -> FlatBatch:
        chunks = [SequenceChunk(row, start, table, True) for row, table in zip(tokens, self._tables, strict=True)]
        return self._model.flatten(ForwardBatch(chunks), self._cache)


class Transformers:
    """The same interface over transformers."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._cache = DynamicCache(config=model.config)

    def prefill(self, prompts: np.ndarray) -> np.ndarray:
        """Return the greedy next token of each prompt [batch, n], from an empty cache."""
        self._cache = DynamicCache(config=self._model.config)
        return self._forward(torch.from_numpy(prompts)).numpy()

    def decode(self, tokens: np.ndarray, context: int, steps: int) -> None:
        """Greedy decode from `context` on."""
        current = torch.from_numpy(tokens)
        for _ in range(steps):
            current = self._forward(current[:, None])
        self._cache.crop(context - self._cache.get_seq_length())

    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            out = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
            tokens: torch.Tensor = out.logits[:, -1].argmax(dim=-1)
            return tokens


def alternate(ours: Callable[[], object], theirs: Callable[[], object], repetitions: int) -> tuple[float, float]:
    """Return the median seconds of both, alternating, after one untimed repetition."""
    taken: tuple[list[float], list[float]] = ([], [])
    for repetition in range(repetitions + 1):
        for run, seconds in zip((ours, theirs), taken, strict=True):
            begin = time.perf_counter()
            run()
            if repetition:
                seconds.append(time.perf_counter() - begin)
    return statistics.median(taken[0]), statistics.median(taken[1])


def measure(
    model: Model, reference: PreTrainedModel, steps: int, repetitions: int
) -> Iterator[tuple[str, float, float]]:
    """Yield (name, tokens/s of the engine, tokens/s of transformers) for each measurement."""
    rng = np.random.default_rng(1)
    for batch in (1, 8):
        prompts = rng.integers(0, model.config.vocab_size, (batch, CONTEXT))
        ours, theirs = EngineUnderTest(model, batch, CONTEXT + steps), Transformers(reference)
        first = ours.prefill(prompts)
        theirs.prefill(prompts)
        seconds = alternate(
            partial(ours.decode, first, CONTEXT, steps),
            partial(theirs.decode, first, CONTEXT, steps),
            repetitions,
        )
        yield f"decode_b{batch}", batch * steps / seconds[0], batch * steps / seconds[1]
    length = min(1024, model.config.max_positions)
    prompt = rng.integers(0, model.config.vocab_size, (1, length))
    ours, theirs = EngineUnderTest(model, 1, length), Transformers(reference)
    if (ours.prefill(prompt) != theirs.prefill(prompt)).any():
        print("note: the two sides differ in the greedy token after the long prompt (a near-tie)", flush=True)
    seconds = alternate(lambda: ours.prefill(prompt), lambda: theirs.prefill(prompt), repetitions)
    yield f"prefill_{length}", length / seconds[0], length / seconds[1]


def product_seconds(model: Model, rows: int, repetitions: int) -> float:
    """Return the median seconds of a step's linear layers, as torch multiplies their matrices with `rows` rows."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    d, q, f = config.hidden_size, config.q_size, config.intermediate_size
    shapes = [(d, q + 2 * config.kv_size), (q, d), (d, 2 * f), (f, d)] * config.num_layers
    matrices = [torch.randn(shape, generator=generator) for shape in shapes]
    inputs = {size: torch.randn(rows, size, generator=generator) for size in (d, q, f)}
    taken = []
    with torch.inference_mode():
        for _ in range(repetitions + 1):
            begin = time.perf_counter()
            for matrix in matrices:
                inputs[len(matrix)] @ matrix
            taken.append(time.perf_counter() - begin)
    return statistics.median(taken[1:])


def main() -> None:
    """Run the comparison and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="model folder (default: the bundled one, else random weights)")
    parser.add_argument("--threads", type=int, default=1, help="threads of both sides, default %(default)s")
    parser.add_argument("--steps", type=int, default=48, help="decode steps per repetition, default %(default)s")
    parser.add_argument("--repetitions", type=int, default=9, help="repetitions per side, default %(default)s")
    parser.add_argument("--store", action="store_true", help="write the result")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.model or (BUNDLED if (BUNDLED / "config.json").is_file() else None)
        if folder is None:
            spec = RandomModelSpec(layers=8, hidden=128, heads=4, kv_heads=2, intermediate=384, vocab=2048, scale=2.0)
            folder = write_random_model(scratch, spec)
            print("no bundled model: random weights of its shape", flush=True)
        model = load_model(folder, device="cpu", dtype="float32", threads=arguments.threads)
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        reference.eval()  # type: ignore[no-untyped-call]
        result: dict[str, float | int | str] = {"threads": arguments.threads, "model": folder.name}
        for name, ours, theirs in measure(model, reference, arguments.steps, arguments.repetitions):
            print(
                f"{name}: engine {ours:,.0f} tokens/s, transformers {theirs:,.0f}, ratio {ours / theirs:.2f}",
                flush=True,
            )
            result |= {f"{name}_ratio": round(ours / theirs, 3), f"{name}_tokens_per_s": round(ours, 1)}
        for name, rows in (("prefill", min(1024, model.config.max_positions)), ("decode_b8", 8)):
            figure = f"prefill_{rows}" if name == "prefill" else name
            seconds = product_seconds(model, rows, 3 * arguments.repetitions)
            result[f"{name}_product_share"] = round(seconds * float(result[f"{figure}_tokens_per_s"]) / rows, 3)
        if arguments.store:
            store("engine-cpu", result)
        print(json.dumps(result))


if __name__ == "__main__":
    main()
