"""Compression of KV at rest: size and speed by layout, load times from slow and fast SSDs, and the quality of int8.

    python -m benchmarks.compression [--bandwidths MB_PER_S ...] [--links MB_PER_S ...] [--rounds N] [--store]

The KV is the bundled model's, computed from the repository's documentation, on which the model was not trained; float16
and bfloat16 are its float32 values rounded, int8 is what `--kv-storage int8` stores.

    layouts   ratio of coded to plain bytes, and the speeds of coding and decoding on one core, in bytes of plain KV
    loads     time until the blocks of one prompt are in memory, from a pool node's SSD whose reads are throttled to a
              bandwidth, with `--pool-ssd-compression` off and auto, by turns. A prompt's TTFT has the same difference.
              Blocks are as large as a larger model's: the KV of eight blocks, stacked as layers
    copies    the same for copies from another pool node over a throttled network, with `--pool-copy-compression`
    quality   of int8: a text is scored with the exact KV of its first half, and with that KV rounded to int8

The last line of output is JSON, with `worst_auto_over_off` and `best_auto_over_off`: the largest and the smallest ratio
of the two settings' load times. `--store` writes benchmarks/results/compression-DATE.json and
docs/pictures/compression.svg. Needs a disk with 300 MB free at --dir, and an idle core.
"""

import argparse
import asyncio
import contextlib
import json
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from benchmarks.stored import PICTURES, store
from benchmarks.throttle import ThrottledProxy
from engine import Model, load_model
from engine.batch import ForwardBatch, SequenceChunk
from kvpool import KvGroup, KvSpec, PoolNodeConfig, kv_namespace, layer_digests
from kvpool.block_coding import decode_block, encode_block, warm_up
from kvpool.node import PoolNode
from kvpool.policy import PutRequest
from kvpool.remote_copy import copy_blocks
from kvpool.service import PoolService
from kvpool.ssd.disk import Disk, InFlightBatch, IoBatch, IoThreads
from messenger import Messenger, MessengerConfig
from moonpool_proto.v1.pool_pb2_grpc import add_PoolServicer_to_server
from rpc.control import start_server
from settings.keys import assemble
from settings.worker import BUNDLED_MODEL, KvSettings
from worker.kv_memory import KvMemory, QuantisedMemory

ROOT = Path(__file__).resolve().parents[1]
TEXTS = ("docs/structure.md", "docs/kv-pool.md", "docs/costs.md", "docs/fairness.md")
BLOCK, TOKENS = 16, 2048
STACKED = 8  # blocks of the bundled model that form one block of the loads
PROMPT_NBYTES = 32 << 20
LAYOUTS = ("float32", "float16", "bfloat16", "int8")
UNLIMITED = 0
COPIED_NBYTES = 8 << 20
OPEN_ADDRESS, PROXIED_ADDRESS = "127.0.0.1", "127.0.0.2"

Bytes = NDArray[np.uint8]


class ThrottledDisk(Disk):
    """Disk whose reads share a bandwidth of `bytes_per_s`; 0: as fast as it can."""

    bytes_per_s = 0.0

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free_at_s = 0.0

    def start(self, threads: IoThreads, batch: IoBatch, fds: NDArray[np.int32], *, write: bool) -> InFlightBatch:
        """Start a batch; a read ends when the bandwidth has room for it."""
        if not write and self.bytes_per_s:
            with self._lock:
                self._free_at_s = end_s = max(self._free_at_s, time.monotonic()) + batch.nbytes / self.bytes_per_s
            time.sleep(max(0.0, end_s - time.monotonic()))
        return super().start(threads, batch, fds, write=write)


def model_kv(model: Model) -> tuple[NDArray[np.float32], Bytes]:
    """Return the KV of the texts.

    float32 [blocks, layers, kv_heads, 2, 16, head_dim], and in int8 as slots uint8 [blocks, slot_nbytes].
    """
    ids = token_ids(TOKENS)
    slots = np.arange(TOKENS // BLOCK, dtype=np.int32)
    with open_memory(model, len(slots)) as (exact, stored):
        for start in range(0, TOKENS, 256):
            chunk = SequenceChunk(
                ids[start : start + 256], start, (slots[: (start + 256) // BLOCK],), want_logits=False
            )
            model.forward(ForwardBatch([chunk]), exact.cache)
        stored.to_host_now(slots.tolist())
        return exact.cache.views[0].numpy().copy(), stored.slot_bytes(0, slots.tolist()).copy()


@contextlib.contextmanager
def open_memory(model: Model, num_slots: int) -> Iterator[tuple[KvMemory, QuantisedMemory]]:
    """Open a model's KV memory with its int8 counterpart."""
    messenger = Messenger(MessengerConfig(), node_id="benchmark", incarnation=1)
    messenger.start()
    exact = KvMemory.of(model, messenger, num_slots=num_slots, block_tokens=BLOCK, kv=KvSettings())
    stored = QuantisedMemory(exact, messenger, num_slots=num_slots)
    try:
        yield exact, stored
    finally:
        stored.close()
        exact.close()
        messenger.close()


def token_ids(count: int) -> NDArray[np.int32]:
    """Return the first ids of the texts."""
    tokenizer = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    text = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in TEXTS)
    return np.array(tokenizer.encode(text).ids[:count], np.int32)


def blocks_of(layout: str, exact: NDArray[np.float32], int8: Bytes) -> tuple[KvSpec, Bytes]:
    """Return the KV in a layout, as blocks uint8 [n, block_nbytes] of stacked layers, and their spec."""
    layers, heads, head_dim = exact.shape[1], exact.shape[2], exact.shape[5]
    if layout == "int8":
        data: Any = int8
        scale_group = 16
    else:
        rounded = torch.from_numpy(exact).to(getattr(torch, layout))
        data, scale_group = rounded.view(torch.uint8).numpy(), 0
    group = KvGroup("full", 0, tuple(range(STACKED * layers)), heads, head_dim, layout, scale_group)
    spec = KvSpec((group,), BLOCK)
    return spec, np.ascontiguousarray(data).reshape(-1, spec.block_nbytes)


def measure_layout(layout: str, spec: KvSpec, blocks: Bytes, rounds: int) -> dict[str, Any]:
    """Return ratio and speeds of the codec."""
    out = np.empty_like(blocks)
    encode_s, decode_s = [], []
    coded: list[bytes] = []
    for _ in range(rounds):
        began = time.thread_time()
        coded = [encode_block([block], spec) or b"" for block in blocks]
        encoded = time.thread_time()
        for data, target in zip(coded, out, strict=True):
            decode_block(np.frombuffer(data, np.uint8), [target], spec)
        encode_s.append(encoded - began)
        decode_s.append(time.thread_time() - encoded)
    assert np.array_equal(out, blocks)
    return {
        "layout": layout,
        "block_bytes": spec.block_nbytes,
        "ratio": round(sum(map(len, coded)) / blocks.nbytes, 4),
        "encode_gb_per_s": round(blocks.nbytes / statistics.median(encode_s) / 1e9, 3),
        "decode_gb_per_s": round(blocks.nbytes / statistics.median(decode_s) / 1e9, 3),
    }


class StoredPrompt:
    """One prompt's blocks at one pool node."""

    def __init__(self, node: PoolNode, spec: KvSpec, blocks: Bytes, nbytes: int = PROMPT_NBYTES) -> None:
        self._node, self._spec = node, spec
        count = nbytes // spec.block_nbytes
        self._blocks = blocks[np.arange(count) % len(blocks)]
        self.chain = [number.to_bytes(16, "big") for number in range(1, count + 1)]
        self.namespace = kv_namespace("benchmark", spec)

    async def store(self, *, written: bool = True) -> None:
        """Store the blocks; if `written`, on the SSD only."""
        request = PutRequest(self.namespace, self._spec, self.chain, [bytes(16), *self.chain[:-1]])
        put = self._node.allocate(request, owner="benchmark", owner_incarnation=1, ttl_ns=60_000_000_000)
        for block, data in zip(put.new_blocks, self._blocks, strict=True):
            self._node.memory.array[block.offsets[0] : block.offsets[0] + len(data)] = data
        full = np.full(len(self._blocks), BLOCK, np.int32)
        digests = [(row.tobytes(),) for row in layer_digests(self._blocks, self._spec, 0, full)]
        self._node.seal_now(put.put_id, digests, [True] * len(digests))
        if written:
            await self.empty_memory()

    async def empty_memory(self) -> None:
        await self._node.flush(None, dram_only=True)

    async def load_s(self) -> float:
        """Return the time until the blocks are leased in memory."""
        began = time.perf_counter()
        grant = await self._node.pin(
            self.namespace, self.chain, owner="benchmark", owner_incarnation=1, lease_ns=10**10, wait_s=60
        )
        took_s = time.perf_counter() - began
        assert grant is not None
        assert len(grant.blocks) == len(self.chain)
        self._node.core.unpin(grant.lease_id)
        return took_s


async def measure_loads(
    folder: Path, spec: KvSpec, blocks: Bytes, layout: str, bandwidths: Sequence[int], rounds: int
) -> list[dict[str, Any]]:
    """Return a row per bandwidth: median load times of both settings, and the share of blocks that auto coded."""
    rows = []
    for megabytes in bandwidths:
        ThrottledDisk.bytes_per_s = megabytes * 1e6
        nodes = {setting: await start_node(folder, setting) for setting in ("off", "auto")}
        prompts = {setting: StoredPrompt(node, spec, blocks) for setting, node in nodes.items()}
        times: dict[str, list[float]] = {"off": [], "auto": []}
        try:
            for prompt in prompts.values():
                await prompt.store()
                for _ in range(2):  # after which the costs are known
                    await prompt.load_s()
                    await prompt.empty_memory()
            for setting, prompt in prompts.items():
                await nodes[setting].flush(None, dram_only=False)
                await prompt.store()
            before = dict(nodes["auto"].counters)
            await nodes["auto"].flush(None, dram_only=False)
            await prompts["auto"].store()
            grown = {name: value - before.get(name, 0) for name, value in nodes["auto"].counters.items()}
            for _ in range(rounds):
                for setting, prompt in prompts.items():
                    times[setting].append(await prompt.load_s())
                    await prompt.empty_memory()
        finally:
            for node in nodes.values():
                await node.close()
        rows.append(row_of(layout, megabytes, times, grown.get("ssd_coded_blocks", 0) / grown["written_blocks"]))
    return rows


async def start_node(
    folder: Path, setting: str, *, copies: str = "off", node_id: str = "pool", messenger: MessengerConfig | None = None
) -> PoolNode:
    """Start a pool node with these settings of the compression on its SSD and of its copies."""
    own = Path(tempfile.mkdtemp(prefix=f"{setting}-", dir=folder))
    config = assemble(
        PoolNodeConfig,
        node_id=node_id,
        listen=f"unix:{own}/pool.sock",
        pool_bytes=4 * PROMPT_NBYTES,
        pool_ssd_dir=own,
        pool_ssd_bytes=2 * PROMPT_NBYTES,
        pool_ssd_compression=setting,
        pool_copy_compression=copies,
        messenger=messenger or assemble(MessengerConfig, transport="tcp", data_host=OPEN_ADDRESS),
    )
    node = PoolNode(config, incarnation=1)
    await node.start()
    return node


async def measure_copies(
    folder: Path, spec: KvSpec, blocks: Bytes, layout: str, links: Sequence[int], rounds: int
) -> list[dict[str, Any]]:
    """Return a row per bandwidth of the network: median times of copies with both settings."""
    rows = []
    ports = {"control": free_port(), "data": free_port()}
    proxies = {name: ThrottledProxy(PROXIED_ADDRESS, OPEN_ADDRESS, port) for name, port in ports.items()}
    config = {"data_host": OPEN_ADDRESS, "data_port": ports["data"], "data_advertise": PROXIED_ADDRESS}
    source = await start_node(
        folder, "off", node_id="source", messenger=assemble(MessengerConfig, transport="tcp", **config)
    )
    server = await start_server(
        f"{OPEN_ADDRESS}:{ports['control']}", lambda server: add_PoolServicer_to_server(PoolService(source), server)
    )
    try:
        prompt = StoredPrompt(source, spec, blocks, COPIED_NBYTES)
        await prompt.store(written=False)
        for megabytes in links:
            for proxy in proxies.values():
                proxy.bytes_per_s = megabytes * 1e6
            targets = {name: await start_node(folder, "off", node_id=name, copies=name) for name in ("off", "auto")}
            times: dict[str, list[float]] = {"off": [], "auto": []}
            try:
                for i in range(rounds + 3):
                    for setting, node in targets.items():
                        began = time.perf_counter()
                        address = f"{PROXIED_ADDRESS}:{ports['control']}"
                        copied = await copy_blocks(node, prompt.namespace, prompt.chain, address, 60)
                        if i == 2:
                            node.counters["copy_coded_blocks"] = 0
                        if i > 2:  # the first ones connect, and measure both kinds
                            times[setting].append(time.perf_counter() - began)
                        assert copied.num_blocks == len(prompt.chain)
                        await node.flush(None, dram_only=False)
                coded = targets["auto"].counters["copy_coded_blocks"] / (rounds * len(prompt.chain))
            finally:
                for node in targets.values():
                    await node.close()
            rows.append(row_of(layout, megabytes, times, coded))
    finally:
        await server.stop(0)
        await source.close()
        for proxy in proxies.values():
            proxy.close()
    return rows


def row_of(layout: str, megabytes: int, times: dict[str, list[float]], coded_share: float) -> dict[str, Any]:
    """Return the result of one cell."""
    ratios = [auto_s / off_s for auto_s, off_s in zip(times["auto"], times["off"], strict=True)]
    row = {
        "layout": layout,
        "megabytes_per_s": megabytes,
        "off_s": round(statistics.median(times["off"]), 4),
        "auto_s": round(statistics.median(times["auto"]), 4),
        "auto_over_off": round(statistics.median(ratios), 3),
        "coded_share": round(coded_share, 3),
    }
    print(row, file=sys.stderr)
    return row


def free_port() -> int:
    """Return a port that is free at both addresses."""
    with socket.socket() as one, socket.socket() as two:
        one.bind((OPEN_ADDRESS, 0))
        two.bind((PROXIED_ADDRESS, one.getsockname()[1]))
        return int(one.getsockname()[1])


def measure_quality(model: Model, num_texts: int = 8, length: int = 512) -> dict[str, Any]:
    """Score the second half of texts with exact KV of the first half, and with that KV in int8."""
    ids, half = token_ids(num_texts * length).reshape(num_texts, length), length // 2
    slots = np.arange(length // BLOCK, dtype=np.int32)
    changes, largest, agree = [], 0.0, []
    nll = []
    with open_memory(model, len(slots)) as (exact, stored):
        for text in ids:
            first = slots[: half // BLOCK]
            rest = SequenceChunk(text[half:], half, (slots,), want_logits=True, every=True)
            model.forward(ForwardBatch([SequenceChunk(text[:half], 0, (first,), want_logits=False)]), exact.cache)
            scores = []
            for is_rounded in (False, True):
                if is_rounded:
                    stored.to_host_now(first.tolist())
                    stored.to_device_now(first.tolist())
                scores.append(torch.log_softmax(model.forward(ForwardBatch([rest]), exact.cache).double(), dim=-1)[:-1])
            target = torch.from_numpy(text[half + 1 :].astype(np.int64))[:, None]
            right, approximate = (score.gather(1, target)[:, 0] for score in scores)
            nll.append(-right.mean().item())
            changes.append((right - approximate).mean().item())
            largest = max(largest, (scores[0] - scores[1]).abs().max().item())
            agree.append((scores[0].argmax(dim=1) == scores[1].argmax(dim=1)).double().mean().item())
    return {
        "texts": num_texts,
        "tokens": num_texts * (half - 1),
        "nll": round(statistics.mean(nll), 4),
        "nll_change": round(statistics.mean(changes), 6),
        "largest_logprob_change": round(largest, 4),
        "greedy_agreement": round(statistics.mean(agree), 4),
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw times with auto relative to off over the bandwidth."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    colours = dict(zip(LAYOUTS, ("#0969da", "#8250df", "#1a7f37", "#bf8700"), strict=True))
    ratios = {row["layout"]: row["ratio"] for row in result["layouts"]}
    with plt.rc_context({"svg.hashsalt": "compression", "font.size": 9.0, "axes.titlelocation": "left"}):
        figure, both = plt.subplots(1, 2, figsize=(9.0, 3.6), layout="constrained", sharey=True)
        for axes, kind, title in zip(both, ("loads", "copies"), ("load from SSD", "copy over a network"), strict=True):
            axes.axhline(1, color="#57606a", linewidth=0.9)
            for layout, ratio in ratios.items():
                rows = [row for row in result[kind] if row["layout"] == layout and row["megabytes_per_s"] != UNLIMITED]
                axes.plot(
                    [row["megabytes_per_s"] for row in rows],
                    [row["auto_over_off"] for row in rows],
                    marker="o",
                    color=colours[layout],
                    label=f"{layout}, coded to {ratio:.2f}",
                )
            axes.set_xscale("log")
            ticks = sorted({row["megabytes_per_s"] for row in result[kind]} - {UNLIMITED})
            axes.set_xticks(ticks, [str(tick) for tick in ticks])
            axes.minorticks_off()
            axes.set_title(title)
            axes.set_xlabel("bandwidth, MB/s")
            axes.grid(color="#d8dee4", linewidth=0.7)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        both[0].set_ylabel("time, auto / off")
        both[0].set_ylim(0, None)
        both[0].legend(frameon=False, fontsize=8, loc="lower right")
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="folder on a disk [.]")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument(
        "--bandwidths",
        type=int,
        nargs="+",
        default=[50, 100, 200, 400, 800, 1600, UNLIMITED],
        help="MB/s; 0: unlimited",
    )
    parser.add_argument(
        "--links", type=int, nargs="+", default=[10, 30, 100, 300, UNLIMITED], help="MB/s of the network; 0: unlimited"
    )
    parser.add_argument("--rounds", type=int, default=5, help="loads per cell; medians count [5]")
    parser.add_argument("--store", action="store_true", help="write the result and the picture")
    options = parser.parse_args()
    warm_up()
    model = load_model(BUNDLED_MODEL, threads=1)
    exact, int8 = model_kv(model)
    layouts, loads, copies = [], [], []
    with mock.patch("kvpool.ssd.store.Disk", ThrottledDisk):
        for layout in options.layouts:
            spec, blocks = blocks_of(layout, exact, int8)
            layouts.append(measure_layout(layout, spec, blocks, options.rounds))
            print(layouts[-1], file=sys.stderr)
            with tempfile.TemporaryDirectory(prefix="moonpool-bench-", dir=options.dir) as folder:
                cell = (Path(folder), spec, blocks, layout)
                loads += asyncio.run(measure_loads(*cell, options.bandwidths, options.rounds))
                copies += asyncio.run(measure_copies(*cell, options.links, options.rounds))
    result = {
        "benchmark": "compression",
        "prompt_bytes": PROMPT_NBYTES,
        "rounds": options.rounds,
        "copied_bytes": COPIED_NBYTES,
        "worst_auto_over_off": max(row["auto_over_off"] for row in (*loads, *copies)),
        "best_auto_over_off": min(row["auto_over_off"] for row in (*loads, *copies)),
        "layouts": layouts,
        "loads": loads,
        "copies": copies,
        "quality": measure_quality(model),
    }
    for what, rows in (("loads from SSD", loads), ("copies", copies)):
        table = Table("layout", "MB/s", "off s", "auto s", "auto / off", "coded", title=what)
        for row in rows:
            table.add_row(*(str(value) for value in row.values()))
        Console(stderr=True).print(table)
    if options.store:
        store("compression", result)
        draw(result, PICTURES / "compression.svg")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
