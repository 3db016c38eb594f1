"""What a front door measures of its requests, under vLLM's metric names so that existing dashboards work.

A registry belongs to one application: nothing here registers itself anywhere by being imported.

What a front door counts of who knocks: keys and the like. No label comes from a client.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder

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
    """A registry of its own with this process's CPU, memory and file descriptors in it."""
    registry = CollectorRegistry(auto_describe=True)
    ProcessCollector(registry=registry)
    return registry


def exposition(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """The registry's contents in the format that the `Accept` header asks for, and its content type."""
    encoder, content_type = choose_encoder(accept)
    return encoder(registry), content_type


class RequestMetrics:
    """Instruments for one model's requests as the front door sees them; times in seconds, sizes in tokens."""

    def __init__(self, families: "RequestFamilies", model_name: str) -> None:
        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return families.histogram(name, text, buckets).labels(model_name)

        def counter(name: str, text: str) -> Counter:
            return families.counter(name, text).labels(model_name)

        self.ttft = histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", _TTFT_S)
        self.itl = histogram("vllm:inter_token_latency_seconds", "Between two tokens of a request.", _ITL_S)
        self.e2e = histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", _REQUEST_S)
        self.queue = histogram("vllm:request_queue_time_seconds", "Waiting before the prefill.", _REQUEST_S)
        self.prefill = histogram("vllm:request_prefill_time_seconds", "Computing the prompt's KV.", _REQUEST_S)
        self.decode = histogram("vllm:request_decode_time_seconds", "First token to last token.", _REQUEST_S)
        self.request_prompt_tokens = histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self.request_generation_tokens = histogram(
            "vllm:request_generation_tokens", "Tokens generated for a request.", _TOKENS
        )
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of requests that were served.")
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens received from the cluster.")
        self.prefix_cache_queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the KV pool.")
        self.prefix_cache_hits = counter("vllm:prefix_cache_hits", "Prompt tokens whose KV was reused.")
        self.attempts = counter("moonpool:request_attempts", "Placements of requests, first ones and further ones.")
        self.retries = counter("moonpool:request_retries", "Further attempts after a worker was lost or failed.")
        self.duplicate_tokens = counter("moonpool:duplicate_tokens", "Tokens received again and ignored.")
        self.slow_clients = counter("moonpool:slow_clients", "Requests cancelled as their client read too slowly.")
        self.answer_memory_hits = counter(
            "moonpool:answer_memory_hits", "Answers in chats' histories that kept the ids they were generated with."
        )
        self.answer_memory_misses = counter(
            "moonpool:answer_memory_misses", "Answers in chats' histories that were tokenised anew."
        )
        bytes_held = families.gauge("moonpool:answer_memory_bytes", "Size of the memory of generated answers.")
        self.answer_memory_bytes = bytes_held.labels(model_name)
        in_flight = families.gauge("moonpool:requests_in_flight", "Requests now held by this frontend.")
        self.in_flight = in_flight.labels(model_name)
        self._handoff = histogram("moonpool:handoff_seconds", "First token to the decode node's first one.", _TTFT_S)
        self._ttft_parts = _by_part(families, model_name, "moonpool:ttft_part_seconds", "Where TTFT went.", TTFT_PARTS)
        self._handoff_parts = _by_part(
            families, model_name, "moonpool:handoff_part_seconds", "Where the hand-off's time went.", HANDOFF_PARTS
        )
        self._success = families.counter("vllm:request_success", "Requests by how they ended.", "finished_reason")
        self._rejected = families.counter("moonpool:requests_rejected", "Requests refused, by reason.", "reason")
        self._model_name = model_name
        for reason in FINISH_REASONS:  # present from the start: a rate over a series that appears late misses its first
            self._success.labels(model_name, reason)

    def began(self, ttft_s: float, parts: Mapping[str, float]) -> None:
        """Count a first token; `parts`, by TTFT_PARTS, sum to `ttft_s`.

        Clocks that differ in speed may make what is left negative: that counts as 0.
        """
        self.ttft.observe(ttft_s)
        for part, seconds in parts.items():
            self._ttft_parts[part].observe(max(0.0, seconds))

    def handed_over(self, gap_s: float, parts: Mapping[str, float]) -> None:
        """Count a hand-off; `parts`, by HANDOFF_PARTS, sum to `gap_s`. The second token may have had a shorter way than
        the first one: what is negative counts as 0."""
        self._handoff.observe(max(0.0, gap_s))
        for part, seconds in parts.items():
            self._handoff_parts[part].observe(max(0.0, seconds))

    def finished(self, reason: str) -> None:
        """Count one request's end; `reason` is one of FINISH_REASONS."""
        if reason not in FINISH_REASONS:
            raise ValueError(f"finish reason {reason!r} is none of {FINISH_REASONS}")
        self._success.labels(self._model_name, reason).inc()

    def rejected(self, reason: str) -> None:
        """Count one refused request; `reason` must come from a fixed set, never from a client."""
        self._rejected.labels(self._model_name, reason).inc()


class RequestFamilies:
    """The families behind the request metrics of all models of one registry: each is made once, every model has its
    series in it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._made: dict[str, Any] = {}

    def histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        """The histogram `name`, labelled by model and `labels`."""
        return self._family(Histogram, name, text, labels, buckets=buckets)

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """The counter `name`, labelled by model and `labels`."""
        return self._family(Counter, name, text, labels)

    def gauge(self, name: str, text: str) -> Gauge:
        """The gauge `name`, labelled by model."""
        return self._family(Gauge, name, text, ())

    def _family(self, kind: Callable[..., T], name: str, text: str, labels: Sequence[str], **options: Any) -> T:
        if name not in self._made:
            self._made[name] = kind(name, text, ["model_name", *labels], registry=self._registry, **options)
        family: T = self._made[name]
        return family


def _by_part(
    families: RequestFamilies, model_name: str, name: str, text: str, parts: Sequence[str]
) -> Mapping[str, Histogram]:
    """Present from the start, as is FINISH_REASONS."""
    family = families.histogram(name, text, _TTFT_S, "part")
    return {part: family.labels(model_name, part) for part in parts}


class FrontendMetrics:
    """Instruments of one registry; each is there from the start."""

    def __init__(self, registry: CollectorRegistry) -> None:
        reads = Counter("moonpool:api_keys_file_reads", "Changes of the file of keys.", ["result"], registry=registry)
        self.keys_good, self.keys_bad = reads.labels("ok"), reads.labels("broken")
        self.keys_current = Gauge(
            "moonpool:api_keys_file_current", "0: the file of keys is broken, older ones hold.", registry=registry
        )
        self.keys_current.set(1)
        num_keys = Gauge("moonpool:api_keys", "API keys in force.", ["scope"], registry=registry)
        self.user_keys, self.admin_keys = num_keys.labels("user"), num_keys.labels("admin")
        self._turned_away = Counter(
            "moonpool:http_turned_away", "Clients' connections ended by a bound.", ["reason"], registry=registry
        )
        self._quota_rejected = Counter(
            "moonpool:quota_rejected", "Requests over their tenant's quota.", ["tenant", "reason"], registry=registry
        )
        self._connections = Gauge("moonpool:http_connections", "Clients' connections open.", registry=registry)
        self._certificate_left_s = Gauge(
            "moonpool:http_certificate_left_seconds",
            "Until the certificate that clients are shown ends; not a number where they are shown none.",
            registry=registry,
        )
        self._certificate_left_s.set(math.nan)

    def turned_away(self, reason: str) -> None:
        """A bound ended a connection; `reason` is one of ours."""
        self._turned_away.labels(reason).inc()

    def quota_rejected(self, tenant: str, reason: str) -> None:
        """A request over its quota; tenants are those of the file of keys, `reason` is one of ours."""
        self._quota_rejected.labels(tenant, reason).inc()

    def watch_certificate(self, left_s: Callable[[], float]) -> None:
        """Ask `left_s` whenever the time that the HTTP certificate has left is read."""
        self._certificate_left_s.set_function(left_s)

    def watch_connections(self, count: Callable[[], int]) -> None:
        """Ask `count` whenever the number of open connections is read."""
        self._connections.set_function(count)
