"""Ids of sessions: which headers and fields name a client's session, and the number that stands for it in the cluster.

A session is one chain of requests, such as a conversation or an agent's run; the parent of a sub-agent's session is
that of the agent that started it. The accepted names are those of vLLM's router (`x-session-id`), of Dynamo
(`x-dynamo-session-id`, `x-dynamo-parent-session-id`), of SGLang's model gateway (`x-smg-routing-key`) and, in the body,
OpenAI's (`prompt_cache_key`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from frontend.errors import InvalidRequest

MAX_SESSION_CHARS: Final = 256
SESSION_HEADERS: Final = ("x-session-id", "x-dynamo-session-id", "x-smg-routing-key")  # the first one given counts
PARENT_HEADERS: Final = ("x-parent-session-id", "x-dynamo-parent-session-id")


@dataclass(frozen=True)
class SessionIds:
    """A session's id and that of its parent, as the client named them; "": none."""

    session: str = ""
    parent: str = ""

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> "SessionIds":
        """Read the headers. Raises InvalidRequest for an id that is too long."""
        return cls(_first(headers, SESSION_HEADERS), _first(headers, PARENT_HEADERS))

    def with_body(self, session: str | None, parent: str | None) -> "SessionIds":
        """Return the ids with those of the body where the headers have none."""
        return SessionIds(self.session or session or "", self.parent or parent or "")


NO_SESSION: Final = SessionIds()


def session_number(tenant: str, session_id: str) -> int:
    """Return a 64-bit hash of the tenant and its session's id, above 0; 0 for the id "".

    Tenants that use the same ids have different numbers, and the client's text stays in the frontend.
    """
    if not session_id:
        return 0
    name = b"%d %s %s" % (len(tenant), tenant.encode(), session_id.encode("utf-8", "surrogatepass"))
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little") or 1


def _first(headers: Mapping[str, str], names: tuple[str, ...]) -> str:
    for name in names:
        text = headers.get(name, "").strip()
        if len(text) > MAX_SESSION_CHARS:
            raise InvalidRequest(
                f"{name} must have at most {MAX_SESSION_CHARS} characters, got {len(text)}", param=name
            )
        if text:
            return text
    return ""
