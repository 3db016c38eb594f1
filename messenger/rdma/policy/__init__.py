"""Decisions of the rdma transport: which ports, which slices on which of them, how many frames may be under way.

Pure: no verbs, clock, socket, thread or file; time is integer nanoseconds from outside. Nothing here imports pyverbs.
"""
