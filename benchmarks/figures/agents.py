"""Section of docs/performance.md on agents and their hints, with its chart."""

from pathlib import Path
from typing import Final

from benchmarks.figures.formatting import interval, source, table
from benchmarks.stored import Result, latest

_GREY: Final = "#57606a"
_LABELS: Final = {
    "none": "none",
    "pauses": "pauses",
    "priorities": "priorities",
    "both": "pauses and priorities",
}


def agents() -> str:
    """Return the section."""
    result, file = latest("agents")
    settings = result["settings"]
    rows = [
        [
            f"`{policy}`",
            _LABELS[hints],
            f"{row['job_s']['mean']:,.0f}",
            interval(row["job_ratio"]) if hints != "none" else "1",
            f"{row['ttft_s']['mean']:.1f}",
            f"{row['reused_share']['mean']:.1%}",
        ]
        for policy, by_hints in result["hints"].items()
        for hints, row in by_hints.items()
    ]
    header = ["policy of the pool", "hints", "mean job time less waits, s", "to none", "mean TTFT, s", "tokens reused"]
    false = [
        [tenant, interval(row["job_ratio"]), f"{row['reused_difference']['mean'] * 100:+.1f} points"]
        for tenant, row in result["false_hints"].items()
    ]
    return f"""<a id="agents"></a>
## Agents

{source("benchmarks/agents.py", file)}: simulated, {settings["agents"]} [coding agents](simulate.md#agents) in a closed loop on {settings["nodes"]} prefill and {settings["nodes"]} decode nodes of the
bundled 70B profile, whose pools hold a fifth of the agents' KV; {settings["seeds"]} paired seeds, 95 % intervals, ratios as geometric means of the pairs.

{table(header, rows)}

Two tenants, of which one announces that all its agents return after 0.1 s; the ratios are to runs in which it announces nothing. It takes room up to its
share, so the honest tenant finds fewer of its tokens. Its jobs take no longer, because the prompts of the other one take less time to compute:

{table(["tenant", "mean job time, false hints to none", "tokens reused"], false)}

![Mean job time with hints to that without them](pictures/agents.svg)

{_live()}"""


def _live() -> str:
    result, file = latest("agents-live")
    pairs = result["pairs"]
    one = pairs[0]["with"]
    ratio = result["agent_completion_ratio_live"]
    rows = [
        [
            label,
            f"{row['mean_job_s']['mean']:,.0f}",
            f"{row['ttft_p50_s']['mean']:.1f} / {row['ttft_p90_s']['mean']:.1f}",
            f"{row['share_cached']['mean']:.1%}",
        ]
        for label, row in (
            ("none", result["variants"]["without"]),
            ("pauses and priorities", result["variants"]["with"]),
        )
    ]
    said = f"{ratio['mean']:.2f} (one pair)" if len(pairs) == 1 else interval(ratio)
    return f"""Live ({source("benchmarks/agents_live.py", file)}): {one["agents"]} agents with {one["turns"]} turns on two prefill and two decode nodes with paced engines of the same profile, pools for
{result["memory"]:.0%} of the agents' KV and the prefill nodes' own slots for {one["slots_share"]:.0%}. Mean job time with hints to that without: {said}.

{table(["hints", "mean job time less waits, s", "TTFT P50 / P90, s", "tokens reused"], rows)}"""


def draw_agents(result: Result, path: Path) -> None:
    """Draw the ratios of mean job times, by policy and hints, and those of both tenants under false hints."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [
        (f"{policy}: {_LABELS[hints]}", row["job_ratio"], "#0969da")
        for policy, by_hints in result["hints"].items()
        for hints, row in by_hints.items()
        if hints != "none"
    ]
    rows += [
        (f"false hints: {tenant} tenant", row["job_ratio"], _GREY) for tenant, row in result["false_hints"].items()
    ]
    with pyplot.rc_context({"svg.hashsalt": path.stem, "font.size": 9.0}):
        figure, axis = pyplot.subplots(figsize=(7.5, 2.4), layout="constrained")
        for place, (_, ratio, colour) in enumerate(rows):
            bars = [[ratio["mean"] - ratio["low"]], [ratio["high"] - ratio["mean"]]]
            axis.errorbar([ratio["mean"]], [place], xerr=bars, fmt="o", color=colour, markersize=5, capsize=3)
        axis.set_yticks(range(len(rows)), [label for label, _, _ in rows])
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.axvline(1.0, color=_GREY, linewidth=0.8)
        axis.set_title("mean job time less tool waits, to that without hints", fontsize=9.5, loc="left")
        axis.grid(axis="x", color="#d8dee4", linewidth=0.7)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
