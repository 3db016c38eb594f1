"""Page of the API's description: Swagger UI on /openapi.json, without resources of other hosts."""

from functools import cache
from importlib.resources import files
from typing import ClassVar, Final

from starlette.requests import Request
from starlette.responses import Response

from frontend.console.routes import SECURITY_HEADERS

_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Moonpool API</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="swagger-ui"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</body>
</html>
"""
_START: Final = (
    'SwaggerUIBundle({url: "openapi.json", dom_id: "#swagger-ui", validatorUrl: null, defaultModelsExpandDepth: 0});\n'
)
# Swagger UI sets styles and icons inline.
_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data:",
        "font-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_TYPES: Final = {"js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8"}
_OF_PACKAGE: Final = ("swagger-ui-bundle.js", "swagger-ui.css")


class DescriptionPage:
    """Handler of /docs and the files below it."""

    PATH: ClassVar[str] = "/docs"

    def methods(self, path: str) -> tuple[str, ...]:
        """Return the allowed methods of a path; () if it does not exist."""
        return ("GET",) if _name(path) in ("", "start.js", *_OF_PACKAGE) else ()

    async def __call__(self, http: Request) -> Response:
        path = http.scope["path"]
        name = _name(path)
        headers = {**SECURITY_HEADERS, "content-security-policy": _POLICY, "cache-control": "no-cache"}
        if name in _OF_PACKAGE:
            return Response(_file(name), headers={**headers, "content-type": _TYPES[name.rpartition(".")[2]]})
        if name:
            return Response(_START, headers={**headers, "content-type": _TYPES["js"]})
        if path.endswith("/"):
            # The page's links are relative, so that it works below a proxy's prefix.
            levels = len(path) - len(path.rstrip("/"))
            return Response(status_code=307, headers={**headers, "location": f"{'../' * levels}docs"})
        return Response(_PAGE, headers={**headers, "content-type": "text/html; charset=utf-8"})


def _name(path: str) -> str:
    return path.removeprefix(DescriptionPage.PATH).strip("/")


@cache
def _file(name: str) -> bytes:
    return (files("swagger_ui") / "static" / name).read_bytes()
