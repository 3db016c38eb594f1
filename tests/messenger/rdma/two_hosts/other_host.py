"""The other host: gives each connection that the tests make a messenger in a process of its own, and ends with `bye`.

A connection's first line, JSON, is the arguments of `child.py` or "bye". Further lines go to the child, whose answers
come back, but for `kill`. The child is killed when the connection ends.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from threading import Thread

PORT = 7700
"""As in conftest.py."""
CHILD = Path(__file__).resolve().parents[2] / "child.py"


def serve(connection: socket.socket, arguments: list[str]) -> None:
    with connection:
        child = subprocess.Popen(
            [sys.executable, str(CHILD), *arguments], stdin=subprocess.PIPE, stdout=connection.fileno()
        )
        assert child.stdin is not None
        with child.stdin, connection.makefile("rb", buffering=0) as lines:
            for line in iter(lines.readline, b""):
                if line == b"kill\n":
                    break
                child.stdin.write(line)
                child.stdin.flush()
            child.kill()
        child.wait()


def main() -> None:
    address = os.environ["RDMA_BED_RAILS"].split(",")[0].split("=")[1]
    with socket.create_server((address, PORT)) as listener:
        while True:
            connection, _ = listener.accept()
            first = b""
            while not first.endswith(b"\n"):
                first += connection.recv(1)
            order = json.loads(first)
            if order == "bye":
                return
            Thread(target=serve, args=(connection, order), daemon=True).start()


if __name__ == "__main__":
    main()
