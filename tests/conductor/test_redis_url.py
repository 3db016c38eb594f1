"""Redis URLs: the password that is given apart from them."""

import pytest
from redis.asyncio.connection import parse_url

from conductor.errors import ConductorConfigError
from conductor.redis_url import redacted, with_password


@pytest.mark.parametrize("url", ["redis://h:1/2", "rediss://h", "redis://user@h", "unix:///s.sock"])
def test_a_password_given_apart_is_the_one_that_redis_gets(url: str) -> None:
    hard = "p@ss/w:rd %41#?"
    whole = with_password(url, hard)
    found = parse_url(whole)
    assert found["password"] == hard
    assert {key: value for key, value in found.items() if key != "password"} == parse_url(url)
    assert hard not in redacted(whole)


def test_the_password_in_the_url_goes_before_it() -> None:
    assert with_password("redis://:mine@h", "other") == "redis://:mine@h"


def test_without_one_the_url_stays_as_it_is() -> None:
    assert with_password("redis://h", "") == "redis://h"


def test_what_is_no_url_is_refused_without_showing_the_password() -> None:
    with pytest.raises(ConductorConfigError, match="expected redis://") as error:
        with_password("h:6379", "secret")
    assert "secret" not in str(error.value)
