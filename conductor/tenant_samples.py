"""What tenants have used, as samples for the metrics; labels are bounded as accounts are. Nothing else lives here."""

from collections.abc import Iterator

from conductor.following import sample
from conductor.policy import Conductor
from moonpool_proto.v1 import conductor_pb2

__all__ = ["tenant_samples"]


def tenant_samples(policy: Conductor) -> Iterator[conductor_pb2.Sample]:
    """Of all accounts, those of tenants that share one among them."""
    for model, account, live in policy.tenants():
        labels, used = {"model_name": model, "tenant": account.name}, account.used
        yield sample("tenant_uncached_tokens_total", used.uncached_tokens, **labels)
        yield sample("tenant_generated_tokens_total", used.generated_tokens, **labels)
        yield sample("tenant_kv_block_seconds_total", used.kv_block_s, **labels)
        yield sample("tenant_requests", live, **labels)
