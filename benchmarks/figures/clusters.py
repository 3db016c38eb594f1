"""Pictures of the benchmarks of heterogeneous and elastic clusters, drawn when their results are stored."""

from pathlib import Path

from benchmarks.figures.charts import finish, pyplot
from benchmarks.stored import Result

_COLOURS = {"per node": "#0969da", "one model": "#cf222e", "linear": "#afb8c1", "trees": "#8c959f"}
_OTHER = "#57606a"


def draw_heterogeneous(result: Result, path: Path) -> None:
    """Draw the median and the 90th percentile of the errors of TTFT and TBT by predictor."""
    plt = pyplot()
    names = list(result["errors"])
    with plt.rc_context({"svg.hashsalt": path.stem, "font.size": 9.0, "axes.titlelocation": "left"}):
        figure, axes = plt.subplots(1, 2, figsize=(9.5, 2.4), layout="constrained", sharey=True)
        for axis, (what, title) in zip(axes, (("ttft", "TTFT"), ("tbt", "TBT")), strict=True):
            for place, name in enumerate(names):
                row, colour = result["errors"][name][what]["all"], _COLOURS.get(name, _OTHER)
                axis.barh(place, row["p90"]["mean"], color=colour, alpha=0.35)
                axis.barh(place, row["p50"]["mean"], color=colour)
            axis.set_title(f"error of {title}: median, and 90th percentile (light)", fontsize=9.5)
            axis.set_yticks(range(len(names)), names)
            axis.set_ylim(len(names) - 0.5, -0.5)
            axis.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        finish(figure, axes, path, grid="both")


def draw_elastic(result: Result, path: Path) -> None:
    """Draw the load of a day and the prefill and decode nodes of each cluster over time."""
    plt = pyplot()
    part = result["diurnal"]
    shown = {"autoscaled": "#0969da", "clairvoyant": "#1a7f37", part["best_static"]: _OTHER}
    with plt.rc_context({"svg.hashsalt": path.stem, "font.size": 9.0, "axes.titlelocation": "left"}):
        figure, axes = plt.subplots(3, 1, figsize=(8.5, 5.2), layout="constrained", sharex=True)
        minutes = [row[0] / 60 for row in part["load"]]
        axes[0].plot(minutes, [row[1] / 1e3 for row in part["load"]], color=_OTHER, label="prompt")
        axes[0].plot(minutes, [row[2] / 1e3 for row in part["load"]], color="#8250df", label="answer")
        axes[0].set_title("arriving tokens per second, thousands", fontsize=9.5)
        axes[0].legend(frameon=False, fontsize=8)
        for axis, role in zip(axes[1:], ("prefill", "decode"), strict=True):
            for name, colour in shown.items():
                steps = [(time_s / 60, nodes) for time_s, of, nodes in part["nodes"][name] if of == role]
                times, nodes = zip(*steps, (minutes[-1], steps[-1][1]), strict=True)
                label = name if name in ("autoscaled", "clairvoyant") else f"best static, {name}"
                axis.step(times, nodes, where="post", color=colour, label=label)
            axis.set_title(f"{role} nodes", fontsize=9.5)
            axis.set_ylim(bottom=0)
        axes[1].legend(frameon=False, fontsize=8)
        axes[2].set_xlabel("minutes")
        finish(figure, axes, path, grid="both")
