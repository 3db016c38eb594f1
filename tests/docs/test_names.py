"""Metrics, fields, codes and report keys named in the documentation are those of the code."""

import ast
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest

from conductor.policy.decisions import Reason
from frontend.api import request_models, response_models
from frontend.api.formats import CompletionFormatter
from frontend.api.formatter import ResponseOptions
from frontend.api.request_models import ChatBody
from frontend.output import OutputChunk
from frontend.request import RequestStats
from kvpool import PoolNodeConfig, node_metrics
from kvpool.node import PoolNode
from loadtest.cluster_metrics import ClusterHistory
from loadtest.dialogue_config import DialogueConfig
from loadtest.dialogue_report import summarise_dialogues
from loadtest.objectives import ReplayObjectives
from loadtest.summary import summarise
from messenger.counters import CERTIFICATE_LEFT, Counters, reported
from settings.keys import assemble
from telemetry import (
    ConductorCollector,
    FrontendMetrics,
    NodeSample,
    NodesCollector,
    RequestFamilies,
    RequestMetrics,
    new_registry,
)
from telemetry.endpoint_picker import EndpointPickerMetrics

ROOT = Path(__file__).parents[2]
Page = Callable[[str], Any]
FirstColumn = Callable[[str], list[str]]
_ADDERS = {"add", "add_transfer"}
# Where counts are kept, and what stands before their names when nodes report them.
_COUNTED = {"worker": "", "prefill_node": "", "decode_node": "", "kvpool": "pool_", "messenger": "messenger_"}


def counter_names(source: str) -> set[str]:
    """Names counted in a module: `counters.add("x", …)`, `counters.add_transfer("x", …)`, `counters["x"] += …`."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _ADDERS:
            owner, argument = ast.unparse(node.func.value), node.args[0] if node.args else None
            is_transfer = node.func.attr == "add_transfer"
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Subscript):
            owner, argument, is_transfer = ast.unparse(node.target.value), node.target.slice, False
        else:
            continue
        if owner.endswith("counters") and isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            names.add(f"kv_{argument.value}_bytes" if is_transfer else argument.value)
    return names


@pytest.fixture(scope="module")
def frontend_metrics() -> set[str]:
    """Return the metrics that a frontend exports of its own requests."""
    registry = new_registry()
    RequestMetrics(RequestFamilies(registry), "m").rejected("queue")
    FrontendMetrics(registry)
    return exported(registry)


@pytest.fixture(scope="module")
def metrics(frontend_metrics: set[str]) -> set[str]:
    """All that /metrics can hold: of requests, of nodes, of what pools hold, and of every counter that nodes count."""
    counted = {
        prefix + name
        for package, prefix in _COUNTED.items()
        for path in (ROOT / package).rglob("*.py")
        for name in counter_names(path.read_text(encoding="utf-8"))
    }
    node = PoolNode(assemble(PoolNodeConfig, node_id="n", listen="unix:/nowhere"), incarnation=1)
    counted |= node_metrics.gauges(node).keys() | {f"pool_{name}" for name in node.core.totals()}
    flows = Counters()
    told = [flows.flow(peer="p", transport="rdma", rail=rail, direction="read") for rail in ("", "mlx5_0/1")]
    counted |= {f"messenger_{name}" for name in reported(flows, {})} | {f"messenger_{CERTIFICATE_LEFT}"}
    assert len(told) == 2
    counted |= {"trace_spans_exported"}
    paced = (ROOT / "worker" / "paced" / "engine.py").read_text(encoding="utf-8")
    counted |= set(re.findall(r'"(paced_[a-z_]+)": self', paced))
    vllm = (ROOT / "vllm_worker" / "node.py").read_text(encoding="utf-8")
    counted |= set(re.findall(r'"(engine_[a-z_]+)": len', vllm))
    some = {"digest_mismatches", "kv_push_bytes", "pool_evicted_blocks", "messenger_retries", "paced_late_seconds"}
    assert some <= counted
    registry = new_registry()
    sample = NodeSample("n", "decode", capacity_tokens=1, counters=dict.fromkeys(counted, 1.0))
    registry.register(NodesCollector(lambda: [sample]))
    registry.register(ConductorCollector(list))
    EndpointPickerMetrics(registry, list)
    return frontend_metrics | exported(registry)


def exported(registry: Any) -> set[str]:
    """Names of the registry's series as they are asked for: a histogram by its own, a counter with _total."""
    return {
        family.name + ("_total" if family.type == "counter" else "")
        for family in registry.collect()
        if family.name.startswith(("vllm:", "moonpool:"))
    }


def test_every_metric_named_is_exported(pages: list[Any], metrics: set[str]) -> None:
    named = {
        (str(page), name)
        for page in pages
        for name in re.findall(r"\b(?:vllm|moonpool):[a-z_]*[a-z]\b", page.text)
        if name != "moonpool:cli"
    }
    assert len(named) >= 40
    assert sorted(f"{page}: {name}" for page, name in named if name not in metrics) == []


def test_every_metric_exported_is_documented(page: Page, metrics: set[str]) -> None:
    text = page("metrics.md").text
    assert sorted(name for name in metrics if f"`{name}`" not in text) == []


def test_every_reason_of_a_rejection_is_documented(page: Page) -> None:
    text = page("slo.md").section("Rejections")
    assert [reason for reason in get_args(Reason) if f"`{reason}`" not in text] == []


def test_every_report_key_is_documented_and_no_other(page: Page, documented: FirstColumn) -> None:
    figures = summarise(
        [],
        {},
        tokens_per_block=8,
        objectives=ReplayObjectives(0.0, 0.0, None),
        history=ClusterHistory(),
        verification=None,
    )
    keys = {*figures, "settings", "trace", "notices", "interrupted", "valid", "invalid_reasons", "senders"}
    keys |= {"unloaded_failed", "verification_failed"}
    assert set(documented(page("replay.md").section("The report"))) - {"report.json"} == keys


def test_every_key_of_the_dialogues_report_is_documented_and_no_other(page: Page, documented: FirstColumn) -> None:
    config = DialogueConfig(url="http://h", out=Path("o"), model_path=Path("m"))
    keys = {*summarise_dialogues(config, [], verification=None), "settings", "notices", "interrupted"}
    assert set(documented(page("replay.md").section("The dialogues' report"))) - {"dialogues.json"} == keys


def test_every_key_of_the_extension_is_documented_and_no_other(page: Page, documented: FirstColumn) -> None:
    request = SimpleNamespace(
        request_id="r",
        tokenize_s=0.0,
        arrival_s=0.0,
        prompt_ids=np.zeros(1),
        dropped_messages=0,
        sampling=SimpleNamespace(seed=1),
        wants_receipt=False,
    )
    generation: Any = SimpleNamespace(stats=RequestStats(), request=request, leader=None)
    form = CompletionFormatter([generation], "m", ResponseOptions())
    answer = form.whole([OutputChunk((1,), "x", "stop")])
    section = page("quickstart.md").section("What `moonpool` in the answer means")
    assert set(documented(section)) == set(answer["moonpool"])


def test_every_key_of_a_receipt_is_documented_and_no_other(page: Page, documented: FirstColumn) -> None:
    section = page("decisions.md").section("Receipts")
    keys = {*response_models.Receipt.model_fields, *response_models.ReceiptAttempt.model_fields}
    assert set(documented(section)) == keys
    assert {key for key in response_models.ReceiptKv.model_fields if f"`{key}`" not in section} == set()


def test_every_field_served_is_documented_and_no_other(page: Page, documented: FirstColumn) -> None:
    served = {*request_models.CompletionBody.model_fields, *request_models.ChatBody.model_fields}
    assert set(documented(page("api.md").section("Fields"))) == served


def test_every_field_refused_is_documented_and_no_other(page: Page) -> None:
    section = page("api.md").section("Refused by name")
    listed = {name for line in section.splitlines() if line.startswith("`") for name in re.findall(r"`(\w+)`", line)}
    assert {name for name in listed if ChatBody.unsupported_field({name: object()}) is None} == set()
    assert ChatBody.UNSUPPORTED.keys() - listed == set()
