"""Configuration keys of the application, in slices; each is declared once.

Others: `pool`, `transport`, `shared_store`, `models`; those of `serve` itself: `supervision`.
"""

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from moonpool.config.fields import Key, Slice
from moonpool.config.sources import parse_size
from moonpool.errors import ConfigError

BUNDLED_MODEL = Path(__file__).resolve().parent.parent / "data" / "model"
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
_TARGET = re.compile(r"unix:.+|[^:]+:\d{1,5}|\[[^\]]+\]:\d{1,5}")
LOG_LEVELS = ("debug", "info", "warning", "error")


def name_of_folder(path: Path) -> str:
    """What a model is called that was given no name."""
    return "moonpool" if path == BUNDLED_MODEL else path.resolve().name


def target_host(target: str) -> str:
    """The host of a gRPC address; "" for a unix socket's."""
    return "" if target.startswith("unix:") else target.rpartition(":")[0].strip("[]")


def is_wildcard(host: str) -> bool:
    """Whether the address stands for all of a machine's: one can listen there, but not dial it."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


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
class SchedulingSettings(Slice):
    """Admission and placement."""

    panel: ClassVar[str] = "Scheduling"
    ttft_slo: Annotated[
        float,
        Key(
            "Objective for the time to the first token, seconds; a request predicted to miss it gets a 429",
            low=0,
            high=86400,
            default_text="off",
        ),
    ] = 0.0
    tbt_slo: Annotated[
        float, Key("Objective for the time between tokens, seconds", low=0, high=3600, default_text="off")
    ] = 0.0
    cost_profile: Annotated[
        tuple[str, ...],
        Key(
            "What a model's work costs until nodes report it: [MODEL=]PROFILE, a JSON file of `moonpool profile` or a "
            "bundled one's name; may be given several times",
            default_text="a guess",
        ),
    ] = ()
    balancing_threshold: Annotated[
        float,
        Key("Ratio of the best cached prefix to a node's own above which KV is copied to the node", low=1, high=1e6),
    ] = 1.5
    max_copies: Annotated[
        int, Key("Copies of hot prefixes between pool nodes under way at once; 0: none are made", low=0, high=1024)
    ] = 8
    replication_horizon: Annotated[
        float,
        Key("Seconds over which demand for a prefix is measured and what a copy saves is predicted", low=1, high=86400),
    ] = 60.0
    replica_idle: Annotated[
        float, Key("Seconds without use after which a copied prefix is given up again", low=1, high=86400)
    ] = 180.0
    max_queue: Annotated[
        float, Key("Longest predicted wait, seconds, with which a request is still admitted", low=0.1, high=86400)
    ] = 60.0
    admission: Annotated[
        str,
        Key(
            "Requests predicted to miss their objectives: off serves them, shadow too but counts them, enforce refuses",
            choices=("off", "shadow", "enforce"),
        ),
    ] = "enforce"
    admission_mode: Annotated[
        str,
        Key(
            "What admission goes by: load when the request comes (early), load when its prefill ends, with answers of "
            "equal (predicted-uniform) or learned lengths (predicted)",
            choices=("none", "early", "predicted-uniform", "predicted"),
        ),
    ] = "predicted-uniform"
    attained_share: Annotated[
        float,
        Key(
            "Share of the admitted requests that are to meet each objective: predictions stay below it by margins "
            "learned from what came of others; 0 keeps none",
            low=0,
            high=0.99,
        ),
    ] = 0.95
    overrun_probability: Annotated[
        float,
        Key(
            "How often an answer may take more pages than the conductor reserved, by the lengths it learned; "
            "0 reserves for max_tokens",
            low=0,
            high=0.5,
        ),
    ] = 0.0
    prefill_group_size: Annotated[
        int,
        Key(
            "Prefill nodes that may compute one long prompt together, chunk by chunk; 1 = each by itself",
            low=1,
            high=64,
        ),
    ] = 1
    prefill_group_min_tokens: Annotated[
        int, Key("Tokens of a prompt that are not in the pool, from which on several nodes may compute it", low=1)
    ] = 4096
    role_switching: Annotated[
        str,
        Key(
            "Whether nodes change between prefill and decode as the load does: off; advise only says so; act",
            choices=("off", "advise", "act"),
        ),
    ] = "off"
    undivided: Annotated[
        str,
        Key(
            "Whether a request is prefilled on its decode node when that is faster and breaks nobody's time between "
            "tokens: off; advise only counts and explains; act",
            choices=("off", "advise", "act"),
        ),
    ] = "off"
    role_hold: Annotated[
        float, Key("Seconds for which such a change must have been the better split", low=1, high=86400)
    ] = 30.0
    role_rest: Annotated[float, Key("Seconds between two changes of a model's nodes", low=1, high=86400)] = 120.0
    aging: Annotated[
        float,
        Key(
            "Seconds that a request waits at most until nothing newer goes before it, whatever its class",
            low=1,
            high=86400,
        ),
    ] = 60.0
    max_tenants: Annotated[
        int,
        Key("Tenants of a model with shares and metrics of their own; all others share one", low=1, high=4096),
    ] = 64
    max_endless: Annotated[
        int, Key("Endless requests that one tenant may have of a model at a time; 0: none are taken", low=0, high=1024)
    ] = 4
    report_timeout: Annotated[
        float,
        Key(
            "Seconds of silence after which a node gets no work until it reports again, at least 2; 0: never",
            low=0,
            high=3600,
        ),
    ] = 5.0

    def check(self) -> None:
        if 0 < self.report_timeout < 2:
            raise ConfigError(
                f"--report-timeout is {self.report_timeout:g}: nodes report every second, so expected at least 2, or 0 "
                "to suspect none"
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


@dataclass(frozen=True)
class LogSettings(Slice):
    """What is logged."""

    panel: ClassVar[str] = "Logs"
    log_level: Annotated[str, Key("Least level that is logged", choices=LOG_LEVELS)] = "info"
    log_json: Annotated[bool, Key("One JSON object per line")] = False


@dataclass(frozen=True)
class NodeSettings(Slice):
    """Which process of the cluster this is."""

    panel: ClassVar[str] = "This node"
    node_id: Annotated[str, Key("Name in the cluster, kept over restarts", default_text="ROLE-HOSTNAME")] = ""
    socket_dir: Annotated[
        Path | None,
        Key("Folder for this node's unix sockets", default_text="moonpool-UID/NODE in the temporary folder"),
    ] = None


@dataclass(frozen=True)
class ListenSettings(Slice):
    """Where this node is called."""

    panel: ClassVar[str] = "This node"
    listen: Annotated[str, Key("gRPC address: host:port (0 = a free one) or unix:/path")] = "127.0.0.1:0"


@dataclass(frozen=True)
class HostSettings(Slice):
    """Which host this node counts itself to, and by which addresses others reach it there."""

    panel: ClassVar[str] = "This node"
    host_id: Annotated[str, Key("Nodes of equal host share memory", default_text="this machine's boot id")] = ""
    advertise: Annotated[
        str,
        Key(
            "gRPC address that others dial, where it is not --listen: host:port (0 = the port listened at)",
            default_text="the one listened at",
        ),
    ] = ""
    data_port: Annotated[int, Key("Port for KV transfers over TCP; 0 takes a free one", low=0, high=65535)] = 0
    data_advertise: Annotated[
        str, Key("Address that peers dial for KV transfers over TCP", default_text="--data-host")
    ] = ""

    def check(self) -> None:
        if self.advertise and not _TARGET.fullmatch(self.advertise):
            raise ConfigError(f"--advertise is {self.advertise!r}: expected host:port or unix:/path")
        if is_wildcard(target_host(self.advertise)):
            raise ConfigError(f"--advertise is {self.advertise!r}, a wildcard, which nobody can dial: give an address")
        if self.data_advertise and is_wildcard(self.data_advertise):
            raise ConfigError(
                f"--data-advertise is {self.data_advertise!r}, a wildcard, which nobody can dial: give an address"
            )


@dataclass(frozen=True)
class WorkerSettings(Slice):
    """A worker's place among its host's workers."""

    panel: ClassVar[str] = "This node"
    worker_index: Annotated[
        int, Key("Which of the host's workers this is: chooses among its GPUs", low=0, high=4096)
    ] = 0
    pool: Annotated[str, Key("gRPC address of this host's pool node", default_text="required")] = ""

    def check(self) -> None:
        if not self.pool:
            raise ConfigError("--pool is required: the gRPC address of this host's pool node")


@dataclass(frozen=True)
class ConductorTarget(Slice):
    """The conductors, for a node that cannot do without."""

    panel: ClassVar[str] = "This node"
    conductor: Annotated[
        tuple[str, ...], Key("gRPC address of the conductor; where there are several, of all", default_text="required")
    ] = ()

    def check(self) -> None:
        if not self.conductor:
            raise ConfigError("--conductor is required: the gRPC address that `moonpool conductor` printed")
        if twice := sorted({each for each in self.conductor if self.conductor.count(each) > 1}):
            raise ConfigError(f"--conductor names {twice[0]!r} twice: name each conductor once")
