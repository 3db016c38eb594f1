"""Plot of the loss of a run's stages. ``python -m tools.training.plot LOG.jsonl ... PICTURE.svg``."""

import argparse
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np

from tools.training.runlog import Row, read

matplotlib.use("Agg")
matplotlib.rcParams.update({"svg.hashsalt": "moonpool", "svg.fonttype": "none"})
from matplotlib import pyplot as plt  # noqa: E402

SMOOTH_ROWS = 25


def joined(stages: list[list[Row]]) -> list[Row]:
    """Return the rows of all stages, whose tokens are counted from the start of the first one."""
    found = list[Row]()
    for rows in stages:
        seen = found[-1].tokens if found else 0
        found += [replace(row, tokens=seen + row.tokens) for row in rows]
    return found


def draw(rows: list[Row], path: Path) -> None:
    """Plot the weighted training loss over tokens seen, per logged batch and as a running mean, with contexts."""
    tokens = np.array([row.tokens for row in rows]) / 1e6
    losses = np.array([row.loss for row in rows])
    kernel = np.ones(min(SMOOTH_ROWS, len(rows)))
    mean = np.convolve(losses, kernel, "same") / np.convolve(np.ones_like(losses), kernel, "same")
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(tokens, losses, ".", color="0.75", markersize=2, label="one batch")
    axes.plot(tokens, mean, color="C0", label=f"mean of {SMOOTH_ROWS}")
    for before, row in pairwise(rows):
        if row.context != before.context or row.step < before.step:
            axes.axvline(row.tokens / 1e6, color="C1", linewidth=1 if row.step > before.step else 2)
            axes.annotate(f" {row.context}", (row.tokens / 1e6, losses.max()), fontsize=8, va="top")
    axes.set(
        xlabel="tokens seen (millions)",
        ylabel="weighted training loss (nats)",
        title="Bundled model: stages and contexts",
    )
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def main() -> None:
    """Run the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("logs", type=Path, nargs="+", help="of one stage after the other")
    parser.add_argument("picture", type=Path)
    given = parser.parse_args()
    draw(joined([read(log) for log in given.logs]), given.picture)


if __name__ == "__main__":
    main()
