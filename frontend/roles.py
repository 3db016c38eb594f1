"""What the roles of nodes are called, in metrics and in the console."""

from collections.abc import Mapping
from typing import Final

from moonpool_proto.v1 import common_pb2

__all__ = ["ROLE_NAMES"]

ROLE_NAMES: Final[Mapping[common_pb2.Role.ValueType, str]] = {
    common_pb2.ROLE_PREFILL: "prefill",
    common_pb2.ROLE_DECODE: "decode",
    common_pb2.ROLE_AGGREGATED: "aggregated",
    common_pb2.ROLE_POOL: "pool",
}
