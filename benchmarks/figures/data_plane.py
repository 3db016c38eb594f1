"""Sections of docs/performance.md on what keeps and moves KV: pool, eviction, messenger, overlap."""

from collections.abc import Callable

from benchmarks.figures.formatting import number, ratio_cell, source, table, write_and_read
from benchmarks.stored import Result, latest


def pool() -> str:
    memory, memory_file = latest("kvpool")
    ssd, ssd_file = latest("kvpool-ssd")
    sizes = list(memory["by_size"])
    ratios: dict[str, Callable[[Result], float | None]] = {
        "get, verified, to memcpy": lambda row: row["get_vs_memcpy"],
        "get, verified, to Mooncake Store": lambda row: row.get("get_vs_mooncake_store"),
        "put to Mooncake Store": lambda row: row.get("put_vs_mooncake_store"),
        "batched put to Mooncake Store's batched put": lambda row: row.get("put_batch_vs_mooncake_store"),
    }
    rows = [[name, *(ratio_cell(ratio(memory["by_size"][size])) for size in sizes)] for name, ratio in ratios.items()]
    for name, kind in (("SSD read to fio", "read"), ("SSD write, durable, to fio with fdatasync", "write")):
        rows.append([name, *(ratio_cell(ssd["by_size"][size]["depth_8"][kind]["vs_fio"]) for size in sizes)])
    return f"""## KV pool

{source("benchmarks/kvpool.py", memory_file)}: through the shared memory of the host, one block at a time, a batch where the row
says so; {source("benchmarks/kvpool_ssd.py", ssd_file)}: eight I/Os in flight. Ratios of throughputs, each pair in one run; above 1 Moonpool is faster.

{table(["ratio", *sizes], rows)}

The aims are 1.2 times Mooncake Store for gets, and for puts up to 1 MiB, one by one and batched; 0.9 for puts of 16 MiB and for SSD reads to fio.
What bounds those that are missed: a put of 4 KiB takes about 180 µs, of which 115 are Python in the pool node (settling 35, receiving 20, allocating 18,
sealing 18, copying 11) and 35 in the client, on one core by turns (Mooncake Store's node is compiled, and its blocks have no digests, no parents and no
events). Of the 281 µs of 1 MiB the copy with its digest takes 82, where a plain copy takes 62; on cores without AVX-512 230, where a plain one takes
143. A put of 16 MiB takes 650 µs beside its copy, which displaces Python's data from the caches. An SSD read of 4 KiB takes 5 µs of Python to prepare, and its thread needs the interpreter between batches.

![Ratios of the pool's gets, puts and SSD to Mooncake Store and fio](pictures/kvpool.svg)"""


def interference() -> str:
    result, file = latest("pool-interference")
    real = result["real"]
    busy = sum(share for name, share in real["calm"]["cpu_share"].items() if name != "load")

    def row(engine: str, kind: str, label: str) -> list[str]:
        calm, figures = result[engine]["calm"], result[engine][kind]
        return [
            f"{engine}, {label}",
            f"{number(calm['p50_ms'])} / {number(calm['p99_ms'])}",
            f"{number(figures['p50_ms'])} / {number(figures['p99_ms'])}",
            number(figures["p50_ratio"]),
            f"{number(figures['p99_ratio'])} ({number(figures['p99_ratios'][0])} to {number(figures['p99_ratios'][-1])})",
            f"{figures['put_bytes_per_s'] / 1e9:.1f} + {figures['get_bytes_per_s'] / 1e9:.1f}",
            f"{figures['cpu_share']['pool-0']:.0%}",
        ]

    rows = [
        row(engine, kind, label)
        for engine in ("paced", "real")
        for kind, label in (("pool", "pool I/O"), ("copy", "copies without the pool"))
    ]
    header = [
        "engine, other work",
        "calm, p50 / p99, ms",
        "under it, ms",
        "ratio of p50",
        "ratio of p99 (rounds)",
        "put + get, GB/s",
        "pool node, of a core",
    ]
    return f"""## Decoding beside full pool I/O

{source("python -m benchmarks.pool_interference", file)}: the time between tokens of {result["streams"]} streams, with one prefill, one decode and one pool
node on {result["cores"]} cores, while a process of the lowest priority stores and reads blocks of 1 MiB without a pause; the pool is full and writes to
its SSD. Phases alternate; ratios are medians over {result["rounds"]} rounds.

{table(header, rows)}

The aim, a ratio of p99 of at most 1.05, is missed: the two cores bound it. Calm, the cluster's processes take {number(busy)} cores with the
real engine, and any other work has about the same effect: a process of the lowest priority that only copies memory, without the pool, raises
p99 to {number(real["copy"]["p99_ratio"])} times. The rounds differ as widely with the paced engine, which hardly computes and whose p50 does not change. The
machine ran other work as well."""


def kv_bytes() -> str:
    result, file = latest("kv_bytes")
    rows = [
        [row["shape"], f"{row['bytes_per_token']:,.0f}", f"{row['ratio']:.1f}", row.get("claim", "")]
        for row in (*result["techniques"], *result["public"])
    ]
    header = ["model", "bytes of KV per token", "times less than GQA-8 in 16 bits", "Character.AI's claim"]
    live, live_file = latest("small-kv-live")

    def live_row(name: str, row: Result) -> list[str]:
        moved = sum(row["moved_bytes_per_turn"].values()) / 1e3
        ttfts = [f"{1e3 * row[key]:,.0f}" for key in ("ttft_p50_s", "last_ttft_p50_s", "last_ttft_cold_p50_s")]
        same = f"{row['same_tokens']:.0%}, {row['logprob_difference']:.1g}"
        return [
            name,
            str(row["held"]),
            f"{row['dialogue_reuse']:.3f}",
            f"{moved:,.0f}",
            *ttfts,
            f"{1e3 * row['last_tpot_p50_s']:.1f}",
            same,
        ]

    live_rows = [live_row(name, row) for name, row in live["models"].items()]
    live_header = ["model", "histories held", "reuse", "kB moved per turn", "TTFT, ms", "last half", "last half, cold"]
    live_header += ["TPOT, ms", "cold run: equal tokens, largest difference of log-probabilities"]
    return f"""## Small KV

{source("python -m benchmarks.kv_bytes", file)}: memory that a decode node allocates for one sequence of {result["context"]:,} tokens, scales included,
[technique by technique](small-kv.md) and for the layouts of public models. The first rows are {len(result["techniques"])} models of 12 layers and heads of 64, of which the last
decode steps run in exactly this memory; the baseline of each row has the same depth and heads.

{table(header, rows)}

A window of 1,024 takes 66 blocks of 16 tokens: those that the next token sees, and a new one. Mistral's window is the same in all layers, so
half of the blocks are kept at this length.

Live ({source("python -m benchmarks.small_kv_live", live_file)}): the bundled model and its sibling with small KV, both trained, with two prefill, two decode
and two pool nodes of {live["pool_bytes"] / 2e6:,.1f} MB each. *Held*: of histories of {live["history_tokens"]:,} tokens that were stored two at a time, so that they go to both hosts,
the newest that are still reused, up to two of them in the workers' own slots. *Reuse*: share of all prompt tokens in two dialogues of {live["messages"]} messages. *TPOT*: time
per further token in their last half. The engine keeps the bundled model's KV in float32.

{table(live_header, live_rows)}

With everything in int8, a cold run gives the same answers bit for bit, for which the compiled backend computes attention row by row: a cold prompt takes more
than twice as long as in floats. In floats log-probabilities differ by less than 1e-4."""


def endless() -> str:
    result, file = latest("endless")
    live, losses = result["live"], result["losses"]
    rows = [[mode, f"{row['behind_window']:.3f}"] for mode, row in losses.items()]
    return f"""## Endless generation

{source("python -m benchmarks.endless", file)}: an answer of {live["tokens"]:,} tokens with {result["sinks"]} sinks and a window of {result["window"]} tokens, through a prefill and a decode
node: {1e3 * live["first_token_s"]:.2f} ms per token in the first tenth and {1e3 * live["last_token_s"]:.2f} ms in the last, {result["time_ratio_last_first"]:.2f} times as much; the aim is at most 1.1. KV grew by
{result["memory_growth_bytes"]:,.0f} bytes, the decode node's resident memory by {live["resident_growth_bytes"] / 1e6:.1f} MB.

Loss of the bundled model on the documentation, behind the window:

{table(["visible", "nats per token"], rows)}

Without sinks the loss is {result["window_only_collapse"]:.2f} nats higher than with {result["sinks"]}. *Recompute* computes the window anew for each token: those keys and values do not depend on what left the
window, which costs {result["loss_gap_to_recompute"]:.2f} nats. The text is longer than the model's positions, from which *dense* suffers.

![Loss by position for each of them](pictures/endless.svg)"""


def droidspeak() -> str:
    result, file = latest("droidspeak")
    test, agents, (first, last) = result["test"], result["cascade"], result["chosen"]
    rows = []
    for name, points in result["curves"].items():
        within = [point for point in points if point["quality_loss"] <= 0.02] or points
        best = min(within, key=lambda point: (point["prefill_s"] is None, point["prefill_s"], point["cost"]))
        took = "–" if best["prefill_s"] is None else f"{1e3 * best['prefill_s']:.0f} ms"
        low, high = best["loss_interval"]
        loss = f"{best['quality_loss']:.1%} ({low:.1%} to {high:.1%})"
        rows.append([name, f"{best['first']} to {best['last']}", f"{best['accuracy']:.1%}", loss, took])
    right, lost = test["accuracy"], result["quality_loss_interval"]
    return f"""## KV of sibling models

{source("python -m benchmarks.droidspeak", file)}: the bundled model's fine-tune [that reads reports](../tools/training/README.md) reuses the bundled
model's [KV](droidspeak.md). Of {test["questions"]:,} questions about {test["contexts"]} contexts of {test["context_tokens"]:,.0f} tokens, the base answers {right["sender"]:.1%} exactly, the fine-tune {right["receiver"]:.1%}, and the
fine-tune with all KV of the base {right["all_reused"]:.1%}: that loses {test["all_reused_loss"]:.0%} of its lead. The reuse profile, made from {result["profile"]["questions"]} other questions about other names, computes
layers {first} to {last}: the first token comes {result["prefill_speedup"]:.2f} times as fast, the KV of the other layers fetched from another host included (aim: 1.7), and {result["quality_loss"]:.1%} of the lead is
lost (95 % interval {lost[0]:.1%} to {lost[1]:.1%}; aim: at most 2 %). Of each of the paper's curves, the fastest group that loses at most 2 %, or the fastest of all if none does; without reuse the
first token takes {1e3 * result["alone_s"]:.0f} ms:

{table(["curve", "layers computed", "exact answers", "lead that is lost", "TTFT"], rows)}

![Lead that is lost, by time to the first token](pictures/droidspeak.svg)

What this fine-tune has learned is in the keys and values of its first two layers, so hidden states of the base, which enter later layers, do not help it; neither *E only* nor
*E + KV* gets near the aim. Keys and values of the first computed layer take {result["receiver_projection_ms"]:.1f} ms. The sender's workers have room for
{result["sender_extra_bytes_of_states"] / 1e6:,.0f} MB of hidden states, beside {result["sender_kv_bytes"] / 1e6:,.0f} MB of KV, if a profile needs those of one layer, in host memory; this one needs none.

A second agent, the fine-tune, that is asked about the {agents["prompt_tokens"]:,.0f} tokens that the base has read and answered has its first token after {1e3 * agents["second_ttft_s"]:.0f} ms, without reuse after
{1e3 * agents["second_ttft_alone_s"]:.0f} ms. It loads {agents["loaded_bytes"] / 1e6:.1f} MB, {agents["bandwidth_saved"]:.0%} less than the KV of all layers."""


def compression() -> str:
    result, file = latest("compression")
    quality = result["quality"]
    layouts = [
        [row["layout"], number(row["ratio"]), number(row["encode_gb_per_s"]), number(row["decode_gb_per_s"])]
        for row in result["layouts"]
    ]

    def cells(kind: str) -> list[list[str]]:
        speeds = list(dict.fromkeys(row["megabytes_per_s"] for row in result[kind]))
        found = {(row["layout"], row["megabytes_per_s"]): row for row in result[kind]}
        return [
            [
                f"{speed or 'unlimited'}",
                *(
                    f"{number(row['auto_over_off'])} ({row['coded_share']:.0%})"
                    for layout in result["layouts"]
                    if (row := found[layout["layout"], speed])
                ),
            ]
            for speed in speeds
        ]

    header = ["MB/s", *(row["layout"] for row in result["layouts"])]
    return f"""## Compression at rest

{source("python -m benchmarks.compression", file)}: does [compressing KV](kv-pool.md#compression) on the SSD and on slow networks load it sooner, and does it ever
load it later? KV of the bundled model, computed from the documentation; size relative to plain KV, and GB/s of plain KV on one core:

{table(["KV", "size", "coding", "decoding"], layouts)}

Time to load a prompt's {result["prompt_bytes"] >> 20} MiB from an SSD whose reads are throttled, with `--pool-ssd-compression auto` relative to `off`, medians of
{result["rounds"]} by turns, and the share of blocks that were compressed:

{table(header, cells("loads"))}

The same for copies of {result["copied_bytes"] >> 20} MiB from another pool node over a throttled network, with `--pool-copy-compression`:

{table(header, cells("copies"))}

The quality of [int8](kv-pool.md#kv-in-int8): with the first half of {quality["texts"]} texts in int8, the negative log-likelihood of the second halves ({quality["tokens"]:,} tokens) changes by
{quality["nll_change"]:+.4f} per token from {number(quality["nll"])}, a log-probability by at most {number(quality["largest_logprob_change"])}, and the most likely token is the same in
{quality["greedy_agreement"]:.1%}.

![Times of loads and copies with compression relative to those without, by bandwidth](pictures/compression.svg)"""


def eviction() -> str:
    result, file = latest("eviction")
    cells = result["cells"]["held-out"]
    header = ["held-out workload", "blocks held", "LRU", "ARC", "Moonpool", "oracle", "gap closed"]
    rows = [
        [
            cell["workload"].replace("_", " "),
            f"{cell['capacity']:,}",
            *(f"{cell[policy]:.3f}" for policy in ("lru", "arc", "moonpool", "belady")),
            "–" if cell["gap_closed"] is None else f"{cell['gap_closed']:.0%}",
        ]
        for cell in cells
    ]
    worst = min((cell for of_set in result["cells"].values() for cell in of_set), key=lambda c: c["minus_best_classic"])
    on_trace = next(cell for cell in result["cells"]["trace"] if cell["capacity"] == 10_000)
    return f"""## Eviction

{source("python -m benchmarks.eviction", file)}: does the policy `moonpool` find more blocks than LRU and ARC on workloads for which it was not tuned, and is it ever worse?
{len({cell["workload"] for cell in cells})} held-out workloads ([generators](../benchmarks/evicting/held_out.py), fixed before the tuning) at three capacities; the oracle is
[Belady's algorithm](simulate.md). Over them, `moonpool` closes {result["mean_gap_closed"]:.0%} of the gap between the better of LRU and ARC and the oracle (mean, where the gap is at least 0.01);
over the workloads of the tuning {result["mean_gap_closed_tuning"]:.0%}, over the bundled trace {result["mean_gap_closed_trace"]:.0%}. The aim is 15 %. On the bundled trace with 10,000 blocks:
LRU {on_trace["lru"]:.4f}, ARC {on_trace["arc"]:.4f}, `moonpool` {on_trace["moonpool"]:.4f}, oracle {on_trace["belady"]:.4f}.

The least difference to the better of LRU and ARC is {result["worst_minus_best_classic"]:+.4f} ({worst["workload"].replace("_", " ")}, {worst["capacity"]:,} blocks); the aim is at least -0.005. It is the price of finding out which
expert is best: [how the policy chooses](simulate.md#the-policy-moonpool). The simulation takes {number(result["us_per_reference"])} µs of CPU time per block of a prompt with `moonpool`, {number(result["us_per_reference_lru"])} µs with LRU,
of which the simulated pool itself is a part; the aim is 5 µs.

{table(header, rows)}

![Hit rates of the policies on the held-out workloads and the bundled trace](pictures/eviction.svg)"""


def messenger() -> str:
    result, file = latest("messenger")
    sizes = {"64KiB": "64 KiB", "1MiB": "1 MiB", "16MiB": "16 MiB", "2000x16KiB": "2,000 × 16 KiB"}
    peers = {
        "tcp_vs_mooncake": "tcp to Mooncake's Transfer Engine",
        "tcp_vs_nixl_tcp": "tcp to NIXL (`UCX_TLS=tcp`)",
        "tcp_vs_iperf3": "tcp to iperf3, which awaits no acknowledgement",
        "shm_vs_nixl": "shared memory to NIXL",
        "shm_vs_memcpy": "shared memory to memcpy",
    }

    def cells(peer: str, what: str) -> list[str]:
        return [" / ".join(write_and_read(result["by_size"][size], peer, what)) for size in sizes]

    throughput = [[label, *cells(peer, "throughput")] for peer, label in peers.items()]
    latency = [[label, *cells(peer, "latency")] for peer, label in peers.items() if peer != "tcp_vs_iperf3"]
    costs = {
        "tcp_digests_vs_tcp": "tcp with digests to tcp",
        "shm_digests_vs_shm": "shared memory with digests to shared memory",
        "tcp_encrypted_vs_aes_socket": "tcp with TLS to AES-256-GCM over a plain socket",
    }
    cost_rows = [[label, *cells(pair, "throughput")] for pair, label in costs.items()]
    rdma, rdma_file = latest("rdma-vm")
    rows = [[size, number(row["write_vs_ib_write_bw"])] for size, row in rdma["counted"]["by_size"].items()]
    return f"""## Messenger

{source("benchmarks/messenger.py", file)}: one-sided writes / reads, several operations under way, in one run with the peers. Ratios of throughputs:

{table(["throughput, writes / reads", *sizes.values()], throughput)}

Ratios of median latencies, one operation at a time; above 1 Moonpool is faster:

{table(["latency, writes / reads", *sizes.values()], latency)}

The aims are 1.0 of every peer's throughput, and a latency of at most 1.2 times the best (0.83 in the table). They are
missed where a call costs more than its bytes: a write of 64 KiB makes about 115 Python calls, some 22 µs, and the owner copies it, since no
process may hold a writable mapping of another's memory; NIXL's caller writes into such a mapping. To revoke one while its user is stopped, the
owner would have to replace the pages: at best 0.14 ms for 64 KiB, 1.1 ms for 1 MiB, 19 ms for 16 MiB. Figures of one cell differ by a fifth from run to run.

![Throughput and latency of writes beside Mooncake, NIXL, iperf3, memcpy and a Python socket](pictures/messenger.svg)

Cost of digests of every 64 KiB, compared on arrival, and of encryption, as ratios of throughputs; the aims are 0.8:

{table(["throughput, writes / reads", *sizes.values()], cost_rows)}

The owner digests in the pass that writes ([how](messenger.md#digests-of-units)), and the writer while a large batch is on its way; computing bounds both.
One core digests about as fast as it copies: 4.6 GB/s beside copies of 5.5 to 6.0 (6.3 to 6.8 within the caches), and in one pass with the copy 4.4 to
4.6; other cores with AVX-512 14.4 beside 13.7. In shared memory the writer's core is idle without digests; with them, the slower of the two cores
bounds a write, at best at 0.8. By tcp both cores copy all the time, and digests on both sides add 0.6 of that time: at best 0.6. Python takes about a
third of the CPU time of both processes at 1 MiB, and two thirds at 64 KiB: requests, answers, the notification, and the look-up of its digests.
Reads are digested in a second pass by the thread that waits for them, which has also copied them in shared memory. TLS is bound by OpenSSL through memory
buffers, which takes 2 to 3 times as long as AES-GCM alone; the kernel's TLS would avoid it where it exists.

RDMA over soft-RoCE in an emulated VM, counted in instructions ({source("benchmarks/rdma_vm.py --count", rdma_file)}), as a ratio to the
throughput of perftest's `ib_write_bw`:

{table(["write", "ratio"], rows)}"""


def paths() -> str:
    result, file = latest("messenger-paths")
    names = {"drop": "drops every packet", "unplug": "is unplugged", "slow_tenfold": "slows down tenfold"}

    def cell(failure: str, figure: str) -> str:
        found = result["by_failure"][failure][figure]
        return f"{found['median_ms']:.0f} / {found['max_ms']:.0f}"

    rows = [[label, *(cell(name, figure) for figure in ("detection", "stall"))] for name, label in names.items()]
    low, high = sorted(result["load_1m"])
    return f"""## Failing networks

{source("benchmarks/messenger_paths.py", file)}: one of two networks between two hosts fails in the middle of a write ([several networks](messenger.md#several-networks)). Time until the path is left, and from then until its work is acknowledged by the other path; medians / maxima, in ms:

{table(["the network", "detection", "stall"], rows)}

The aim is a stall of at most 50 ms. Maxima depend on what else runs on the two cores (load average {low:.1f} to {high:.1f})."""


def overlap() -> str:
    result, file = latest("overlap")
    rows = {(row["mode"], row["layers"], row["ratio"]): row for row in result["rows"]}
    cells = sorted({(layers, ratio) for _, layers, ratio in rows})

    def columns(layers: int, ratio: float) -> list[str]:
        load, push = rows["load", layers, ratio], rows["push", layers, ratio]
        whole = rows["whole", layers, ratio]
        chunks = rows.get(("chunks", layers, ratio))
        times = (load["sum_s"], load["bound_s"], whole["seconds"], load["seconds"])
        worst = max(row["over_bound"] for row in (load, push, chunks) if row)
        in_chunks = number(chunks["seconds"]) if chunks else "–"
        return [str(layers), f"{ratio:g}", *map(number, times), in_chunks, number(push["seconds"]), number(worst)]

    header = [
        "layers",
        "transfer / compute",
        "sum",
        "bound",
        "load, all layers first",
        "load",
        "load, in chunks",
        "push",
        "worst / bound",
    ]
    return f"""## Overlap of transfers and computing

{source("python -m benchmarks.overlap", file)}: does moving KV hide behind computing? Real nodes with the paced engine, which computes for
{number(result["compute_s"])} s, while {result["moved_bytes"] >> 20} MiB of KV go through a proxy that forwards at a bounded rate; seconds, medians of {result["rounds"]}. *Load*: a worker reuses KV
from a pool node, until the first token. *Push*: a prefill node pushes a prompt to a decode node, until the decode node's first token. The
*sum* is what both take one after the other. The *bound* is the longer one and one layer of the shorter one, since the first layer cannot be
computed before it is there, nor the last one sent before it is computed. *In chunks*: a load by a prefill node that computes the rest in four
chunks, in one step while the KV arrives. *All layers first* is the load of earlier versions.

{table(header, [columns(*cell) for cell in cells])}

The largest ratio to the bound is {number(result["worst_over_max"])}, and {number(result["worst_over_longer"])} to the longer time alone; the aim is 1.15. The rest is leases, the reservation, the hand-off, and digests on the cores that the
nodes share. On a prefill node up to eight chunks of a prompt overlap with its load, but no more tokens than are reused; on a node that decodes, one chunk does, since a decoding sequence
that joins waits for the end of the step. Placement still predicts the sum of load and computation, an upper bound ([costs](costs.md)).

![Time to the token by the ratio of transfer to compute time, for loads and pushes](pictures/overlap.svg)"""
