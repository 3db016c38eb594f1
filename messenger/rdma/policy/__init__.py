"""Decisions of the rdma transport: which ports to use, how to split batches over rails, how many frames may be under
way.

Pure: no verbs, clock, socket, thread or file; time is an argument in integer nanoseconds. Nothing here imports pyverbs.
"""
