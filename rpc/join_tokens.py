"""The tokens by which the cluster's processes know each other: a file of them, read again as it changes. Opens no
connection, and no message shows a token.

One token per line; empty lines and those that begin with # mean nothing. A process shows the first one and accepts all,
so that a new one can be known everywhere before anybody shows it.
"""

import hashlib
import hmac
import logging
import os
import stat
import threading
import time
from pathlib import Path
from typing import Final

from rpc.errors import InvalidArgument

__all__ = ["JoinTokens"]

FEWEST_CHARS: Final = 16
MOST_CHARS: Final = 512
LOOK_EVERY_S: Final = 1.0
_MOST_NBYTES: Final = 64 << 10

_log = logging.getLogger(__name__)


class JoinTokens:
    """Those in the file at `path` now, or when it could last be used. Raises InvalidArgument for a file of no use."""

    def __init__(self, path: Path, look_every_s: float = LOOK_EVERY_S) -> None:
        self.path = path
        self._look_every_s = look_every_s
        self._lock = threading.Lock()
        self._content = _read(path)
        self._tokens = _parse(path, self._content)
        self._hashes = [_hash(token) for token in self._tokens]
        self._trouble = ""
        self._next_look_s = time.monotonic() + look_every_s

    def newest(self) -> str:
        """To be shown by a call that begins now."""
        with self._lock:
            self._look()
            return self._tokens[0]

    def knows(self, token: str) -> bool:
        """Whether it is one of them. Takes as long for any other."""
        shown = _hash(token)
        with self._lock:
            self._look()
            found = False
            for known in self._hashes:
                found |= hmac.compare_digest(shown, known)
            return found

    def _look(self) -> None:
        """Not more often than that: calls may come by the thousand."""
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + self._look_every_s
        try:
            content = _read(self.path)
            tokens = self._tokens if content == self._content else _parse(self.path, content)
        except InvalidArgument as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                _log.error("going on with the join tokens from before: %s", error)
            return
        self._trouble = ""
        if tokens is not self._tokens:
            self._content, self._tokens = content, tokens
            self._hashes = [_hash(token) for token in tokens]
            _log.info("%d join tokens are accepted now, those of %s", len(tokens), self.path)


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(_MOST_NBYTES + 1)
    except OSError as error:
        raise InvalidArgument(f"join_token_file {path} cannot be read: {error.strerror}") from error
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise InvalidArgument(f"join_token_file {path}: every user of this machine may use it: chmod 600 {path}")
    if len(content) > _MOST_NBYTES:
        raise InvalidArgument(f"join_token_file {path} has more than {_MOST_NBYTES} bytes: expected a token per line")
    return content


def _parse(path: Path, content: bytes) -> list[str]:
    tokens = []
    for number, raw in enumerate(content.split(b"\n"), 1):
        line = raw.strip()
        if not line or line.startswith(b"#"):
            continue
        is_plain = all(0x21 <= byte <= 0x7E for byte in line)
        if not is_plain or not FEWEST_CHARS <= len(line) <= MOST_CHARS:
            raise InvalidArgument(
                f"join_token_file {path}, line {number}: expected one token of {FEWEST_CHARS} to {MOST_CHARS} ASCII "
                "characters without spaces (openssl rand -hex 32 makes one)"
            )
        tokens.append(line.decode("ascii"))
    if not tokens:
        raise InvalidArgument(f"join_token_file {path} holds no token: expected one per line (openssl rand -hex 32)")
    return tokens
