"""Routes of the console: its files and its API.

Reading requires a key with admin scope if any keys are configured; actions always require one. No cookies are used, and
every action carries a key in its header, so another site's page cannot trigger actions. The served files are those in
`page/` when the process starts.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from frontend.api.body import read_body
from frontend.api.stream import encode
from frontend.callers import ApiCaller
from frontend.errors import InvalidRequest
from frontend.service import Service

_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Only scripts, styles and requests of this origin; nothing inline, no frames, no forms, no text parsed as markup.
_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
SECURITY_HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass(frozen=True)
class ConsoleFile:
    """Static file. Browsers cache it and revalidate it by its ETag each time."""

    body: bytes
    headers: Mapping[str, str]

    def is_known(self, if_none_match: str) -> bool:
        """Return True if the If-None-Match header contains this content's ETag."""
        named = {tag.strip().removeprefix("W/") for tag in if_none_match.split(",")}
        return self.headers["etag"] in named or "*" in named


class ConsoleFiles:
    """Static files by name; "" is the page itself."""

    def __init__(self) -> None:
        found = {each.name: each.read_bytes() for each in (files(__package__) / "page").iterdir() if each.is_file()}
        self._pages = {name: _page(name, body) for name, body in found.items() if _suffix(name) in _TYPES}
        self._pages[""] = self._pages["index.html"]

    def find(self, name: str) -> ConsoleFile | None:
        """Return the file of that name, or None."""
        return self._pages.get(name)

    @property
    def names(self) -> list[str]:
        """Names of all files, sorted."""
        return sorted(self._pages)


def _page(name: str, body: bytes) -> ConsoleFile:
    headers = {
        "content-type": _TYPES[_suffix(name)],
        "cache-control": "no-cache",
        "etag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
    }
    return ConsoleFile(body, {**headers, **SECURITY_HEADERS})


def _suffix(name: str) -> str:
    return name[name.rfind(".") :]


CONSOLE: Final = "/console"
_API: Final = f"{CONSOLE}/api/"
_REQUEST: Final = "requests/"
_MOST_BODY_NBYTES: Final = 1 << 20


class ConsoleRoutes:
    """Handler of all paths at and below /console."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._pages = ConsoleFiles()
        self._readings = {
            "about": self._about,
            "state": self._state,
            "pool": self._pool,
            "objectives": self._objectives,
        }
        actions = service.console_actions
        self._actions = {"drain": actions.drain, "switch": actions.switch, "objectives": actions.change_objectives}

    def methods(self, path: str) -> tuple[str, ...]:
        """Return the allowed methods of a path; () if it does not exist."""
        if not path.startswith(_API):
            return ("GET",) if path == CONSOLE or self._pages.find(_name(path)) is not None else ()
        name = path.removeprefix(_API)
        reads = name in self._readings or (name.startswith(_REQUEST) and name != _REQUEST)
        return (*(("GET",) if reads else ()), *(("POST",) if name in self._actions else ()))

    async def __call__(self, http: Request) -> Response:
        """Answer a request whose path and method are valid. Raises ApiError."""
        path: str = http.scope["path"]
        if not path.startswith(_API):
            return self._page(http, path)
        name = path.removeprefix(_API)
        if http.method == "POST":
            caller = self._service.keys.admin(http.headers.get("authorization"))
            body = await read_object(self._service, http)
            return _answer(await self._actions[name](body, _author(caller)))
        if name != "about":
            self._service.keys.viewer(http.headers.get("authorization"))
        if name.startswith(_REQUEST):
            return _answer(await self._request(name.removeprefix(_REQUEST)))
        return await self._readings[name](http)

    def _page(self, http: Request, path: str) -> Response:
        if path == CONSOLE:  # relative, so that it also works behind a proxy's path prefix
            return Response(status_code=307, headers={"location": "console/", **SECURITY_HEADERS})
        page = self._pages.find(_name(path))
        assert page is not None  # `methods` has found it
        if page.is_known(http.headers.get("if-none-match", "")):
            return Response(status_code=304, headers=page.headers)
        return Response(page.body if http.method == "GET" else b"", headers=page.headers)

    async def _about(self, http: Request) -> Response:
        """Return what a page without a key needs to know."""
        return _answer({"needs_key": self._service.keys.guard_views, "has_admin": self._service.keys.has_admin})

    async def _state(self, http: Request) -> Response:
        state = await self._service.console.state()
        if "gzip" in http.headers.get("accept-encoding", ""):
            return Response(state.packed, headers=_headers() | {"content-encoding": "gzip", "vary": "accept-encoding"})
        return Response(state.plain, headers=_headers() | {"vary": "accept-encoding"})

    async def _pool(self, http: Request) -> Response:
        return _answer(await self._service.console_pool.get())

    async def _objectives(self, http: Request) -> Response:
        return _answer(await self._service.console_actions.objectives())

    async def _request(self, request_id: str) -> dict[str, Any]:
        return {
            "request_id": request_id,
            "front_door": self._service.path_of(request_id),
            "conductors": await self._service.console_actions.explain(request_id),
        }


async def read_object(service: Service, http: Request) -> dict[str, Any]:
    """Return the JSON object in the body of an admin's request. Raises ApiError."""
    with service.body_budget.place("") as place:
        raw = await read_body(http, place, max_nbytes=_MOST_BODY_NBYTES, timeout_s=service.config.body_timeout_s)
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    return body


def _name(path: str) -> str:
    """Return the name of a file of the page."""
    return path.removeprefix(f"{CONSOLE}/")


def _author(caller: ApiCaller) -> str:
    """Return the author for the audit log: the key's name, never the key."""
    return f"{caller.key_name or caller.tenant or 'admin'} (console)"


def _answer(value: object) -> Response:
    return Response(encode(value), headers=_headers())


def _headers() -> dict[str, str]:
    return {"content-type": "application/json", "cache-control": "no-store", **SECURITY_HEADERS}
