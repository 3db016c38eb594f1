"""Section of docs/performance.md on separate or aggregated workers, and its chart."""

from pathlib import Path
from typing import Any

from benchmarks.figures.charts import finish, pyplot
from benchmarks.figures.formatting import interval, source, table
from benchmarks.stored import Result, latest

_SPLIT, _AGGREGATED, _GREY = "#0969da", "#bf8700", "#afb8c1"


def frontier() -> str:
    result, file = latest("frontier")
    objectives = result["tbt_objectives_s"]
    shown = [objectives.index(each) for each in (0.03, 0.05, 0.1, 0.2, 0.5)]
    rows = []
    for name, found in result["workloads"].items():
        for label, key in (("split", "split"), ("aggregated, sum", "sum"), ("aggregated, longest", "longest")):
            rows.append([name if key == "split" else "", label, *(_best_cell(found, key, at) for at in shown)])
        for key in ("sum", "longest"):
            ratios = [found["best"][at][f"split_over_{key}"] for at in shown]
            rows.append(["", f"split to {key}", *(interval(each) if each else "–" for each in ratios)])
    header = ["requests", "workers", *(f"{objectives[at] * 1e3:.0f} ms" for at in shown)]
    seeds = " / ".join(str(found["seeds"]) for found in result["workloads"].values())
    return f"""## Separate or aggregated workers

{source("benchmarks/frontier.py", file)}: simulated; requests per second and node of which {result["share"]:.0%} meet TTFT and the objective of the time
between tokens in the column, for the best split into prefill and decode nodes and the best chunk size of aggregated workers on the same number of
nodes, in parentheses. Steps with both a chunk and decoding take the sum of both times or the longer one. {seeds} paired seeds, 95 % intervals.
[What the figures show](simulate.md#frontier).

{table(header, rows)}

![Capacity per node by the objective of the time between tokens](pictures/frontier.svg)

{_live()}"""


def _live() -> str:
    result, file = latest("frontier-live")
    objectives = result["tbt_objectives_s"]
    shown = [objectives.index(each) for each in (0.05, 0.07, 0.1, 0.14, 0.2, 0.5)]
    rows = [[shape, *(f"{shares[at]:.0%}" for at in shown)] for shape, shares in result["shares"].items()]
    wrong, failed = (
        sum(run[name] for runs in result["runs"].values() for run in runs) for name in ("wrong_tokens", "failed")
    )
    return f"""Live ({source("benchmarks/frontier_live.py", file)}): four workers with paced engines of the same profile, the same long prompts and long answers at
{result["rate_per_s"]:g} requests/s, {result["seeds"]} seeds; share of the requests that meet TTFT and the objective of the time between tokens. Times are those of the
profile; the engines ran {result["slower"]:g} times as slowly. {failed} requests failed, {wrong} of the verified answers had a wrong token.

{table(["workers", *(f"{objectives[at] * 1e3:.0f} ms" for at in shown)], rows)}

![Share of requests within the objectives by the objective of the time between tokens, live](pictures/frontier-live.svg)"""


def _best_cell(found: Result, key: str, at: int) -> str:
    name = found["best"][at][key]
    capacity = found["capacity_per_node"][name][at]["mean"]
    setting = name if key == "split" else name.split(", ")[1]
    return f"{capacity:.2f} ({setting})" if capacity else "0"


def draw_frontier(result: Result, path: Path) -> None:
    """Draw the capacity per node of the best split and the best aggregated workers by the objective of TBT."""
    plt = pyplot()
    objectives_ms = [1e3 * each for each in result["tbt_objectives_s"]]
    with plt.rc_context({"svg.hashsalt": path.stem, "font.size": 9.0, "axes.titlelocation": "left"}):
        workloads = result["workloads"]
        figure, panels = plt.subplots(1, len(workloads), figsize=(10.5, 3.3), layout="constrained")
        for axis, (name, found) in zip(panels, workloads.items(), strict=True):
            capacities = found["capacity_per_node"]
            for shape, row in capacities.items():
                if shape in {best["split"] for best in found["best"]} or "aggregated" not in shape:
                    axis.plot(objectives_ms, [each["mean"] for each in row], color=_GREY, linewidth=0.8)
            slow, fast = (_best_row(found, key) for key in ("sum", "longest"))
            axis.fill_between(objectives_ms, slow, fast, color=_AGGREGATED, alpha=0.35, label="best aggregated")
            axis.plot(objectives_ms, slow, color=_AGGREGATED, linewidth=0.9)
            axis.plot(objectives_ms, fast, color=_AGGREGATED, linewidth=0.9)
            axis.plot(objectives_ms, _best_row(found, "split"), "-o", color=_SPLIT, markersize=3, label="best split")
            axis.set_xscale("log")
            axis.set_xticks([30, 50, 100, 200, 500, 1000], ["30", "50", "100", "200", "500", "1000"])
            axis.xaxis.set_minor_formatter(lambda *_: "")
            axis.set_ylim(bottom=0)
            axis.set_title(name, fontsize=9.5)
            axis.set_xlabel("objective of the time between tokens, ms")
        panels[0].set_ylabel("requests/s and node")
        panels[0].legend(frameon=False, fontsize=8, loc="lower right")
        finish(figure, list(panels), path)


def draw_frontier_live(result: Result, path: Path) -> None:
    """Draw the share of requests that met the objectives by the objective of TBT, for each live cluster."""
    plt = pyplot()
    objectives_ms = [1e3 * each for each in result["tbt_objectives_s"]]
    colours = [_SPLIT if "aggregated" not in shape else _AGGREGATED for shape in result["shares"]]
    with plt.rc_context({"svg.hashsalt": path.stem, "font.size": 9.0, "axes.titlelocation": "left"}):
        figure, axis = plt.subplots(figsize=(6.5, 3.0), layout="constrained")
        for (shape, shares), colour, mark in zip(result["shares"].items(), colours, "os^vD", strict=False):
            axis.plot(
                objectives_ms, [100 * share for share in shares], f"-{mark}", color=colour, markersize=4, label=shape
            )
        axis.set_xscale("log")
        axis.set_xticks([30, 50, 100, 200, 500, 1000], ["30", "50", "100", "200", "500", "1000"])
        axis.xaxis.set_minor_formatter(lambda *_: "")
        axis.set_ylim(0, 103)
        axis.set_title("requests that meet TTFT and the objective of the time between tokens, %", fontsize=9.5)
        axis.set_xlabel("objective of the time between tokens, ms")
        axis.legend(frameon=False, fontsize=8, loc="lower right")
        finish(figure, [axis], path)


def _best_row(found: Result, key: str) -> list[float]:
    capacities: dict[str, Any] = found["capacity_per_node"]
    return [capacities[best[key]][at]["mean"] for at, best in enumerate(found["best"])]
