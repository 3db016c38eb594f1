"""Summary of the stored results: the first table of docs/performance.md."""

from collections.abc import Iterable

from benchmarks.figures.formatting import interval, number, table
from benchmarks.stored import Result, latest


def at_a_glance() -> str:
    """Return the first section of docs/performance.md: each question, its figure, the aim and the section below."""
    overlap, eviction, overhead = (latest(name)[0] for name in ("overlap", "eviction", "overhead"))
    pool, ssd, messenger = (latest(name)[0] for name in ("kvpool", "kvpool-ssd", "messenger"))
    paths, beside, frontend, conductor, compression = (
        latest(name)[0] for name in ("messenger-paths", "pool-interference", "frontend", "conductor", "compression")
    )
    small_kv, endless, siblings = (latest(name)[0] for name in ("kv_bytes", "endless", "droidspeak"))
    vllm, scheduling, admission = latest("vllm_pd")[0], latest("scheduling")[0], latest("admission")[0]
    small = [row for size, row in pool["by_size"].items() if size != "16 MiB"]
    large = pool["by_size"]["16 MiB"]
    rows = [
        [
            "Does moving KV hide behind computing? Time to the longer of both and one layer",
            "overlap of transfers and computing",
            number(overlap["worst_over_max"]),
            "≤ 1.15",
        ],
        [
            "Is eviction ever worse than the better of LRU and ARC? Difference of hit rates",
            "eviction",
            f"{eviction['worst_minus_best_classic']:+.4f}",
            "≥ -0.005",
        ],
        [
            "How much of the gap to the oracle does it close?",
            "eviction",
            f"{eviction['mean_gap_closed']:.0%}",
            "≥ 15 %",
        ],
        [
            "Transfers over tcp to Mooncake's Transfer Engine / NIXL, least of all sizes",
            "messenger",
            f"{number(messenger['tcp_vs_mooncake'])} / {number(messenger['tcp_vs_nixl_tcp'])}",
            "≥ 1",
        ],
        [
            "Transfers in shared memory to NIXL, least of all sizes",
            "messenger",
            number(messenger["shm_vs_nixl"]),
            "≥ 1",
        ],
        [
            "Transfers with digests to those without, least from 64 KiB up, tcp / shared memory",
            "messenger",
            f"{_known(messenger, 'tcp_digests_vs_tcp')} / {_known(messenger, 'shm_digests_vs_shm')}",
            "≥ 0.8",
        ],
        [
            "Encrypted transfers to AES-GCM over a socket, least of all sizes",
            "messenger",
            _known(messenger, "tcp_encrypted_vs_aes_socket"),
            "≥ 0.8",
        ],
        [
            "Stall of a transfer whose network fails, beyond detection, median / maximum",
            "failing networks",
            _stalls(paths),
            "≤ 50 ms",
        ],
        [
            "Gets from the pool to Mooncake Store",
            "KV pool",
            _span(row.get("get_vs_mooncake_store") for row in pool["by_size"].values()),
            "≥ 1.2",
        ],
        [
            "Puts up to 1 MiB to Mooncake Store, one by one / batched",
            "KV pool",
            f"{_span(row.get('put_vs_mooncake_store') for row in small)} / {_span(row.get('put_batch_vs_mooncake_store') for row in small)}",
            "≥ 1.2",
        ],
        ["Puts of 16 MiB to Mooncake Store", "KV pool", _known(large, "put_vs_mooncake_store"), "≥ 0.9"],
        [
            "Loads with compression to those without, worst / best of all speeds and layouts",
            "compression at rest",
            f"{number(compression['worst_auto_over_off'])} / {number(compression['best_auto_over_off'])}",
            "≤ 1",
        ],
        [
            "KV per token of GQA-8 in 16 bits to the smallest KV, at 8,192 tokens, with / without int8",
            "small KV",
            f"{number(small_kv['small_kv_ratio'])} / {number(small_kv['small_kv_ratio_without_int8'])}",
            "≥ 80 / 45",
        ],
        [
            "Time per token in the last tenth of an endless answer of 100,000 tokens, to the first",
            "endless generation",
            f"{endless['time_ratio_last_first']:.2f}",
            "≤ 1.1",
        ],
        [
            "TTFT without a sibling's KV to that with it, and the part of the fine-tune's lead that is lost",
            "KV of sibling models",
            f"{siblings['prefill_speedup']:.2f} / {siblings['quality_loss']:.1%}",
            "≥ 1.7 / ≤ 2 %",
        ],
        ["SSD reads of 4 KiB to fio", "KV pool", _known(ssd["by_size"]["4 KiB"]["depth_8"]["read"], "vs_fio"), "≥ 0.9"],
        [
            "Decoding beside full pool I/O, p99 of the time between tokens, real engine",
            "decoding beside full pool I/O",
            f"{number(beside['real']['pool']['p99_ratio'])} times",
            "≤ 1.05",
        ],
        [
            "TTFT to one process without a cluster, 64 / 1,024 tokens",
            "overhead of the cluster",
            f"{overhead['ttft_ratio_64']:.2f} / {overhead['ttft_ratio_1024']:.2f}",
            "≤ 1.8 / 1.15",
        ],
        ["Time between tokens to one process", "overhead of the cluster", f"{overhead['tbt_ratio']:.2f}", "≤ 1.4"],
        [
            "The frontend's CPU time per request to a plain HTTP server's",
            "frontend",
            number(frontend["requests"]["frontend_cpu_over_floor"]),
            "≤ 3",
        ],
        [
            "Decisions to Dynamo's selector, by tokens / by hashes",
            "conductor",
            f"{_known(conductor, 'decisions_vs_dynamo_selector_tokens')} / {_known(conductor, 'decisions_vs_dynamo_selector_hashes')}",
            "≥ 6",
        ],
        [
            "TTFT of Algorithm 1 to that of placement by each node's own prefixes, simulated",
            "scheduling by reuse and load",
            interval(scheduling["algorithm1_vs_cache_aware"]),
            "< 1",
        ],
        [
            "TTFT without copies of hot prefixes to TTFT with them, skewed / shifting popularity, simulated",
            "scheduling by reuse and load",
            f"{interval(scheduling['replication_gain'])} / {interval(scheduling['replication_gain_shifting'])}",
            "> 1.1",
        ],
        [
            "Goodput of the default admission mode to that of the best other, in the worst scenario, simulated",
            "admission under overload",
            interval(admission["default_vs_best_mode"]),
            "interval up to ≥ 1.0",
        ],
        [
            "Useful prefill to that without prices / rejections to `load`, at twice the capacity, simulated",
            "admission under overload",
            f"{interval(admission['useful_vs_uniform'])} / {interval(admission['rejected_vs_baseline'])}",
            "≥ 1.1 / ≤ 0.6",
        ],
        [
            "Agents' job time less tool waits with hints to without, pool for a fifth of their KV, simulated",
            "agents",
            interval(latest("agents")[0]["agent_completion_ratio"]),
            "≤ 0.7",
        ],
        [
            "Prompt tokens reused in dialogues of 180 messages, two conductors, one killed",
            "reuse in dialogues",
            "{mean:.3f} ({low:.3f} to {high:.3f})".format(**latest("dialogues-live")[0]["dialogue_reuse"]),
            "≥ 0.95",
        ],
        [
            "TTFT of vLLM workers behind the conductor to round-robin / with the pool to vLLM's prefix cache",
            "vllm",
            f"{number(vllm['conductor_vs_round_robin_ttft_ratio'])} / {number(vllm['pool_vs_prefix_cache_ttft_ratio'])}",
            "≤ 0.8 / 0.5",
        ],
    ]
    linked = [
        [question, f"[{section}](#{section.replace('/', '').replace(' ', '-').lower()})", figure, aim]
        for question, section, figure, aim in rows
    ]
    return f"""## At a glance

Each section names the script that repeats the measurement, and says what limits a figure that misses its aim. "A to B" is the ratio A ÷ B.

{table(["question", "section", "figure", "aim"], linked)}"""


def _anchor(title: str) -> str:
    """Return the anchor of a section's title."""
    return title.replace("/", "").replace(" ", "-").lower()


def _known(result: Result, name: str) -> str:
    return number(result[name]) if name in result else "–"


def _stalls(result: Result) -> str:
    stalls = [failure["stall"] for name, failure in result["by_failure"].items() if name != "undisturbed"]
    return f"{max(stall['median_ms'] for stall in stalls):.0f} / {max(stall['max_ms'] for stall in stalls):.0f} ms"


def _span(values: Iterable[float | None]) -> str:
    found = [value for value in values if value is not None]
    return f"{number(min(found))} to {number(max(found))}" if found else "–"
