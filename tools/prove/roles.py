"""Installs the simulated world under the roles' modules; import this before anything of theirs."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from tools.prove import imports
from tools.prove.world import basics, disk_modules, native_reference, rpc, sockets, ssd_loops
from tools.prove.world.scheduler import world


def _load_engine(config: Any) -> Any:
    """In place of `worker.engine_loading.load_engine`."""
    from engine.config import read_config
    from tools.prove.hash_engine import HashEngine, HashLimits, hash_model

    model = read_config(config.model.path)
    limits = HashLimits(model.vocab_size, model.max_positions, model.eos_token_ids)
    hashed = hash_model(config.model.name, vocab_size=model.vocab_size, head_dim=world().pace.head_dim)
    return HashEngine(hashed, limits)


def install() -> None:
    """Replace the modules through which the roles reach the world."""
    engine_loading = ModuleType("worker.engine_loading")
    engine_loading.load_engine = _load_engine  # type: ignore[attr-defined]
    imports.install(
        {
            **rpc.REPLACED,
            **sockets.REPLACED,
            **native_reference.REPLACED,
            **disk_modules.MODULES,
            **ssd_loops.SSD_MODULES,
            **basics.REPLACED,
            "worker.engine_loading": engine_loading,
        }
    )
