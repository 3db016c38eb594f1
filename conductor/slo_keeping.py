"""Which keeper of the record of objectives a configuration asks for."""

from conductor.config import ConductorConfig
from conductor.continuity import Contact
from conductor.core import Core
from conductor.errors import ConfigError
from conductor.slo import FileVersions, MemoryVersions, RedisVersions, SloKeeper, SloSettings, VersionStore

__all__ = ["slo_keeper"]


def slo_keeper(config: ConductorConfig, contact: Contact, core: Core) -> SloKeeper:
    """Versions are kept in Redis, else in a folder, else nowhere. Raises ConfigError for a folder of no use."""
    files = None
    if config.objectives_dir is not None:
        try:
            files = FileVersions(config.objectives_dir, config.cluster_name)
        except OSError as error:
            raise ConfigError(f"objectives_dir is {str(config.objectives_dir)!r}, of no use: {error}") from error
    store: VersionStore = files or MemoryVersions()
    if contact.store is not None:
        store = RedisVersions(contact.store)
    settings = SloSettings(
        configured=config.policy.record if config.objectives is None else config.objectives,
        is_forced=config.objectives_forced,
        node_id=config.node_id,
        incarnation=contact.incarnation,
        every_s=config.shared_refresh_s,
        ttl_s=config.shared_ttl_s,
    )
    return SloKeeper(core, store, settings, copy=files if contact.store is not None else None)
