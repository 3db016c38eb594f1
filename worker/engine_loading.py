"""Selection of the configured engine implementation. Imports it on demand: the paced engine never loads torch."""

from __future__ import annotations

from worker.config import WorkerConfig
from worker.engine_interface import SteppedEngine


def load_engine(config: WorkerConfig) -> SteppedEngine:
    """Return the engine selected by `config.engine.engine`. Raises StartupError."""
    if config.engine.engine == "paced":
        from worker.paced.engine import PacedEngine

        return PacedEngine.of(config)
    from worker.transformer import Transformer

    return Transformer.of(config)
