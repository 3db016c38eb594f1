"""The server before the first request: what it serves, and whether its tokens are ours."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import aiohttp

from loadtest.errors import ServerUnreachable, ServerUnusable, TokenizerMismatch
from loadtest.http import without_surrogates
from loadtest.tokens import ModelTokens

_SHOWN = 200
_SAMPLE_TEXT = "Patient millers carry copper lanterns beyond the northern gate; 42 owls, déjà vu."


@dataclass(frozen=True)
class ServerInfo:
    """The server as the replay addresses it. `base_url` without a trailing slash; `model`: the name in requests.

    `fingerprint`: of the served model's weights, "" where the server does not tell. `stand_ins`: what it says that it
    has in place of engines that compute.
    """

    base_url: str
    model: str
    max_model_len: int | None = None
    fingerprint: str = ""
    stand_ins: tuple[str, ...] = ()


def error_message(text: str) -> str:
    """The message of an error in OpenAI's shape, else the text itself, cut short."""
    try:
        error = json.loads(text)["error"]
        message = error["message"] if isinstance(error, dict) else error
    except (ValueError, KeyError, TypeError):
        message = text
    return " ".join(without_surrogates(str(message)).split())[:_SHOWN]


async def discover(
    session: aiohttp.ClientSession, base_url: str, *, model: str, deadline_s: float, needs_list: bool = True
) -> ServerInfo:
    """Ask /v1/models what is served there; `model` picks one by name, "" the first.

    `needs_list` False: a server without that route is taken at the caller's word for `model`. Raises ServerUnusable.
    """
    url = f"{base_url}/v1/models"
    status, text = await _ask(session.get(url, timeout=aiohttp.ClientTimeout(total=deadline_s)), url)
    if status in (404, 405) and model and not needs_list:
        return ServerInfo(base_url, model)
    if status != 200:
        hint = "; give the key with --api-key" if status in (401, 403) else ""
        raise ServerUnusable(f"{url} answers HTTP {status}: {error_message(text)}{hint}")
    try:
        models: dict[str, dict[str, Any]] = {card["id"]: card for card in json.loads(text)["data"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ServerUnusable(f"{url} does not answer as an OpenAI-compatible server: {text[:_SHOWN]!r}") from error
    if not models or (model and model not in models):
        raise ServerUnusable(f"{url} serves {', '.join(map(repr, models)) or 'no model'}, not {model or 'any model'!r}")
    name = model or next(iter(models))
    length = models[name].get("max_model_len")
    extension = models[name].get("moonpool")
    extension = extension if isinstance(extension, dict) else {}
    fingerprint, stand_ins = extension.get("fingerprint"), extension.get("stand_ins")
    return ServerInfo(
        base_url,
        name,
        length if isinstance(length, int) and length > 0 else None,
        fingerprint if isinstance(fingerprint, str) else "",
        tuple(each for each in stand_ins if isinstance(each, str)) if isinstance(stand_ins, list) else (),
    )


async def check_tokenizer(
    session: aiohttp.ClientSession,
    server: ServerInfo,
    tokens: ModelTokens,
    *,
    deadline_s: float,
    flag: str = "--model-path",
) -> str:
    """Compare the server's /tokenize with the local tokenizer on a sample text.

    Returns a notice where the server has no such route, else "". Raises TokenizerMismatch, naming `flag`, where the two
    differ: then the prompts would be no text to the served model, and a verification against the local one would be
    void.
    """
    url = f"{server.base_url}/tokenize"
    body = {"model": server.model, "prompt": _SAMPLE_TEXT, "add_special_tokens": False}
    status, text = await _ask(session.post(url, json=body, timeout=aiohttp.ClientTimeout(total=deadline_s)), url)
    if status != 200:
        return f"the server's tokenizer was not compared ({url} answers HTTP {status})"
    try:
        theirs = json.loads(text)["tokens"]
    except (ValueError, KeyError, TypeError):
        return f"the server's tokenizer was not compared ({url} answers {text[:_SHOWN]!r})"
    if theirs != tokens.encode_all([_SAMPLE_TEXT])[0]:
        raise TokenizerMismatch(
            f"{server.base_url} tokenises otherwise than {tokens.path}; give the folder of the served model "
            f"({server.model}) with {flag}"
        )
    return ""


async def _ask(request: Any, url: str) -> tuple[int, str]:
    try:
        async with request as response:
            return response.status, await response.text()
    except aiohttp.ClientConnectorCertificateError as error:
        raise ServerUnreachable(
            f"the certificate at {url} is not trusted ({error.certificate_error}); name the CA that signed it in "
            "SSL_CERT_FILE, and in the URL a name that it carries"
        ) from error
    except aiohttp.ClientConnectorSSLError as error:
        raise ServerUnreachable(f"no TLS at {url} ({error.strerror}); is it http://?") from error
    except (TimeoutError, aiohttp.ClientError, OSError, UnicodeDecodeError) as error:
        raise ServerUnreachable(
            f"no usable server at {url} ({type(error).__name__}: {error}); start one with `moonpool serve`"
        ) from error
