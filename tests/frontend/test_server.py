"""The process around the application: sockets, probes, metrics, signals, bad configuration."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from frontend import FrontendConfig, FrontendConfigError, HttpPortInUse, ModelFilesError, ServedModelConfig
from frontend.server import bind, url_of
from frontend.tokenizer import Tokenizer
from moonpool_proto.v1 import worker_pb2
from settings.keys import InvalidSetting, replaced

CODE = """
import asyncio, sys
from pathlib import Path
from frontend import FrontendConfig, ServedModelConfig, serve_frontend
from rpc.control import run
from settings.keys import assemble

async def main(stop):
    models = (ServedModelConfig(Path(sys.argv[1]), "tiny"),)
    config = assemble(FrontendConfig, models=models, conductor_targets=(sys.argv[2],), port=0)
    await serve_frontend(config, stop, lambda url: print(url, flush=True))

stop = asyncio.Event()
run(main(stop), stop=stop)
print("ended", flush=True)
"""


@pytest.fixture
def model_copy(model_path: Path, tmp_path: Path) -> Path:
    """The model folder, to be broken."""
    shutil.copytree(model_path, tmp_path, dirs_exist_ok=True)
    return tmp_path


async def test_a_port_in_use_is_a_clear_error_before_anything_is_served(
    config: FrontendConfig, start_front: Any
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(HttpPortInUse, match=f"127.0.0.1:{port}: the port is in use"):
            async with start_front(port=port):
                pass


def test_an_address_of_nobody_is_a_clear_error() -> None:
    with pytest.raises(FrontendConfigError, match=r"192\.0\.2\.1"):
        bind("192.0.2.1", 0)


@pytest.mark.parametrize(("host", "start"), [("0.0.0.0", "http://127.0.0.1:"), ("::1", "http://[::1]:")])
def test_url_is_one_that_a_client_can_use(host: str, start: str) -> None:
    try:
        listener = bind(host, 0)
    except FrontendConfigError:
        pytest.skip(f"no {host} here")
    with listener:
        assert url_of(listener).startswith(start)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"port": 70000}, "port"),
        ({"conductor_targets": ("",)}, "conductor_targets"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"request_timeout_s": float("nan")}, "request_timeout"),
        ({"drain_grace_s": -1.0}, "drain_grace"),
        ({"api_key": ("a", "")}, "--api-key must not be empty"),
        ({"models": ()}, "models must hold at least one model"),
        ({"models": (ServedModelConfig(Path("a"), "m"), ServedModelConfig(Path("b"), "m"))}, "got 'm' twice"),
        (
            {"models": (ServedModelConfig(Path("a"), "m", ("n",)), ServedModelConfig(Path("b"), "n"))},
            "got 'n' twice",
        ),
    ],
)
def test_configuration_that_cannot_be_right_is_refused_by_name(
    config: FrontendConfig, change: dict[str, Any], named: str
) -> None:
    with pytest.raises((FrontendConfigError, InvalidSetting), match=named):
        replaced(config, **change)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda path: (path / "tokenizer.json").unlink(), "cannot read .*tokenizer.json"),
        (lambda path: (path / "tokenizer.json").write_text("{}"), "is not a valid tokenizer"),
        (lambda path: (path / "config.json").unlink(), "cannot read .*config.json"),
        (lambda path: (path / "config.json").write_text("{"), "not valid JSON"),
        (lambda path: (path / "config.json").write_text('{"vocab_size": "many"}'), "vocab_size"),
        (lambda path: (path / "chat_template.jinja").write_text("{% if %}"), "does not compile"),
        (lambda path: (path / "tokenizer_config.json").write_text('{"chat_template": 5}'), "chat_template"),
    ],
)
def test_a_broken_model_folder_is_a_clear_error(model_copy: Path, break_it: Any, message: str) -> None:
    Tokenizer(model_copy)
    break_it(model_copy)
    with pytest.raises(ModelFilesError, match=message):
        Tokenizer(model_copy)


def test_a_missing_model_folder_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match="does not exist"):
        Tokenizer(tmp_path / "nowhere")


def test_a_template_file_wins_over_the_configurations(model_copy: Path) -> None:
    (model_copy / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    template = Tokenizer(model_copy).chat_template
    assert template is not None
    assert template.render([{"role": "user", "content": "hi"}], {}, add_generation_prompt=True) == "hi!"


async def test_chats_without_a_template_are_refused(model_copy: Path, start_front: Any) -> None:
    (model_copy / "tokenizer_config.json").unlink()
    async with start_front(models=(ServedModelConfig(model_copy, "tiny"),)) as front:
        status, body = await front.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
        assert (status, body["error"]["code"]) == (400, "no_chat_template")


async def test_readiness_follows_the_cluster(cluster: Any, front: Any) -> None:
    assert (await front.get("/ready"))[0] == 200
    cluster.conductor.cluster.ready_models[:] = []
    _, text = await front.readiness(503)
    assert "no nodes yet" in json.loads(text)["reason"]
    for path in ("/health", "/live"):
        assert (await front.get(path))[0] == 200
    cluster.conductor.cluster.ready_models[:] = ["tiny"]
    await front.readiness(200)


async def test_metrics_tell_of_requests_and_nodes(cluster: Any, front: Any) -> None:
    cluster.answer_with(lambda submit: ([20, 21, 22], worker_pb2.FINISH_LENGTH))
    prompt = list(range(10, 20))
    assert (await front.post("/v1/completions", {"prompt": prompt, "max_tokens": 3}))[0] == 200
    status, text = await front.get("/metrics/cluster")
    assert status == 200
    for line in (
        'vllm:time_to_first_token_seconds_count{model_name="tiny"} 1.0',
        'vllm:inter_token_latency_seconds_count{model_name="tiny"} 2.0',
        'vllm:e2e_request_latency_seconds_count{model_name="tiny"} 1.0',
        'vllm:request_queue_time_seconds_sum{model_name="tiny"} 0.5',
        'vllm:request_prefill_time_seconds_sum{model_name="tiny"} 0.125',
        'vllm:request_decode_time_seconds_count{model_name="tiny"} 1.0',
        'vllm:prompt_tokens_total{model_name="tiny"} 10.0',
        'vllm:generation_tokens_total{model_name="tiny"} 3.0',
        'vllm:prefix_cache_queries_total{model_name="tiny"} 10.0',
        'vllm:prefix_cache_hits_total{model_name="tiny"} 8.0',
        'vllm:request_success_total{finished_reason="length",model_name="tiny"} 1.0',
        'moonpool:request_attempts_total{model_name="tiny"} 1.0',
        'moonpool:requests_in_flight{model_name="tiny"} 0.0',
        'vllm:num_requests_running{model_name="tiny",node="p0",role="prefill"} 1.0',
        'vllm:kv_cache_usage_perc{model_name="tiny",node="p0",role="prefill"} 0.75',
        'moonpool:kv_bytes_moved_total{model_name="tiny",node="p0",path="push",role="prefill"} 7.0',
    ):
        assert line in text.splitlines()


async def test_a_stopped_frontend_frees_its_port(config: FrontendConfig, start_front: Any) -> None:
    async with start_front() as front:
        port = int(front.url.rsplit(":", 1)[1])
    async with start_front(port=port) as front:
        assert (await front.get("/live"))[0] == 200


def test_process_serves_without_a_conductor_and_ends_at_sigterm(model_path: Path, run_dir: Path) -> None:
    command = [sys.executable, "-c", CODE, str(model_path), f"unix:{run_dir}/none.sock"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            with urllib.request.urlopen(f"{url}/live", timeout=10) as response:
                assert response.status == 200
            with pytest.raises(urllib.error.HTTPError, match="503") as refused:
                urllib.request.urlopen(f"{url}/ready", timeout=10)
            refused.value.close()
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline().strip() == "ended"
            assert process.wait(timeout=20) == 0
        finally:
            process.kill()
