"""The command `moonpool endpoint-picker`, and what it reads of Moonpool's own API servers."""

import asyncio
import json
import subprocess
import sys

from endpoint_picker.endpoints import requests_in
from moonpool.supervision.child import READY_PREFIX
from telemetry import RequestFamilies, RequestMetrics, exposition, new_registry
from tests.endpoint_picker.gateway import Gateway, chat

COMMAND = [sys.executable, "-m", "moonpool", "endpoint-picker", "--listen", "127.0.0.1:0"]


async def test_the_command_serves_a_gateway_until_it_is_told_to_stop(start_endpoint):
    endpoint = await start_endpoint()
    command = [*COMMAND, "--endpoint", endpoint.address]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        assert line.startswith(READY_PREFIX)
        gateway = Gateway(json.loads(line.removeprefix(READY_PREFIX))["target"])
        assert (await gateway.answer(chat("Hello"))).destination == endpoint.address
        await gateway.close()
        process.terminate()
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def test_a_missing_or_malformed_endpoint_is_named():
    for further, message in (
        ([], "--endpoint is required"),
        (["--endpoint", "http://a:80"], "--endpoint must be host:port, such as 10.0.0.5:8000, got 'http://a:80'"),
        (["--endpoint", "a:80", "--picker-tls-cert", "x"], "--picker-tls-cert and --picker-tls-key must be given"),
    ):
        done = subprocess.run([*COMMAND, *further], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert message in " ".join(done.stderr.split())


def test_the_load_of_an_api_server_is_its_own_even_beside_that_of_the_cluster():
    registry = new_registry()
    families = RequestFamilies(registry)
    for name, count in (("m", 3), ("n", 4)):
        RequestMetrics(families, name).in_flight.set(count)
    text, _ = exposition(registry, "")
    assert requests_in(text.decode() + 'vllm:num_requests_running{node="decode-0"} 90.0\n') == 7


def test_metrics_without_requests_say_nothing_of_the_load():
    assert requests_in("python_info 1.0\n") is None
    for value in ("none", "NaN", "+Inf"):
        assert requests_in(f"vllm:num_requests_running{{}} {value}\n") is None
