"""Metrics of the API server: requests under vLLM's metric names, so that existing dashboards work, and HTTP access.

A registry belongs to one application: importing this module registers nothing. No label value comes from a client.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

T = TypeVar("T")

# vLLM's buckets (vllm/v1/metrics/loggers.py), so that quantiles over both systems are comparable.
# fmt: off
_TTFT_S: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)
_ITL_S: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)
_REQUEST_S: Final = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)
# fmt: on
_TOKENS: Final = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))

TTFT_PARTS: Final = ("tokenize", "sibling", "schedule", "lost", "queue", "load", "prefill", "delivery")
HANDOFF_PARTS: Final = ("tail", "join", "step", "delivery")
FINISH_REASONS: Final = ("stop", "length", "abort", "error")


def new_registry() -> CollectorRegistry:
    """Return a new registry that includes this process's CPU, memory and file descriptors."""
    registry = CollectorRegistry(auto_describe=True)
    ProcessCollector(registry=registry)
    return registry


class IncludedRegistry(Collector):
    """Exports the series of another registry, so that two registries can share them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        """Return the other registry's families."""
        return self._registry.collect()


def exposition(registry: CollectorRegistry, accept: str, *, shows_tenants: bool = True) -> tuple[bytes, str]:
    """Return the registry's contents in the format of the `Accept` header, and its content type.

    Without `shows_tenants`, series of tenants are summed to series without the label `tenant`.
    """
    encoder, content_type = choose_encoder(accept)
    return encoder(registry if shows_tenants else _WithoutTenants(registry)), content_type


class _WithoutTenants(CollectorRegistry):
    """View of a registry whose metrics are summed over tenants."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__()
        self._whole = registry

    def collect(self) -> Iterator[Metric]:
        return map(_without_tenants, self._whole.collect())


def _without_tenants(metric: Metric) -> Metric:
    """Return the metric summed over its label `tenant`; of the times of creation, the earliest is kept."""
    if not any("tenant" in sample.labels for sample in metric.samples):
        return metric
    found: dict[tuple[str, frozenset[tuple[str, str]]], Sample] = {}
    for sample in metric.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "tenant"}
        key = sample.name, frozenset(labels.items())
        before = found.get(key)
        value = sample.value
        if before is not None:
            value = min(before.value, value) if sample.name.endswith("_created") else before.value + value
        found[key] = Sample(sample.name, labels, value)
    summed = Metric(metric.name, metric.documentation, metric.type, metric.unit)
    summed.samples = list(found.values())
    return summed


class RequestMetrics:
    """Metrics of one model's requests as the API server measures them; times in seconds, sizes in tokens."""

    def __init__(self, families: "RequestFamilies", model_name: str) -> None:
        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return families.histogram(name, text, buckets).labels(model_name)

        def counter(name: str, text: str) -> Counter:
            return families.counter(name, text).labels(model_name)

        self.ttft = histogram("vllm:time_to_first_token_seconds", "Time from arrival to first token.", _TTFT_S)
        self.itl = histogram("vllm:inter_token_latency_seconds", "Time between two tokens of a request.", _ITL_S)
        self.e2e = histogram("vllm:e2e_request_latency_seconds", "Time from arrival to last token.", _REQUEST_S)
        self.queue = histogram("vllm:request_queue_time_seconds", "Time spent waiting before the prefill.", _REQUEST_S)
        self.prefill = histogram(
            "vllm:request_prefill_time_seconds", "Time spent computing the prompt's KV.", _REQUEST_S
        )
        self.decode = histogram("vllm:request_decode_time_seconds", "Time from first to last token.", _REQUEST_S)
        self.request_prompt_tokens = histogram("vllm:request_prompt_tokens", "Prompt tokens per request.", _TOKENS)
        self.request_generation_tokens = histogram(
            "vllm:request_generation_tokens", "Generated tokens per request.", _TOKENS
        )
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of served requests.")
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens received from the cluster.")
        self.prefix_cache_queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the KV pool.")
        self.prefix_cache_hits = counter("vllm:prefix_cache_hits", "Prompt tokens whose KV was reused.")
        self.attempts = counter("moonpool:request_attempts", "Placements of requests, including retries.")
        self.retries = counter("moonpool:request_retries", "Retries after a worker was lost or failed.")
        self.duplicate_tokens = counter("moonpool:duplicate_tokens", "Duplicate tokens received and ignored.")
        self.slow_clients = counter("moonpool:slow_clients", "Requests cancelled because their client read too slowly.")
        self.answer_memory_hits = counter(
            "moonpool:answer_memory_hits", "Earlier answers of chats whose generated token ids were reused."
        )
        self.answer_memory_misses = counter(
            "moonpool:answer_memory_misses", "Earlier answers of chats that were tokenised again."
        )
        bytes_held = families.gauge(
            "moonpool:answer_memory_bytes", "Bytes of generated answers kept for later chat turns."
        )
        self.answer_memory_bytes = bytes_held.labels(model_name)
        in_flight = families.gauge("moonpool:requests_in_flight", "Requests in flight at this API server.")
        self.in_flight = in_flight.labels(model_name)
        self._handoff = histogram(
            "moonpool:handoff_seconds", "Time from the first token to the decode node's first token.", _TTFT_S
        )
        self._ttft_parts = _by_part(families, model_name, "moonpool:ttft_part_seconds", "TTFT by part.", TTFT_PARTS)
        self._handoff_parts = _by_part(
            families, model_name, "moonpool:handoff_part_seconds", "Hand-off time by part.", HANDOFF_PARTS
        )
        self._success = families.counter(
            "vllm:request_success", "Finished requests, by finish reason.", "finished_reason"
        )
        self._rejected = families.counter("moonpool:requests_rejected", "Rejected requests, by reason.", "reason")
        self._model_name = model_name
        for reason in FINISH_REASONS:  # created at start: a rate over a series that appears late misses its first
            self._success.labels(model_name, reason)

    def began(self, ttft_s: float, parts: Mapping[str, float]) -> None:
        """Count a first token; `parts`, by TTFT_PARTS, sum to `ttft_s`.

        Clock skew between hosts may make the remainder negative; it is then counted as 0.
        """
        self.ttft.observe(ttft_s)
        for part, seconds in parts.items():
            self._ttft_parts[part].observe(max(0.0, seconds))

    def handed_over(self, gap_s: float, parts: Mapping[str, float]) -> None:
        """Count a hand-off; `parts`, by HANDOFF_PARTS, sum to `gap_s`.

        The second token may have had a shorter path than the first; negative parts are counted as 0.
        """
        self._handoff.observe(max(0.0, gap_s))
        for part, seconds in parts.items():
            self._handoff_parts[part].observe(max(0.0, seconds))

    def finished(self, reason: str) -> None:
        """Count one request's end; `reason` is one of FINISH_REASONS."""
        if reason not in FINISH_REASONS:
            raise ValueError(f"finish reason must be one of {FINISH_REASONS}, got {reason!r}")
        self._success.labels(self._model_name, reason).inc()

    def rejected(self, reason: str) -> None:
        """Count a rejected request; `reason` must come from a fixed set, never from a client."""
        self._rejected.labels(self._model_name, reason).inc()


class RequestFamilies:
    """Metric families of all models of one registry: each is created once, with a series per model."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._made: dict[str, Any] = {}

    def histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        """Return the histogram `name`, labelled by model and `labels`."""
        return self._family(Histogram, name, text, labels, buckets=buckets)

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """Return the counter `name`, labelled by model and `labels`."""
        return self._family(Counter, name, text, labels)

    def gauge(self, name: str, text: str) -> Gauge:
        """Return the gauge `name`, labelled by model."""
        return self._family(Gauge, name, text, ())

    def _family(self, kind: Callable[..., T], name: str, text: str, labels: Sequence[str], **options: Any) -> T:
        if name not in self._made:
            self._made[name] = kind(name, text, ["model_name", *labels], registry=self._registry, **options)
        family: T = self._made[name]
        return family


def _by_part(
    families: RequestFamilies, model_name: str, name: str, text: str, parts: Sequence[str]
) -> Mapping[str, Histogram]:
    """Return one series per part, created at start, as for FINISH_REASONS."""
    family = families.histogram(name, text, _TTFT_S, "part")
    return {part: family.labels(model_name, part) for part in parts}


class FrontendMetrics:
    """Metrics of one API server's connections, keys and quotas; all series exist from the start."""

    def __init__(self, registry: CollectorRegistry) -> None:
        reads = Counter(
            "moonpool:api_keys_file_reads", "Reloads of the API key file, by result.", ["result"], registry=registry
        )
        self.keys_good, self.keys_bad = reads.labels("ok"), reads.labels("broken")
        self.keys_current = Gauge(
            "moonpool:api_keys_file_current",
            "1 if the API key file is valid; 0: it is invalid and earlier keys stay in force.",
            registry=registry,
        )
        self.keys_current.set(1)
        num_keys = Gauge("moonpool:api_keys", "API keys in force.", ["scope"], registry=registry)
        self.user_keys, self.admin_keys = num_keys.labels("user"), num_keys.labels("admin")
        self._turned_away = Counter(
            "moonpool:http_turned_away",
            "Client connections closed because of a limit, by reason.",
            ["reason"],
            registry=registry,
        )
        self._quota_rejected = Counter(
            "moonpool:quota_rejected", "Requests over their tenant's quota.", ["tenant", "reason"], registry=registry
        )
        next_turns = Counter(
            "moonpool:next_turn_prefills",
            "Answers whose request asked to compute the next turn's prompt in advance, by outcome.",
            ["outcome"],
            registry=registry,
        )
        self._next_turns = {name: next_turns.labels(name) for name in ("computed", "covered", "dropped", "failed")}
        self._grammars = {
            "refused": Counter(
                "moonpool:http_grammars_refused",
                "Requests refused because their grammar takes too much time or memory to check.",
                registry=registry,
            ),
            "killed": Counter(
                "moonpool:http_grammar_processes_killed",
                "Processes that ended before they had checked their grammar, most by a limit.",
                registry=registry,
            ),
        }
        self._connections = Gauge("moonpool:http_connections", "Open client connections.", registry=registry)
        self._certificate_left_s = Gauge(
            "moonpool:http_certificate_left_seconds",
            "Seconds until the HTTP certificate expires; NaN without TLS.",
            registry=registry,
        )
        self._certificate_left_s.set(math.nan)

    def next_turn_prefill(self, outcome: Literal["computed", "covered", "dropped", "failed"]) -> None:
        """Count the outcome of one answer's next-turn prefill.

        `covered`: all blocks were stored already; `dropped`: too many were in progress, or the server is draining.
        """
        self._next_turns[outcome].inc()

    def turned_away(self, reason: str) -> None:
        """Count a connection that was closed because of a limit; `reason` comes from a fixed set."""
        self._turned_away.labels(reason).inc()

    def quota_rejected(self, tenant: str, reason: str) -> None:
        """Count a request over its quota. Tenants are those of the API key file; `reason` comes from a fixed set."""
        self._quota_rejected.labels(tenant, reason).inc()

    def grammar(self, what: str) -> None:
        """Count a grammar refused for its cost ("refused"), or an ended process ("killed")."""
        self._grammars[what].inc()

    def watch_certificate(self, left_s: Callable[[], float]) -> None:
        """Export `left_s()` as the remaining lifetime of the HTTP certificate."""
        self._certificate_left_s.set_function(left_s)

    def watch_connections(self, count: Callable[[], int]) -> None:
        """Export `count()` as the number of open connections."""
        self._connections.set_function(count)
