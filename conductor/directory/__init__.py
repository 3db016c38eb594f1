"""Directory of blocks: which pool node holds which block in which tier, maintained from the nodes' events."""

from conductor.directory.directory import Directory, DirectoryState, Match
from conductor.directory.feeds import follow_pool_events

__all__ = ["Directory", "DirectoryState", "Match", "follow_pool_events"]
