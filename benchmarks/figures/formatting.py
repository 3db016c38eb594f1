"""Formats of tables, numbers and sources, as the generated pages show them."""

from collections.abc import Iterable, Sequence

from benchmarks.stored import Result


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table of Markdown."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def source(command: str, file: str) -> str:
    """Format the command that repeats a measurement and a link to its stored result."""
    return f"`{command}`, [{file}](../benchmarks/results/{file})"


def number(value: float) -> str:
    """Format a figure with at least two significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def interval(value: Result) -> str:
    """Format an estimate with its confidence interval."""
    return f"{value['mean']:.2f} ({value['low']:.2f} to {value['high']:.2f})"


def ratio_cell(value: float | None) -> str:
    """Format a ratio, or a dash if it was not measured."""
    return "–" if value is None else number(value)


def write_and_read(row: Result, peer: str, metric: str) -> list[str]:
    """Format a ratio of the messenger's result for writes and for reads; `row` is that of a batch size."""
    return [
        ratio_cell(row[direction].get("ratios", {}).get(peer, {}).get(metric)) if direction in row else "–"
        for direction in ("write", "read")
    ]
