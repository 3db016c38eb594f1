"""Does this front door fit the cluster? Chain keys, and so every request, depend on model and block size. Pure."""

from collections.abc import Iterable

from moonpool_proto.v1 import conductor_pb2


def is_served(nodes: Iterable[conductor_pb2.Node], model: str) -> bool:
    """Is a worker of the model among the nodes?"""
    return any(node.model == model for node in nodes)


def misfit(nodes: Iterable[conductor_pb2.Node], model: str, block_tokens: int, *, was_served: bool) -> str | None:
    """What is wrong between a front door and the cluster's workers, naming both values; None when nothing is.

    A model that was served before (`was_served`) has lost its workers for the moment: that is no misfit.
    """
    workers = [node for node in nodes if node.model]  # pool nodes have none
    mine = [node for node in workers if node.model == model]
    if workers and not mine and not was_served:
        others = ", ".join(repr(name) for name in sorted({node.model for node in workers}))
        return (
            f"misconfigured: this front door serves model {model!r}, the cluster's workers serve {others}; "
            "start both with the same model folder or --served-model-name"
        )
    for node in mine:
        if node.spec.block_tokens != block_tokens:
            return (
                f"misconfigured: this front door has block_tokens {block_tokens}, node {node.node_id!r} and the other "
                f"workers of model {model!r} have {node.spec.block_tokens}; start both with the same --block-tokens"
            )
    return None
