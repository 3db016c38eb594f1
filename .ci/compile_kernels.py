"""Compiles the CPU kernels once, into the cache beside their sources: a cluster's processes need not each do it."""

import time
from pathlib import Path

from engine import load_model
from kvpool import digest, directory_table
from kvpool.local.copy_kernels import copy_kernel, digest_kernel
from kvpool.local.index_kernels import index_kernels
from kvpool.ssd.kernels import kernels as ssd_kernels
from messenger.copying import copy_rows
from messenger.native.grant_slots import GrantSlots
from messenger.native.owner_loop import owner_loop
from messenger.shm.page_kernels import page_kernels

BUNDLED = Path(__file__).resolve().parent.parent / "moonpool" / "data" / "model"

if __name__ == "__main__":
    began = time.monotonic()
    load_model(BUNDLED).warm_up()
    digest.warm_up()
    ssd_kernels()
    directory_table.warm_up()
    index_kernels()
    copy_kernel()
    digest_kernel()
    copy_rows()
    page_kernels()
    GrantSlots()
    owner_loop()
    print(f"kernels compiled in {time.monotonic() - began:.1f} s")
