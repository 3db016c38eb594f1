"""API keys: the tenant of a key, and access for operators."""

import hashlib
from typing import Any

import pytest

from frontend.api_keys import ApiKeys
from frontend.callers import ANYBODY
from frontend.errors import ApiError, Forbidden, Unauthorized
from frontend.keys_file import KeyEntry, callers_of


def entry(name: str, key: str, **more: Any) -> KeyEntry:
    return KeyEntry(name, hashlib.sha256(key.encode()).digest(), **{"tenant": name, **more})


def keys_of(*entries: KeyEntry, now_s: float = 0.0, plain: tuple[str, ...] = ()) -> ApiKeys:
    keys = ApiKeys(plain, required=True, now_s=lambda: now_s)
    keys.replace(callers_of(entries))
    return keys


def code_of(raised: pytest.ExceptionInfo[ApiError]) -> tuple[int, str | None]:
    return raised.value.status, raised.value.code


def test_without_any_key_configured_everybody_may_ask_and_nobody_is_an_admin() -> None:
    keys = ApiKeys()
    assert keys.caller(None) == keys.caller("Bearer any") == ANYBODY
    for authorization in (None, "Bearer any"):
        with pytest.raises(Forbidden, match="moonpool keys new --admin") as raised:
            keys.admin(authorization)
        assert code_of(raised) == (403, "no_admin_key")


def test_an_empty_file_lets_nobody_in() -> None:
    with pytest.raises(Unauthorized):
        keys_of().caller("Bearer any")


@pytest.mark.parametrize(
    "authorization", [None, "", "Bearer", "Bearer ", "mp-u", "Basic mp-u", "Bearer mp-x", "Bearer 你"]
)
def test_who_shows_no_known_key_is_refused(authorization: str | None) -> None:
    keys = keys_of(entry("u", "mp-u"), entry("a", "mp-a", is_admin=True))
    for ask in (keys.caller, keys.admin):
        with pytest.raises(Unauthorized):
            ask(authorization)


def test_a_key_stands_for_its_tenant_and_only_an_admin_s_for_an_operator() -> None:
    keys = keys_of(entry("u", "mp-u"), entry("a", "mp-a", is_admin=True), plain=("trial",))
    assert (keys.caller("Bearer mp-u").tenant, keys.caller("bearer  mp-a ").tenant) == ("u", "a")
    assert keys.admin("Bearer mp-a").key_name == "a"
    for key in ("mp-u", "trial"):
        with pytest.raises(Forbidden) as raised:
            keys.admin(f"Bearer {key}")
        assert code_of(raised) == (403, "admin_only")
    assert set(keys.tenants) == {"u", "a", hashlib.sha256(b"trial").hexdigest()[:16]}


def test_a_key_ends_at_its_time() -> None:
    late = entry("late", "mp-late", is_admin=True, expires_s=100.0)
    assert keys_of(late, now_s=99.9).admin("Bearer mp-late").tenant == "late"
    for ask in (keys_of(late, now_s=100.0).caller, keys_of(late, now_s=100.0).admin):
        with pytest.raises(Unauthorized) as raised:
            ask("Bearer mp-late")
        assert code_of(raised) == (401, "expired_api_key")


def test_what_the_file_held_before_is_forgotten() -> None:
    keys = keys_of(entry("u", "mp-u"), plain=("trial",))
    keys.replace(callers_of([entry("v", "mp-v")]))
    assert keys.caller("Bearer mp-v").tenant == "v"
    assert keys.caller("Bearer trial").tenant
    with pytest.raises(Unauthorized):
        keys.caller("Bearer mp-u")
