"""Messages between a role and the processes that handle its grammars. Imports nothing heavy.

Frames are a length (uint32) and that many bytes. The role sends COMMANDs to the template and receives EXITs. On a job's
socket it sends a request (JSON) and receives the verdict (JSON). In a worker the process then stays, and each further
byte passes it the socket of one sequence. On that, the role sends first the ids generated so far (int32), then one id
at a time, and receives a frame after each: FAILED and the error's text, or OPEN or STOPPED and a bit per id, set if the
id may come next.
"""

from __future__ import annotations

import signal
import socket
import struct

from worker.errors import GrammarError

COMMAND = struct.Struct("<cq")  # START with the job's socket, or KILL; the job's id
START, KILL = b"s", b"k"
EXIT = struct.Struct("<qidq")  # job's id, status as of wait(), CPU seconds, bytes of memory grown
LENGTH = struct.Struct("<I")
FAILED, OPEN, STOPPED = b"f", b"o", b"s"  # STOPPED: the grammar is complete

MAX_SOURCE_NBYTES = 128 * 1024
MAX_LARK_REPEATS = 500  # nested repetitions multiply in the library's parser: two of these still take half a second
OUT_OF_MEMORY = 3  # exit status
ENDED_FOR_MEMORY = signal.SIGUSR1  # to the largest process when all together take too much


def receive_frame(sock: socket.socket) -> bytes | None:
    """Return the next frame; None at the end of the stream."""
    head = receive_exactly(sock, LENGTH.size)
    if head is None:
        return None
    return receive_exactly(sock, LENGTH.unpack(head)[0])


def send_frame(sock: socket.socket, data: bytes) -> None:
    """Send one frame."""
    sock.sendall(LENGTH.pack(len(data)) + data)


def receive_exactly(sock: socket.socket, nbytes: int) -> bytes | None:
    """Return that many bytes; None at the end of the stream."""
    data = bytearray()
    while len(data) < nbytes:
        piece = sock.recv(nbytes - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)


def source_nbytes(source: str) -> int:
    """Return the size of a grammar's source. Raises GrammarError for more than MAX_SOURCE_NBYTES, and for surrogates,
    which no encoding has."""
    try:
        nbytes = len(source.encode())
    except UnicodeEncodeError as error:
        raise GrammarError(f"the grammar is not valid Unicode: {error.reason}") from error
    if nbytes > MAX_SOURCE_NBYTES:
        raise GrammarError(f"the grammar must have at most {MAX_SOURCE_NBYTES} bytes, got {nbytes}")
    return nbytes
