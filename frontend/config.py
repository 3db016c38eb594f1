"""Configuration of the frontend: parsed elsewhere, validated here, immutable."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Final

from frontend.errors import FrontendConfigError
from settings.frontend import HttpSettings
from settings.node import NodeSettings
from settings.worker import BlockSettings

_MAY_BE_ZERO: Final = frozenset({"replace_grace_s"})


@dataclass(frozen=True)
class ServedModelConfig:
    """Configuration of one served model. Raises FrontendConfigError for an empty name."""

    path: Path  # folder with tokenizer.json, config.json and, for chat, a template
    name: str  # as in metrics and in the nodes' configuration
    aliases: tuple[str, ...] = ()  # further names that requests may use
    own_window: int | None = None  # of endless requests that do not name theirs; None: that of `HttpSettings`
    own_reasoning_parser: str | None = None  # None: that of `HttpSettings`, as in the next field
    own_tool_call_parser: str | None = None

    def __post_init__(self) -> None:
        if not all(self.names):
            raise FrontendConfigError(f"the name of the model in {self.path} must not be empty")

    @property
    def names(self) -> tuple[str, ...]:
        """All names that requests may use, the main one first."""
        return (self.name, *self.aliases)


@dataclass(frozen=True)
class FrontendConfig:
    """Configuration of `serve_frontend`. Raises FrontendConfigError naming the invalid field."""

    models: tuple[ServedModelConfig, ...]  # a request without a model goes to the first
    conductor_targets: tuple[str, ...]  # gRPC targets of all conductors; any of them can place a request
    http: HttpSettings = field(default_factory=HttpSettings)
    blocks: BlockSettings = field(default_factory=BlockSettings)  # must equal those of the nodes
    node: NodeSettings = field(default_factory=lambda: NodeSettings("frontend-0"))  # node_id is set
    idle_timeout_s: float = 60.0  # longest time between two tokens before the decode worker is suspected
    max_attempts: int = 5  # attempts per request; one that does not reach its workers is free during replace_grace_s
    # Longest wait of a request for another placement after its worker died or was unreachable
    replace_grace_s: float = 30.0
    attach_timeout_s: float = 5.0  # opening the token stream to a worker
    max_body_nbytes: int = 16 << 20
    max_bodies_nbytes: int = 1 << 30  # all request bodies in memory together
    body_timeout_s: float = 60.0  # to receive one request's body
    max_prompts: int = 64  # in one completions request
    max_choices: int = 128  # choices per request: prompts times n
    max_prompt_scores: int = 4 << 20  # log-probabilities of prompt tokens in one response
    max_logit_biases: int = 1024
    max_stop_strings: int = 16
    max_stop_chars: int = 256  # per stop string
    completion_default_tokens: int = 16  # OpenAI's default of max_tokens
    chat_default_tokens: int = 2048  # upper limit for a chat without max_tokens
    client_buffer_tokens: int = 1024  # per request; a request whose client falls further behind is cancelled
    tokenizer_threads: int = 2
    cluster_interval_s: float = 1.0  # between two polls of the cluster's state
    access_log: bool = False

    def __post_init__(self) -> None:
        names = [name for model in self.models for name in model.names]
        if not names:
            raise FrontendConfigError("models must hold at least one model, got none")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise FrontendConfigError(f"models: names and aliases must be unique, got {twice[0]!r} twice")
        if not all(self.conductor_targets) or not self.conductor_targets:
            raise FrontendConfigError("conductor_targets must hold at least one target and no empty one")
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if not (value > 0 or (value == 0 and each.name in _MAY_BE_ZERO)):
                raise FrontendConfigError(f"{each.name} must be positive, got {value}")

    @property
    def node_id(self) -> str:
        """Name of the frontend in the cluster."""
        return self.node.node_id

    @property
    def block_tokens(self) -> int:
        """Tokens in a KV block."""
        return self.blocks.block_tokens
