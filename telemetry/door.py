"""What a front door counts of who knocks: keys and the like. No label comes from a client."""

import math
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge


class DoorMetrics:
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
