"""Names to addresses: at once where they are addresses, within the limit where a name server does not answer."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from messenger.tcp.transport import resolve


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_an_address_in_digits_is_taken_as_it_is(host: str, family: socket.AddressFamily) -> None:
    found = resolve(host, 7000, 1.0)
    assert (found[0], found[4][:2]) == (family, (host, 7000))


def test_a_name_that_this_host_knows_is_found() -> None:
    assert resolve("localhost", 7000, 60.0)[4][1] == 7000


def test_a_name_that_there_is_not_is_told_as_the_resolver_does() -> None:
    with pytest.raises(socket.gaierror):
        resolve("no such name", 7000, 60.0)


def test_a_name_server_that_does_not_answer_holds_nobody_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked, answers = socket.getaddrinfo, [], threading.Event()

    def dead_server(host: str, port: int, *, type: int, flags: int) -> Any:
        if flags & socket.AI_NUMERICHOST:
            return real(host, port, type=type, flags=flags)
        asked.append(host)
        answers.wait(60)
        return real("127.0.0.1", port, type=type, flags=flags)

    monkeypatch.setattr(socket, "getaddrinfo", dead_server)
    with ThreadPoolExecutor(4) as pool:
        tries = [pool.submit(resolve, "far.example", 7000, 0.05) for _ in range(4)]
        for one in tries:
            with pytest.raises(TimeoutError, match=r"no name server answered for 'far\.example' within 0\.05 s"):
                one.result(30)
        waiting = pool.submit(resolve, "far.example", 7000, 60.0)
        answers.set()
        assert waiting.result(30)[4] == ("127.0.0.1", 7000)
    assert 1 <= len(asked) <= 2  # once for all who gave up, and again only if the last came after the answer
    before = len(asked)
    give_up = time.monotonic() + 30
    while len(asked) == before:  # an answer is not kept: names move
        assert time.monotonic() < give_up
        resolve("far.example", 7000, 60.0)
