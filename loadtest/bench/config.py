"""Configuration of `bench serve`; names and defaults match vLLM's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from loadtest.config import MAX_SEND_LAG_S, Bound, check_bounds, is_http
from loadtest.errors import SettingInvalid

ENDPOINTS: Final[Mapping[str, str]] = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}
"""Endpoint path of each backend; `vllm` is an alias of `openai`."""
DATASETS: Final = ("random", "sharegpt", "custom", "prefix_repetition")
FILE_DATASETS: Final = ("sharegpt", "custom")
METRICS: Final = ("ttft", "tpot", "itl", "e2el")
GOODPUT_METRICS: Final = ("ttft", "tpot", "e2el")


def _positive(value: float) -> bool:
    return value > 0 and not math.isnan(value)


def _at_least(least: int) -> Callable[[Any], bool]:
    return lambda value: value is None or value >= least


_BOUNDS: Final[dict[str, Bound]] = {
    "base_url": ("--base-url", is_http, "http://HOST:PORT"),
    "backend": ("--backend", lambda v: v in ENDPOINTS, f"one of {', '.join(ENDPOINTS)}"),
    "dataset_name": (
        "--dataset-name",
        lambda v: v in DATASETS,
        f"one of {', '.join(DATASETS)} (recorded traces: `moonpool replay`)",
    ),
    "num_prompts": ("--num-prompts", _at_least(1), "at least 1"),
    "request_rate": ("--request-rate", _positive, "requests per second, above 0, or inf"),
    "burstiness": ("--burstiness", _positive, "a number above 0, or inf"),
    "max_concurrency": ("--max-concurrency", _at_least(1), "at least 1"),
    "random_input_len": ("--random-input-len", _at_least(1), "at least 1 token"),
    "random_output_len": ("--random-output-len", _at_least(1), "at least 1 token"),
    "random_range_ratio": ("--random-range-ratio", lambda v: 0 <= v < 1, "a ratio from 0 to below 1"),
    "random_prefix_len": ("--random-prefix-len", _at_least(0), "tokens, from 0 on"),
    "prefix_repetition_prefix_len": ("--prefix-repetition-prefix-len", _at_least(0), "tokens, from 0 on"),
    "prefix_repetition_suffix_len": ("--prefix-repetition-suffix-len", _at_least(1), "at least 1 token"),
    "prefix_repetition_num_prefixes": ("--prefix-repetition-num-prefixes", _at_least(1), "at least 1"),
    "prefix_repetition_output_len": ("--prefix-repetition-output-len", _at_least(1), "at least 1 token"),
    "sharegpt_output_len": ("--sharegpt-output-len", _at_least(1), "at least 1 token"),
    "custom_output_len": (
        "--custom-output-len",
        lambda v: v == -1 or v >= 1,
        "at least 1 token, or -1 for each line's output_tokens",
    ),
    "num_warmups": ("--num-warmups", _at_least(0), "a number of requests, from 0 on"),
    "request_timeout_s": ("--request-timeout", lambda v: 0 < v < math.inf, "seconds, above 0"),
    "ready_check_timeout_s": ("--ready-check-timeout-sec", lambda v: 0 <= v < math.inf, "seconds, from 0 on"),
    "senders": ("--senders", _at_least(0), "a number of processes, 0 to choose by the load"),
    "on_429": ("--on-429", lambda v: v in ("count", "retry"), "count or retry"),
    "max_send_lag_s": ("--max-send-lag", lambda v: 0 < v < math.inf, "seconds, above 0"),
    "percentile_metrics": (
        "--percentile-metrics",
        lambda v: all(name in METRICS for name in v),
        f"a list of {', '.join(METRICS)}",
    ),
    "metric_percentiles": (
        "--metric-percentiles",
        lambda v: len(v) > 0 and all(0 <= p <= 100 for p in v),
        "a list of numbers from 0 to 100",
    ),
    "goodput": (
        "--goodput",
        lambda v: all(name in GOODPUT_METRICS and _positive(bound) for name, bound in v.items()),
        f"KEY:MILLISECONDS pairs of {', '.join(GOODPUT_METRICS)}",
    ),
}


@dataclass(frozen=True)
class BenchConfig:
    """Configuration of one `bench serve` run."""

    base_url: str = "http://127.0.0.1:8000"
    """URL of the server."""
    backend: str = "openai"
    """Protocol: a key of ENDPOINTS."""
    endpoint: str = ""
    """Endpoint path; empty: the backend's."""
    model: str = ""
    """Model name in requests; empty: the first model that the server lists."""
    served_model_name: str = ""
    """Model name in requests if it differs from `model`, for example because `model` is a folder."""
    tokenizer: Path | None = None
    """Folder or Hugging Face id of the model whose tokenizer generates and counts prompts; None: the bundled one."""
    api_key: str = field(default="", repr=False)
    """API key, sent as bearer token."""
    headers: tuple[tuple[str, str], ...] = ()
    """Extra headers of every request."""
    dataset_name: str = "random"
    """Source of the prompts: one of DATASETS."""
    dataset_path: Path | None = None
    """File of a `sharegpt` or `custom` dataset."""
    disable_shuffle: bool = False
    """Keep the order of the dataset file."""
    no_oversample: bool = False
    """Do not repeat prompts of a file that has fewer than `num_prompts`."""
    num_prompts: int = 1000
    """Number of requests."""
    seed: int = 0
    """Random seed of prompts, lengths, arrivals, and the jitter of retries."""
    random_input_len: int = 1024
    """Tokens of a random prompt, excluding the shared prefix."""
    random_output_len: int = 128
    """Output tokens of a random request."""
    random_range_ratio: float = 0.0
    """Lengths are drawn between length x (1 - ratio) and length x (1 + ratio)."""
    random_prefix_len: int = 0
    """Tokens of the prefix shared by all random prompts."""
    prefix_repetition_prefix_len: int = 256
    """Tokens of each prefix."""
    prefix_repetition_suffix_len: int = 256
    """Tokens after the prefix."""
    prefix_repetition_num_prefixes: int = 10
    """Number of distinct prefixes."""
    prefix_repetition_output_len: int = 128
    """Output tokens of a prefix_repetition request."""
    sharegpt_output_len: int | None = None
    """Output tokens of a sharegpt request; None: the length of the recorded answer."""
    custom_output_len: int = 256
    """Output tokens of a custom request; -1: each line's output_tokens."""
    request_rate: float = math.inf
    """Requests per second; infinite: all at once."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of intervals: 1 is a Poisson process; larger values are more even."""
    max_concurrency: int | None = None
    """Maximum number of requests in flight."""
    ignore_eos: bool = False
    """Ignore end-of-sequence tokens, so that answers have their full length."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Sampling fields of the request body: temperature, top_p and so on."""
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """Additional fields of the request body."""
    num_warmups: int = 0
    """Warm-up requests, excluded from the results."""
    ready_check_timeout_s: float = 0.0
    """Seconds to wait for the server to be ready."""
    request_timeout_s: float = 6 * 3600.0
    """Timeout of a request in seconds."""
    on_429: str = "count"
    """Handling of rejections: `count` them as failures, or `retry`."""
    senders: int = 0
    """Number of sender processes; 0: chosen from the load and the CPU cores."""
    max_send_lag_s: float = MAX_SEND_LAG_S
    """The run is INVALID if over 1 % of the requests are sent later than this; not checked at an infinite rate."""
    keep_text: bool = False
    """Keep the answers' texts."""
    percentile_metrics: tuple[str, ...] = ("ttft", "tpot", "itl")
    """Latency metrics to report."""
    metric_percentiles: tuple[float, ...] = (99.0,)
    """Percentiles to report."""
    goodput: Mapping[str, float] = field(default_factory=dict)
    """Objectives in milliseconds, by metric."""

    @property
    def path(self) -> str:
        """Endpoint path."""
        return self.endpoint or ENDPOINTS[self.backend]

    @property
    def chat(self) -> bool:
        """True if requests contain chat messages instead of a prompt."""
        return self.backend == "openai-chat"

    def __post_init__(self) -> None:
        """Validate the fields. Raises SettingInvalid naming the flag."""
        check_bounds(self, _BOUNDS)
        if not self.path.endswith(ENDPOINTS[self.backend].removeprefix("/v1")):
            raise SettingInvalid(
                f"--endpoint is {self.path}; --backend {self.backend} needs one that ends with "
                f"{ENDPOINTS[self.backend].removeprefix('/v1')}"
            )
        if (self.dataset_path is not None) != (self.dataset_name in FILE_DATASETS):
            needs = "needs" if self.dataset_path is None else "takes no"
            raise SettingInvalid(f"--dataset-name {self.dataset_name} {needs} --dataset-path")
