"""Names of the KV namespaces in a cluster's pool, from the nodes that use them."""

from collections.abc import Iterable

from moonpool_proto.v1 import conductor_pb2

__all__ = ["namespace_users"]


def namespace_users(nodes: Iterable[conductor_pb2.NodeStatus]) -> dict[str, str]:
    """Return the model of each KV namespace, in hexadecimal, that a worker uses.

    Layers with windows have a namespace of their own, and its name says so.
    """
    found = dict[str, str]()
    for node in (status.node for status in nodes if status.node.kv_namespace):
        if node.window_namespace:
            found[node.window_namespace.hex()] = f"{node.model}, layers with windows"
        found[node.kv_namespace.hex()] = node.model  # the same, if all layers have windows
    return found
