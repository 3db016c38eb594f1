"""The processes of a rendered release, run as the chart says, with an address of this machine for each pod: they find
each other, answer the probes, serve a request, and end when told to.
"""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from settings.worker import BUNDLED_MODEL

LIMIT_S = 240
PROMPT = {"prompt": "In the beginning", "max_tokens": 8, "ignore_eos": True}


class Machine:
    """Stands for the cluster: gives each pod an address, and names to them, and starts containers."""

    def __init__(self, release: Any, folder: Path) -> None:
        self.release = release
        self._folder = folder
        # Loopback addresses that no other run of this test has: the ports are those of the chart.
        run = os.getpid() % 32000
        network = f"127.{64 + run // 250}.{run % 250}"
        self.addresses = {pod.name: f"{network}.{number}" for number, pod in enumerate(release.pods, start=1)}
        for name, text in release.one("ConfigMap", "moonpool-config")["data"].items():
            (folder / name).write_text(self._resolved(text))

    def _resolved(self, text: str) -> str:
        """DNS: a conductor's own name, and that of the pool node of the host."""
        text = re.sub(r"moonpool-conductor-0\.[\w.-]+", self.addresses["moonpool-conductor"], text)
        text = text.replace("/models/", f"{self._folder}/models/")
        return re.sub(r"moonpool-pool\.[\w.-]+", self.addresses["moonpool-pool"], text)

    @contextmanager
    def running(self, pod: Any) -> Iterator[Callable[[], None]]:
        """Its process, ended like a pod's; what waits until its start is over."""
        own = {"POD_NAME": pod.name, "POD_IP": self.addresses[pod.name], "NODE_NAME": "host"}
        arguments = [
            re.sub(r"\$\((\w+)\)", lambda found: own[found[1]], self._resolved(argument)).replace(
                "0.0.0.0",
                own["POD_IP"],  # all pods share this machine's ports
            )
            for argument in pod.container["args"]
        ]
        arguments = [argument.replace("/var/lib/moonpool", str(self._folder)) for argument in arguments]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MOONPOOL_")}
        (config,) = [mount["subPath"] for mount in pod.container["volumeMounts"] if mount["name"] == "config"]
        environment |= {"MOONPOOL_CONFIG": str(self._folder / config), "OMP_NUM_THREADS": "1"}
        environment |= {"TMPDIR": str(self._folder)}
        log = self._folder / f"{pod.name}.log"
        with (
            log.open("w") as output,
            subprocess.Popen(
                [sys.executable, "-m", "moonpool", *arguments], env=environment, stdout=output, stderr=output
            ) as process,
        ):
            try:
                yield lambda: self._wait_started(pod, process, log)
            finally:
                process.send_signal(signal.SIGTERM)
                assert process.wait(LIMIT_S) == 0, log.read_text()

    def _wait_started(self, pod: Any, process: "subprocess.Popen[bytes]", log: Path) -> None:
        deadline = time.monotonic() + LIMIT_S
        while self.probe(pod, "startupProbe") != 200:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)

    def scraped(self) -> dict[str, list[float]]:
        """Return the values of every metric that the monitors make Prometheus scrape, of all processes together."""
        values: dict[str, list[float]] = {}
        for kind, endpoints in (("ServiceMonitor", "endpoints"), ("PodMonitor", "podMetricsEndpoints")):
            (monitor,) = self.release.kind(kind)
            wanted = monitor["spec"]["selector"]["matchLabels"].items()
            for pod, endpoint in itertools.product(self.release.pods, monitor["spec"][endpoints]):
                ports = {port["name"]: port["containerPort"] for port in pod.container["ports"]}
                if wanted <= pod.labels.items() and endpoint["port"] in ports:
                    url = f"http://{self.addresses[pod.name]}:{ports[endpoint['port']]}{endpoint['path']}"
                    with urllib.request.urlopen(url, timeout=30) as answer:
                        for family in text_string_to_metric_families(answer.read().decode()):
                            for sample in family.samples:
                                values.setdefault(sample.name, []).append(sample.value)
        return values

    def start(self, stack: ExitStack, names: Sequence[str]) -> None:
        """Run the processes of these pods, and return when all are ready."""
        pods = [self.release.pod(f"moonpool-{name}") for name in names]
        for wait_started in [stack.enter_context(self.running(pod)) for pod in pods]:
            wait_started()
        deadline = time.monotonic() + LIMIT_S
        while any(self.probe(pod, "readinessProbe") != 200 for pod in pods):
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the answer of the API to a request."""
        url = f"http://{self.addresses['moonpool-frontend']}:8000{path}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return json.load(answer)

    def probe(self, pod: Any, which: str) -> int:
        """The status that Kubernetes would get; 0 for no answer."""
        get = pod.container[which]["httpGet"]
        (port,) = [one["containerPort"] for one in pod.container["ports"] if one["name"] == get["port"]]
        try:
            with urllib.request.urlopen(f"http://{self.addresses[pod.name]}:{port}{get['path']}", timeout=30) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        except OSError:
            return 0


@pytest.fixture
def machine(render: Any, example_values: Callable[[str], dict[str, Any]], short_path: Path) -> Machine:
    values = example_values("cpu-trial")
    config = values["config"] | {"threads": 1, "engine": "paced"}  # what computes is another test's
    monitoring = {"serviceMonitor": {"enabled": True}}
    release = render(values | {"redis": {"enabled": False}, "config": config, "monitoring": monitoring})
    return Machine(release, short_path)


def test_the_processes_of_a_release_make_a_cluster_that_serves(machine: Machine) -> None:
    with ExitStack() as stack:
        # The frontend last, as it ends first.
        machine.start(stack, ("conductor", "pool", "prefill", "decode", "frontend"))
        assert {machine.probe(pod, "livenessProbe") for pod in machine.release.pods} == {200}
        told = machine.ask("/v1/completions", PROMPT)
        assert told["usage"]["completion_tokens"] == 8
        assert told["moonpool"]["prefill_node"] == "moonpool-prefill"
        assert told["moonpool"]["decode_node"] == "moonpool-decode"
        scraped = machine.scraped()
        assert sum(scraped["vllm:request_success_total"]) == 1
        assert sum(scraped["vllm:generation_tokens_total"]) == 8
        assert len(scraped["vllm:num_requests_running"]) == 3  # of each node one


@pytest.fixture
def fleet(render: Any, example_values: Callable[[str], dict[str, Any]], short_path: Path) -> Machine:
    values = example_values("cpu-trial")
    config = values["config"] | {"threads": 1, "engine": "paced"}
    group = {"both": {"role": "aggregated"}}
    models = [
        {"name": "one", "source": "image", "servedNames": ["one", "uno"], "workers": group},
        {"name": "two", "source": "image", "config": {"max_batch": 2}, "workers": group},
    ]
    for model in models:
        shutil.copytree(BUNDLED_MODEL, short_path / "models" / str(model["name"]))
    release = render(values | {"redis": {"enabled": False}, "config": config, "models": models})
    return Machine(release, short_path)


def test_the_processes_of_a_fleet_serve_every_model_on_its_own_workers(fleet: Machine) -> None:
    with ExitStack() as stack:
        fleet.start(stack, ("conductor", "pool", "one-both", "two-both", "frontend"))
        assert [entry["id"] for entry in fleet.ask("/v1/models")["data"]] == ["one", "uno", "two"]
        workers = {
            name: fleet.ask("/v1/completions", PROMPT | {"model": name})["moonpool"]["decode_node"]
            for name in ("one", "uno", "two")
        }
    assert workers == {"one": "moonpool-one-both", "uno": "moonpool-one-both", "two": "moonpool-two-both"}
