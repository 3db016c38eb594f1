"""A worker with vLLM refuses wrong configurations before it starts. Runs with and without vLLM."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from settings.worker import BUNDLED_MODEL
from vllm_worker.engine_args import check_arguments, require_vllm
from worker.errors import StartupError


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--block-size 16", ["--block-size", "--block-tokens"]),
        ("--max_num_seqs=4", ["--max_num_seqs=4", "--max-batch"]),
        ("--kv-transfer-config '{}'", ["--kv-transfer-config", "Moonpool moves KV itself"]),
        ("--speculative-config.model x", ["speculative decoding"]),
        ("-sc.model x", ["'-sc.model'", "speculative decoding"]),
        ("-dp 2", ["'-dp'", "data parallelism in one worker"]),
        ("--enable-lora", ["LoRA"]),
        ("--seed 'x", ["cannot be split", "--seed 'x"]),
    ],
)
def test_arguments_that_moonpool_sets_or_does_not_support_are_refused_by_name(text: str, words: list[str]) -> None:
    with pytest.raises(StartupError) as refused:
        check_arguments(text)
    for word in words:
        assert word in str(refused.value)


def test_other_arguments_are_passed_on() -> None:
    assert check_arguments("--tensor-parallel-size 2 --quantization='fp8' -ep -cc.mode 3 --swap -1") == [
        *("--tensor-parallel-size", "2", "--quantization=fp8", "-ep", "-cc.mode", "3", "--swap", "-1")
    ]


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_a_worker_without_vllm_says_how_to_install_it() -> None:
    with pytest.raises(StartupError, match=r"vLLM cannot be imported.*pip install 'moonpool\[vllm\]'"):
        require_vllm()


def test_prefill_and_decode_workers_are_refused(moonpool: Callable[..., Any], assert_refused: Any) -> None:
    done = moonpool("serve", BUNDLED_MODEL, "--engine", "vllm", "--port", "0")
    assert_refused(done, "--engine vllm", "--aggregated", "1 prefill and 1 decode")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_so_is_one_that_is_started_alone(
    role: str, moonpool: Callable[..., Any], assert_refused: Any, short_path: Path
) -> None:
    addresses = ["--listen", f"unix:{short_path}/worker.sock", "--conductor", f"unix:{short_path}/nobody.sock"]
    addresses += ["--pool", f"unix:{short_path}/no-pool.sock"]
    done = moonpool("node", role, "--engine", "vllm", "--block-tokens", "32", *addresses)
    assert_refused(done, "--engine vllm runs aggregated workers only", f"ROLE_{role.upper()}")
