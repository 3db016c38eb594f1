"""Workloads of the eviction benchmark: those used for tuning, and those held out."""
