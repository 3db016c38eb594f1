"""The configuration of a replay: frozen, one line of help per field."""

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

Bound = tuple[str, Callable[[Any], bool], str]  # flag, what must hold, what that is in words


def _above_zero(value: float) -> bool:
    return 0 < value < math.inf


def _not_negative(value: float) -> bool:
    return 0 <= value < math.inf


def is_http(url: str) -> bool:
    """Return True if this is the address of an HTTP server."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        return False


def server_root(url: str) -> str:
    """`url` without a trailing slash, and without the /v1 that OpenAI's clients are given."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def check_bounds(config: object, bounds: Mapping[str, Bound]) -> None:
    """Raises SettingInvalid naming the flag of the first field whose value is out of its bounds."""
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
    "slo_ttft_s": ("--slo-ttft", _not_negative, "seconds, 0 for the default rule"),
    "slo_tbt_s": ("--slo-tbt", _not_negative, "seconds, 0 for the default rule"),
    "verify_sample": ("--verify-sample", lambda value: value >= 1, "at least 1 request"),
    "verify_tolerance": ("--verify-tolerance", _not_negative, "a number from 0 on"),
    "on_429": ("--on-429", lambda value: value in ("count", "retry"), "count or retry"),
    "senders": ("--senders", _not_negative, "a number of processes, 0 to choose by the load"),
    "max_send_lag_s": ("--max-send-lag", _above_zero, "seconds, above 0"),
    "poll_every_s": ("the polling interval", _above_zero, "seconds, above 0"),
}


@dataclass(frozen=True)
class ReplayConfig:
    """Everything `loadtest.runner.run` needs to know."""

    trace: str
    """The word `conversation` for the bundled trace, or the path of a Mooncake JSONL file (plain, .xz, .zst, .gz)."""
    url: str
    """Address of the server, such as http://127.0.0.1:8000."""
    out: Path
    """Folder for report.json, report.html and requests.jsonl."""
    model_path: Path
    """Folder of the served model: its tokenizer makes the prompts, its weights verify the answers."""
    model: str = ""
    """Name of the model in requests; empty: the first that the server lists."""
    api_key: str = ""
    """Bearer key for the server."""
    speed: float = 1.0
    """Factor by which arrivals are closer together than in the trace."""
    sample_families: float = 1.0
    """Fraction of the trace's prefix families to replay."""
    sample_seed: int = SAMPLING_SEED
    """Which families are sampled."""
    limit: int = 0
    """At most so many requests, 0 = all."""
    duration_s: float = 0.0
    """Only requests of the trace's first so many seconds (of its own time), 0 = all."""
    tokens_per_block: int = 8
    """Tokens per block of the trace (512 there); prompts and outputs are scaled together."""
    max_model_len: int = 0
    """Longest prompt + output, 0 = what the server says, else what the model's configuration says."""
    seed: int = 0
    """Of texts, of the requests' sampling seeds, and of the choice of what is verified."""
    sampled_fraction: float = 0.5
    """Fraction of requests drawn at `temperature`; the others are greedy."""
    temperature: float = 0.8
    """Temperature of the drawn requests."""
    request_timeout_s: float = 300.0
    """A request that takes longer has failed."""
    on_429: str = "count"
    """What is done about a rejection: `count` it as the request's outcome, or `retry` after what Retry-After says."""
    senders: int = 0
    """Processes that send, 0 = chosen by the load and this machine's cores."""
    max_send_lag_s: float = MAX_SEND_LAG_S
    """The run is INVALID if more than 1 % of the requests left later than this."""
    slo_ttft_s: float = 0.0
    """TTFT objective in seconds, 0 = 10 x that of a lone request of the same length."""
    slo_tbt_s: float = 0.0
    """TBT objective in seconds, 0 = 5 x that of lone requests."""
    measure_unloaded: bool = True
    """Measure lone requests first."""
    reuse_earlier: bool = False
    """Let blocks that earlier runs left in the cluster be reused; otherwise each run has a cache salt of its own."""
    verify: bool = False
    """Re-score a sample of the answers in this process."""
    verify_sample: int = 100
    """How many answers to re-score."""
    verify_tolerance: float = 1e-3
    """How far below the largest score a token may lie without being wrong."""
    verify_device: str = "cpu"
    """Where the reference runs."""
    verify_threads: int = 0
    """Threads of the reference, 0 = torch's own choice."""
    poll_every_s: float = 1.0
    """Seconds between looks at /metrics."""

    @property
    def base_url(self) -> str:
        """`url` without a trailing slash, and without the /v1 that OpenAI's clients are given."""
        return server_root(self.url)

    def __post_init__(self) -> None:
        """Raises SettingInvalid naming the flag."""
        check_bounds(self, _BOUNDS)
