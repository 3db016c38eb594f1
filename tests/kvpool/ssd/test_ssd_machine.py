"""A store under any sequence of writes, reads, frees, damage and restarts does what a dictionary would."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpool.errors import SsdCorrupt, SsdNotStored, SsdRefused
from kvpool.ssd import SsdConfig, SsdStore

PAGE, PAGES, SEGMENT_PAGES = 4096, 24, 5


def test_a_store_does_what_a_dictionary_would(ssd_path: Path, blocks_of: Any, unsynced_disk: Any) -> None:
    small, large = blocks_of(2048, 1200), blocks_of(4096, 8200)  # of one page, and of four
    pages_of = {small: 1, large: 4}

    class Machine(RuleBasedStateMachine):
        """`stored`: first page to (blocks, number); `corrupt`: first pages of those whose bytes were changed."""

        def __init__(self) -> None:
            super().__init__()
            self.folder = Path(tempfile.mkdtemp(dir=ssd_path))
            self.stored: dict[int, tuple[Any, int]] = {}
            self.corrupt: set[int] = set()
            self.number = 0
            self.store = self.open()

        def open(self) -> SsdStore:
            config = SsdConfig(
                self.folder, PAGES * PAGE, "node", segment_nbytes=SEGMENT_PAGES * PAGE,
                read_depth=2, write_depth=2, min_journal_nbytes=16 * PAGE,
            )  # fmt: skip
            return SsdStore.open(config, unsynced_disk)

        def over(self, page: int, kind: Any) -> bool:
            return any(
                page < other + pages_of[of] and other < page + pages_of[kind] for other, (of, _) in self.stored.items()
            )

        @rule(at=st.lists(st.tuples(st.integers(0, PAGES), st.sampled_from([small, large])), min_size=1, max_size=4))
        def write(self, at: list[tuple[int, Any]]) -> None:
            for kind in (small, large):  # one request per kind, so that its blocks meet those before it
                pages = {}
                for page, of in at:
                    if of is kind:
                        self.number += 1
                        pages[self.number] = page
                for (number, page), error in zip(pages.items(), kind.write(self.store, pages), strict=True):
                    if page + pages_of[kind] > PAGES or self.over(page, kind):
                        assert isinstance(error, SsdRefused)
                    else:
                        assert error is None
                        self.stored[page] = (kind, number)
                        self.corrupt.discard(page)

        @rule(pages=st.sets(st.integers(0, PAGES - 1), max_size=5))
        def free(self, pages: set[int]) -> None:
            self.store.free([page * PAGE for page in pages])
            for page in pages:
                self.stored.pop(page, None)
                self.corrupt.discard(page)

        @rule(page=st.integers(0, PAGES - 1))
        def read_another(self, page: int) -> None:
            assert isinstance(small.read(self.store, self.number + 1, page), SsdNotStored)

        @precondition(lambda self: self.stored)
        @rule(data=st.data())
        def change_a_byte_on_the_disk(self, data: st.DataObject) -> None:
            page = data.draw(st.sampled_from(sorted(self.stored)))
            byte = page * PAGE + data.draw(st.integers(0, pages_of[self.stored[page][0]] * PAGE - 1))
            index, offset = divmod(byte, SEGMENT_PAGES * PAGE)
            if page not in self.corrupt:
                with (self.folder / f"segment-{index:05}").open("r+b") as file:
                    file.seek(offset)
                    value = file.read(1)[0]
                    file.seek(offset)
                    file.write(bytes([value ^ 0x10]))
                self.corrupt.add(page)

        @rule()
        def restart(self) -> None:
            assert self.store.close()
            self.store = self.open()
            found = {entry.offset // PAGE: int.from_bytes(entry.chain_key, "big") for entry in self.store.recovered}
            assert found == {page: number for page, (_, number) in self.stored.items()}

        @rule()
        def restart_after_a_kill(self) -> None:
            """Frees that were not yet written down come back, and nothing else changes."""
            killed = self.folder
            self.folder = Path(tempfile.mkdtemp(dir=ssd_path))
            shutil.copytree(killed, self.folder, dirs_exist_ok=True)
            assert self.store.close()
            self.store = self.open()
            found = {entry.offset // PAGE: int.from_bytes(entry.chain_key, "big") for entry in self.store.recovered}
            assert found.items() >= {page: number for page, (_, number) in self.stored.items()}.items()
            self.store.free([page * PAGE for page in found.keys() - self.stored.keys()])
            shutil.rmtree(killed)

        @invariant()
        def reads_what_was_written(self) -> None:
            for page, (kind, number) in self.stored.items():
                error = kind.read(self.store, number, page)
                assert isinstance(error, SsdCorrupt) if page in self.corrupt else error is None
            assert self.store.stats().num_entries == len(self.stored)
            assert self.store.stats().journal_nbytes <= 40 * PAGE

        def teardown(self) -> None:
            assert self.store.close()
            shutil.rmtree(self.folder)

    run = Machine.TestCase()
    run.settings = settings(max_examples=15, stateful_step_count=20)
    run.runTest()
