"""gRPC's core does not print past a role's log: a node that dials in the clear, again and again, would fill it."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ENCRYPTED_AND_DIALLED_IN_THE_CLEAR = """
import asyncio, sys
from pathlib import Path
import moonpool
from rpc.control import secure, start_server
from rpc.tls import TlsFiles

async def main():
    secure(TlsFiles(*map(Path, sys.argv[1:4])))
    server = await start_server("127.0.0.1:0", lambda _: None)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.target.rpartition(":")[2]))
    writer.write(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n")
    print(await reader.read())
    writer.close()
    await server.stop()

asyncio.run(main())
"""


def test_a_handshake_that_fails_prints_nothing(tls_settings: Callable[..., dict[str, Path]]) -> None:
    files = tls_settings()
    given = [str(files[name]) for name in ("tls_cert", "tls_key", "tls_ca")]
    quiet = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    ended = subprocess.run(
        [sys.executable, "-c", ENCRYPTED_AND_DIALLED_IN_THE_CLEAR, *given],
        capture_output=True,
        text=True,
        env=quiet,
        timeout=100,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "b''\n"
