"""Validation and redaction of Redis URLs. Passwords never appear in messages."""

from urllib.parse import SplitResult, quote, urlsplit

from conductor.errors import ConductorConfigError

__all__ = ["check_redis_url", "redacted", "with_password"]

_SCHEMES = ("redis", "rediss", "unix")


def check_redis_url(url: str) -> None:
    """Raise ConductorConfigError unless `url` is a Redis URL."""
    expected = "expected redis://[user:password@]host[:port][/db], rediss://... (TLS) or unix://[:password@]/socket"
    try:
        parts = urlsplit(url)
        complete = bool(parts.path) if parts.scheme == "unix" else bool(parts.hostname)
        _ = parts.port if parts.scheme != "unix" else None
    except ValueError as error:
        raise ConductorConfigError(f"redis_url cannot be read ({_why(error, url)}): {expected}") from None
    if parts.scheme not in _SCHEMES or not complete:
        raise ConductorConfigError(f"redis_url is {redacted(url)!r}: {expected}")


def with_password(url: str, password: str) -> str:
    """Return the URL with `password` (unescaped) added if it has none. Raises ConductorConfigError."""
    if not password:
        return url
    check_redis_url(url)
    parts = urlsplit(url)
    if parts.password is not None:
        return url
    who, _, where = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"{who}:{quote(password, safe='')}@{where}").geturl()


def redacted(url: str) -> str:
    """Return the URL without its password, and without its options, which may contain one."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "..."
    if not parts.scheme:
        return "..."
    return SplitResult(parts.scheme, _without_password(parts.netloc), parts.path, "", "").geturl()


def _without_password(netloc: str) -> str:
    who, at, where = netloc.rpartition("@")
    user, colon, _ = who.partition(":")
    return f"{user}{':***' if colon else ''}{at}{where}"


def _why(error: ValueError, url: str) -> str:
    """Return the reason, unless it repeats the URL, which may contain a password."""
    text = str(error)
    return "not a URL" if any(part and part in text for part in (url, url.rpartition("@")[0])) else text
