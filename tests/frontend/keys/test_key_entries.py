"""The form of the file of keys: what is taken, and that no message shows what may be a key."""

import datetime
import hashlib

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from frontend.callers import ApiCaller, Quota
from frontend.errors import KeysFileError
from frontend.keys_file import KeyEntry, callers_of, parse_keys, plain

HASH = "sha256:" + hashlib.sha256(b"mp-one").hexdigest()
OTHER = "sha256:" + hashlib.sha256(b"mp-two").hexdigest()


def file_of(*entries: str) -> str:
    return "keys:\n" + "\n".join("- {" + entry + "}" for entry in entries)


def test_an_entry_with_everything_in_it() -> None:
    said = f"name: a, hash: {HASH}, tenant: t, scope: admin, expires: 2027-01-31, cache_salt: x"
    (entry,) = parse_keys(file_of(said + ", requests_per_minute: 1, tokens_per_minute: 2, max_concurrent: 3"))
    end_s = datetime.datetime(2027, 1, 31, tzinfo=datetime.UTC).timestamp()
    assert entry == KeyEntry("a", bytes.fromhex(HASH[7:]), "t", True, end_s, "x", Quota(1, 2, 3))


@pytest.mark.parametrize("text", ["keys:", "keys: []", "keys:\n"])
def test_a_file_without_keys_lets_nobody_in(text: str) -> None:
    assert parse_keys(text) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "expected a mapping with the single key `keys`"),
        ("[1]", "expected a mapping with the single key `keys`"),
        ("keys: 1", "expected a mapping with the single key `keys`"),
        ("keys: []\nmore: 1", "expected a mapping with the single key `keys`"),
        ("keys:\n- name: a\n  name: b", "duplicate field in the mapping that begins at line 2"),
        ("keys:\n- 'mp-secret", "line 2"),
        ("keys: !!python/object/apply:os.system [mp-secret]", "invalid YAML"),
        (file_of("mp-secret"), "entry 1: name"),
        (file_of(f"name: 'mp secret', hash: {HASH}, tenant: t"), "entry 1: name"),
        (file_of("name: a, hash: mp-secret, tenant: t"), r"entry 1 \(a\): hash: expected sha256"),
        (file_of(f"name: a, hash: '{HASH[7:]}', tenant: t"), r"entry 1 \(a\): hash: expected sha256"),
        (file_of(f"name: a, hash: {HASH}"), r"\(a\): tenant"),
        (file_of(f"name: a, hash: {HASH}, tenant: other"), r"\(a\): tenant"),
        (file_of(f"name: a, hash: {HASH}, tenant: t, scope: mp-secret"), "scope: expected user or admin"),
        (file_of(f"name: a, hash: {HASH}, tenant: t, mp-secret: 1"), "1 unknown fields; expected only"),
        (file_of(f"name: a, hash: {HASH}, tenant: t, expires: mp-secret"), "expires: expected a date"),
        (file_of(f"name: a, hash: {HASH}, tenant: t, cache_salt: 7"), "cache_salt: expected a text"),
        (
            file_of(f"name: a, hash: {HASH}, tenant: t, max_concurrent: 0"),
            "max_concurrent: expected an integer of at least 1",
        ),
        (
            file_of(f"name: a, hash: {HASH}, tenant: t, max_concurrent: true"),
            "max_concurrent: expected an integer of at least 1",
        ),
        *(
            (file_of(f"name: a, hash: {HASH}, tenant: t, slo_classes: {wrong}"), "slo_classes: expected a list")
            for wrong in ("[]", "chat", "[secret!]", "[[a]]", "[1]")
        ),
        (file_of(f"name: a, hash: {HASH}, tenant: t", f"name: a, hash: {OTHER}, tenant: t"), "duplicate name"),
        (file_of(f"name: a, hash: {HASH}, tenant: t", f"name: b, hash: {HASH}, tenant: u"), "duplicate hash"),
    ],
)
def test_what_cannot_be_is_named_and_not_shown(text: str, problem: str) -> None:
    with pytest.raises(KeysFileError, match=problem) as raised:
        parse_keys(text)
    assert "secret" not in str(raised.value)


def test_what_one_entry_says_of_a_tenant_holds_for_all_its_keys() -> None:
    entries = parse_keys(
        file_of(
            f"name: a, hash: {HASH}, tenant: t",
            f"name: b, hash: {OTHER}, tenant: t, cache_salt: s, max_concurrent: 3, slo_classes: [chat, batch]",
        )
    )
    assert [caller for _, caller in callers_of(entries)] == [
        ApiCaller("t", "a", cache_salt="s", quota=Quota(max_concurrent=3), slo_classes=("batch", "chat")),
        ApiCaller("t", "b", cache_salt="s", quota=Quota(max_concurrent=3), slo_classes=("batch", "chat")),
    ]


@pytest.mark.parametrize("said", ["cache_salt: s%d", "max_concurrent: %d", "slo_classes: [c%d]"])
def test_two_entries_that_differ_about_their_tenant_are_refused(said: str) -> None:
    entries = (f"name: k{i}, hash: {h}, tenant: t, {said % i}" for i, h in ((1, HASH), (2, OTHER)))
    with pytest.raises(KeysFileError, match="another key of tenant 't'"):
        callers_of(parse_keys(file_of(*entries)))


@given(
    st.builds(
        KeyEntry,
        name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", fullmatch=True).filter(lambda name: name != "other"),
        digest=st.binary(min_size=32, max_size=32),
        tenant=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", fullmatch=True).filter(lambda name: name != "other"),
        is_admin=st.booleans(),
        expires_s=st.none() | st.integers(0, 4 * 10**9).map(float),
        cache_salt=st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
        quota=st.builds(Quota, *[st.none() | st.integers(1, 10**9)] * 3),
        slo_classes=st.sets(st.sampled_from(["batch", "chat", "gold"])).map(sorted).map(tuple),
    )
)
def test_an_entry_survives_the_file(entry: KeyEntry) -> None:
    assert parse_keys(yaml.safe_dump({"keys": [plain(entry)]})) == [entry]


@given(st.text(max_size=8), st.text(max_size=8))
def test_a_request_s_salt_stays_within_its_tenant(first: str, second: str) -> None:
    callers = [
        ApiCaller(""),
        ApiCaller("a"),
        ApiCaller("b"),
        ApiCaller("a", cache_salt="b"),
        ApiCaller("c", cache_salt="c"),
    ]
    salts = [caller.block_salt(requested) for caller in callers for requested in {first, second}]
    assert len(set(salts)) == len(salts)


def test_a_salt_that_looks_like_a_tenant_s_is_another_where_no_key_is_asked_for() -> None:
    inner = ApiCaller("a").block_salt("")
    assert ApiCaller("").block_salt(inner) != inner
    assert ApiCaller("").block_salt("plain") == "plain"
    assert ApiCaller("a").block_salt("") == ApiCaller("a", "another key", is_admin=True).block_salt("")
    shared = [ApiCaller(name, cache_salt="shared").block_salt("x") for name in "ab"]
    assert shared[0] == shared[1] != ApiCaller("shared").block_salt("x")
