"""Dashboards as data: what Grafana needs is there, panels do not overlap, and Prometheus takes each expression."""

import itertools
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "deploy" / "helm" / "moonpool" / "files" / "dashboards"
BOARDS = sorted(FOLDER.glob("*.json"))
# Grafana puts these in the place of its variables.
VALUES = {"$__rate_interval": "5m", "$model": ".*", "$role": ".*", "$node": ".*", "$slo_class": ".*"}


def board_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_there_is_one_for_the_fleet_and_one_for_objectives() -> None:
    boards = [board_of(path) for path in BOARDS]
    assert [path.name for path in BOARDS] == ["fleet.json", "slo.json"]
    assert len({board["uid"] for board in boards}) == len(boards)
    assert all(path.stat().st_size < 900_000 for path in BOARDS)  # what a ConfigMap takes


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: str(path.name))
def test_panels_stand_side_by_side_and_ask_the_chosen_source(path: Path) -> None:
    board = board_of(path)
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for one, other in itertools.combinations([panel["gridPos"] for panel in panels], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, (one, other)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)
    variables = {variable["name"] for variable in board["templating"]["list"]}
    for panel in panels:
        if panel["type"] == "row":
            continue
        assert panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert [target["datasource"] for target in panel["targets"]] == [panel["datasource"]] * len(panel["targets"])
        for target in panel["targets"]:
            used = {name for name in ("model", "role", "node", "slo_class") if f"${name}" in target["expr"]}
            assert used <= variables, panel["title"]


def test_prometheus_takes_every_expression(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        if os.environ.get("REQUIRE_PROMTOOL"):
            pytest.fail("REQUIRE_PROMTOOL is set, and there is no promtool")
        pytest.skip("there is no promtool (Debian's package prometheus has it)")
    exprs = [
        target["expr"] for path in BOARDS for panel in board_of(path)["panels"] for target in panel.get("targets", ())
    ]
    for name, value in VALUES.items():
        exprs = [expr.replace(name, value) for expr in exprs]
    assert not any("$" in expr for expr in exprs)
    rules = [{"record": f"panel:{number}", "expr": expr} for number, expr in enumerate(exprs)]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    done = subprocess.run([promtool, "check", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(exprs) >= 50
