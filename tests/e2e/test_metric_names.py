"""Dashboards and rules ask only for metrics, labels and values that a live cluster's /metrics has."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from telemetry import NodeSample, NodesCollector, new_registry
from telemetry.conductor import CONDUCTOR_HISTOGRAMS, CONDUCTOR_METRICS

FILES: Final = Path(__file__).parents[2] / "deploy" / "helm" / "moonpool" / "files"
# What nodes count with the first event of its kind only, under the names that they report.
LATE: Final = (
    *("digest_mismatches", "pool_digest_mismatches", "parity_mismatches", "pool_dram_corrupt_blocks"),
    *("pool_ssd_corrupt_blocks", "pool_evicted_dram_room_blocks"),
    *("trace_spans_failed", "messenger_tls_certificate_left_seconds"),
)
_NAME: Final = r"(?:vllm|moonpool):[a-z0-9_]+"
_SELECTOR: Final = re.compile(rf"(?<![\w:])({_NAME})(?:\{{([^}}]*)\}})?")
_BY_NAME: Final = re.compile(r'\{__name__=~"([^"]+)"([^}]*)\}')
_MATCHER: Final = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
Labels = dict[str, dict[str, set[str]]]  # values by label by metric


@pytest.fixture(scope="module")
def cluster(random_model: Path, tmp_path_factory: pytest.TempPathFactory, start_cluster: Callable[..., Any]) -> Any:
    flags = ["--engine", "paced", "--ttft-slo", "60", "--tbt-slo", "10", "--block-tokens", "8", "--transport", "tcp"]
    folder = tmp_path_factory.mktemp("log")
    with start_cluster(
        random_model, *flags, "--decision-log", str(folder), "--pool-bytes", "64MiB", "--metrics-show-tenants"
    ) as running:
        yield running


@pytest.fixture
async def live(cluster: Any, session: aiohttp.ClientSession) -> Labels:
    """Return /metrics after requests that were served, repeated and rejected."""
    prompt = list(range(100, 300))
    for _ in range(2):
        answer = await cluster.complete(session, prompt, max_tokens=8, ignore_eos=True)
        assert answer.moonpool["attempts"] == 1
    body = {"prompt": prompt, "max_tokens": 8}
    async with session.post(f"{cluster.url}/v1/completions", json=body, headers={"x-slo-ttft-ms": "0.001"}) as response:
        assert response.status == 429
    wanted = {"moonpool:slo_requests_total", "moonpool:kv_bytes_moved_total", "moonpool:messenger_bytes_total"}
    async with asyncio.timeout(60):
        while True:
            async with session.get(f"{cluster.url}/metrics") as response:
                found = labels_of(await response.text())
            if wanted <= found.keys() and "rejected" in found["moonpool:slo_requests_total"].get("result", ()):
                return found
            await asyncio.sleep(0.2)


def declared() -> Labels:
    """Return the metrics that appear with the first event of their kind, and their labels."""
    found: Labels = {}
    for name, (_, labels) in CONDUCTOR_METRICS.items():
        found.setdefault(f"moonpool:{name}", {label: set() for label in labels})
    for name, (_, labels) in CONDUCTOR_HISTOGRAMS.items():
        found[f"moonpool:{name}_bucket"] = {label: set() for label in labels}
    registry = new_registry()
    registry.register(NodesCollector(lambda: [NodeSample("n", "decode", "m", counters=dict.fromkeys(LATE, 1.0))]))
    for family in registry.collect():
        for sample in family.samples:
            found.setdefault(sample.name, {label: set() for label in sample.labels})
    return found


def labels_of(text: str) -> Labels:
    found: Labels = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return found


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FILES / "rules" / "moonpool.yaml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def asked() -> Iterator[tuple[str, str, str]]:
    """(where, expression, words in which labels are shown)"""
    for rule in rules():
        yield rule.get("alert") or rule["record"], rule["expr"], rule.get("annotations", {}).get("summary", "")
    for path in sorted((FILES / "dashboards").glob("*.json")):
        board = json.loads(path.read_text(encoding="utf-8"))
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                yield f"{path.name}: {panel['title']}", target["expr"], target["legendFormat"]
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                selector, label = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["definition"]).groups()  # type: ignore[union-attr]
                yield f"{path.name}: variable {variable['name']}", f"max by ({label}) ({selector})", ""


def selectors(expr: str) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """(metric, its matchers: label, operator, value)"""
    for names, rest in _BY_NAME.findall(expr):
        for name in names.split("|"):
            yield name, _MATCHER.findall(rest)
    for name, matchers in _SELECTOR.findall(_BY_NAME.sub("", expr)):
        yield name, _MATCHER.findall(matchers)


_RARE: Final = {"no_nodes", "error"}  # values that only trouble brings; docs/slo.md has them


def test_every_metric_label_and_value_asked_for_exists(live: Labels) -> None:
    known = declared() | live
    recorded = {rule["record"]: rule["expr"] for rule in rules() if "record" in rule}
    wrong: list[str] = []
    metrics = set()
    for where, expr, words in asked():
        for _ in range(2):  # what is recorded from what is recorded
            for name, source in recorded.items():
                expr = expr.replace(name, f"({source})")
        labels = {"le", "__name__"}
        for name, matchers in selectors(expr):
            metrics.add(name)
            if name not in known:
                wrong.append(f"{where}: {name} is no metric")
                continue
            labels |= known[name].keys()
            for label, operator, value in matchers:
                if label not in known[name]:
                    wrong.append(f"{where}: {name} has no label {label}")
                elif operator == "=" and known[name][label] and value not in known[name][label] | _RARE:
                    wrong.append(f"{where}: {name} has no {label} {value!r}, but {sorted(known[name][label])}")
        shown = re.findall(r"\{\{\s*\$labels\.(\w+)\s*\}\}", words) + re.findall(r"\{\{(\w+)\}\}", words)
        grouped = [label.strip() for found in re.findall(r"by \(([^)]*)\)", expr) for label in found.split(",")]
        wrong += [f"{where}: no label {label}" for label in {*shown, *grouped} - labels]
        wrong += [f"{where}: {label} is shown, and summed away" for label in set(shown) - set(grouped)]
    assert wrong == []
    assert len(metrics) >= 50


def test_nearly_all_that_is_asked_for_is_there_without_trouble(live: Labels) -> None:
    """So that the test above does not live on what is only declared."""
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    metrics = {name for _, expr, _ in asked() for name, _ in selectors(expr)} - recorded
    assert len(metrics & live.keys()) >= 0.75 * len(metrics), sorted(metrics - live.keys())
