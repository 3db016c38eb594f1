"""Configuration keys of the application, in slices; each is declared once. Here: model, engine, cluster, HTTP, logs.

Others: `scheduling`, `places`, `pool`, `transport`, `shared_store`, `models`; those of `serve` itself: `supervision`.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from moonpool.config.fields import Key, Slice
from moonpool.config.sources import parse_size
from moonpool.errors import ConfigError

BUNDLED_MODEL = Path(__file__).resolve().parent.parent / "data" / "model"
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
LOG_LEVELS = ("debug", "info", "warning", "error")


def name_of_folder(path: Path) -> str:
    """What a model is called that was given no name."""
    return "moonpool" if path == BUNDLED_MODEL else path.resolve().name


@dataclass(frozen=True)
class ModelSettings(Slice):
    """Which model, and in what blocks its KV is kept."""

    panel: ClassVar[str] = "Model"
    model: Annotated[
        Path | None,
        Key("Hugging Face folder: config.json, *.safetensors, tokenizer.json", default_text="the bundled model"),
    ] = None
    served_model_name: Annotated[
        tuple[str, ...],
        Key("Name that requests use; further ones are aliases", default_text="the folder's name"),
    ] = ()
    block_tokens: Annotated[int, Key("Tokens in a KV block, the unit of reuse and transfer", low=1, high=4096)] = 16

    @property
    def path(self) -> Path:
        """The model's folder."""
        return self.model or BUNDLED_MODEL

    @property
    def name(self) -> str:
        """The name that metrics and nodes use, and requests may."""
        return self.served_model_name[0] if self.served_model_name else name_of_folder(self.path)

    @property
    def aliases(self) -> tuple[str, ...]:
        """Further names that requests may use."""
        return self.served_model_name[1:]

    def check(self) -> None:
        if not all(name.strip() for name in self.served_model_name):
            raise ConfigError("--served-model-name is empty: give a name, or leave it out for the folder's")


@dataclass(frozen=True)
class EngineSettings(Slice):
    """How an engine process computes."""

    panel: ClassVar[str] = "Engine"
    engine: Annotated[
        str,
        Key(
            "What computes; paced: nothing does, steps take as long as a cost profile says, to try a cluster without "
            "GPUs",
            choices=("transformer", "paced"),
        ),
    ] = "transformer"
    paced_profile: Annotated[
        str,
        Key("Cost profile of a paced engine: instant (no step takes any time), a bundled one's name, or a JSON file"),
    ] = "instant"
    paced_kv_bytes: Annotated[
        int,
        Key(
            "KV of one token under a paced engine, about; all layers are kept",
            low=0,
            parse=parse_size,
            default_text="as many bytes as the model's",
        ),
    ] = 0
    paced_answer_tokens: Annotated[
        int,
        Key("Mean length of the answers that a paced engine ends by itself; 0: it ends none", low=0, high=10**6),
    ] = 128
    device: Annotated[
        str, Key("cpu, cuda:N, cuda (workers take turns over the GPUs), auto (cuda if there is one, else cpu)")
    ] = "auto"
    dtype: Annotated[
        str,
        Key(
            "Weights and KV; auto: float32 on a CPU, the checkpoint's own on a GPU",
            choices=("auto", "float32", "float16", "bfloat16"),
        ),
    ] = "auto"
    threads: Annotated[
        int, Key("CPU threads of each engine process", low=0, high=1024, default_text="cores shared equally")
    ] = 0
    capacity_tokens: Annotated[int, Key("Tokens of KV that one engine holds", low=1)] = 32768
    max_batch: Annotated[int, Key("Sequences decoded in one step", low=1, high=65536)] = 64
    prefill_chunk_tokens: Annotated[int, Key("Most prompt tokens computed in one step", low=1)] = 512
    prefill_lookahead: Annotated[
        int, Key("Requests loaded or reserved ahead of the one computed", low=1, high=1024)
    ] = 3
    max_model_len: Annotated[int, Key("Longest prompt and output together", low=0, default_text="the model's own")] = 0
    worker_drain_grace: Annotated[
        float,
        Key(
            "Seconds that running requests have when a worker is drained or stopped; then they move to another",
            low=0,
            high=86400,
        ),
    ] = 20.0

    def check(self) -> None:
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(f"--device is {self.device!r}: expected auto, cpu, cuda or cuda:N")


@dataclass(frozen=True)
class TopologySettings(Slice):
    """How many processes of each role `serve` starts."""

    panel: ClassVar[str] = "Cluster"
    prefill_nodes: Annotated[
        int | None, Key("Prefill workers", low=0, high=256, default_text="1, or 0 with --aggregated")
    ] = None
    decode_nodes: Annotated[
        int | None, Key("Decode workers", low=0, high=256, default_text="1, or 0 with --aggregated")
    ] = None
    aggregated: Annotated[int, Key("Workers that do both phases: the baseline to compare with", low=0, high=256)] = 0
    pool_nodes: Annotated[
        int, Key("KV pool nodes; each stands for a host of its own, workers take turns over them", low=1, high=64)
    ] = 1

    conductors: Annotated[
        int, Key("Conductors; each knows all nodes, any of them places any request", low=1, high=8)
    ] = 1

    @property
    def num_prefill(self) -> int:
        return (0 if self.aggregated else 1) if self.prefill_nodes is None else self.prefill_nodes

    @property
    def num_decode(self) -> int:
        return (0 if self.aggregated else 1) if self.decode_nodes is None else self.decode_nodes

    @property
    def num_engines(self) -> int:
        return self.num_prefill + self.num_decode + self.aggregated

    def check(self) -> None:
        if bool(self.num_prefill) != bool(self.num_decode):
            raise ConfigError(
                f"prefill_nodes is {self.num_prefill} and decode_nodes is {self.num_decode}: "
                "one cannot serve without the other (--aggregated N starts workers that do both)"
            )
        if not self.num_engines:
            raise ConfigError(
                "no worker is asked for: give --prefill-nodes and --decode-nodes, or --aggregated, at least 1"
            )


@dataclass(frozen=True)
class HttpSettings(Slice):
    """The OpenAI API."""

    panel: ClassVar[str] = "HTTP"
    host: Annotated[str, Key("Address to listen at; 0.0.0.0 for every interface")] = "127.0.0.1"
    port: Annotated[int, Key("Port; 0 takes a free one", low=0, high=65535)] = 8000
    api_key: Annotated[
        tuple[str, ...], Key("Accepted API key; may be given several times", default_text="no key asked")
    ] = ()
    api_keys_file: Annotated[
        Path | None,
        Key("YAML file of API keys' hashes, tenants, scopes and quotas; read again when it changes"),
    ] = None
    http_tls_cert: Annotated[
        Path | None,
        Key("PEM file: the certificate that clients are shown, read again when it changes", default_text="plain HTTP"),
    ] = None
    http_tls_key: Annotated[Path | None, Key("PEM file: that certificate's private key, not encrypted")] = None
    metrics_need_admin: Annotated[bool, Key("Ask for an admin's API key where metrics are read")] = False
    max_connections: Annotated[
        int,
        Key(
            "Clients' connections open at a time; at most three quarters of the files that the process may open",
            low=1,
            high=10**6,
        ),
    ] = 10_000
    header_timeout: Annotated[
        float, Key("Seconds that a client has to send a request's headers", low=0.1, high=3600)
    ] = 15.0
    request_timeout: Annotated[float, Key("Seconds after which a request fails", low=0.1, high=86400)] = 600.0
    drain_grace: Annotated[
        float, Key("Seconds that running requests have when the front door is stopped", low=0, high=3600)
    ] = 3.0
    endless_idle: Annotated[
        float, Key("Seconds without a token after which an endless request fails", low=1, high=86400)
    ] = 120.0
    hold_off: Annotated[
        float,
        Key(
            "Seconds before a node that failed a request is asked again, if it is the only one; doubles each time",
            low=0.01,
            high=15,
        ),
    ] = 1.0
    answer_memory: Annotated[
        int,
        Key(
            "Memory for the ids of each model's answers, kept for when they come back in chats; 0 keeps none",
            low=0,
            parse=parse_size,
            default_text="64MiB",
        ),
    ] = 64 << 20

    def check(self) -> None:
        if not all(self.api_key):
            raise ConfigError("--api-key is empty: give a key, or leave it out and no key is asked")
        if (self.http_tls_cert is None) != (self.http_tls_key is None):
            raise ConfigError("of --http-tls-cert and --http-tls-key one is missing: HTTPS needs both")

    @property
    def scheme(self) -> str:
        """Of the API's URLs."""
        return "http" if self.http_tls_cert is None else "https"


@dataclass(frozen=True)
class LogSettings(Slice):
    """What is logged."""

    panel: ClassVar[str] = "Logs"
    log_level: Annotated[str, Key("Least level that is logged", choices=LOG_LEVELS)] = "info"
    log_format: Annotated[str, Key("Lines for people, or one JSON object per line", choices=("text", "json"))] = "text"
