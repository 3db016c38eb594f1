"""Report of a campaign: report.json, and the same figures as a Markdown table on standard output."""

import datetime
import json
from collections.abc import Mapping
from pathlib import Path

from tools.fuzz.fuzzer import Findings


def write_report(found: Mapping[str, Findings], *, seed: int, out: Path) -> None:
    """Write OUT/report.json and print the table."""
    targets = {
        name: {
            "cases": each.cases,
            "refused": each.refused,
            "cases_per_s": round(each.cases / each.seconds) if each.seconds else 0,
            "lines": each.lines,
            "num_lines": each.num_lines,
            "corpus": each.corpus,
            "defects": sorted(each.defects),
        }
        for name, each in found.items()
    }
    report = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "seed": seed,
        "cases": sum(each.cases for each in found.values()),
        "defects": sum(len(each.defects) for each in found.values()),
        "targets": targets,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(table(found))
    for name, each in found.items():
        for defect in each.defects.values():
            print(f"{name}: {defect.where}")
    print(f"seed {seed}; report and cases of defects: {out}")


def table(found: Mapping[str, Findings]) -> str:
    """Return the figures by target as a Markdown table."""
    rows = ["| target | cases | refused | cases/s | lines reached | of | defects |", "|---|---|---|---|---|---|---|"]
    for name, each in found.items():
        rate = each.cases / each.seconds if each.seconds else 0.0
        share = f"{each.lines} ({each.lines / max(1, each.num_lines):.0%})"
        cells = (name, each.cases, each.refused, f"{rate:.0f}", share, each.num_lines, len(each.defects))
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)
