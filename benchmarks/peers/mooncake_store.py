"""Put and get with Mooncake Store for benchmarks/kvpool.py, in any Python that has the package.

Usage: mooncake_store.py MASTER_PORT METADATA_PORT CLIENT_PORT REGION_NBYTES. Reads lines "OPERATION NBYTES COUNT FIRST"
from stdin and replies to each with a line of JSON: seconds per operation. Operations: put (put_from, keys from FIRST
on), put16 (batch_put_from, 16 at a time), get (get_into; the first block's bytes are checked), remove. Everything is on
one host; the segment is in this process.
"""

import json
import sys
import time

import numpy as np
from mooncake.store import MooncakeDistributedStore


def main(master_port: int, metadata_port: int, client_port: int, region_nbytes: int) -> None:
    store = MooncakeDistributedStore()
    code = store.setup(
        f"127.0.0.1:{client_port}",
        f"http://127.0.0.1:{metadata_port}/metadata",
        region_nbytes,
        64 << 20,
        "tcp",
        "",
        f"127.0.0.1:{master_port}",
    )
    if code:
        raise SystemExit(f"Mooncake Store could not be set up: {code}")
    source = np.random.default_rng(0).integers(0, 256, 64 << 20, dtype=np.uint8)
    target = np.zeros_like(source)
    for array in (source, target):
        if store.register_buffer(array.ctypes.data, array.nbytes):
            raise SystemExit("Mooncake Store did not register a buffer")
    print("READY", flush=True)
    for line in sys.stdin:
        operation, *numbers = line.split()
        nbytes, count, first = map(int, numbers)
        places = len(source) // nbytes
        seconds = []
        if operation == "put16":
            for i in range(first, first + count, 16):
                keys = [f"{nbytes}-{k}" for k in range(i, i + 16)]
                pointers = [source.ctypes.data + k % places * nbytes for k in range(i, i + 16)]
                began = time.perf_counter()
                done = store.batch_put_from(keys, pointers, [nbytes] * 16)
                seconds.append(time.perf_counter() - began)
                if any(done):
                    raise SystemExit(f"Mooncake Store failed to put {keys}: {done}")
            print(json.dumps(seconds), flush=True)
            continue
        for i in range(first, first + count):
            key, shift = f"{nbytes}-{i}", i % places * nbytes
            began = time.perf_counter()
            if operation == "put":
                done = store.put_from(key, source.ctypes.data + shift, nbytes) == 0
            elif operation == "get":
                done = store.get_into(key, target.ctypes.data + shift, nbytes) == nbytes
            else:
                done = store.remove(key) == 0
            seconds.append(time.perf_counter() - began)
            if not done and operation != "remove":
                raise SystemExit(f"Mooncake Store failed to {operation} {key}")
        if operation == "get" and not np.array_equal(
            target[first % places * nbytes :][:nbytes], source[first % places * nbytes :][:nbytes]
        ):
            raise SystemExit("the bytes read from Mooncake Store differ from the bytes put")
        print(json.dumps(seconds), flush=True)
    store.close()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
