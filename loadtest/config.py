"""Configuration of a replay."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from loadtest.errors import SettingInvalid
from traces import SAMPLING_SEED

MAX_SEND_LAG_S: Final = 0.25

Bound = tuple[str, Callable[[Any], bool], str]  # flag, predicate, description of the expected value


def _above_zero(value: float) -> bool:
    return 0 < value < math.inf


def _not_negative(value: float) -> bool:
    return 0 <= value < math.inf


def is_http(url: str) -> bool:
    """Return True if `url` is a valid http or https URL."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        return False


def server_root(url: str) -> str:
    """Return `url` without a trailing slash and without the /v1 of OpenAI base URLs."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def check_bounds(config: object, bounds: Mapping[str, Bound]) -> None:
    """Raise SettingInvalid for the first field whose value is out of bounds, naming its flag."""
    for name, (flag, holds, expected) in bounds.items():
        value = getattr(config, name)
        if not holds(value):
            raise SettingInvalid(f"{flag} is {_shown(value)}; expected {expected}")


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{key}:{bound:g}" for key, bound in value.items())
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


_BOUNDS: Final[dict[str, Bound]] = {
    "url": ("--url", is_http, "http://HOST:PORT"),
    "speed": ("--speed", _above_zero, "a number above 0"),
    "sample_families": ("--sample-families", lambda value: 0 < value <= 1, "a fraction above 0, at most 1"),
    "limit": ("--limit", _not_negative, "a number of requests, 0 for all"),
    "duration_s": ("--duration", _not_negative, "seconds, 0 for all"),
    "max_model_len": ("--max-model-len", _not_negative, "tokens, 0 to ask the server"),
    "sampled_fraction": ("--sampled-fraction", lambda value: 0 <= value <= 1, "a fraction from 0 to 1"),
    "temperature": ("--temperature", _above_zero, "a number above 0"),
    "request_timeout_s": ("--request-timeout", _above_zero, "seconds, above 0"),
    "slo_ttft_s": ("--ttft-slo", _not_negative, "seconds, 0 for the default rule"),
    "slo_tbt_s": ("--tbt-slo", _not_negative, "seconds, 0 for the default rule"),
    "verify_sample": ("--verify-sample", lambda value: value >= 1, "at least 1 request"),
    "verify_tolerance": ("--verify-tolerance", _not_negative, "a number from 0 on"),
    "on_429": ("--on-429", lambda value: value in ("count", "retry"), "count or retry"),
    "senders": ("--senders", _not_negative, "a number of processes, 0 to choose by the load"),
    "max_send_lag_s": ("--max-send-lag", _above_zero, "seconds, above 0"),
    "poll_every_s": ("the polling interval", _above_zero, "seconds, above 0"),
}


@dataclass(frozen=True)
class ReplayConfig:
    """Configuration of one replay."""

    trace: str
    """The word `conversation` for the bundled trace, or the path of a Mooncake JSONL file (plain, .xz, .zst, .gz)."""
    url: str
    """URL of the server, such as http://127.0.0.1:8000."""
    out: Path
    """Folder for report.json, report.html and requests.jsonl."""
    model_path: Path
    """Folder or Hugging Face id of the served model: tokenizer for the prompts, weights for verification."""
    model: str = ""
    """Model name in requests; empty: the first model that the server lists."""
    api_key: str = ""
    """API key, sent as bearer token."""
    speed: float = 1.0
    """Factor by which arrivals are accelerated."""
    sample_families: float = 1.0
    """Fraction of the trace's prefix families to replay."""
    sample_seed: int = SAMPLING_SEED
    """Random seed of the choice of families."""
    limit: int = 0
    """Maximum number of requests; 0: all."""
    duration_s: float = 0.0
    """Replay only the first seconds of the trace, in trace time; 0: all."""
    tokens_per_block: int = 8
    """Tokens to send per block of the trace (512 tokens there); scales prompts and outputs."""
    max_model_len: int = 0
    """Maximum prompt + output tokens; 0: the server's, else that of the model's configuration."""
    seed: int = 0
    """Random seed of texts, of the requests' sampling seeds, and of the verified sample."""
    sampled_fraction: float = 0.5
    """Fraction of requests sampled at `temperature`; the others are greedy."""
    temperature: float = 0.8
    """Temperature of the sampled requests."""
    request_timeout_s: float = 300.0
    """Timeout of a request in seconds."""
    on_429: str = "count"
    """Handling of rejections: `count` them as the request's outcome, or `retry` after the time in Retry-After."""
    senders: int = 0
    """Number of sender processes; 0: chosen from the load and the CPU cores."""
    max_send_lag_s: float = MAX_SEND_LAG_S
    """The run is INVALID if over 1 % of the requests are sent later than this."""
    slo_ttft_s: float = 0.0
    """TTFT objective in seconds; 0: 10 times that of a single unloaded request of the same length."""
    slo_tbt_s: float = 0.0
    """TBT objective in seconds; 0: 5 times that of single unloaded requests."""
    measure_unloaded: bool = True
    """Measure single requests without load first."""
    reuse_earlier: bool = False
    """Allow reuse of blocks left by earlier runs; otherwise each run has its own cache salt."""
    verify: bool = False
    """Re-score a sample of the answers in this process."""
    verify_sample: int = 100
    """Number of answers to re-score."""
    verify_tolerance: float = 1e-3
    """Largest difference below the maximum score at which a token counts as correct."""
    verify_device: str = "cpu"
    """Device of the reference model."""
    verify_threads: int = 0
    """Threads of the reference model; 0: torch's default."""
    poll_every_s: float = 1.0
    """Interval of polling /metrics in seconds."""

    @property
    def base_url(self) -> str:
        """`url` without a trailing slash and without the /v1 of OpenAI base URLs."""
        return server_root(self.url)

    def __post_init__(self) -> None:
        """Validate the fields. Raises SettingInvalid naming the flag."""
        check_bounds(self, _BOUNDS)
