"""The native engine on a GPU: PPL.LLM's table, shares of the roofline, int8, reuse, interference, and peers.

The model has the shape of LLaMA-7B with multi-head attention, random weights in 16 bits and no tokenizer: times do not
depend on the values. Measured, each with what the hardware would allow:

    roofline      the rate of a large product, and of copies in the device's memory, which all shares refer to
    table         prefill, decode step, tokens/s and memory of PPL.LLM's batches, beside its figures on an H800
    kernels       of one decode step: time by kernel, and the bytes and FLOPs that its parts need at least
    int8          a decode step with KV in int8 in groups of 64 and 8, W8A8, and W4A16 in groups of 64, against 16 bits
    reuse         TTFT of a prompt of 8,192 tokens of which 0, 50, 90 and 95 % are reused
    interference  steps of a decoding batch, alone and beside the chunks of a prompt of 32,768 tokens
    peers         transformers with the same shape and dtype in the same run; vLLM with dummy weights, if installed

Each part runs with every backend that the device has. `--shape tiny --device cpu` runs the whole script on a CPU in
seconds, as its test does; such figures mean nothing. It has not run on a GPU yet. The last line of output is JSON.
`--store` writes benchmarks/results/engine-gpu-DATE.json.

    python benchmarks/engine_gpu.py [--backend triton] [--store]
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

# Replace this folder on the path by the repository root: scripts here may have the names of packages.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.stored import store  # noqa: E402
from engine import BackendUnavailable, ForwardBatch, Model, ModelConfig, PagedCache, SequenceChunk  # noqa: E402
from engine.backends.registry import BACKENDS, Placement, choose_backend  # noqa: E402
from engine.config import parse_config, with_int8_kv  # noqa: E402
from engine.folder import SCALE_SUFFIX, int8_tensors, layer_parts, tensor_shapes  # noqa: E402
from engine.quantisation import INT8_ACTIVATIONS, INT8_WEIGHTS, quantization_config  # noqa: E402
from engine.rope import RopeTable  # noqa: E402
from engine.sampling import SamplingRow, sample  # noqa: E402
from engine.weights import load_weights  # noqa: E402

BLOCK_TOKENS: Final = 256  # which flash-attn needs
STEP_TOKENS: Final = 8192  # most tokens of a prefill step
REPEATS: Final = 5


@dataclass(frozen=True)
class TableRow:
    """A row of PPL.LLM's table: LLaMA-7B in 16 bits on an H800; times in ms."""

    batch: int
    prompt: int
    answer: int
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    tokens_per_s: float = 0.0


@dataclass(frozen=True)
class MeasuredShape:
    """A model's config.json, and the sizes of what is measured."""

    raw: dict[str, Any]
    rows: tuple[TableRow, ...]
    reuse_tokens: int
    long_prompt: int
    chunk_tokens: int
    beside: int  # decoding sequences beside the long prompt


def llama(layers: int, hidden: int, heads: int, intermediate: int, vocab: int, positions: int) -> dict[str, Any]:
    """Return the config.json of a LLaMA with multi-head attention."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "dtype": "float16",
    }


SHAPES: Final = {
    "7b": MeasuredShape(
        llama(32, 4096, 32, 11008, 32000, 40960),
        (
            TableRow(1, 8, 256, 6.78, 6.83, 145.85),
            TableRow(16, 8, 256, 7.94, 7.15, 2229.65),
            TableRow(64, 8, 256, 16.35, 8.55, 7429.85),
            TableRow(128, 8, 256, 30.03, 10.47, 12095.66),
            TableRow(256, 8, 256, 58.60, 15.20, 16597.23),
            TableRow(512, 8, 256, 110.82, 25.45, 19785.23),
            TableRow(1, 1024, 1024, 30.68, 8.64, 115.40),
            TableRow(8, 1024, 1024, 213.48, 9.23, 848.04),
            TableRow(16, 1024, 1024, 415.95, 10.06, 1528.73),
            TableRow(32, 1024, 1024, 830.35, 13.84, 2184.17),
            TableRow(64, 1024, 1024, 1633.89, 20.18, 2939.07),
        ),
        reuse_tokens=8192,
        long_prompt=32768,
        chunk_tokens=512,
        beside=16,
    ),
    "tiny": MeasuredShape(
        llama(2, 128, 2, 256, 512, 2048),
        (TableRow(1, 8, 16), TableRow(4, 64, 32)),
        reuse_tokens=512,
        long_prompt=512,
        chunk_tokens=64,
        beside=2,
    ),
}


class RandomCheckpoint:
    """A checkpoint whose tensors are drawn when they are read."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._shapes, self._in_int8 = tensor_shapes(config), frozenset(int8_tensors(config))
        self._packed = {
            part.in_layer(layer) + "_shape": part.shape
            for layer in range(config.num_layers)
            for part in layer_parts(config, layer)
            if part.packed is not None
        }
        self._device, self._dtype = device, dtype

    @contextmanager
    def reading(self, name: str) -> Iterator[torch.Tensor]:
        """Context with the tensor, on the device."""
        yield self._drawn(name)

    def kind(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor of scales."""
        return torch.float32

    def _drawn(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        if name in self._packed:
            return torch.tensor(self._packed[name])
        if name.endswith("_packed"):
            return torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int32, device=self._device)
        if name in self._in_int8:
            return torch.randint(-127, 128, shape, dtype=torch.int8, device=self._device)
        if name.endswith(SCALE_SUFFIX):
            return torch.full(shape, 1e-4, device=self._device)
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        return torch.randn(shape, dtype=self._dtype, device=self._device).mul_(shape[-1] ** -0.5)


class MeasuredDevice:
    """The device, its dtype, and its measured rates."""

    def __init__(self, name: str) -> None:
        self.device = torch.device(name)
        self.dtype = torch.float16 if self.device.type == "cuda" else torch.float32
        self.flops_per_s, self.bytes_per_s = self._roofline()

    @property
    def name(self) -> str:
        """Name for results."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"

    def seconds(self, work: Callable[[], object], repeats: int = REPEATS) -> float:
        """Return the median seconds of work, after one run that is not counted."""
        taken = []
        for _ in range(repeats + 1):
            self.wait()
            began = time.perf_counter()
            work()
            self.wait()
            taken.append(time.perf_counter() - began)
        return statistics.median(taken[1:])

    def wait(self) -> None:
        """Wait until the device has ended its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def least_s(self, flops: float, nbytes: float) -> float:
        """Return the seconds that the roofline allows."""
        return max(flops / self.flops_per_s, nbytes / self.bytes_per_s)

    def _roofline(self) -> tuple[float, float]:
        size, count = (8192, 1 << 30) if self.device.type == "cuda" else (512, 1 << 22)
        a, b = torch.randn(2, size, size, dtype=self.dtype, device=self.device)
        source = torch.zeros(count, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * size**3 / self.seconds(lambda: a @ b), 2 * count / self.seconds(lambda: target.copy_(source))


class RandomEngine:
    """The engine with random weights, and the steps to be measured."""

    def __init__(self, on: MeasuredDevice, config: ModelConfig, backend: str) -> None:
        self.config, self._on = config, on
        kind = choose_backend(backend, Placement(config, on.device, on.dtype, BLOCK_TOKENS))
        checkpoint: Any = RandomCheckpoint(config, on.device, on.dtype)
        weights = load_weights(config, checkpoint, device=on.device, dtype=on.dtype)
        rope = RopeTable(config.ropes, config.head_dim, config.max_positions, on.device)
        self.model = Model(config, weights, kind, kind.build(config, weights, rope), rope, "random")
        self.model.record_steps()
        self.parameters = sum(
            prod(part.shape) for layer in range(config.num_layers) for part in layer_parts(config, layer)
        )
        self.weight_nbytes = self.parameters * (1 if config.int8_linears else on.dtype.itemsize)

    def cache(self, sequences: int, tokens: int) -> tuple[PagedCache, list[tuple[np.ndarray, ...]]]:
        """Return a cache and the slot tables of so many sequences of so many tokens, scattered."""
        blocks = -(-tokens // BLOCK_TOKENS)
        groups = len(self.model.kv_groups)
        cache = self.model.new_cache((sequences * blocks,) * groups, BLOCK_TOKENS)
        slots = np.random.default_rng(0).permutation(sequences * blocks).astype(np.int32).reshape(sequences, blocks)
        return cache, [(row,) * groups for row in slots]

    def step(self, cache: PagedCache, chunks: Sequence[SequenceChunk]) -> Callable[[], object]:
        """Return the work of a step: the forward pass, and a greedy token of each chunk that wants one."""
        plan = self.model.flatten(ForwardBatch(list(chunks)), cache)
        rows = [SamplingRow(0.0, 1.0, 0, 0, 0, 0)] * sum(chunk.want_logits for chunk in chunks)

        def work() -> None:
            logits = self.model.run(plan, cache)
            if rows:
                sample(logits, rows)

        return work

    def chunk(self, table: tuple[np.ndarray, ...], start: int, tokens: int, *, last: bool = True) -> SequenceChunk:
        """Return a chunk of arbitrary ids."""
        return SequenceChunk(np.arange(tokens, dtype=np.int32) % 500, start, table, want_logits=last)

    def decode_s(self, batch: int, context: int) -> float:
        """Return the seconds of a decode step."""
        cache, tables = self.cache(batch, context + 1)
        return self._on.seconds(self.step(cache, [self.chunk(table, context, 1) for table in tables]))

    def prefill_s(self, batch: int, tokens: int, start: int = 0) -> float:
        """Return the seconds of computing `tokens` tokens of each prompt after `start` that are cached."""
        cache, tables = self.cache(batch, start + tokens)
        pieces = [
            self.chunk(table, at, min(STEP_TOKENS, start + tokens - at), last=at + STEP_TOKENS >= start + tokens)
            for table in tables
            for at in range(start, start + tokens, STEP_TOKENS)
        ]
        steps, size = list[list[SequenceChunk]](), STEP_TOKENS + 1
        for piece in pieces:  # whole prompts together, as many as fit in a step; parts of one prompt one after another
            if size + len(piece.token_ids) > STEP_TOKENS or piece.start > start:
                steps.append([])
                size = 0
            steps[-1].append(piece)
            size += len(piece.token_ids)
        works = [self.step(cache, step) for step in steps]
        return self._on.seconds(lambda: [work() for work in works])

    def decode_needs(self, batch: int, context: int) -> dict[str, float]:
        """Return the FLOPs and bytes that a decode step needs at least, of its linear layers and of its attention."""
        config = self.config
        head = config.vocab_size * config.hidden_size
        kv = sum(
            PagedCache.required_nbytes([group], [1], BLOCK_TOKENS) / BLOCK_TOKENS for group in self.model.kv_groups
        )
        return {
            "linear_flops": 2.0 * batch * (self.parameters + head),
            "linear_bytes": self.weight_nbytes + head * self._on.dtype.itemsize,
            "attention_flops": 4.0 * batch * context * config.num_layers * config.q_size,
            "attention_bytes": batch * context * kv,
        }

    def least_decode_s(self, batch: int, context: int) -> float:
        """Return the seconds that the roofline allows for a decode step."""
        needs = self.decode_needs(batch, context)
        return self._on.least_s(needs["linear_flops"], needs["linear_bytes"]) + self._on.least_s(
            needs["attention_flops"], needs["attention_bytes"]
        )


def table(on: MeasuredDevice, engine: RandomEngine, rows: Sequence[TableRow]) -> list[dict[str, Any]]:
    """Measure the batches of the table; those that do not fit in memory are named."""
    found: list[dict[str, Any]] = []
    for row in rows:
        context = row.prompt + row.answer // 2
        if on.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(on.device)
        try:
            prefill_s, decode_s = engine.prefill_s(row.batch, row.prompt), engine.decode_s(row.batch, context)
        except (torch.OutOfMemoryError, MemoryError):
            found.append({"published": vars(row), "problem": "not enough memory"})
            continue
        found.append(
            {
                "published": vars(row),
                "prefill_ms": 1e3 * prefill_s,
                "decode_ms": 1e3 * decode_s,
                "decode_roofline_share": engine.least_decode_s(row.batch, context) / decode_s,
                "tokens_per_s": row.batch * row.answer / (prefill_s + row.answer * decode_s),
                "memory_bytes": torch.cuda.max_memory_allocated(on.device) if on.device.type == "cuda" else 0,
            }
        )
    return found


def kernels(on: MeasuredDevice, engine: RandomEngine, batch: int, context: int) -> dict[str, Any]:
    """Profile one decode step: seconds by kernel, and what its parts need at least."""
    cache, tables = engine.cache(batch, context + 1)
    work = engine.step(cache, [engine.chunk(each, context, 1) for each in tables])
    work()
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if on.device.type == "cuda" else activity.CPU]) as profiled:
        work()
        on.wait()
    spent = [
        (event.key, event.self_device_time_total if on.device.type == "cuda" else event.self_cpu_time_total)
        for event in profiled.key_averages()
    ]
    total = sum(time_us for _, time_us in spent) or 1.0
    largest = sorted(spent, key=lambda item: -item[1])[:12]
    return {
        "batch": batch,
        "context": context,
        "least_ms": 1e3 * engine.least_decode_s(batch, context),
        **engine.decode_needs(batch, context),
        "kernels": [{"kernel": name, "us": time_us, "share": time_us / total} for name, time_us in largest],
    }


def reuse(engine: RandomEngine, tokens: int) -> dict[str, float]:
    """Return the TTFT of a prompt by the share of it that is reused, in ms."""
    found = {}
    for share in (0.0, 0.5, 0.9, 0.95):
        start = int(tokens * share) // BLOCK_TOKENS * BLOCK_TOKENS
        found[f"{share:.0%}"] = 1e3 * engine.prefill_s(1, tokens - start, start)
    return found


def interference(on: MeasuredDevice, engine: RandomEngine, shape: MeasuredShape) -> dict[str, float]:
    """Return the steps of a decoding batch in ms, alone and beside the chunks of a long prompt: median and p99."""
    context = min(1024, engine.config.max_positions // 2)
    cache, tables = engine.cache(shape.beside + 1, max(context + 1, shape.long_prompt))
    decoding = [engine.chunk(each, context, 1) for each in tables[:-1]]
    alone = engine.step(cache, decoding)
    times: dict[str, list[float]] = {"alone": [], "beside": []}
    for at in range(0, shape.long_prompt, shape.chunk_tokens):
        beside = engine.step(cache, [*decoding, engine.chunk(tables[-1], at, shape.chunk_tokens, last=False)])
        for name, work in (("alone", alone), ("beside", beside)):
            on.wait()
            began = time.perf_counter()
            work()
            on.wait()
            times[name].append(1e3 * (time.perf_counter() - began))
    return {
        f"{name}_{label}_ms": float(np.quantile(values, share))
        for name, values in times.items()
        for label, share in (("p50", 0.5), ("p99", 0.99))
    }


def transformers_rows(on: MeasuredDevice, raw: dict[str, Any], rows: Sequence[TableRow]) -> list[dict[str, Any]]:
    """Measure transformers with the same shape and dtype: prefill and decode steps of the table's batches."""
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    kept = {name: value for name, value in raw.items() if name not in ("architectures", "model_type", "dtype")}
    torch.set_default_dtype(on.dtype)
    try:
        with torch.device(on.device):
            config: Any = LlamaConfig(**kept)
            config._attn_implementation = "sdpa"
            model: Any = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    found = []
    for row in rows:
        ids = torch.zeros((row.batch, row.prompt), dtype=torch.long, device=on.device)
        context = row.prompt + row.answer // 2
        size = (row.batch, model.config.num_key_value_heads, context, model.config.head_dim)
        try:
            with torch.inference_mode():
                cache = DynamicCache(config=model.config)
                for layer in range(model.config.num_hidden_layers):
                    key, value = (torch.zeros(size, dtype=on.dtype, device=on.device) for _ in range(2))
                    cache.update(key, value, layer)

                def prefill(ids: torch.Tensor = ids) -> None:
                    model(input_ids=ids, use_cache=True, logits_to_keep=1)

                def decode(cache: Any = cache, ids: torch.Tensor = ids) -> None:
                    model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1)
                    cache.crop(-1)

                prefill_s, decode_s = on.seconds(prefill), on.seconds(decode)
        except torch.OutOfMemoryError:
            found.append({"batch": row.batch, "prompt": row.prompt, "problem": "not enough memory"})
            continue
        found.append(
            {
                "batch": row.batch,
                "prompt": row.prompt,
                "prefill_ms": 1e3 * prefill_s,
                "decode_ms": 1e3 * decode_s,
            }
        )
    return found


def vllm_rows(raw: dict[str, Any], rows: Sequence[TableRow]) -> list[dict[str, Any]] | str:
    """Measure vLLM with dummy weights: whole batches, in tokens/s; or say why not."""
    if find_spec("vllm") is None:
        return "vllm is not installed"
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(raw))
        engine = LLM(
            model=folder, load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False, dtype="float16"
        )
        found = []
        for row in rows:
            prompts = [{"prompt_token_ids": [1 + i % 500] * row.prompt} for i in range(row.batch)]
            how = SamplingParams(temperature=0.0, max_tokens=row.answer, ignore_eos=True, detokenize=False)
            engine.generate(prompts, how, use_tqdm=False)
            began = time.perf_counter()
            engine.generate(prompts, how, use_tqdm=False)
            seconds = time.perf_counter() - began
            found.append({"batch": row.batch, "prompt": row.prompt, "tokens_per_s": row.batch * row.answer / seconds})
        return found


def measure(on: MeasuredDevice, shape: MeasuredShape, backends: Sequence[str]) -> dict[str, Any]:
    """Run all parts with each backend, then the peers."""
    plain = parse_config(shape.raw, {}, where="benchmark")
    int8 = {"quantization_config": quantization_config(INT8_WEIGHTS, INT8_ACTIVATIONS)}
    int4 = {
        "quantization_config": quantization_config(
            {**INT8_WEIGHTS, "num_bits": 4, "strategy": "group", "group_size": 64}
        )
    }
    w8a8, w4a16 = (parse_config(shape.raw | kind, {}, where="benchmark") for kind in (int8, int4))
    largest = max(shape.rows, key=lambda row: row.batch * (row.prompt + row.answer) * (row.prompt > 8))
    batch, context = largest.batch, largest.prompt + largest.answer // 2
    found: dict[str, Any] = {}
    for backend in backends:
        try:
            engine = RandomEngine(on, plain, backend)
        except BackendUnavailable as error:
            found[backend] = {"problem": str(error)}
            continue
        print(f"{backend}: table", file=sys.stderr, flush=True)
        part = found[backend] = {"table": table(on, engine, shape.rows)}
        part["kernels"] = kernels(on, engine, batch, context)
        part["reuse_ttft_ms"] = reuse(engine, shape.reuse_tokens)
        part["interference"] = interference(on, engine, shape)
        exact_s, prefill_s = engine.decode_s(batch, context), engine.prefill_s(1, largest.prompt)
        del engine
        others = {f"kv_int8_{group}": with_int8_kv(plain, group) for group in (64, 8)}
        others |= {"w8a8": w8a8, "w4a16": w4a16}
        for name, config in others.items():
            gc.collect()
            print(f"{backend}: {name}", file=sys.stderr, flush=True)
            try:
                other = RandomEngine(on, config, backend)
            except BackendUnavailable as error:
                part[name] = {"problem": str(error)}
                continue
            part[name] = {"decode_ratio": exact_s / other.decode_s(batch, context)}
            part[name]["prefill_ratio"] = prefill_s / other.prefill_s(1, largest.prompt)
            del other
    gc.collect()
    print("peers", file=sys.stderr, flush=True)
    return {
        "device": on.name,
        "flops_per_s": on.flops_per_s,
        "bytes_per_s": on.bytes_per_s,
        "backends": found,
        "transformers": transformers_rows(on, shape.raw, shape.rows),
        "vllm": vllm_rows(shape.raw, shape.rows) if on.device.type == "cuda" else "not measured on a CPU",
    }


def main() -> None:
    """Measure, and print the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu for a trial")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="7b", help="of the model")
    parser.add_argument("--backend", action="append", choices=sorted(BACKENDS), help="only this one; may be repeated")
    parser.add_argument("--store", action="store_true", help="store the result")
    args = parser.parse_args()
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("there is no GPU: give --device cpu --shape tiny to try the script")
    on = MeasuredDevice(args.device)
    own = [name for name in BACKENDS if name != "compiled" or on.device.type == "cpu"]
    result = measure(on, SHAPES[args.shape], args.backend or own)
    if args.store:
        store("engine-gpu", result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
