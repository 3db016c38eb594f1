"""Directories of blocks, maintained from the nodes' events: which pool node holds which block in which tier, and which
worker holds which block in its own memory.
"""

from conductor.directory.directory import Directory, DirectoryState, Match, WindowedBlocks
from conductor.directory.feeds import POOL_NODES, WORKERS, follow_events

__all__ = ["POOL_NODES", "WORKERS", "Directory", "DirectoryState", "Match", "WindowedBlocks", "follow_events"]
