"""Alerts: promtool takes the rules, each alert fires when it should and else is silent, and has its runbook."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "helm" / "moonpool" / "files" / "rules" / "moonpool.yaml"
NODE: Final = 'node="n1",model_name="m"'
MODEL: Final = 'model_name="m"'

# Each alert: (at this minute, series that make it fire, the labels it fires with, series that do not). Series have a
# sample a minute; `a+bxn` is promtool's for n more samples, each b larger.
Series = dict[str, str]
CASES: dict[str, tuple[int, Series, Series, Series]] = {
    "MoonpoolBudgetBurnsFast": (
        70,
        {
            f'moonpool:slo_requests_total{{{MODEL},objective="all",result="met"}}': "0+40x100",
            f'moonpool:slo_requests_total{{{MODEL},objective="all",result="missed"}}': "0+60x100",
        },
        {"model_name": "m"},
        {  # an hour ago it was as bad, now it is not
            f'moonpool:slo_requests_total{{{MODEL},objective="all",result="met"}}': "0+40x60 2500+100x40",
            f'moonpool:slo_requests_total{{{MODEL},objective="all",result="missed"}}': "0+60x60 3600x40",
        },
    ),
    "MoonpoolBudgetBurnsSlowly": (
        400,
        {
            f'moonpool:slo_requests_total{{{MODEL},objective="all",result="met"}}': "0+80x450",
            f'moonpool:slo_requests_total{{{MODEL},objective="all",result="rejected"}}': "0+20x450",
        },
        {"model_name": "m"},
        {
            f'moonpool:slo_requests_total{{{MODEL},objective="all",result="met"}}': "0+96x450",
            f'moonpool:slo_requests_total{{{MODEL},objective="all",result="rejected"}}': "0+4x450",
        },
    ),
    "MoonpoolKeysFileBroken": (
        10,
        {
            'moonpool:api_keys_file_current{instance="a"}': "1x2 0x20",
            'moonpool:api_keys_file_current{instance="b"}': "1x20",
        },
        {},
        {'moonpool:api_keys_file_current{instance="a"}': "1x2 0x2 1x20"},
    ),
    "MoonpoolObjectiveUnmeetable": (15, {"moonpool:slo_unmeetable": "1x20"}, {}, {"moonpool:slo_unmeetable": "0x20"}),
    "MoonpoolNoFrontDoor": (3, {}, {}, {f"moonpool:requests_in_flight{{{MODEL}}}": "0x20"}),
    "MoonpoolNothingCanServe": (
        5,
        {f'moonpool:requests_rejected_total{{{MODEL},reason="no_nodes"}}': "0+3x20"},
        {"model_name": "m"},
        {f'moonpool:requests_rejected_total{{{MODEL},reason="ttft"}}': "0+3x20"},
    ),
    "MoonpoolRejectsMuch": (
        25,
        {
            f'moonpool:requests_rejected_total{{{MODEL},reason="ttft"}}': "0+10x30",
            f'vllm:request_success_total{{{MODEL},finished_reason="stop"}}': "0+90x30",
        },
        {"model_name": "m"},
        {
            f'moonpool:requests_rejected_total{{{MODEL},reason="ttft"}}': "0+2x30",
            f'vllm:request_success_total{{{MODEL},finished_reason="stop"}}': "0+98x30",
        },
    ),
    "MoonpoolRequestsFail": (
        20,
        {
            f'vllm:request_success_total{{{MODEL},finished_reason="error"}}': "0+2x30",
            f'vllm:request_success_total{{{MODEL},finished_reason="stop"}}': "0+98x30",
        },
        {"model_name": "m"},
        {
            f'vllm:request_success_total{{{MODEL},finished_reason="error"}}': "0x30",
            f'vllm:request_success_total{{{MODEL},finished_reason="abort"}}': "0+20x30",
            f'vllm:request_success_total{{{MODEL},finished_reason="stop"}}': "0+98x30",
        },
    ),
    "MoonpoolRetriesOften": (
        25,
        {
            f"moonpool:request_retries_total{{{MODEL}}}": "0+3x30",
            f"moonpool:request_attempts_total{{{MODEL}}}": "0+100x30",
        },
        {"model_name": "m"},
        {
            f"moonpool:request_retries_total{{{MODEL}}}": "0+1x30",
            f"moonpool:request_attempts_total{{{MODEL}}}": "0+100x30",
        },
    ),
    "MoonpoolNodeSilent": (
        5,
        {f'moonpool:node_up{{{NODE},role="decode",instance="a"}}': "1x2 0x20"},
        {"node": "n1", "role": "decode"},
        {  # one conductor still receives its reports, another one does not
            f'moonpool:node_up{{{NODE},role="decode",instance="a"}}': "0x20",
            f'moonpool:node_up{{{NODE},role="decode",instance="b"}}': "1x20",
        },
    ),
    "MoonpoolNodeSlow": (
        20,
        {f'moonpool:node_slowdown{{{NODE},what="step"}}': "1.8x30"},
        {"node": "n1", "model_name": "m", "what": "step"},
        {f'moonpool:node_slowdown{{{NODE},what="step"}}': "1.2x30"},
    ),
    "MoonpoolOverload": (
        15,
        {f'moonpool:load{{{MODEL},phase="prefill"}}': "1.4x20"},
        {"model_name": "m", "phase": "prefill"},
        {f'moonpool:load{{{MODEL},phase="prefill"}}': "0.5+0.2x4 0.5x20"},
    ),
    "MoonpoolDecodeMemoryFull": (
        20,
        {f'vllm:kv_cache_usage_perc{{{NODE},role="decode"}}': "0.99x30"},
        {"model_name": "m"},
        {
            f'vllm:kv_cache_usage_perc{{{NODE},role="decode"}}': "0.5x30",
            f'vllm:kv_cache_usage_perc{{{NODE},role="prefill"}}': "1x30",
        },
    ),
    "MoonpoolEventLoopHeld": (
        15,
        {'moonpool:event_loop_held_seconds{process="frontend"}': "0.8x20"},
        {"process": "frontend"},
        {
            'moonpool:event_loop_held_seconds{process="frontend"}': "0.1x20",
            'moonpool:event_loop_lag_seconds{process="frontend"}': "3x20",
        },
    ),
    "MoonpoolCertificateEnds": (
        70,
        {f"moonpool:messenger_tls_certificate_left_seconds{{{NODE}}}": "1000000x90"},
        {"node": "n1"},
        {
            f"moonpool:messenger_tls_certificate_left_seconds{{{NODE}}}": "3000000x90",
            'moonpool:http_certificate_left_seconds{instance="f"}': "3000000x90",
            'moonpool:http_certificate_left_seconds{instance="plain"}': "NaN NaN NaN",
        },
    ),
    "MoonpoolDamagedKV": (
        90,
        {f"moonpool:digest_mismatches_total{{{NODE}}}": "_x80 1x20"},  # appears with its first event
        {"node": "n1"},
        {f"moonpool:digest_mismatches_total{{{NODE}}}": "7x100"},  # of long ago
    ),
    "MoonpoolDirectoryDegraded": (
        8,
        {'moonpool:directory_exact{node="p1"}': "0x20"},
        {"node": "p1"},
        {'moonpool:directory_exact{node="p1"}': "1x20"},
    ),
    "MoonpoolSsdNotWritten": (
        15,
        {'moonpool:pool_ssd_writable{node="p1"}': "0x20", 'moonpool:pool_ssd_capacity_bytes{node="p1"}': "1000x20"},
        {"node": "p1"},
        {'moonpool:pool_ssd_writable{node="p1"}': "0x20", 'moonpool:pool_ssd_capacity_bytes{node="p1"}': "0x20"},
    ),
    "MoonpoolSharedStoreDown": (8, {"moonpool:shared_store_up": "0x20"}, {}, {"moonpool:shared_store_up": "1x20"}),
    "MoonpoolDecisionsLost": (
        5,
        {'moonpool:decision_log_lost_total{reason="behind"}': "0 0 4x20"},
        {"reason": "behind"},
        {'moonpool:decision_log_lost_total{reason="behind"}': "4x20"},
    ),
    "MoonpoolSpansLost": (
        30,
        {f'moonpool:node_trace_spans_total{{{NODE},result="failed"}}': "0+5x40"},
        {"result": "failed"},
        {'moonpool:trace_spans_total{process="frontend",result="exported"}': "0+5x40"},
    ),
}


def alerts() -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


@pytest.fixture(scope="module")
def promtool() -> str:
    """Where CI must have it, a machine without it has failed."""
    found = shutil.which("promtool")
    if found is None:
        if os.environ.get("REQUIRE_PROMTOOL"):
            pytest.fail("REQUIRE_PROMTOOL is set, and there is no promtool")
        pytest.skip("there is no promtool (Debian's package prometheus has it)")
    return found


def run(promtool: str, *arguments: str | Path) -> None:
    done = subprocess.run([promtool, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_takes_the_rules(promtool: str) -> None:
    run(promtool, "check", "rules", "--lint=all", "--lint-fatal", RULES)


def test_each_alert_fires_when_it_should_and_else_is_silent(promtool: str, tmp_path: Path) -> None:
    rules = alerts()
    assert rules.keys() == CASES.keys()
    tests = []
    for name, (minute, firing, labels, silent) in CASES.items():
        for series, is_firing in ((firing, True), (silent, False)):
            expected = {"exp_labels": {**labels, **rules[name]["labels"]}} if is_firing else None
            alert: dict[str, Any] = {"eval_time": f"{minute}m", "alertname": name}
            if expected is not None:
                alert["exp_alerts"] = [expected]
            tests.append(
                {
                    "name": f"{name} {'fires' if is_firing else 'is silent'}",
                    "interval": "1m",
                    "input_series": [{"series": key, "values": values} for key, values in series.items()],
                    "alert_rule_test": [alert],
                }
            )
    # The words of annotations are not looked at: promtool would have them to the letter.
    stripped = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    for group in stripped["groups"]:
        for rule in group["rules"]:
            rule.pop("annotations", None)
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(stripped))
    file = tmp_path / "tests.yaml"
    file.write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}))
    run(promtool, "test", "rules", file)


def test_each_alert_has_a_runbook_and_each_runbook_an_alert() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "docs" / "runbooks.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings == list(alerts())
    for name, rule in alerts().items():
        assert rule["annotations"]["runbook_url"] == f"docs/runbooks.md#{name.lower()}"
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}


def test_each_runbook_says_what_it_means_what_to_look_at_and_what_to_do() -> None:
    text = (ROOT / "docs" / "runbooks.md").read_text(encoding="utf-8")
    for section in text.split("\n## ")[1:]:
        for part in ("**Means:**", "**Usual causes:**", "**Look at:**", "**Do:**"):
            assert section.count(part) == 1, section.splitlines()[0]
