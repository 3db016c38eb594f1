"""The generated parts of pages of docs/, and their comparison with the stored results."""

from collections.abc import Callable
from pathlib import Path

from benchmarks.figures import charts, data_plane, disaggregation, serving, summary
from benchmarks.figures.agents import agents
from benchmarks.figures.guarantees import guarantees
from benchmarks.stored import latest

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"
SECTIONS = (
    summary.at_a_glance,
    serving.engine,
    serving.techniques,
    serving.overhead,
    serving.frontend,
    serving.conductor,
    data_plane.pool,
    data_plane.kv_bytes,
    data_plane.endless,
    data_plane.droidspeak,
    data_plane.compression,
    data_plane.interference,
    data_plane.eviction,
    data_plane.messenger,
    data_plane.paths,
    data_plane.overlap,
    serving.scheduling,
    disaggregation.frontier,
    serving.admission,
    serving.groups,
    serving.dialogues,
    agents,
    serving.vllm,
    serving.hostile,
)


def performance() -> str:
    """Return the generated part of docs/performance.md."""
    return "\n\n".join(section() for section in SECTIONS)


PAGES: dict[str, Callable[[], str]] = {
    "docs/performance.md": performance,
    "docs/guarantees.md": guarantees,
}


def main(mode: str) -> int:
    """Write the pages and their charts, or check the pages; return the exit status."""
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
    if mode == "write":
        pictures = ROOT / "docs" / "pictures"
        charts.draw_all(pictures)
        disaggregation.draw_frontier(latest("frontier")[0], pictures / "frontier.svg")
        disaggregation.draw_frontier_live(latest("frontier-live")[0], pictures / "frontier-live.svg")
    if stale and mode == "check":
        print(f"{', '.join(stale)}: figures differ from the stored results; run `python -m benchmarks.figures write`")
        return 1
    return 0
