"""Sections of docs/performance.md on what serves requests: engine, nodes, frontend, conductor, whole clusters."""

from benchmarks.figures.formatting import interval, number, source, table
from benchmarks.stored import Result, latest


def engine() -> str:
    result, file = latest("engine-cpu")
    names = {"decode_b1": "decode, batch 1", "decode_b8": "decode, batch 8", "prefill_1024": "prefill of 1,024 tokens"}
    rows = [
        [label, number(result[f"{key}_tokens_per_s"]), number(result[f"{key}_ratio"])] for key, label in names.items()
    ]
    return f"""## Engine

{source("benchmarks/engine_cpu.py", file)}: the CPU engine against `transformers`, with the same weights and one thread each, in one run.

{table(["work", "tokens/s", "ratio to transformers"], rows)}

The aims are 8 for decode at batch 1, 4 at batch 8, and 1.35 for prefill. The products of the linear layers alone, by torch with the same matrices in float32, would take {number(100 * result["prefill_product_share"])} % of
the time of the whole prefill and {number(100 * result["decode_b8_product_share"])} % of that of decoding at batch 8: the engine's kernels multiply faster on this processor, and read the weights in the checkpoint's 16 bits. Decoding
at batch 8 is bound by reading keys and values in float32, 14 MB per step."""


def techniques() -> str:
    """Return the section on PPL.LLM's techniques and on quantisation."""
    result, file = latest("engine-techniques")
    quality, quality_file = latest("quantisation")
    full = result["variants"]["all techniques"]["qps"]
    rows = [
        [
            name,
            f"{row['qps']:.2f}",
            f"{full / row['qps'] - 1:+.0%}" if row["qps"] != full else "",
            result["claims"].get(name, ""),
            f"{row['max_running']:.0f}",
            f"{1e3 * row['first_token_p50_s']:.0f} / {1e3 * row['first_token_p99_s']:.0f}",
            f"{1e3 * row['token_p50_s']:.1f} / {1e3 * row['token_p99_s']:.1f}",
        ]
        for name, row in result["variants"].items()
    ]
    header = [
        "server",
        "requests/s",
        "all techniques give",
        "PPL.LLM's claim",
        "answers at a time",
        "first token, ms",
        "per token, ms",
    ]
    losses = [
        *(
            [row["format"], f"{row['loss_added']:+.4f}", f"{row['bits_per_weight']:.2f}", ""]
            for row in quality["weights"]
        ),
        *([row["format"], f"{row['loss_added']:+.4f}", "", f"{row['tokens_to_16_bits']:.2f}"] for row in quality["kv"]),
    ]
    return f"""## Techniques of the engine

{source("benchmarks/engine_techniques.py", file)}: {result["requests"]} requests with the lengths of the bundled trace, scaled down, and `max_tokens` far above most answers; a KV cache of {result["capacity_tokens"]:,}
tokens; each technique turned off by itself. Latencies, p50 / p99, are at 60 % of the first server's load.

{table(header, rows)}

All servers gave the same tokens to {100 * result["tokens_equal"]:.0f} % of the requests. *Stages* overlap the host's work with the engine's: {result["host_us_per_token"]:.0f} µs per token here, little beside a step on a CPU;
of PPL.LLM's published step for 64 sequences on an H800, 20.2 ms, it would be {100 * result["host_share_of_published_step"]:.0f} %. Pages on demand serve somewhat more than pages by predicted length, since more answers run at a time, but {result["variants"]["allocation: pages on demand"]["waits_for_pages"]:.0f} times one had to wait for
a page in the middle; by predicted length, none had to.
W8A8, weights of 4 bits and CUDA graphs save time on GPUs only, and have not been measured.

![Requests per second and first-token latency with all techniques, and without each](pictures/engine_techniques.svg)

{source("benchmarks/quantisation.py", quality_file)}: nats per token that each format adds to the loss of the bundled model, {quality["loss"]:.2f}, on a text of {quality["tokens"]:,} tokens; bits with their scales; tokens of KV in the memory
that one takes in 16 bits, with heads of 128 dimensions. The model is small, and has not been trained for any of them.

{table(["format", "loss added", "bits per weight", "tokens of KV"], losses)}"""


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
are 1.8, 1.15 and 1.4. The two cores bound it, which six processes share: a request of 64 tokens and 16 generated ones takes 114 ms of CPU time in all of
them, and the CPU time of the decode engine's thread together with its waits for a core is all of its time between tokens. At 64 tokens, five calls
between processes follow each other, each of which wakes processes with cold caches; at 1,024, KV is digested and pushed while the prompt is computed.

![Time to first token by its parts, and time between tokens, beside those of one process](pictures/overhead.svg)"""


def frontend() -> str:
    result, file = latest("frontend")
    ours, floor = (result["requests"][name] for name in ("moonpool", "floor"))
    rows = [
        ["requests/s, 8 tokens each", number(ours["requests_per_s"]), number(floor["requests_per_s"])],
        [
            "CPU of the frontend per request, ms",
            number(ours["cpu_ms_per_request"]["frontend"]),
            number(floor["cpu_ms_per_request"]["frontend"]),
        ],
        ["first token, ms", number(ours["first_token_ms"]), number(floor["first_token_ms"])],
    ]
    if "streams" in result:
        streams = [result["streams"][name] for name in ("moonpool", "floor")]
        rows.append(
            [
                "CPU of the frontend per token, µs, many streams",
                *(number(each["cpu_us_per_token"]["frontend"]) for each in streams),
            ]
        )
        rows.append(["delay that it adds to a token, p99, ms", *(number(each["added_ms_p99"]) for each in streams)])
    return f"""## Frontend

{source("python -m benchmarks.frontend", file)}: the frontend and the conductor before scripted nodes that answer at once, and the *floor*: a server on the same HTTP
library that streams as many events and does nothing else.

{table(["figure", "Moonpool", "floor"], rows)}

A request takes {number(result["requests"]["frontend_cpu_over_floor"])} times the floor's CPU time in the frontend; the aim is 3. The frontend also checks the request, computes its chain keys,
schedules it at the conductor, submits it to two nodes and reads their streams, none of which the floor does. Its profile is flat: the largest
parts by their own time are Prometheus' counters (5 %), sending HTTP (4 %) and reading from gRPC (4 %).

![The frontend's CPU time as a multiple of a plain HTTP server's](pictures/frontend.svg)"""


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
        "live_index_vs_dynamo": ("events and look-ups mixed to the index of Dynamo's selection service", "3"),
        "decisions_vs_dynamo_selector": ("decisions with 4 workers to Dynamo's selector", "6"),
    }
    rows += [[label, number(result[key]), aim] for key, (label, aim) in peers.items() if key in result]
    return f"""## Conductor

{source("benchmarks/conductor.py", file)}: {result["nodes"]:,} nodes, {result["blocks"]:,} blocks, {result["live_requests"]:,} requests under way.

{table(["figure", "value", "aim"], rows)}

Decisions miss their aims: about 300 Python calls take nearly all of a decision's time, none of them a tenth; its two compiled kernels take 7 µs. The
strongest index that Dynamo's wheel offers without a server is that of its selection service, which is concurrent; it receives events over ZMQ and
hashes their tokens, which is part of its time.

![Ratios to Dynamo's radix index and selector](pictures/conductor.svg)"""


def scheduling() -> str:
    result, file = latest("scheduling")
    networks, settings = result["conversations"], result["settings"]
    first = next(iter(networks.values()))
    order = ("random", "load-balance", "cache-aware", "algorithm1", "moonpool", "aggregated, 8192", "aggregated, 2048")
    rows = [
        [
            f"`{name}`",
            interval(first["placements"][name]["ttft_mean_s"]),
            interval(first["vs_cache_aware"][name]) if name != "cache-aware" else "1",
            f"{first['placements'][name]['tbt_p90_s']['mean'] * 1e3:.0f}",
            f"{first['placements'][name]['hit_rate']['mean']:.1%}",
            f"{first['placements'][name]['fetched_gb']['mean']:,.0f} / {first['placements'][name]['copied_gb']['mean']:,.0f}",
            f"{result['paper_ttft_s'][name]:.2f}" if name in result["paper_ttft_s"] else "–",
        ]
        for name in order
    ]
    header = [
        "placement",
        "mean TTFT, s",
        "to `cache-aware`",
        "TBT P90, ms",
        "hits",
        "GB fetched / copied",
        "the paper's mean TTFT, s",
    ]
    by_network = [
        [network, *(interval(row["vs_cache_aware"][name]) for name in ("algorithm1", "moonpool"))]
        for network, row in networks.items()
    ]
    popular = [
        [
            name,
            *(
                f"{row['placements'][each]['ttft_mean_s']['mean']:.2f}"
                for each in ("without copies", "algorithm1", "moonpool")
            ),
            interval(row["gain"]),
            " / ".join(f"{row['placements'][each]['copied_gb']['mean']:,.0f}" for each in ("algorithm1", "moonpool")),
        ]
        for name, row in result["popular"].items()
    ]
    popular_header = [
        "popularity",
        "TTFT without copies, s",
        "`algorithm1`",
        "`moonpool`",
        "without copies to `moonpool`",
        "GB copied by `algorithm1` / `moonpool`",
    ]
    return f"""## Scheduling by reuse and load

{source("benchmarks/scheduling.py", file)}: simulated, {settings["prefill"]} prefill and {settings["decode"]} decode nodes of the bundled 70B profile, placed by the conductor's
own policy object; {settings["seeds"]} paired seeds, 95 % intervals, ratios as geometric means of the pairs. Conversations at the trace's {settings["rate"]:.2f} requests/s; the [placements](simulate.md#placements):

{table(header, rows)}

The mean TTFT of placements that fetch from other hosts, relative to `cache-aware`, by the bandwidth between two hosts:

{table(["network", "`algorithm1`", "`moonpool`"], by_network)}

Questions behind popular prefixes at {settings["hot_rate"]:g} requests/s, with and without copies of them ({settings["hot_seeds"]} seeds). [What the figures
show](simulate.md#placements).

{table(popular_header, popular)}

![Mean TTFT by placement, the effect of the network, and what copies save](pictures/scheduling.svg)

{_copies_live()}"""


def _copies_live() -> str:
    result, file = latest("copies-live")
    skewed = result["popularities"]["skewed"]
    pairs = ", ".join(
        f"{pair['without']['ttft_mean_s']:.2f} and {pair['with']['ttft_mean_s']:.2f}"
        for pair in result["pairs"]["skewed"]
    )
    megabytes = {name: skewed["variants"][name]["network_mb"]["mean"] for name in ("without", "with")}
    return f"""Live ({source("benchmarks/copies_live.py", file)}): {result["hosts"]} hosts with a paced prefill node each and links of {result["link_bytes_per_s"] / 1e6:g} MB/s, {result["rate_per_s"]:g} requests/s
behind skewed prefixes, {skewed["pairs"]} pairs of runs. Mean TTFT without copies and with them: {pairs} s; ratio {interval(skewed["without_over_with"]["ttft_mean_s"])},
of P90 {interval(skewed["without_over_with"]["ttft_p90_s"])}; {megabytes["without"]:.0f} and {megabytes["with"]:.0f} MB between hosts. Copies pay where the nodes that hold the hottest prefix would not keep up with
its questions: that is so in one of these pairs. At 8 requests/s and shorter questions no pool node copied anything."""


def admission() -> str:
    simulated, simulated_file = latest("admission")
    live, live_file = latest("overload-live")
    small, small_file = latest("overload-small")
    scenarios, default = simulated["scenarios"], simulated["default"]
    modes = list(next(iter(scenarios.values()))["modes"])
    goodput = [
        [
            f"`{name}`",
            *(number(one["modes"][mode]["good_per_s"]["mean"]) for mode in modes),
            number(one["bound_good_per_s"]["mean"]),
        ]
        for name, one in scenarios.items()
    ]
    overload = [
        [
            _mode(mode),
            interval(row["good_per_s"]),
            f"{row['useful_tokens_per_s']['mean'] / 1e3:.1f}",
            f"{row['wasted_tokens']['mean'] / 1e6:.2f}",
            _share(row["rejected_share"]),
            _share(row["missed_share"]),
            _share(row["regret"]),
        ]
        for mode, row in scenarios["2x"]["modes"].items()
    ]
    judged = simulated["false_rejects"]
    worst = simulated["default_vs_best_mode"]

    def live_rows(result: Result) -> list[list[str]]:
        order = [name for name in ("none", "early", "predicted-uniform", "predicted") if name in result["modes"]]
        return [
            [f"`{name}`", number(mode["goodput_rps"]), f"{mode['wasted_share']:.0%}", str(mode["wrong_tokens"])]
            for name, mode in ((name, result["modes"][name]) for name in order)
        ]

    live_header = ["mode", "goodput, requests/s", "prefill tokens in vain", "wrong tokens"]
    return f"""## Admission under overload

Goodput counts the requests that met both objectives. Simulated, eight prefill and eight decode nodes, {simulated["settings"]["seeds"]} paired seeds that were not used to choose
the rules ({source("benchmarks/admission.py", simulated_file)}; 95 % intervals). Good requests per second by scenario and admission mode. *Unpriced* is `predicted-uniform`
as it was before [expensive requests left room](admission.md#reserve) to cheaper ones, *oracle* the mode `predicted` with known lengths of answers; the last column is the bound of
an admission that knows all requests in advance:

{table(["scenario", *map(_mode, modes), "bound"], goodput)}

![Goodput by scenario and mode, and useful prefill at twice the capacity](pictures/admission.svg)

At twice the capacity:

{table(["mode", "goodput, requests/s", "useful prefill, thousand tokens/s", "wasted prefill, million tokens", "rejected", "an objective missed", "regret against the bound"], overload)}

The default mode, `{default}`, to the best other mode without knowledge of lengths in the worst scenario (`{worst["scenario"]}`, {_mode(worst["mode"])}): {interval(worst)} of its goodput. At
twice the capacity, its useful prefill to that without prices: {interval(simulated["useful_vs_uniform"])}; its rejections to those of the paper's baseline, `load`:
{interval(simulated["rejected_vs_baseline"])} (the paper has 0.86); its goodput to that with known lengths: {interval(simulated["share_of_oracle_goodput"])}. Of {judged["judged"]} rejections that were judged, {_share(judged["share"])} were false:
a rejected request is judged as if it alone had been admitted. [Overload](overload.md) explains the method.

Live at the same size, paced engines over the real protocol, {live["seconds"]:.0f} s of which the first {live["uncounted_s"]:.0f} are not counted
({source("benchmarks/overload_live.py", live_file)}); decode nodes can complete {number(live["decode_rps"])} requests/s:

{table(live_header, live_rows(live))}

Live with one prefill and one decode node and real engines ({source("benchmarks/overload_small.py", small_file)}), where the three modes that reject
do not differ significantly:

{table(live_header, live_rows(small))}"""


def _mode(name: str) -> str:
    """Return the name of a mode as it is set, or of a comparison without one."""
    return name if name in ("unpriced", "oracle") else f"`{name}`"


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
    live, live_file = latest("dialogues-live")
    reuse = live["dialogue_reuse"]
    reused = f"{reuse['mean']:.1%} ({reuse['low']:.1%} to {reuse['high']:.1%})"
    return f"""## Reuse in dialogues

{source("benchmarks/dialogues.py", file)}: {result["dialogues"]:,} simulated dialogues with a mean history of {result["mean_history_messages"]:.0f} messages and
memory for {result["memory_share"]:.0%} of their KV. Of the prompt tokens {result["reused_sticky"]:.1%} are reused with sticky sessions,
{result["reused_random"]:.1%} without; {result["reused_limit"]:.1%} would be with unlimited memory.

Live ({source("benchmarks/dialogues_live.py", live_file)}; [setting](replay.md#long-dialogues)): {live["dialogues"]} dialogues of {2 * live["turns_per_dialogue"]} messages, memory for {live["pool_share"]:.0%} of their KV in the pools, two
prefill and two decode nodes with paced engines, two conductors, one of which is killed halfway. Of the prompt tokens {reused} are reused;
of {live["turns"]:,} turns {live["lost"]} were lost, and of {live["verified"]:,} answers {live["wrong_tokens"]} had a wrong token."""


def vllm() -> str:
    result, file = latest("vllm_pd")
    header = [
        "shape",
        "TTFT",
        "TTFT, p90",
        "TPOT",
        "prompt tokens from a cache",
        "CPU seconds",
        "answers equal to vLLM's",
    ]
    tables = [
        table(
            header,
            [
                [
                    shape,
                    *(f"{row[name]:.1f}" for name in ("ttft_p50_ms", "ttft_p90_ms", "tpot_p50_ms")),
                    f"{row['hit_rate']:.0%}",
                    f"{row['cpu_s']:.0f}",
                    f"{result['equal'][shape]:.1%}",
                ]
                for shape, row in result["rows"][scenario].items()
            ],
        )
        for scenario in ("shared prefixes", "dialogues")
    ]
    memory = result["kv_tokens_per_engine"]
    return f"""## vLLM

{source("benchmarks/vllm_pd.py", file)}: two engines per shape, the same requests at the same times, medians in milliseconds at the client, float32 on
two cores. First, prompts that begin with one of 20 system prompts; every engine has {memory["shared prefixes"]:,} tokens of KV, and Moonpool's workers
as many again in slots:

{tables[0]}

TTFT behind Moonpool's conductor is {number(result["conductor_vs_round_robin_ttft_ratio"])} times that of round-robin (aim 0.8): a larger part of the prompts comes from a
cache, but a request passes through four more processes, which share the two cores with both engines. Then dialogues whose KV exceeds the engines'
memory ({memory["dialogues"]:,} tokens each), with vLLM's prefix cache and with Moonpool's pool:

{tables[1]}

TTFT with the pool is {number(result["pool_vs_prefix_cache_ttft_ratio"])} times that with the prefix cache alone (aim 0.5).

![Median times to the first token of all shapes](pictures/vllm_pd.svg)"""


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
