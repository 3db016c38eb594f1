"""What a store starts from: the journal in its folder judged against its configuration and the files that are there."""

import logging

from kvpool.errors import SsdFolderError, SsdForeign
from kvpool.ssd.disk import Disk
from kvpool.ssd.extents import Extent
from kvpool.ssd.folder import Segments
from kvpool.ssd.journal import JOURNAL
from kvpool.ssd.records import SsdConfig
from kvpool.ssd.recovery import Recovered, read_journal

__all__ = ["lying_within", "recover"]

_log = logging.getLogger(__name__)


def recover(config: SsdConfig, disk: Disk) -> Recovered:
    """What the folder's journal says; nothing when there is none, or none that can be read.

    Raises SsdForeign when the folder is not this node's.
    """
    path = config.dir / JOURNAL
    try:
        found = read_journal(path)
    except FileNotFoundError:
        return Recovered()
    except OSError as error:
        raise SsdFolderError(f"the SSD journal {path} cannot be read: {error.strerror}. Mend or remove it") from error
    if found.header is None:
        _set_aside(config, disk, found)
        return found
    for what, theirs, ours in (
        ("node", found.header.node_id, config.node_id),
        ("cluster", found.header.cluster, config.cluster),
    ):
        if theirs != ours:
            raise SsdForeign(
                f"the SSD folder {config.dir} belongs to {what} {theirs!r}, this is {ours!r}: give this node a folder "
                "of its own, or empty this one (it is a cache). Nothing was changed"
            )
    for name in ("lost_frames", "superseded"):
        if found.counts[name]:
            _log.error("the SSD journal %s is damaged: %s %d", path, name, found.counts[name])
    return found


def lying_within(found: Recovered, segments: Segments) -> list[Extent]:
    """The blocks that the space still has room for, in files that were there. Counts the others."""
    kept = []
    for extent in found.extents:
        if extent.end > segments.nbytes:
            found.counts["outside"] += 1
        elif not segments.was_there(extent.start, extent.end):
            found.counts["missing_files"] += 1
        else:
            kept.append(extent)
    if found.counts["missing_files"]:
        _log.error("segment files are missing or cut: %d blocks are lost", found.counts["missing_files"])
    return kept


def _set_aside(config: SsdConfig, disk: Disk, found: Recovered) -> None:
    path = config.dir / JOURNAL
    numbers = (int(old.suffix[1:]) for old in config.dir.glob(f"{JOURNAL}-unreadable.*") if old.suffix[1:].isdigit())
    aside = config.dir / f"{JOURNAL}-unreadable.{max(numbers, default=0) + 1}"
    try:
        disk.rename(path, aside)
    except OSError as error:
        raise SsdFolderError(f"the SSD journal {path} is unreadable and cannot be moved: {error.strerror}") from error
    _log.error(
        "the SSD journal %s has no readable header: the tier starts empty; the journal is kept as %s", path, aside
    )
    found.counts["unreadable_journal"] = 1
