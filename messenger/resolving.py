"""Names to addresses within a time limit. The system's resolver knows none: a dead name server holds it for minutes."""

import socket
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet

__all__ = ["Address", "resolve"]

Address = tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int] | tuple[str, int, int, int]]

_lock = threading.Lock()
_asked: dict[tuple[str, int], Future[Address]] = {}


def resolve(host: str, port: int, timeout_s: float) -> Address:
    """The first address to connect a stream to, as `socket.getaddrinfo` gives it; an address in digits asks nobody.

    Raises OSError: TimeoutError where no answer comes in time, socket.gaierror where there is none. UnicodeError for
    what cannot be a name: too long a part of it, or an empty one.
    """
    try:
        return _lookup(host, port, socket.AI_NUMERICHOST)
    except socket.gaierror:
        pass
    try:
        return _asking(host, port).result(timeout_s)
    except NotYet:
        raise TimeoutError(f"no name server told within {timeout_s:g} s where {host!r} is") from None


def _asking(host: str, port: int) -> "Future[Address]":
    """One question at a time per name, however many wait for the answer and however often they give up."""
    key = host, port
    with _lock:
        if key in _asked:
            return _asked[key]
        answer = _asked[key] = Future()

        def ask() -> None:
            try:
                found = _lookup(host, port, 0)
            except Exception as error:  # a name of strange characters, too
                _forget(key)
                answer.set_exception(error)
            else:
                _forget(key)
                answer.set_result(found)

        try:
            # A daemon: a process that ends does not wait for a name server.
            threading.Thread(target=ask, name=f"resolve-{host}", daemon=True).start()
        except RuntimeError as error:
            del _asked[key]
            raise OSError(f"the system gives this process no thread to look {host!r} up: {error}") from error
    return answer


def _forget(key: tuple[str, int]) -> None:
    with _lock:
        del _asked[key]


def _lookup(host: str, port: int, flags: int) -> Address:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)[0]  # type: ignore[return-value]
