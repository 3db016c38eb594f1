"""Reading of a request by the picker itself: its model, and the dialogue to which it belongs.

Everything else is left to the endpoint, which may be another server than Moonpool's. So a body is refused only if it
can be no request of OpenAI's API at all.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from blake3 import blake3

from frontend.api.routes import GENERATION_ROUTES
from frontend.errors import InvalidRequest
from frontend.sessions import SessionIds

__all__ = ["RoutedRequest", "generation_path", "read_request"]

_HEAD_CHARS: Final = 1024  # of a completion's prompt: later ones of the dialogue have the same beginning
_HEAD_IDS: Final = 256
_SHOWN_CHARS: Final = 80  # of a client's text in an error


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """Model and dialogue of a request. `model` is "" if it names none, `affinity` is b"" if it stands alone."""

    model: str = ""
    affinity: bytes = b""


def read_request(path: str, headers: Mapping[str, str], body: bytes | None) -> RoutedRequest:
    """Read a request; `body` is None if the gateway does not send it. Raises InvalidRequest.

    The dialogue is that of the session which the client names, else it is recognised by its first prompt: a chat by its
    messages up to the first one of the user.
    """
    is_generation = bool(generation_path(path))
    fields = _fields(body, is_generation=is_generation) if body is not None and (body or is_generation) else {}
    model = fields.get("model")
    if model is not None and not isinstance(model, str):
        if is_generation:
            raise InvalidRequest(f"model must be a string, got {_shown(model)}", param="model")
        model = None
    session = SessionIds.of(headers).with_body(
        _text(fields, "session_id") or _text(fields, "prompt_cache_key"), _text(fields, "parent_session_id")
    )
    parts = ["session", named] if (named := session.session or session.parent) else list(_first_prompt(fields))
    return RoutedRequest(model or "", _digest([model or "", *parts]) if parts else b"")


def generation_path(path: str) -> str:
    """Return the API's path of a generation request; "" for another. The gateway's route may have its own prefix."""
    bare = path.partition("?")[0]
    return next((each for each in GENERATION_ROUTES if bare.endswith(each)), "")


def _fields(body: bytes, *, is_generation: bool) -> Mapping[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        if not is_generation:
            return {}
        raise InvalidRequest(f"the body must be JSON: {error}", code="invalid_json") from error
    if isinstance(found, dict):
        return found
    if is_generation:
        raise InvalidRequest(f"the body must be a JSON object, got {_shown(found)}")
    return {}


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    return value if isinstance(value, str) else ""


def _first_prompt(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield what all requests of a dialogue begin with; nothing if there is no prompt."""
    messages, prompt = fields.get("messages") or fields.get("input"), fields.get("prompt")
    if (instructions := fields.get("system") or fields.get("instructions")) is not None:
        yield json.dumps(instructions, sort_keys=True)
    if isinstance(messages, str):
        yield messages
    elif isinstance(messages, list):
        for message in messages:
            if not isinstance(message, dict):
                return
            yield json.dumps([message.get("role"), message.get("content")], sort_keys=True)
            if message.get("role") == "user":
                return
    elif isinstance(prompt, str):
        yield prompt[:_HEAD_CHARS]
    elif isinstance(prompt, list):
        yield json.dumps(prompt[:_HEAD_IDS])[: 8 * _HEAD_CHARS]


def _digest(parts: list[str]) -> bytes:
    hashed = blake3()
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass")
        hashed.update(len(raw).to_bytes(8, "little") + raw)
    return hashed.digest(16)


def _shown(value: Any) -> str:
    return json.dumps(value)[:_SHOWN_CHARS]
