"""Where a pool node keeps a block."""

import enum

__all__ = ["Tier"]


class Tier(enum.IntEnum):
    """From fast to slow; the values are the wire's."""

    DRAM = 1
    SSD = 2
