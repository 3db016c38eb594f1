"""Texts out of JSON may hold halves of characters, which can be neither written nor printed. Pure.

JSON's escapes are of UTF-16, and servers that count in it cut an emoji between two events.
"""

from __future__ import annotations


def mended(text: str) -> str:
    """The text with halves of characters put together; one without its other half becomes U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
