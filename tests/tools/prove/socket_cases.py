"""Cases of stream sockets whose outcomes must be the same with the kernel's sockets and with the simulated ones.

`python socket_cases.py SEED` runs them in a simulated world, and writes a JSON object of their outcomes.
"""

from __future__ import annotations

import contextlib
import json
import struct
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Modules(NamedTuple):
    """`socket`, `select` and `threading`, a function that sleeps until everything has arrived, and what to close."""

    socket: Any
    select: Any
    threading: Any
    settle: Callable[[], None]
    opened: contextlib.ExitStack


def pair(m: Modules) -> tuple[Any, Any]:
    """Return the two ends of a connection."""
    with m.socket.create_server(("127.0.0.1", 0)) as listener:
        one = m.socket.create_connection(listener.getsockname())
        other, address = listener.accept()
        m.opened.enter_context(one)
        m.opened.enter_context(other)
        assert address == one.getsockname()
    one.settimeout(5.0)
    other.settimeout(5.0)
    return one, other


def outcome(call: Callable[[], Any]) -> Any:
    """Return the call's result, or the number of its error."""
    try:
        result = call()
    except OSError as error:
        return f"{type(error).__name__} {error.errno}"
    return result.decode() if isinstance(result, bytes) else result


def polled(m: Modules, one: Any) -> int:
    """Return the events of a socket, of those that matter here."""
    poll = m.select.poll()
    poll.register(one, m.select.POLLIN | m.select.POLLRDHUP)
    return sum(events for _, events in poll.poll(0))


def orderly_close(m: Modules) -> list[Any]:
    one, other = pair(m)
    one.sendall(b"last words")
    one.close()
    m.settle()
    return [polled(m, other), *(outcome(lambda: other.recv(100)) for _ in range(2)), outcome(one.fileno)]


def reset(m: Modules) -> list[Any]:
    one, other = pair(m)
    one.sendall(b"abc")
    one.setsockopt(m.socket.SOL_SOCKET, m.socket.SO_LINGER, RESET_ON_CLOSE)
    one.close()
    m.settle()
    got = [polled(m, other), *(outcome(lambda: other.recv(100)) for _ in range(3))]
    return [*got, outcome(lambda: other.send(b"x"))]


def close_with_unread_bytes(m: Modules) -> list[Any]:
    one, other = pair(m)
    other.sendall(b"nobody reads this")
    m.settle()
    one.close()
    m.settle()
    return [outcome(lambda: other.recv(100))]


def send_to_closed(m: Modules) -> list[Any]:
    one, other = pair(m)
    one.close()
    m.settle()
    got = [outcome(lambda: other.send(b"x"))]
    m.settle()
    return [*got, outcome(lambda: other.send(b"x"))]


def shutdown(m: Modules) -> list[Any]:
    one, other = pair(m)
    other.sendall(b"early")
    m.settle()
    one.shutdown(m.socket.SHUT_RDWR)
    m.settle()
    got = [polled(m, one), outcome(lambda: one.send(b"x")), outcome(lambda: one.recv(9)), outcome(lambda: one.recv(9))]
    got += [polled(m, other), outcome(lambda: other.recv(9)), outcome(lambda: other.send(b"late"))]
    m.settle()
    return [*got, outcome(lambda: other.send(b"x"))]


def half_close(m: Modules) -> list[Any]:
    one, other = pair(m)
    one.shutdown(m.socket.SHUT_WR)
    got = [outcome(lambda: other.recv(9)), outcome(lambda: other.send(b"answer"))]
    return [*got, outcome(lambda: one.recv(9))]


def shutdown_wakes(m: Modules) -> list[Any]:
    one, _ = pair(m)
    one.settimeout(None)
    threading = m.threading
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(outcome(lambda: one.recv(1))))
    thread.start()
    m.settle()
    one.shutdown(m.socket.SHUT_RDWR)
    thread.join()
    return got


def full(m: Modules) -> list[Any]:
    one, other = pair(m)
    one.settimeout(None)
    sent, part = 0, bytes(range(256)) * 512
    while True:
        try:
            sent += one.send(part[sent % 256 :], m.socket.MSG_DONTWAIT)
        except BlockingIOError:
            break
    got: list[Any] = [sent > 0]
    one.settimeout(0.05)
    got.append(outcome(lambda: one.send(b"x")))
    received = bytearray()
    while len(received) < sent:
        received += other.recv(1 << 20)
    got.append(bytes(received) == bytes(index % 256 for index in range(256)) * (sent // 256) + part[: sent % 256])
    return [*got, outcome(lambda: one.send(b"x"))]


def gather_and_scatter(m: Modules) -> list[Any]:
    one, other = pair(m)
    other.settimeout(None)
    threading = m.threading
    parts = [bytes([number]) * (number * 1000) for number in range(200)]
    memory = bytearray(sum(map(len, parts)) + 5)
    views = [memoryview(memory)[at : at + 99_999] for at in range(0, len(memory), 99_999)]

    def send() -> None:
        pending = [memoryview(part) for part in parts if part]
        while pending:
            sent = one.sendmsg(pending)
            while pending and sent >= len(pending[0]):
                sent -= len(pending.pop(0))
            if sent:
                pending[0] = pending[0][sent:]
        one.close()

    thread = threading.Thread(target=send)
    thread.start()
    got = other.recvmsg_into(views, 0, m.socket.MSG_WAITALL)[0]
    thread.join()
    return [got, bytes(memory) == b"".join(parts) + bytes(5), outcome(lambda: other.recv(1))]


def no_listener(m: Modules) -> list[Any]:
    with m.socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        got = [outcome(lambda: m.socket.create_server(address, reuse_port=False))]
    return [*got, outcome(lambda: m.socket.create_connection(address))]


def time_limit(m: Modules) -> list[Any]:
    one, _ = pair(m)
    one.settimeout(0.05)
    got = [outcome(lambda: one.recv(1))]
    one.settimeout(None)
    got.append(outcome(lambda: one.recv(1, m.socket.MSG_DONTWAIT)))
    one.setblocking(False)
    return [*got, outcome(lambda: one.recv(1))]


def shutdown_of_listener(m: Modules) -> list[Any]:
    listener = m.socket.create_server(("127.0.0.1", 0))
    got: list[Any] = []
    threading = m.threading
    thread = threading.Thread(target=lambda: got.append(outcome(listener.accept)))
    thread.start()
    m.settle()
    listener.shutdown(m.socket.SHUT_RDWR)
    thread.join()
    listener.close()
    return [*got, outcome(listener.accept)]


def not_connected(m: Modules) -> list[Any]:
    with m.socket.socket() as one:
        got = [outcome(lambda: one.send(b"x")), outcome(one.getpeername), outcome(lambda: one.shutdown(2))]
        return [*got, one.family, one.getsockname()]


def names(m: Modules) -> list[Any]:
    found = m.socket.getaddrinfo("127.0.0.1", 80, type=m.socket.SOCK_STREAM, flags=m.socket.AI_NUMERICHOST)
    numeric = m.socket.AI_NUMERICHOST
    got = [list(map(str, found[0])), outcome(lambda: m.socket.getaddrinfo("localhost", 80, flags=numeric))]
    try:
        m.socket.getaddrinfo("a..b", 80)
    except UnicodeError:
        got.append("UnicodeError")
    return [*got, outcome(lambda: m.socket.getaddrinfo("no-such-host.invalid", 80))]


CASES = (
    orderly_close,
    reset,
    close_with_unread_bytes,
    send_to_closed,
    shutdown,
    half_close,
    shutdown_wakes,
    full,
    gather_and_scatter,
    no_listener,
    time_limit,
    shutdown_of_listener,
    not_connected,
    names,
)


def run_all(m: Modules) -> dict[str, Any]:
    """Return the outcomes of all cases."""
    with m.opened:
        return {case.__name__: case(m) for case in CASES}


def main(seed: int) -> None:
    """Run the cases in a simulated world."""
    from tools.prove.world import clock, sockets, threads
    from tools.prove.world.network import SimNetwork
    from tools.prove.world.process import Process
    from tools.prove.world.scheduler import World, set_world

    world = World(seed)
    set_world(world)
    SimNetwork(world)
    process = Process(world, "cases", "host")
    outcomes: dict[str, Any] = {}
    modules = Modules(sockets.socket, sockets.select, threads, lambda: clock.time.sleep(1.0), contextlib.ExitStack())
    thread = world.spawn(process, lambda: outcomes.update(run_all(modules)), "main")
    assert world.run(lambda: thread.ended, 1000.0)
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(int(sys.argv[1]))
