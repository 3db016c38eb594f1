"""`bench serve`: load generator for OpenAI-compatible servers, with synthetic prompts or a dataset, at a given rate.

Flags, metric definitions and result keys match those of vLLM's `bench serve`.
"""

from loadtest.bench.config import BenchConfig
from loadtest.bench.runner import BenchResult, run_bench

__all__ = ["BenchConfig", "BenchResult", "run_bench"]
