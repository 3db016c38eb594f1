"""What a front door counts of who knocks: keys and the like. No label comes from a client."""

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
