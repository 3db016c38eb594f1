"""Decisions of the rdma transport: choice of ports, split of batches over rails, credits for frames.

Pure: no verbs, clock, socket, thread or file; time is an argument in integer nanoseconds. Nothing here imports pyverbs.
"""
