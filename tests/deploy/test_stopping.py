"""Pods are given the time that their processes take to end, whatever the values say."""

from typing import Any

import pytest

TIMES = [(0, 0, 0), (10, 120, 60), (600, 86400, 86400)]


@pytest.mark.parametrize(("pre_stop", "drain", "worker_drain"), TIMES)
@pytest.mark.parametrize("mode", ["statefulset", "kuberay"])
def test_running_requests_have_the_time_that_they_were_promised(
    render: Any, mode: str, pre_stop: int, drain: int, worker_drain: int
) -> None:
    release = render(
        {
            "mode": mode,
            "frontend": {"preStopSeconds": pre_stop, "drainSeconds": drain},
            "workerDrainSeconds": worker_drain,
        }
    )
    settings = release.settings
    assert (settings["drain_grace"], settings["worker_drain_grace"]) == (drain, worker_drain)
    for pod in release.pods:
        grace = pod.spec.get("terminationGracePeriodSeconds", 30)
        if pod.name == "moonpool-frontend":
            assert pod.container["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", str(pre_stop)]
            assert grace >= pre_stop + settings["drain_grace"] + 5
        elif "llm-d.ai/role" in pod.labels or pod.name == "moonpool-launcher":
            assert grace >= settings["worker_drain_grace"] + 10


def test_a_start_has_the_time_that_its_model_takes_to_load(render: Any) -> None:
    release = render({"workerStartupSeconds": 1234})
    probe = release.pod("moonpool-prefill").container["startupProbe"]
    assert probe["httpGet"]["path"] == "/ready"
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 1234


def test_a_frontend_is_replaced_before_it_leaves(example: Any) -> None:
    strategy = example.one("Deployment", "moonpool-frontend")["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}


def test_memory_holds_the_pool(example: Any) -> None:
    """In the examples: KV lies in the limit for memory, or in huge pages."""
    units = {"Mi": 1 << 20, "Gi": 1 << 30, "MiB": 1 << 20, "GiB": 1 << 30}

    def nbytes(text: str) -> int:
        number = text.rstrip("MGiB")
        return int(number) * units[text.removeprefix(number)]

    if example.kind("DaemonSet"):
        limits = example.pod("moonpool-pool").container["resources"]["limits"]
        assert nbytes(limits.get("hugepages-2Mi", limits["memory"])) >= nbytes(example.settings["pool_bytes"])
