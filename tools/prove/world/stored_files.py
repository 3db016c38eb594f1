"""Files and folders of a simulated disk: what processes see, and what of it survives a crash of the machine.

A file consists of pages of 4 KiB, each an immutable `bytes`. It has two states, the one that processes see (page cache
or write cache of the device) and the durable one, and for each page all contents that it had since the last sync. After
a crash, a page has any of these contents, even another one in each sector of 512 bytes: writes reach the medium in any
order, torn or not at all. Writes to one sector are never mixed with each other.

A folder has the same two states of its entries. A change of entries is kept or lost as a whole.
"""

from __future__ import annotations

import random
from typing import Any

PAGE_NBYTES = 4096
SECTOR_NBYTES = 512
_ZEROS = bytes(PAGE_NBYTES)


class File:
    """Contents of a file. `reserved` pages from its start have space on the disk even if nothing was written there."""

    def __init__(self, number: int, mode: int) -> None:
        self.number, self.mode = number, mode
        self.size = self.reserved = 0
        self.locks: dict[Any, bool] = {}  # holder of a flock to True if it is exclusive
        self._pages: dict[int, bytes] = {}  # pages that are missing are zeros
        self._durable: dict[int, bytes] = {}
        self._durable_size = 0
        self._last_change = 0
        self._unsynced: dict[int, list[tuple[int, bytes | None]]] = {}  # change and content, oldest first
        self._sizes: list[tuple[int, int]] = []  # change and size, oldest first

    @property
    def num_pages(self) -> int:
        """Number of pages that take space on the disk."""
        return self.reserved + sum(page >= self.reserved for page in self._pages)

    def num_new_pages(self, offset: int, nbytes: int) -> int:
        """Return the number of pages for which a write would need space."""
        touched = range(offset // PAGE_NBYTES, -(-(offset + nbytes) // PAGE_NBYTES))
        return sum(page >= self.reserved and page not in self._pages for page in touched)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return the bytes in this range; fewer at the end of the file."""
        end = min(offset + nbytes, self.size)
        if end <= offset:
            return b""
        first, pages = offset // PAGE_NBYTES, self._pages
        touched = range(first, (end - 1) // PAGE_NBYTES + 1)
        data = b"".join([pages.get(page, _ZEROS) for page in touched])
        start = first * PAGE_NBYTES
        return data if len(data) == end - offset else data[offset - start : end - start]

    def write(self, offset: int, data: memoryview) -> None:
        """Write `data`; the file grows if it ends beyond the file's end."""
        at = 0
        while at < len(data):
            page, start = divmod(offset + at, PAGE_NBYTES)
            part = bytes(data[at : at + PAGE_NBYTES - start])
            if len(part) < PAGE_NBYTES:
                old = self._pages.get(page, _ZEROS)
                part = old[:start] + part + old[start + len(part) :]
                at += PAGE_NBYTES - start
            else:
                at += PAGE_NBYTES
            self._put(page, _ZEROS if part == _ZEROS else part)
        if offset + len(data) > self.size:
            self._resize(offset + len(data))

    def reserve(self, nbytes: int) -> None:
        """Take space for the first `nbytes`; the file grows if it is shorter."""
        self.reserved = max(self.reserved, -(-nbytes // PAGE_NBYTES))
        if nbytes > self.size:
            self._resize(nbytes)

    def truncate(self, nbytes: int) -> None:
        """Cut the file, or extend it by zeros."""
        if nbytes < self.size:
            end = -(-nbytes // PAGE_NBYTES)
            for page in [page for page in self._pages if page >= end]:
                self._put(page, None)
            self.reserved = min(self.reserved, end)
            inside = nbytes % PAGE_NBYTES
            if inside and end - 1 in self._pages:
                self._put(end - 1, self._pages[end - 1][:inside].ljust(PAGE_NBYTES, b"\0"))
        if nbytes != self.size:
            self._resize(nbytes)

    def last_change(self) -> int:
        """Return the number of the latest change, for `make_durable`."""
        return self._last_change

    def make_durable(self, until: int) -> None:
        """Make all changes up to this number durable; later ones may have happened since a sync began."""
        for page, contents in list(self._unsynced.items()):
            later = [each for each in contents if each[0] > until]
            if len(later) < len(contents):
                _set(self._durable, page, contents[len(contents) - len(later) - 1][1])
            if later:
                self._unsynced[page] = later
            else:
                del self._unsynced[page]
        while self._sizes and self._sizes[0][0] <= until:
            self._durable_size = self._sizes.pop(0)[1]

    def lose_writes(self, rng: random.Random) -> None:
        """Lose what a failed sync could not write: pages count as clean, and later syncs do not write them again."""
        for page, contents in self._unsynced.items():
            if rng.random() < 0.5:
                _set(self._durable, page, contents[-1][1])
            elif rng.random() < 0.5:  # dropped from the cache, so that reads return what the disk has
                _set(self._pages, page, self._durable.get(page))
        self._unsynced.clear()

    def crash(self, rng: random.Random) -> None:
        """Replace the contents by what survives a crash of the machine."""
        how = rng.choice(("all", "none", "pages", "sectors", "sectors"))
        if self._sizes and how != "none":
            sizes = [self._durable_size, *(size for _, size in self._sizes)]
            self._durable_size = sizes[-1] if how == "all" else rng.choice(sizes)
        if how != "none":
            for page, unsynced in self._unsynced.items():
                contents = [self._durable.get(page, _ZEROS), *(each or _ZEROS for _, each in unsynced)]
                if how == "all":
                    survivor = contents[-1]
                elif how == "pages" or all(each == contents[0] for each in contents):
                    survivor = rng.choice(contents)
                else:
                    chosen = rng.choices(contents, k=PAGE_NBYTES // SECTOR_NBYTES)
                    parts = (each[i * SECTOR_NBYTES :][:SECTOR_NBYTES] for i, each in enumerate(chosen))
                    survivor = b"".join(parts)
                self._durable[page] = survivor
        end, inside = divmod(self._durable_size, PAGE_NBYTES)
        self._durable = {page: content for page, content in self._durable.items() if page < end + bool(inside)}
        if inside and end in self._durable:
            self._durable[end] = self._durable[end][:inside].ljust(PAGE_NBYTES, b"\0")
        self._pages, self.size = dict(self._durable), self._durable_size
        self.reserved = min(self.reserved, -(-self.size // PAGE_NBYTES))
        self._unsynced.clear()
        self._sizes.clear()
        self.locks.clear()

    def flip(self, rng: random.Random) -> tuple[int, int] | None:
        """Flip a bit of a durable page, of one that is not all zeros if there is any. Returns its byte and bit."""
        pages = [page for page, content in self._durable.items() if content != _ZEROS] or list(self._durable)
        if not pages:
            return None
        page, at, bit = rng.choice(pages), rng.randrange(PAGE_NBYTES), rng.randrange(8)
        content = bytearray(self._durable[page])
        content[at] ^= 1 << bit
        self._durable[page] = bytes(content)
        if page not in self._unsynced:
            self._pages[page] = self._durable[page]
        return page * PAGE_NBYTES + at, bit

    def _put(self, page: int, content: bytes | None) -> None:
        self._last_change += 1
        _set(self._pages, page, content)
        self._unsynced.setdefault(page, []).append((self._last_change, content))

    def _resize(self, nbytes: int) -> None:
        self._last_change += 1
        self.size = nbytes
        self._sizes.append((self._last_change, nbytes))


def _set(pages: dict[int, bytes], page: int, content: bytes | None) -> None:
    if content is None:
        pages.pop(page, None)
    else:
        pages[page] = content


class StoredFolder:
    """Entries of a folder."""

    def __init__(self, number: int, mode: int) -> None:
        self.number, self.mode = number, mode
        self.entries: dict[str, File | StoredFolder] = {}
        self._durable: dict[str, File | StoredFolder] = {}
        self._last_change = 0
        self._unsynced: list[tuple[int, dict[str, File | StoredFolder | None]]] = []

    def change(self, changes: dict[str, File | StoredFolder | None]) -> None:
        """Set entries, or remove those for which None is given, in one step."""
        self._last_change += 1
        self._unsynced.append((self._last_change, changes))
        _apply(self.entries, changes)

    def last_change(self) -> int:
        """Return the number of the latest change, for `make_durable`."""
        return self._last_change

    def make_durable(self, until: int) -> None:
        """Make all changes of entries up to this number durable."""
        while self._unsynced and self._unsynced[0][0] <= until:
            _apply(self._durable, self._unsynced.pop(0)[1])

    def lose_writes(self, rng: random.Random) -> None:
        """A failed sync loses no entries: file systems write them again with the next one."""

    def crash(self, rng: random.Random) -> None:
        """Replace the entries by those that survive a crash of the machine, and crash the files in them.

        The first of the unsynced changes survive, as with a journal of the file system, or any of them.
        """
        num_first = rng.randint(0, len(self._unsynced)) if rng.random() < 0.5 else None
        for i, (_, changes) in enumerate(self._unsynced):
            if i < num_first if num_first is not None else rng.random() < 0.5:
                _apply(self._durable, changes)
        self._unsynced.clear()
        self.entries = dict(self._durable)
        for node in self.entries.values():
            node.crash(rng)

    def files(self, path: str) -> list[tuple[str, File]]:
        """Return the files below this folder, whose path is given, with their paths."""
        found: list[tuple[str, File]] = []
        for name, node in self.entries.items():
            if isinstance(node, File):
                found.append((f"{path}/{name}", node))
            else:
                found += node.files(f"{path}/{name}")
        return found


def _apply(entries: dict[str, File | StoredFolder], changes: dict[str, File | StoredFolder | None]) -> None:
    for name, node in changes.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node
