"""`bench serve`: synthetic or given prompts at a rate against any OpenAI-compatible server, with the flags, the
definitions and the result keys that users know from vLLM's command of that name."""

from loadtest.bench.config import BenchConfig
from loadtest.bench.runner import BenchResult, run_bench

__all__ = ["BenchConfig", "BenchResult", "run_bench"]
