"""Fixtures for tests with a prefill and a decode node in one process."""

from tests.worker.node_pair import greedy, model, model_path, prompt, start_pair

__all__ = ["greedy", "model", "model_path", "prompt", "start_pair"]
