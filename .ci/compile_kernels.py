"""Compile the CPU kernels into the cache beside their sources, so that the processes of a cluster only load them.

Several processes share the work, the longest part first; a process imports only the modules that it compiles.
"""

import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor


def engine() -> None:
    from engine import load_model
    from settings.worker import BUNDLED_MODEL

    load_model(BUNDLED_MODEL).warm_up()


def directory() -> None:
    from conductor.directory import table
    from conductor.policy.kernels import prefill_kernels
    from conductor.policy.lengths import length_kernels
    from conductor.policy.placement.decode import decode_kernels

    table.warm_up()
    prefill_kernels()
    decode_kernels()
    length_kernels()


def owner() -> None:
    from messenger import UnitSection
    from messenger.native.grant_slots import GrantSlots
    from messenger.native.responder_loop import responder_loop
    from messenger.native.socket_io import receive_rows
    from messenger.native.unit_digests import UnitDigests

    GrantSlots()
    responder_loop()
    receive_rows()
    UnitDigests([UnitSection(0, 4, 1)], 4)


def ssd() -> None:
    from kvpool.ssd.async_kernels import async_kernel
    from kvpool.ssd.kernels import kernels

    async_kernel()
    kernels()


def host_door() -> None:
    from kvpool.local.copy_kernels import copy_kernel, digest_kernel
    from kvpool.local.index_kernels import index_kernels

    index_kernels()
    copy_kernel()
    digest_kernel()


def eviction() -> None:
    from kvpool.policy.eviction.shadows import Shadows

    Shadows()


def small_ones() -> None:
    from kvpool import digest
    from messenger.shm.kernels import copy_rows, page_kernels
    from worker.paced.kernels import kernels as paced_kernels

    digest.warm_up()
    paced_kernels()
    copy_rows()
    page_kernels()


PARTS: tuple[Callable[[], None], ...] = (engine, directory, owner, eviction, host_door, ssd, small_ones)

if __name__ == "__main__":
    began = time.monotonic()
    with ProcessPoolExecutor(min(os.cpu_count() or 1, len(PARTS))) as processes:
        for done in [processes.submit(part) for part in PARTS]:
            done.result()
    print(f"kernels compiled in {time.monotonic() - began:.1f} s")
