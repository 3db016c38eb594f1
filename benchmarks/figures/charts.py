"""Charts of docs/performance.md that are drawn from stored results alone: ratios to peers, and the cluster's overhead."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.figures.agents import draw_agents
from benchmarks.stored import Result, latest

_OURS, _MISSED, _GREY = "#0969da", "#cf222e", "#57606a"
_LARGE = "16 MiB"  # copying bounds it, so its aim is lower
_PARTS = (("queue_s", "queue", "#8250df"), ("prefill_s", "prefill", "#0969da"), ("other_s", "all else", "#bf8700"))


@dataclass(frozen=True)
class RatioRow:
    """Ratios of one comparison; `better` is "higher" or "lower", and `aim` the ratio to reach."""

    label: str
    values: Sequence[tuple[str, float]]  # (size or case, ratio)
    aim: float
    better: str = "higher"

    def misses(self, value: float) -> bool:
        """Return True if a ratio misses the aim."""
        return value < self.aim if self.better == "higher" else value > self.aim


def draw_all(folder: Path) -> None:
    """Draw every chart into `folder`, as SVG."""
    draw_ratios(pool_rows(latest("kvpool")[0], latest("kvpool-ssd")[0]), folder / "kvpool.svg")
    draw_ratios(conductor_rows(latest("conductor")[0]), folder / "conductor.svg")
    draw_ratios(frontend_rows(latest("frontend")[0]), folder / "frontend.svg")
    draw_overhead(latest("overhead")[0], folder / "overhead.svg")
    draw_techniques(latest("engine-techniques")[0], folder / "engine_techniques.svg")
    draw_shapes(latest("vllm_pd")[0], folder / "vllm_pd.svg")
    draw_scheduling(latest("scheduling")[0], folder / "scheduling.svg")
    draw_agents(latest("agents")[0], folder / "agents.svg")
    draw_admission(latest("admission")[0], folder / "admission.svg")


def pool_rows(memory: Result, ssd: Result) -> list[RatioRow]:
    """Return the pool's ratios to Mooncake Store and fio by block size."""

    small = [size for size in memory["by_size"] if size != _LARGE]

    def values(name: str, *sizes: str) -> list[tuple[str, float]]:
        return [(size, row[name]) for size in sizes if name in (row := memory["by_size"].get(size, {}))]

    def disk(kind: str) -> list[tuple[str, float]]:
        cases = ssd["by_size"].items()
        return [(size, row["depth_8"][kind]["vs_fio"]) for size, row in cases if "vs_fio" in row["depth_8"][kind]]

    return [
        RatioRow("get to Mooncake Store", values("get_vs_mooncake_store", *small, _LARGE), 1.2),
        RatioRow("put to Mooncake Store", values("put_vs_mooncake_store", *small), 1.2),
        RatioRow("put to Mooncake Store", values("put_vs_mooncake_store", _LARGE), 0.9),
        RatioRow("batched put", values("put_batch_vs_mooncake_store", *small), 1.2),
        RatioRow("batched put", values("put_batch_vs_mooncake_store", _LARGE), 0.9),
        RatioRow("SSD read to fio", disk("read"), 0.9),
        RatioRow("SSD write to fio", disk("write"), 0.9),
    ]


def conductor_rows(result: Result) -> list[RatioRow]:
    """Return the conductor's ratios to Dynamo's radix index and selector."""
    matches = [
        (f"{count} blocks", result[name]) for count in (16, 128, 1000) if (name := f"index_vs_dynamo_{count}") in result
    ]
    decisions = [
        (what, result[name])
        for what in ("tokens", "hashes")
        if (name := f"decisions_vs_dynamo_selector_{what}") in result
    ]
    mixed = [("events and look-ups", result[name]) for name in ("live_index_vs_dynamo",) if name in result]
    return [
        RatioRow("matches to Dynamo's radix index", matches, 3.0),
        RatioRow("to the index of its selection service", mixed, 3.0),
        RatioRow("decisions to Dynamo's selector", decisions, 6.0),
    ]


def frontend_rows(result: Result) -> list[RatioRow]:
    """Return the frontend's CPU time as a multiple of a plain HTTP server's."""
    values = [("per request", result["requests"]["frontend_cpu_over_floor"])]
    if "streams" in result:
        values.append(("per token of 1,000 streams", result["streams"]["frontend_cpu_over_floor"]))
    return [RatioRow("frontend's CPU to its HTTP floor", values, 3.0, "lower")]


def draw_ratios(rows: Sequence[RatioRow], path: Path) -> None:
    """Draw one line per ratio on a logarithmic axis, with its aim as a tick; ratios that miss their aim are red."""
    plt = pyplot()
    lines = [(row, case, value) for row in rows for case, value in row.values]
    with plt.rc_context({"svg.hashsalt": path.stem, "font.size": 9.0, "axes.titlelocation": "left"}):
        figure, axis = plt.subplots(figsize=(8.5, 0.7 + 0.27 * len(lines)), layout="constrained")
        for place, (row, _, value) in enumerate(lines):
            colour = _MISSED if row.misses(value) else _OURS
            axis.hlines(place, 1.0, value, color=colour, linewidth=4, alpha=0.35)
            axis.plot(value, place, "o", color=colour, markersize=5)
            axis.plot(row.aim, place, "|", color=_GREY, markersize=11)
            axis.annotate(
                f"{value:.2f}",
                (value, place),
                (7 if value >= 1 else -7, 0),
                textcoords="offset points",
                va="center",
                ha="left" if value >= 1 else "right",
                fontsize=8,
                color=colour,
            )
        axis.axvline(1.0, color=_GREY, linewidth=0.8)
        axis.set_xscale("log")
        axis.margins(x=0.12)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.xaxis.set_minor_formatter(lambda *_: "")
        axis.set_yticks(range(len(lines)), [f"{row.label}, {case}" for row, case, _ in lines])
        axis.set_ylim(len(lines) - 0.5, -0.5)
        axis.set_xlabel(f"ratio, {'above' if rows[0].better == 'higher' else 'below'} 1 is better; grey tick: aim")
        finish(figure, [axis], path)


def draw_overhead(result: Result, path: Path) -> None:
    """Draw TTFT by its parts and TBT beside those of one process, by prompt length."""
    plt = pyplot()
    rows = result["rows"]
    names = [f"{row['prompt_tokens']:,.0f} tokens" for row in rows]
    with plt.rc_context({"svg.hashsalt": path.stem, "font.size": 9.0, "axes.titlelocation": "left"}):
        figure, (first, between) = plt.subplots(
            1, 2, figsize=(9.5, 0.9 + 0.55 * len(rows)), layout="constrained", width_ratios=(2, 1)
        )
        for place, row in enumerate(rows):
            first.barh(
                place - 0.2, row["bare_ttft_s"] * 1e3, 0.36, color="#afb8c1", label="one process" if not place else None
            )
            start = 0.0
            for name, label, colour in _PARTS:
                first.barh(
                    place + 0.2,
                    row[name] * 1e3,
                    0.36,
                    left=start,
                    color=colour,
                    label=f"cluster: {label}" if not place else None,
                )
                start += row[name] * 1e3
            first.annotate(
                f"{row['ttft_s'] / row['bare_ttft_s']:.2f} times",
                (start, place + 0.2),
                (4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
            between.barh(place - 0.2, row["bare_tbt_s"] * 1e3, 0.36, color="#afb8c1")
            between.barh(place + 0.2, row["tbt_s"] * 1e3, 0.36, color="#0969da")
            between.annotate(
                f"{row['tbt_s'] / row['bare_tbt_s']:.2f} times",
                (row["tbt_s"] * 1e3, place + 0.2),
                (4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        for axis, title in ((first, "time to first token, ms"), (between, "time between tokens, ms")):
            axis.set_title(title, fontsize=9.5)
            axis.margins(x=0.16)
            axis.set_ylim(len(rows) - 0.5, -0.5)
        first.set_yticks(range(len(rows)), names)
        between.set_yticks(range(len(rows)), [""] * len(rows))
        figure.legend(*first.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
        finish(figure, [first, between], path)


def draw_techniques(result: Result, path: Path) -> None:
    """Draw what the server with all techniques serves, and what it serves without each."""
    variants, plt = result["variants"], pyplot()
    names = list(variants)[::-1]
    colours = [_OURS if name == "all techniques" else _GREY for name in names]
    qps = [variants[name]["qps"] for name in names]
    with plt.rc_context({"svg.hashsalt": path.stem}):
        figure, axes = plt.subplots(1, 2, figsize=(9.2, 2.6), layout="constrained", sharey=True)
        axes[0].barh(names, qps, color=colours, height=0.6)
        axes[0].set_title("requests/s, all sent at once", fontsize=10, loc="left")
        for place, value in enumerate(qps):
            axes[0].annotate(f" {value:.2f}", (value, place), va="center", fontsize=8)
        axes[0].set_xlim(0, 1.15 * max(qps))
        for share, marker in (("p50", "o"), ("p99", "|")):
            values = [variants[name][f"first_token_{share}_s"] for name in names]
            axes[1].scatter(values, range(len(names)), color=colours, marker=marker, s=60)
        axes[1].set_xscale("log")
        axes[1].set_title("first token, s: median (dot) and p99 (line)", fontsize=10, loc="left")
        finish(figure, axes, path)


def draw_shapes(result: Result, path: Path) -> None:
    """Draw the median and the 90th percentile of TTFT of every shape, one panel per scenario."""
    plt = pyplot()
    scenarios = result["rows"]
    heights = [len(rows) for rows in scenarios.values()]
    with plt.rc_context({"svg.hashsalt": path.stem}):
        figure, panels = plt.subplots(
            len(scenarios), 1, figsize=(8, 0.5 * sum(heights) + 1.2), height_ratios=heights, layout="constrained"
        )
        for axes, (scenario, rows) in zip(panels, scenarios.items(), strict=True):
            for place, (shape, row) in enumerate(reversed(rows.items())):
                axes.barh(place, row["ttft_p50_ms"], color=_GREY if "round" in shape or "cache" in shape else _OURS)
                axes.plot(row["ttft_p90_ms"], place, "|", color="black", markersize=14)
                axes.text(row["ttft_p50_ms"], place, f" {row['ttft_p50_ms']:.0f}", va="center", fontsize=9)
            axes.set_yticks(range(len(rows)), list(reversed(rows)))
            axes.set_title(f"{scenario}: TTFT, median (bar) and p90 (line), ms", fontsize=10, loc="left")
        finish(figure, panels, path)


def draw_scheduling(result: Result, path: Path) -> None:
    """Draw mean TTFT by placement beside the paper's, ratios to `cache-aware` by network, and the gain of copies."""
    plt = pyplot()
    networks = result["conversations"]
    first = next(iter(networks.values()))["placements"]
    names = sorted(first, key=lambda name: -first[name]["ttft_mean_s"]["mean"])
    with plt.rc_context({"svg.hashsalt": path.stem, "font.size": 9.0, "axes.titlelocation": "left"}):
        figure, (ttft, network, gain) = plt.subplots(1, 3, figsize=(10.5, 2.9), layout="constrained")
        for place, name in enumerate(names):
            ttft.barh(place, first[name]["ttft_mean_s"]["mean"], color=_OURS if name == "moonpool" else "#afb8c1")
            if name in result["paper_ttft_s"]:
                ttft.plot(result["paper_ttft_s"][name], place, "|", color="black", markersize=13)
        ttft.set_xscale("log")
        ttft.set_xlim(0.5, 30)
        ttft.set_xticks([0.5, 1, 2, 5, 10, 20], ["0.5", "1", "2", "5", "10", "20"])
        ttft.xaxis.set_minor_formatter(lambda *_: "")
        ttft.set_yticks(range(len(names)), names)
        ttft.set_ylim(len(names) - 0.5, -0.5)
        ttft.set_title("mean TTFT, s (line: the paper's)", fontsize=9.5)
        for shift, name, colour in ((-0.12, "algorithm1", _GREY), (0.12, "moonpool", _OURS)):
            ratios = [row["vs_cache_aware"][name] for row in networks.values()]
            _points(network, [at + shift for at in range(len(ratios))], ratios, colour, name)
        network.set_yticks(range(len(networks)), list(networks))
        network.set_ylim(len(networks) - 0.5, -0.5)
        network.set_title("mean TTFT to cache-aware, by network", fontsize=9.5)
        network.legend(frameon=False, fontsize=8)
        popular = result["popular"]
        _points(gain, list(range(len(popular))), [row["gain"] for row in popular.values()], _OURS, "moonpool")
        gain.set_yticks(range(len(popular)), list(popular))
        gain.set_ylim(len(popular) - 0.5, -0.5)
        gain.set_title("TTFT without copies to TTFT with them", fontsize=9.5)
        for axis in (network, gain):
            axis.axvline(1.0, color=_GREY, linewidth=0.8)
        finish(figure, [ttft, network, gain], path)


_MODES = {
    "none": "#d0d7de",
    "load": "#afb8c1",
    "early": "#8c959f",
    "unpriced": "#57606a",
    "predicted-uniform": _OURS,
    "predicted": "#1a7f37",
    "oracle": "#8250df",
}


def draw_admission(result: Result, path: Path) -> None:
    """Draw goodput by scenario and mode as a share of the bound, and useful against good at twice the capacity."""
    plt = pyplot()
    scenarios = result["scenarios"]
    with plt.rc_context({"svg.hashsalt": path.stem, "font.size": 9.0, "axes.titlelocation": "left"}):
        figure, (goodput, useful) = plt.subplots(
            1, 2, figsize=(10.5, 3.4), layout="constrained", gridspec_kw={"width_ratios": [2, 1]}
        )
        for at, (mode, colour) in enumerate(_MODES.items()):
            shares = [
                one["modes"][mode]["good_per_s"]["mean"] / one["bound_good_per_s"]["mean"] for one in scenarios.values()
            ]
            goodput.bar(
                [place + (at - 3) * 0.12 for place in range(len(shares))], shares, 0.11, color=colour, label=mode
            )
            row = scenarios["2x"]["modes"][mode]
            x, y = row["good_per_s"], row["useful_tokens_per_s"]
            useful.errorbar(
                x["mean"],
                y["mean"] / 1e3,
                xerr=[[x["mean"] - x["low"]], [x["high"] - x["mean"]]],
                yerr=[[(y["mean"] - y["low"]) / 1e3], [(y["high"] - y["mean"]) / 1e3]],
                fmt="o",
                color=colour,
                capsize=2,
            )
        goodput.set_xticks(range(len(scenarios)), list(scenarios))
        goodput.set_ylim(0, 1.0)
        goodput.set_title("goodput, share of the bound that knows all requests in advance", fontsize=9.5)
        goodput.legend(frameon=False, fontsize=8, ncols=7, loc="upper center", bbox_to_anchor=(0.5, -0.08))
        goodput.grid(axis="y", color="#d8dee4", linewidth=0.7)
        useful.set_xlabel("good requests/s")
        useful.set_title("useful prefill at 2x, thousand tokens/s", fontsize=9.5)
        finish(figure, [goodput, useful], path)


def _points(axis: Any, places: Sequence[float], ratios: Sequence[dict[str, float]], colour: str, label: str) -> None:
    """Draw ratios with their intervals, one per line."""
    means = [ratio["mean"] for ratio in ratios]
    bars = [[ratio["mean"] - ratio["low"] for ratio in ratios], [ratio["high"] - ratio["mean"] for ratio in ratios]]
    axis.errorbar(means, places, xerr=bars, fmt="o", color=colour, markersize=5, capsize=3, label=label)


def pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def finish(figure: Any, axes: Sequence[Any], path: Path, grid: str = "x") -> None:
    """Style the axes and write the figure."""
    for axis in axes:
        axis.grid(axis=grid, color="#d8dee4", linewidth=0.7)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    pyplot().close(figure)
