"""Does this front door fit the cluster? Chain keys, and so every request, depend on model and block size. Pure."""

from collections.abc import Collection, Iterable

from moonpool_proto.v1 import conductor_pb2


def is_served(nodes: Iterable[conductor_pb2.Node], model: str) -> bool:
    """Is a worker of the model among the nodes?"""
    return any(node.model == model for node in nodes)


def misfit(
    nodes: Iterable[conductor_pb2.Node],
    model: str,
    block_tokens: int,
    *,
    was_served: bool,
    front_door: Collection[str] = (),
) -> str | None:
    """What is wrong between a front door and the workers of one of its models, naming both values; None: nothing is.

    A model that was served before (`was_served`) has lost its workers for the moment: that is no misfit. Workers of
    the other models of this `front_door` say nothing about this one: its own may still be on their way.
    """
    nodes = list(nodes)
    mine = [node for node in nodes if node.model == model]
    strangers = {node.model for node in nodes if node.model} - {model, *front_door}  # pool nodes have no model
    if strangers and not mine and not was_served:
        others = ", ".join(repr(name) for name in sorted(strangers))
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
