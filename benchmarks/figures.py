"""Generate the figures in README.md and docs/performance.md from the stored benchmark results.

    python -m benchmarks.figures write | check

`benchmarks/results/NAME-DATE.json` contains the output of a benchmark; the latest date of each name is used. The
generated parts of the pages are between the lines `<!-- figures -->` and `<!-- end of figures -->`. `check` exits with
status 1 if a page differs from the results.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.stored import Result, latest

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def source(command: str, file: str) -> str:
    return f"`{command}`, [{file}](../benchmarks/results/{file})"


def number(value: float) -> str:
    """Format a figure with at least two significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def engine() -> str:
    result, file = latest("engine-cpu")
    names = {"decode_b1": "decode, batch 1", "decode_b8": "decode, batch 8", "prefill_1024": "prefill of 1,024 tokens"}
    rows = [
        [label, number(result[f"{key}_tokens_per_s"]), number(result[f"{key}_ratio"])] for key, label in names.items()
    ]
    return f"""## Engine

{source("benchmarks/engine_cpu.py", file)}: the CPU engine against `transformers`, with the same weights and one thread each, in one run.

{table(["work", "tokens/s", "ratio to transformers"], rows)}

The aim is 3 for decode at batch 8."""


def overhead() -> str:
    result, file = latest("overhead")
    columns = ("bare_ttft_s", "ttft_s", "queue_s", "prefill_s", "other_s", "bare_tbt_s", "tbt_s")
    rows = [[f"{row['prompt_tokens']:,.0f}", *(f"{row[name] * 1e3:.1f}" for name in columns)] for row in result["rows"]]
    header = [
        "prompt tokens",
        "TTFT, one process",
        "TTFT, cluster",
        "queue",
        "prefill",
        "all else",
        "TBT, one process",
        "TBT, cluster",
    ]
    return f"""## Overhead of the cluster

{source("benchmarks/overhead.py", file)}: one request at a time without reuse, medians in milliseconds. *Queue* includes the leases at the
pool; *prefill* is computed while the decode node is reserved and KV is pushed; *all else* is HTTP, tokenising, scheduling and the way of the
token back.

{table(header, rows)}

TTFT is {result["ttft_ratio_64"]:.2f} times that of one process at 64 tokens and {result["ttft_ratio_1024"]:.2f} times at 1,024, TBT {result["tbt_ratio"]:.2f} times; the aims
are 1.8, 1.15 and 1.4."""


def pool() -> str:
    memory, memory_file = latest("kvpool")
    ssd, ssd_file = latest("kvpool-ssd")
    sizes = list(memory["by_size"])
    ratios: dict[str, Callable[[Result], float | None]] = {
        "get, verified, to memcpy": lambda row: row["get_vs_memcpy"],
        "get, verified, to Mooncake Store": lambda row: row.get("get_vs_mooncake_store"),
        "put to Mooncake Store (aims: 2 up to 1 MiB, 1.2 at 16 MiB)": lambda row: row.get("put_vs_mooncake_store"),
        "batched put to Mooncake Store's batched put": lambda row: (
            row["mooncake_put_batch_us"] / row["put_batch_us"] if "mooncake_put_batch_us" in row else None
        ),
    }
    rows = [[name, *(_ratio(ratio(memory["by_size"][size])) for size in sizes)] for name, ratio in ratios.items()]
    for name, kind in (("SSD read to fio", "read"), ("SSD write, durable, to fio with fdatasync", "write")):
        rows.append([name, *(_ratio(ssd["by_size"][size]["depth_8"][kind]["vs_fio"]) for size in sizes)])
    return f"""## KV pool

{source("benchmarks/kvpool.py", memory_file)}: through the shared memory of the host, one block at a time, a batch where the row
says so; {source("benchmarks/kvpool_ssd.py", ssd_file)}: eight I/Os in flight. Ratios of throughputs, each pair in one run; above 1 Moonpool is faster.

{table(["ratio", *sizes], rows)}"""


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


def _ratio(value: float | None) -> str:
    return "–" if value is None else number(value)


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
        return [" / ".join(_pair(result["by_size"][size], peer, what)) for size in sizes]

    throughput = [[label, *cells(peer, "throughput")] for peer, label in peers.items()]
    latency = [[label, *cells(peer, "latency")] for peer, label in peers.items() if peer != "tcp_vs_iperf3"]
    rdma, rdma_file = latest("rdma-vm")
    rows = [[size, number(row["write_vs_ib_write_bw"])] for size, row in rdma["counted"]["by_size"].items()]
    return f"""## Messenger

{source("benchmarks/messenger.py", file)}: one-sided writes / reads, several operations under way, in one run with the peers. Ratios of throughputs:

{table(["throughput, writes / reads", *sizes.values()], throughput)}

Ratios of median latencies, one operation at a time; above 1 Moonpool is faster:

{table(["latency, writes / reads", *sizes.values()], latency)}

The aims are 2.7 times Mooncake up to 1 MiB and 1.6 at 16 MiB, 0.9 of iperf3, 1.2 times NIXL in shared memory and 0.8 of memcpy. They are
missed at 64 KiB, where a call costs more than its bytes. Figures of one cell differ by a fifth from run to run.

RDMA over soft-RoCE in an emulated VM, counted in instructions ({source("benchmarks/rdma_vm.py --count", rdma_file)}), as a ratio to the
throughput of perftest's `ib_write_bw`:

{table(["write", "ratio"], rows)}"""


def _pair(row: Result, peer: str, what: str) -> list[str]:
    return [
        _ratio(row[direction].get("ratios", {}).get(peer, {}).get(what)) if direction in row else "–"
        for direction in ("write", "read")
    ]


def overlap() -> str:
    result, file = latest("overlap")
    rows = {(row["mode"], row["layers"], row["ratio"]): row for row in result["rows"]}
    cells = sorted({(layers, ratio) for _, layers, ratio in rows})

    def columns(layers: int, ratio: float) -> list[str]:
        load, push = rows["load", layers, ratio], rows["push", layers, ratio]
        whole = rows["whole", layers, ratio]
        times = (load["sum_s"], load["bound_s"], whole["seconds"], load["seconds"], push["seconds"])
        return [str(layers), f"{ratio:g}", *map(number, times), number(max(load["over_bound"], push["over_bound"]))]

    header = ["layers", "transfer / compute", "sum", "bound", "load, all layers first", "load", "push", "worse / bound"]
    return f"""## Overlap of transfers and computing

{source("python -m benchmarks.overlap", file)}: does moving KV hide behind computing? Real nodes with the paced engine, which computes for
{number(result["compute_s"])} s, while {result["moved_bytes"] >> 20} MiB of KV go through a proxy that forwards at a bounded rate; seconds, medians of {result["rounds"]}. *Load*: a worker reuses KV
from a pool node, until the first token. *Push*: a prefill node pushes a prompt to a decode node, until the decode node's first token. The
*sum* is what both take one after the other. The *bound* is the longer one and one layer of the shorter one, since the first layer cannot be
computed before it is there, nor the last one sent before it is computed. *All layers first* is the load of earlier versions.

{table(header, [columns(*cell) for cell in cells])}

The largest ratio to the bound is {number(result["worst_over_max"])}, and {number(result["worst_over_longer"])} to the longer time alone; the aim is 1.15. The machine was busy, so the benchmark's
processes had real-time priority. The rest is leases, the reservation, the hand-over, and digests on the cores that the
nodes share. Only a prompt's first chunk overlaps with its load: a longer rest is computed after it, and the sum shrinks by the shorter of the load and
that chunk. Placement still predicts the sum of both, an upper bound ([costs](costs.md)).

![Time to the token by the ratio of transfer to compute time, for loads and pushes](pictures/overlap.svg)"""


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

The aim is a stall of at most 50 ms. The two cores were shared with other work (load {low:.1f} to {high:.1f}), on which the maxima depend."""


def conductor() -> str:
    result, file = latest("conductor")
    rows = [
        ["decisions per second, one core", number(result["decisions_per_s"]), "5,000"],
        ["decision, p99", f"{result['decision_p99_us'] / 1e3:.2f} ms", "1 ms"],
        ["directory, bytes per block of 512 tokens", number(result["bytes_per_block"]), "–"],
    ]
    peers = {
        "index_vs_dynamo_16": ("matches of 16 blocks to Dynamo's radix index", "3"),
        "index_vs_dynamo_128": ("matches of 128 blocks to Dynamo's radix index", "3"),
        "decisions_vs_dynamo_selector": ("decisions with 4 workers to Dynamo's selector", "10"),
    }
    rows += [[label, number(result[key]), aim] for key, (label, aim) in peers.items() if key in result]
    return f"""## Conductor

{source("benchmarks/conductor.py", file)}: {result["nodes"]:,} nodes, {result["blocks"]:,} blocks, {result["live_requests"]:,} requests under way.

{table(["figure", "value", "aim"], rows)}"""


def admission() -> str:
    simulated, simulated_file = latest("overload")
    live, live_file = latest("overload-live")
    small, small_file = latest("overload-small")
    rows = [
        [
            f"`{row['mode']}`",
            _interval(row["goodput"], 2),
            _share(row["wasted_share"]),
            f"{_share(row['false_rejects'])} of {row['rejects_tried']}",
            _share(row["false_accepts"]),
        ]
        for row in simulated["summaries"]
    ]
    header = [
        "mode",
        "goodput, requests/s",
        "prefill tokens in vain",
        "false rejects, of rejections judged",
        "false accepts",
    ]

    def live_rows(result: Result) -> list[list[str]]:
        order = [name for name in ("none", "early", "predicted-uniform", "predicted") if name in result["modes"]]
        return [
            [f"`{name}`", number(mode["goodput_rps"]), f"{mode['wasted_share']:.0%}", str(mode["wrong_tokens"])]
            for name, mode in ((name, result["modes"][name]) for name in order)
        ]

    live_header = ["mode", "goodput, requests/s", "prefill tokens in vain", "wrong tokens"]
    return f"""## Admission under twofold overload

Goodput counts the requests that met both objectives. Simulated, eight prefill and eight decode nodes, ten paired seeds
({source("moonpool simulate overload", simulated_file)}; 95 % intervals):

{table(header, rows)}

The rejections that are judged are a small sample, and nearly all of them are false in the modes that predict: a rejected
request is judged as if it alone had been admitted. [Overload](overload.md) explains the method.

Live at the same size, paced engines over the real protocol, {live["seconds"]:.0f} s of which the first {live["uncounted_s"]:.0f} are not counted
({source("benchmarks/overload_live.py", live_file)}); decode nodes can complete {number(live["decode_rps"])} requests/s:

{table(live_header, live_rows(live))}

Live with one prefill and one decode node and real engines ({source("benchmarks/overload_small.py", small_file)}), where the three modes that reject
do not differ significantly:

{table(live_header, live_rows(small))}"""


def _interval(value: Result, digits: int) -> str:
    return f"{value['mean']:.{digits}f} ({value['low']:.{digits}f} to {value['high']:.{digits}f})"


def _share(value: Result) -> str:
    low, high = max(value["low"], 0.0), min(value["high"], 1.0)
    return f"{value['mean']:.0%} ({low:.0%} to {high:.0%})"


def groups() -> str:
    result, file = latest("prefill-group")
    rows = [
        [
            f"paced, {run['paced']}" if run.get("paced") else "real engine, two cores",
            f"{row['tokens']:,}",
            str(row["members"]),
            number(row["speedup"]),
        ]
        for run in result["runs"]
        for row in run["rows"]
        if row["members"] > 1
    ]
    return f"""## Prefill groups

{source("benchmarks/prefill_group.py", file)}: the time to first token of one long prompt, one node against a group of several.

{table(["engine", "prompt tokens", "nodes", "speed-up"], rows)}"""


def dialogues() -> str:
    result, file = latest("dialogues")
    return f"""## Reuse in dialogues

{source("benchmarks/dialogues.py", file)}: {result["dialogues"]:,} simulated dialogues with a mean history of {result["mean_history_messages"]:.0f} messages and
memory for {result["memory_share"]:.0%} of their KV. Of the prompt tokens {result["reused_sticky"]:.1%} are reused with sticky sessions,
{result["reused_random"]:.1%} without; {result["reused_limit"]:.1%} would be with unlimited memory."""


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


def hostile() -> str:
    result, file = latest("hostile")
    header = [
        "attack",
        "p50, ms",
        "p99, ms",
        "ratio of p99",
        "released after, s",
        "process with the highest peak, MiB",
    ]

    def row(name: str, attack: Result) -> list[str]:
        node, peak = max(attack["peak_mib"].items(), key=lambda item: item[1])
        return [
            name,
            number(attack["under_p50_ms"]),
            number(attack["under_p99_ms"]),
            number(attack["p99_ratio"]),
            number(attack["released_s"]) if attack["released_s"] is not None else "–",
            f"{node} {peak:,}",
        ]

    limits = ", ".join(f"{role} {limit:,}" for role, limit in result["limit_mib"].items())
    return f"""## Under attack

{source("python -m benchmarks.hostile", file)}: the time to first token of a second tenant during [each attack](security-testing.md#attacks), {result["requests"]:,}
requests at {number(result["rate"])} per second on two cores, with one prefill and one decode node. Without an attack it is {number(result["without_p50_ms"])} ms (p50) and {number(result["without_p99_ms"])} ms (p99).
The row *no attack* shows the noise. Requests that failed: {result["failures"]}. Processes over the chart's memory limit: {result["peak_rss_over_limit"]} (limits in MiB: {limits}).

{table(header, [row(name, attack) for name, attack in result["attacks"].items()])}

The aim is a ratio of at most 2. The attacker's own valid requests and the costs of its invalid ones share the two cores with the second tenant's.

![p99 of the second tenant's time to first token during each attack](pictures/hostile.svg)"""


def summary() -> str:
    """Return the table of README.md."""
    engine_result, _ = latest("engine-cpu")
    pool_result, _ = latest("kvpool")
    messenger_result, _ = latest("messenger")
    conductor_result, _ = latest("conductor")
    overload_result, _ = latest("overload")
    group_result, _ = latest("prefill-group")
    disaggregation = _disaggregation()
    sizes, by_size = list(pool_result["by_size"]), pool_result["by_size"]
    tcp = {
        size: _pair(messenger_result["by_size"][size], "tcp_vs_mooncake", "throughput")
        for size in ("64KiB", "1MiB", "16MiB")
    }
    modes = ", ".join(f"`{row['mode']}` {row['goodput']['mean']:.1f}" for row in overload_result["summaries"])
    false = ", ".join(
        f"`{row['mode']}` {row['false_rejects']['mean']:.0%} of {row['rejects_tried']}"
        for row in overload_result["summaries"][1:]
    )
    speedups = [
        (run.get("paced"), row["members"], row["speedup"]) for run in group_result["runs"] for row in run["rows"]
    ]
    real = [speedup for paced, members, speedup in speedups if members == 2 and not paced]

    def span(members: int) -> str:
        found = [speedup for paced, count, speedup in speedups if count == members and paced]
        return f"{min(found):.1f} to {max(found):.1f}"

    rows = [
        [
            "engine to `transformers`, same weights, one thread",
            ", ".join(
                f"{label} {number(engine_result[f'{key}_ratio'])}"
                for key, label in (
                    ("decode_b1", "decode at batch 1"),
                    ("decode_b8", "at batch 8"),
                    ("prefill_1024", "prefill"),
                )
            ),
        ],
        [
            f"KV pool, {sizes[0]} to {sizes[-1]}, to Mooncake Store",
            f"get {_span(by_size[size].get('get_vs_mooncake_store') for size in sizes)}, put "
            f"{_span(by_size[size].get('put_vs_mooncake_store') for size in sizes)}, batched put "
            + _span(
                row["mooncake_put_batch_us"] / row["put_batch_us"]
                for row in by_size.values()
                if "mooncake_put_batch_us" in row
            ),
        ],
        [
            "messenger over tcp to Mooncake's Transfer Engine, writes / reads",
            ", ".join(f"{size} {' / '.join(pair)}" for size, pair in tcp.items()),
        ],
        [
            f"conductor, {conductor_result['nodes']:,} nodes, {conductor_result['blocks']:,} blocks, one core",
            f"{conductor_result['decisions_per_s']:,.0f} decisions/s, p99 {conductor_result['decision_p99_us'] / 1e3:.2f} ms",
        ],
        ["goodput under twofold overload, simulated, requests/s", modes],
        ["false rejects of the rejections judged there", false],
        [
            "prefill groups, time to first token of one long prompt",
            f"two paced nodes {span(2)} times as fast, four {span(4)}; two real engines on two cores {real[-1]:.2f}",
        ],
        ["1 prefill + 1 decode node to 2 aggregated workers, same two cores", disaggregation],
    ]
    return table(["what", "figure (above 1: Moonpool is faster)"], rows)


def _span(values: Iterable[float | None]) -> str:
    found = [value for value in values if value is not None]
    return f"{number(min(found))} to {number(max(found))}" if found else "–"


def _disaggregation() -> str:
    """Return the ratios of medians at the lowest speed, disaggregated over aggregated."""
    result, _ = latest("disaggregation")
    speed = min(run["speed"] for run in result["runs"])

    def median(shape: str, figure: str) -> float:
        values = sorted(
            run["figures"][figure] for run in result["runs"] if run["speed"] == speed and run["shape"].startswith(shape)
        )
        return float(values[len(values) // 2])

    def ratio(figure: str) -> str:
        return f"{median('1', figure) / median('2', figure):.2f}"

    return f"TTFT p50 takes {ratio('ttft_p50_s')} times as long, TPOT p50 {ratio('tpot_p50_s')}; goodput {ratio('goodput_rps')}"


def performance() -> str:
    parts = (
        engine,
        overhead,
        pool,
        interference,
        messenger,
        paths,
        overlap,
        conductor,
        admission,
        groups,
        dialogues,
        eviction,
        hostile,
    )
    return "\n\n".join(part() for part in parts)


PAGES: dict[str, Callable[[], str]] = {"README.md": summary, "docs/performance.md": performance}


def main(mode: str) -> int:
    stale = []
    for name, render in PAGES.items():
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        before, rest = text.split(BEGIN, 1)
        after = rest.split(END, 1)[1]
        current = f"{before}{BEGIN}\n{render()}\n{END}{after}"
        if current != text:
            stale.append(name)
            if mode == "write":
                path.write_text(current, encoding="utf-8")
    if stale and mode == "check":
        print(f"{', '.join(stale)}: figures differ from benchmarks/results; run `python -m benchmarks.figures write`")
        return 1
    return 0


if __name__ == "__main__":
    if sys.argv[1:] not in (["write"], ["check"]):
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
