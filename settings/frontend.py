"""Settings of the frontend's HTTP API."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

from settings.keys import InvalidSetting, Key, SettingsGroup, parse_size

__all__ = ["MOST_ENDLESS_TOKENS", "HttpSettings"]

_ORIGIN: Final = re.compile(r"https?://[^/\s]+")
MOST_ENDLESS_TOKENS: Final = 1 << 24  # bound of a prompt and its answer with a rolling window


@dataclass(frozen=True)
class HttpSettings(SettingsGroup):
    """The OpenAI API over HTTP."""

    panel: ClassVar[str] = "HTTP"
    host: Annotated[str, Key("Address to listen on; 0.0.0.0 for all interfaces")] = "127.0.0.1"
    port: Annotated[int, Key("Port to listen on; 0 selects a free one", low=0, high=65535)] = 8000
    api_key: Annotated[
        tuple[str, ...], Key("Accepted API key; may be given several times", default_text="no key required")
    ] = ()
    api_keys_file: Annotated[
        Path | None,
        Key("YAML file of hashed API keys, tenants, scopes and quotas; reloaded when it changes"),
    ] = None
    cors_origins: Annotated[
        tuple[str, ...],
        Key(
            "Origin whose web pages may call the API, such as https://chat.example.org; may be given several times; "
            "* for all",
            default_text="none",
        ),
    ] = ()
    http_tls_cert: Annotated[
        Path | None,
        Key(
            "PEM file of the certificate for HTTPS; reloaded when it changes",
            default_text="plain HTTP",
            aliases=("--ssl-certfile",),
        ),
    ] = None
    http_tls_key: Annotated[
        Path | None, Key("PEM file of the certificate's private key, unencrypted", aliases=("--ssl-keyfile",))
    ] = None
    metrics_need_admin: Annotated[bool, Key("Require an admin's API key for /metrics")] = False
    metrics_scope: Annotated[
        Literal["auto", "own", "cluster"],
        Key(
            "Content of /metrics: this process's own series, or also those of all nodes and a conductor (at most one "
            "frontend of a cluster); auto: cluster under `serve`, else own"
        ),
    ] = "auto"
    metrics_show_tenants: Annotated[
        bool, Key("Show each tenant's series in /metrics to callers without an admin's API key, instead of their sums")
    ] = False
    max_connections: Annotated[
        int,
        Key(
            "Maximum open client connections; capped at three quarters of the process's limit on open files",
            low=1,
            high=10**6,
        ),
    ] = 10_000
    header_timeout_s: Annotated[
        float, Key("Seconds within which a client must send a request's headers", low=0.1, high=3600, unit="s")
    ] = 15.0
    request_timeout_s: Annotated[float, Key("Seconds after which a request fails", low=0.1, high=86400, unit="s")] = (
        600.0
    )
    drain_grace_s: Annotated[
        float,
        Key(
            "Seconds that running requests may take to finish when the frontend is stopped", low=0, high=3600, unit="s"
        ),
    ] = 3.0
    endless_idle_s: Annotated[
        float, Key("Seconds without a token after which an endless request fails", low=1, high=86400, unit="s")
    ] = 120.0
    endless_window: Annotated[
        int,
        Key(
            "Tokens that an endless request sees at once if it does not say so; 0: it ends when its context is full",
            low=0,
            high=MOST_ENDLESS_TOKENS,
            unit="tokens",
        ),
    ] = 0
    endless_limit_tokens: Annotated[
        int,
        Key(
            "Tokens of prompt and answer at which an endless request with a window ends",
            low=1,
            high=MOST_ENDLESS_TOKENS,
            unit="tokens",
        ),
    ] = 1_000_000
    hold_off_s: Annotated[
        float,
        Key(
            "Seconds before a retry on the only suitable node after it failed a request; doubles each time",
            low=0.01,
            high=15,
            unit="s",
        ),
    ] = 1.0
    reasoning_parser: Annotated[
        Literal["auto", "off", "deepseek_r1", "qwen3", "openai_gptoss"],
        Key(
            "Parser that separates a chat answer's reasoning from its content; auto: by the chat template, off: the "
            "content includes the reasoning"
        ),
    ] = "auto"
    tool_call_parser: Annotated[
        Literal["auto", "hermes", "qwen3_coder", "llama3_json", "mistral", "openai"],
        Key("Format of tool calls in chat answers; auto: by the chat template"),
    ] = "auto"
    answer_memory_bytes: Annotated[
        int,
        Key(
            "Memory for the token ids of each model's answers, for reuse in later chat turns; 0 disables it",
            low=0,
            unit="bytes",
            parse=parse_size,
            default_text="64MiB",
        ),
    ] = 64 << 20

    def check(self) -> None:
        if not all(self.api_key):
            raise InvalidSetting("--api-key must not be empty: give a key, or omit it to require none")
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise InvalidSetting(f"--cors-origins must be * or SCHEME://HOST[:PORT] without a path, got {origin!r}")
        if (self.http_tls_cert is None) != (self.http_tls_key is None):
            raise InvalidSetting("--http-tls-cert and --http-tls-key must be given together: HTTPS needs both")

    @property
    def scheme(self) -> str:
        """Scheme of the API's URLs, http or https."""
        return "http" if self.http_tls_cert is None else "https"
