"""The front door's slice of configuration: parsed elsewhere, checked here, frozen."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from frontend.errors import ConfigError

_MAY_BE_ZERO: Final = frozenset({"port", "replace_grace_s", "drain_grace_s", "answer_memory_nbytes"})


@dataclass(frozen=True)
class ModelConfig:
    """One model that is served. Raises ConfigError for an empty name."""

    path: Path  # folder with tokenizer.json, config.json and, for chat, a template
    name: str  # which metrics and the cluster's nodes use
    aliases: tuple[str, ...] = ()  # further names that requests may use

    def __post_init__(self) -> None:
        if not all(self.names):
            raise ConfigError(f"the model in {self.path} has an empty name")

    @property
    def names(self) -> tuple[str, ...]:
        """All that requests may use, the name first."""
        return (self.name, *self.aliases)


@dataclass(frozen=True)
class FrontendConfig:
    """Everything `serve_frontend` needs. Raises ConfigError naming the field that cannot be right."""

    models: tuple[ModelConfig, ...]  # a request that names none goes to the first
    conductor_targets: tuple[str, ...]  # gRPC targets of all conductors: any of them places a request
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free port
    node_id: str = "frontend-0"
    api_keys: tuple[
        str, ...
    ] = ()  # of trials, each a tenant of its own; with neither these nor a file none is asked for
    api_keys_file: Path | None = None  # YAML, read again when it changes
    tls_cert: Path | None = None  # PEM, with its key: HTTPS instead of HTTP; read again when they change
    tls_key: Path | None = None
    metrics_need_admin: bool = False  # else whoever reaches the port may read them
    block_tokens: int = 16  # of every model; must equal the nodes'
    request_timeout_s: float = 600.0  # from arrival to the last token
    idle_timeout_s: float = 60.0  # between two tokens of one attempt, before its decode worker is suspected
    max_attempts: int = 5  # tries of one request; those for which no worker could be reached do not count at first
    replace_grace_s: float = 30.0  # how long a request whose worker died, or cannot be reached, waits for a place
    endless_idle_s: float = 120.0  # an endless request ends when it had no token for so long
    hold_off_s: float = 1.0  # before a node that failed a request is asked again, if it is the only one; doubles
    attach_timeout_s: float = 5.0  # opening the token stream to a worker
    max_body_nbytes: int = 16 << 20
    max_bodies_nbytes: int = 1 << 30  # of all bodies that come in and are read, together
    body_timeout_s: float = 60.0  # receiving one request's body
    header_timeout_s: float = 15.0  # receiving one request's headers
    max_connections: int = 10_000  # of clients
    max_prompts: int = 64  # in one completions request
    max_choices: int = 128  # answers of one request: prompts times n
    max_prompt_scores: int = 4 << 20  # log-probabilities of prompts' tokens told in one answer
    max_logit_biases: int = 1024
    max_stop_strings: int = 16
    max_stop_chars: int = 256  # of one stop string
    completion_default_tokens: int = 16  # OpenAI's default of max_tokens
    chat_default_tokens: int = 2048  # bound on "as much as fits" where a chat names no max_tokens
    client_buffer_tokens: int = 1024  # per request; a client that falls further behind is cancelled
    tokenizer_threads: int = 2
    answer_memory_nbytes: int = 64 << 20  # ids of chats' answers, per model; 0: none are kept
    cluster_interval_s: float = 1.0  # between two looks at the cluster's state
    drain_grace_s: float = 30.0  # for running requests once asked to stop
    access_log: bool = False

    def __post_init__(self) -> None:
        names = [name for model in self.models for name in model.names]
        if not names:
            raise ConfigError("models is empty: the front door needs one at least")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"models: the name {twice[0]!r} is given twice; names and aliases must be unique")
        if not all(self.conductor_targets) or not self.conductor_targets:
            raise ConfigError("conductor_targets is empty, or one of them: the front door needs a conductor")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port {self.port} is not between 0 and 65535")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("of tls_cert and tls_key one is missing: HTTPS needs both")
        if any(not key for key in self.api_keys):
            raise ConfigError("api_keys contains an empty key")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if not (value > 0 or (value == 0 and field.name in _MAY_BE_ZERO)):
                raise ConfigError(f"{field.name} is {value}: expected a positive number")
