"""Discovery of the server: its models, and a comparison of its tokenizer with the local one."""

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
    """Server under test. `base_url`: without a trailing slash; `model`: the name in requests.

    `fingerprint`: of the served model's weights, "" if not reported. `kv_scale_group`: values of its KV in int8 that
    share a scale, 0 for other KV. `stand_ins`: names of the engines that simulate
    computation instead of running a model, as reported by the server.
    """

    base_url: str
    model: str
    max_model_len: int | None = None
    fingerprint: str = ""
    stand_ins: tuple[str, ...] = ()
    kv_scale_group: int = 0


def error_message(text: str) -> str:
    """Return the message of an error in OpenAI's format, else the text itself, truncated."""
    try:
        error = json.loads(text)["error"]
        message = error["message"] if isinstance(error, dict) else error
    except (ValueError, KeyError, TypeError):
        message = text
    return " ".join(without_surrogates(str(message)).split())[:_SHOWN]


async def discover(
    session: aiohttp.ClientSession, base_url: str, *, model: str, deadline_s: float, needs_list: bool = True
) -> ServerInfo:
    """Query /v1/models and select `model` by name, or the first model if it is "".

    `needs_list` False: if the server lacks that endpoint, `model` is used unchecked. Raises ServerUnusable.
    """
    url = f"{base_url}/v1/models"
    status, text = await _ask(session.get(url, timeout=aiohttp.ClientTimeout(total=deadline_s)), url)
    if status in (404, 405) and model and not needs_list:
        return ServerInfo(base_url, model)
    if status != 200:
        hint = "; give the key with --api-key" if status in (401, 403) else ""
        raise ServerUnusable(f"{url} returned HTTP {status}: {error_message(text)}{hint}")
    try:
        models: dict[str, dict[str, Any]] = {card["id"]: card for card in json.loads(text)["data"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ServerUnusable(
            f"{url} did not return the model list of an OpenAI-compatible server: {text[:_SHOWN]!r}"
        ) from error
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
        group if isinstance(group := extension.get("kv_scale_group"), int) else 0,
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

    Returns a notice if the server lacks that endpoint, else "". Raises TokenizerMismatch, naming `flag`, if the two
    differ: the prompts would be meaningless to the served model, and verification would be invalid.
    """
    url = f"{server.base_url}/tokenize"
    body = {"model": server.model, "prompt": _SAMPLE_TEXT, "add_special_tokens": False}
    status, text = await _ask(session.post(url, json=body, timeout=aiohttp.ClientTimeout(total=deadline_s)), url)
    if status != 200:
        return f"the server's tokenizer was not compared ({url} returned HTTP {status})"
    try:
        theirs = json.loads(text)["tokens"]
    except (ValueError, KeyError, TypeError):
        return f"the server's tokenizer was not compared ({url} returned {text[:_SHOWN]!r})"
    if theirs != tokens.encode_all([_SAMPLE_TEXT])[0]:
        raise TokenizerMismatch(
            f"{server.base_url} uses a different tokenizer than {tokens.path}; give the folder of the served model "
            f"({server.model}) with {flag}"
        )
    return ""


async def _ask(request: Any, url: str) -> tuple[int, str]:
    try:
        async with request as response:
            return response.status, await response.text()
    except aiohttp.ClientConnectorCertificateError as error:
        raise ServerUnreachable(
            f"the certificate of {url} is not trusted ({error.certificate_error}); set SSL_CERT_FILE to the CA that "
            "signed it, and use a host name listed in the certificate"
        ) from error
    except aiohttp.ClientConnectorSSLError as error:
        raise ServerUnreachable(
            f"the TLS handshake with {url} failed ({error.strerror}); if the server does not use TLS, use http://"
        ) from error
    except (TimeoutError, aiohttp.ClientError, OSError, UnicodeDecodeError) as error:
        raise ServerUnreachable(
            f"no usable server at {url} ({type(error).__name__}: {error}); start one with `moonpool serve`"
        ) from error
