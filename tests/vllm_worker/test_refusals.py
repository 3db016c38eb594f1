"""A worker with vLLM refuses wrong configurations before it starts. Runs with and without vLLM."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from settings.worker import BUNDLED_MODEL
from vllm_worker.engine_args import check_arguments, gpus_of, require_vllm
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


@pytest.mark.parametrize(
    ("device", "num_ranks", "visible", "gpus"),
    [
        ("cuda", 1, None, "0"),
        ("cuda:0", 1, "5", "5"),
        ("cuda:3", 1, None, "3"),
        ("cuda:1", 2, None, "2,3"),
        ("cuda:1", 2, "7,6,5,4", "5,4"),
        ("cuda:1", 1, "GPU-a,GPU-b", "GPU-b"),
        ("cpu", 2, "0,1", ""),
    ],
)
def test_every_worker_of_a_host_has_gpus_of_its_own(
    device: str, num_ranks: int, visible: str | None, gpus: str
) -> None:
    assert gpus_of(device, num_ranks, visible) == gpus


def test_more_gpus_than_there_are_is_refused_with_both_numbers() -> None:
    with pytest.raises(StartupError, match=r"cuda:1 with --tensor-parallel-size 2 needs 4 GPUs, .* names 3"):
        gpus_of("cuda:1", 2, "0,1,2")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_a_worker_without_vllm_says_how_to_install_it() -> None:
    with pytest.raises(StartupError, match=r"vLLM cannot be imported.*pip install 'moonpool\[vllm\]'"):
        require_vllm()


def test_rounded_storage_is_refused(moonpool: Callable[..., Any], assert_refused: Any) -> None:
    done = moonpool("serve", BUNDLED_MODEL, "--engine", "vllm", "--kv-storage", "int8", "--port", "0")
    assert_refused(done, "--kv-storage must be exact with --engine vllm", "int8")


def test_siblings_kv_is_refused(tmp_path: Path, moonpool: Callable[..., Any], assert_refused: Any) -> None:
    profile = tmp_path / "reuse.json"
    done = moonpool("serve", BUNDLED_MODEL, "--engine", "vllm", "--reuse-profile", profile, "--port", "0")
    assert_refused(done, "--reuse-profile needs --engine transformer and --kv-storage exact", "vllm")
