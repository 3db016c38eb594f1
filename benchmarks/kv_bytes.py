"""KV per token at a context length, counted from memory that a decode node allocates, technique by technique.

    python -m benchmarks.kv_bytes [--context TOKENS] [--steps N] [--store]

The baseline is a model of the same depth and head_dim with 8 KV heads in 16 bits and full attention. Each row adds one
of Character.AI's techniques: multi-query attention, windows in 5 of 6 layers, KV shared between neighbours and across
blocks of layers, int8. Public shapes follow, each relative to the same baseline of its own depth and head_dim.

    allocated   the memory of a decode node's slots for one sequence of this length: lasting groups have a slot for
                each block, windowed ones what a decoding sequence holds at once; scales included
    computed    with `--steps`, the small shapes are models with random weights, and that many decode steps at the end
                of the context run in that memory; a step that would need more fails

The last line of output is JSON, with `small_kv_ratio` (all techniques) and `small_kv_ratio_without_int8`: bytes of the
baseline relative to bytes of the row. `--store` writes benchmarks/results/kv_bytes-DATE.json.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.stored import store
from engine import ForwardBatch, KvGroupShape, SequenceChunk, load_model
from engine.random_model import RandomModelSpec, write_random_model
from messenger import Messenger, MessengerConfig
from settings.keys import assemble
from worker.kv_memory import KvMemory
from worker.paced.memory import PacedMemory
from worker.policy import SlotPool, WindowSlots, slots_of_answer
from worker.slot_memory import spec_of

BLOCK = 16
LAYERS, HEADS, HEAD_DIM, WINDOW, GLOBAL_EVERY = 12, 8, 64, 1024, 6


@dataclass(frozen=True)
class KvShape:
    """KV of a model: its layers' windows (0: full attention) and KV owners."""

    name: str
    windows: tuple[int, ...]
    owners: tuple[int, ...]
    kv_heads: int
    head_dim: int
    dtype: str = "float16"
    claim: str = ""

    def groups(self) -> tuple[KvGroupShape, ...]:
        """Return the KV groups, full attention first."""
        owned = [window for layer, window in enumerate(self.windows) if self.owners[layer] == layer]
        return tuple(
            KvGroupShape(
                kind="window" if window else "full",
                window=window,
                layers=tuple(i for i, own in enumerate(owned) if own == window),
                kv_heads=self.kv_heads,
                head_dim=self.head_dim,
                dtype=self.dtype,
                scale_group=self.head_dim // 2 if self.dtype == "int8" else 0,
            )
            for window in sorted(set(owned), key=lambda window: (window != 0, -window))
        )

    @property
    def baseline(self) -> "KvShape":
        """The same depth and head_dim with 8 KV heads, 16 bits and full attention."""
        count = len(self.windows)
        return KvShape("GQA-8, 16 bits", (0,) * count, tuple(range(count)), 8, self.head_dim)


def alternating(count: int, window: int, every: int) -> tuple[int, ...]:
    """Windows of `count` layers, of which every `every`-th has full attention."""
    return tuple(0 if layer % every == every - 1 else window for layer in range(count))


def shared_pairs(windows: tuple[int, ...]) -> tuple[int, ...]:
    """Owners: neighbours among the layers with windows share; all layers with full attention use the first one's."""
    owners, last, full = list[int](), -1, -1
    for layer, window in enumerate(windows):
        if not window:
            full = layer if full < 0 else full
            owners.append(full)
        elif last >= 0:
            owners.append(last)
            last = -1
        else:
            owners.append(layer)
            last = layer
    return tuple(owners)


def techniques() -> list[KvShape]:
    """Return the baseline and one shape more for each technique."""
    every = tuple(range(LAYERS))
    windows = alternating(LAYERS, WINDOW, GLOBAL_EVERY)
    base = KvShape("GQA-8, 16 bits", (0,) * LAYERS, every, 8, HEAD_DIM)
    multi_query = replace(base, name="+ multi-query attention", kv_heads=1, claim="8 times, against GQA-8")
    windowed = replace(multi_query, name=f"+ windows of {WINDOW:,} in 5 of 6 layers", windows=windows)
    windowed = replace(windowed, claim="layers with windows keep the window only")
    shared = replace(windowed, name="+ KV shared across layers", owners=shared_pairs(windows), claim="2 to 3 times")
    int8 = replace(shared, name="+ int8, scales included", dtype="int8", claim="more than 20 times in all")
    return [base, multi_query, windowed, shared, int8]


PUBLIC = (
    KvShape("Llama 3.1 8B", (0,) * 32, tuple(range(32)), 8, 128),
    KvShape("Mistral 7B v0.1, window 4,096", (4096,) * 32, tuple(range(32)), 8, 128),
    KvShape("Gemma 2 9B, window 4,096 in every other layer", alternating(42, 4096, 2), tuple(range(42)), 8, 256),
    KvShape("Gemma 3 12B, window 1,024 in 5 of 6 layers", alternating(48, 1024, 6), tuple(range(48)), 8, 256),
    KvShape("gpt-oss-20b, window 128 in every other layer", alternating(24, 128, 2), tuple(range(24)), 8, 64),
)


def allocated(shape: KvShape, context: int, messenger: Messenger) -> int:
    """Return the bytes of a decode node's slots for one sequence of `context` tokens."""
    spec = spec_of(shape.groups(), BLOCK)
    blocks = -(-context // BLOCK)
    memory = PacedMemory(spec, blocks, messenger, answer_windows(spec.window_blocks, blocks))
    try:
        return memory.nbytes
    finally:
        memory.close()


def answer_windows(window_blocks: int, blocks: int) -> WindowSlots | None:
    """Return as many window slots as one decoding sequence holds; None without windowed groups."""
    if not window_blocks:
        return None
    return WindowSlots(blocks, min(blocks, slots_of_answer(window_blocks)), window_blocks=window_blocks)


def compute(shape: KvShape, context: int, steps: int, messenger: Messenger, folder: Path) -> int:
    """Run the last `steps` decode steps of a context in the memory of one sequence; return that memory's bytes."""
    spec = RandomModelSpec(
        family="moonpool",
        layers=LAYERS,
        hidden=128,
        heads=HEADS,
        kv_heads=shape.kv_heads,
        head_dim=HEAD_DIM,
        vocab=256,
        max_len=context,
        window=max(shape.windows),
        extra={
            "layer_types": ["sliding_attention" if window else "full_attention" for window in shape.windows],
            "kv_owners": list(shape.owners),
            **({"kv_dtype": "int8"} if shape.dtype == "int8" else {}),
        },
    )
    model = load_model(write_random_model(folder / str(len(shape.name)), spec), backend="torch", dtype="bfloat16")
    blocks = -(-context // BLOCK)
    windows = answer_windows(spec_of(model.kv_groups, BLOCK).window_blocks, blocks)
    memory = KvMemory(model, messenger, num_slots=blocks, block_tokens=BLOCK, windows=windows)
    pool = SlotPool(blocks, windows=windows)
    taken = pool.acquire([], blocks, window_slots=windows.num_slots if windows is not None else 0)
    table = np.array(taken.slots, np.int32)
    first = context - steps
    if windows is not None and taken.window is not None:
        taken.window.reach(windows.first_seen(first // BLOCK), -(-first // BLOCK))
    for position in range(first, context):
        block = position // BLOCK
        if taken.window is not None:
            taken.window.step(block, block + 1)
        used = table[: block + 1]
        tables = tuple(memory.numbers(g, used).astype(np.int32) for g in range(memory.num_groups))
        chunk = SequenceChunk(np.array([position % 256], np.int32), position, tables, want_logits=True)
        logits = model.forward(ForwardBatch([chunk]), memory.cache)
        assert bool(logits.isfinite().all()), "the step's logits are not finite"
        if taken.window is not None:
            taken.window.leave((position + 1) // BLOCK)
    found = memory.nbytes
    memory.close()
    return found


def measured(shapes: list[KvShape], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row per shape."""
    rows = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        config = assemble(MessengerConfig, shm_dir=Path(folder))
        messenger = Messenger(config, node_id="kv", incarnation=1)
        messenger.start()
        for shape in shapes:
            nbytes = allocated(shape, options.context, messenger)
            base = allocated(shape.baseline, options.context, messenger)
            row = {"shape": shape.name, "bytes_per_token": nbytes / options.context, "ratio": base / nbytes}
            if shape.claim:
                row["claim"] = shape.claim
            if options.steps and shape in techniques():
                used = compute(shape, options.context, options.steps, messenger, Path(folder))
                assert used == nbytes, f"{shape.name}: computed in {used} bytes, but {nbytes} were counted"
                row["computed_steps"] = options.steps
            rows.append(row)
            print(row, file=sys.stderr)
        messenger.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=8192, help="tokens of the sequence [8192]")
    parser.add_argument("--steps", type=int, default=64, help="decode steps to run in the memory; 0: none [64]")
    parser.add_argument("--store", action="store_true", help="write the result")
    options = parser.parse_args()
    rows, public = measured(techniques(), options), measured(list(PUBLIC), options)
    result = {
        "benchmark": "kv_bytes",
        "context": options.context,
        "block_tokens": BLOCK,
        "small_kv_ratio": rows[-1]["ratio"],
        "small_kv_ratio_without_int8": rows[-2]["ratio"],
        "techniques": rows,
        "public": public,
    }
    table = Table("shape", "bytes per token", "less than the baseline", "Character.AI")
    for row in (*rows, *public):
        table.add_row(row["shape"], f"{row['bytes_per_token']:,.1f}", f"{row['ratio']:.1f}", row.get("claim", ""))
    Console(stderr=True).print(table)
    if options.store:
        store("kv_bytes", result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
