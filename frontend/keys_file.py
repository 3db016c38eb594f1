"""Format of the API keys file. Pure. Error messages never contain a value, which might be a key.

keys:
- name: acme-2026            # appears in logs; unique
  hash: sha256:9f86d081...   # of the key; `moonpool keys new` makes both
  tenant: acme
  scope: user                # or admin; user if left out
  expires: 2027-01-31        # optional: at the beginning of that day, UTC; or a time
  cache_salt: ...            # this and the following belong to the tenant: set in one of its entries, or equal in all
  requests_per_minute: 600
  tokens_per_minute: 200000
  max_concurrent: 32
  slo_classes: [chat, batch] # the only classes of objectives that the tenant may use
"""

import datetime
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import yaml

from frontend.callers import UNBOUNDED, ApiCaller, Quota
from frontend.errors import KeysFileError
from settings.yaml_nesting import events_of

NAME: Final = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
_HASH: Final = re.compile(r"sha256:([0-9a-f]{64})")
_SCOPES: Final = ("user", "admin")
_QUOTAS: Final = ("requests_per_minute", "tokens_per_minute", "max_concurrent")
TENANT_FIELDS: Final = ("cache_salt", *_QUOTAS, "slo_classes")  # of an entry, for all keys of its tenant
_FIELDS: Final = ("name", "hash", "tenant", "scope", "expires", *TENANT_FIELDS)
_OTHERS: Final = "other"  # the conductor's name for all tenants beyond its limit
_MOST: Final = 10**12
_MOST_SALT_CHARS: Final = 512
_MOST_CLASSES: Final = 64


@dataclass(frozen=True)
class KeyEntry:
    """Entry of one key; `expires_s` in seconds since the epoch."""

    name: str
    digest: bytes = field(repr=False)
    tenant: str
    is_admin: bool = False
    expires_s: float | None = None
    cache_salt: str = field(default="", repr=False)
    quota: Quota = UNBOUNDED
    slo_classes: tuple[str, ...] = ()  # (): all


def parse_keys(text: str) -> list[KeyEntry]:
    """Parse the file's content. Raises KeysFileError, which names the entry and the field."""
    content = _plain(text)
    if not isinstance(content, dict) or set(content) != {"keys"} or not isinstance(content["keys"] or [], list):
        raise KeysFileError("expected a mapping with the single key `keys` and a list of entries")
    entries = [_entry(fields, f"entry {number}") for number, fields in enumerate(content["keys"] or [], start=1)]
    for what in ("name", "digest"):
        seen: dict[Any, str] = {}
        for entry in entries:
            if (value := getattr(entry, what)) in seen:
                first = f", first in {seen[value]!r}" if what == "digest" else ""
                raise KeysFileError(f"{entry.name!r}: duplicate {'hash' if what == 'digest' else what}{first}")
            seen[value] = entry.name
    return entries


def callers_of(entries: Sequence[KeyEntry]) -> list[tuple[KeyEntry, ApiCaller]]:
    """Return each entry with its caller. A tenant's salt, quotas and classes, set in one entry, apply to all its keys.

    Raises KeysFileError if two entries of one tenant contradict each other.
    """
    salts: dict[str, str] = {}
    quotas: dict[str, Quota] = {}
    classes: dict[str, tuple[str, ...]] = {}
    for entry in entries:
        if entry.cache_salt and salts.setdefault(entry.tenant, entry.cache_salt) != entry.cache_salt:
            raise KeysFileError(f"{entry.name!r}: another key of tenant {entry.tenant!r} has a different cache_salt")
        if entry.quota != UNBOUNDED and quotas.setdefault(entry.tenant, entry.quota) != entry.quota:
            raise KeysFileError(
                f"{entry.name!r}: another key of tenant {entry.tenant!r} has different quotas: set them in only one "
                "of its entries, or to the same values in each"
            )
        if entry.slo_classes and classes.setdefault(entry.tenant, entry.slo_classes) != entry.slo_classes:
            raise KeysFileError(f"{entry.name!r}: another key of tenant {entry.tenant!r} has different slo_classes")
    return [
        (
            entry,
            ApiCaller(
                entry.tenant,
                entry.name,
                entry.is_admin,
                salts.get(entry.tenant, ""),
                quotas.get(entry.tenant, UNBOUNDED),
                classes.get(entry.tenant, ()),
            ),
        )
        for entry in entries
    ]


def plain(entry: KeyEntry) -> dict[str, Any]:
    """Return the entry in the form of the file."""
    fields: dict[str, Any] = {"name": entry.name, "hash": f"sha256:{entry.digest.hex()}", "tenant": entry.tenant}
    fields["scope"] = _SCOPES[entry.is_admin]
    if entry.expires_s is not None:
        fields["expires"] = datetime.datetime.fromtimestamp(entry.expires_s, datetime.UTC).isoformat()
    if entry.cache_salt:
        fields["cache_salt"] = entry.cache_salt
    fields |= {name: value for name, value in asdict(entry.quota).items() if value is not None}
    return fields | ({"slo_classes": list(entry.slo_classes)} if entry.slo_classes else {})


def check_name(text: Any, where: str) -> str:
    """Return `text` if it is a valid name of a key or tenant. Raises KeysFileError."""
    if not isinstance(text, str) or not re.fullmatch(NAME, text) or text == _OTHERS:
        raise KeysFileError(
            f"{where}: expected at most 64 letters, digits, _ . and -, beginning with a letter or digit"
            f" (and not {_OTHERS!r})"
        )
    return text


def _entry(fields: Any, where: str) -> KeyEntry:
    if not isinstance(fields, dict):
        raise KeysFileError(f"{where}: expected a mapping with {', '.join(_FIELDS[:4])}")
    name = check_name(fields.get("name"), f"{where}: name")
    where = f"{where} ({name})"
    if unknown := [key for key in fields if key not in _FIELDS]:
        raise KeysFileError(f"{where}: {len(unknown)} unknown fields; expected only {', '.join(_FIELDS)}")
    found = _HASH.fullmatch(str(fields.get("hash")))
    if found is None:
        raise KeysFileError(f"{where}: hash: expected sha256: and 64 hexadecimal digits (never the key itself)")
    if fields.get("scope", "user") not in _SCOPES:
        raise KeysFileError(f"{where}: scope: expected {' or '.join(_SCOPES)}")
    return KeyEntry(
        name,
        bytes.fromhex(found[1]),
        check_name(fields.get("tenant"), f"{where}: tenant"),
        fields.get("scope") == "admin",
        expiry(fields["expires"], where) if fields.get("expires") is not None else None,
        _salt(fields.get("cache_salt", ""), where),
        replace(Quota(), **dict(_limits(fields, where))),
        check_classes(fields.get("slo_classes"), f"{where}: slo_classes"),
    )


def expiry(value: Any, where: str) -> float:
    """Return a date (its beginning) or time in seconds since the epoch; UTC by default. Raises KeysFileError."""
    if isinstance(value, str):
        try:
            value = datetime.datetime.fromisoformat(value)
        except ValueError:
            value = None
    if isinstance(value, datetime.date) and not isinstance(value, datetime.datetime):
        value = datetime.datetime(value.year, value.month, value.day)
    if not isinstance(value, datetime.datetime):
        raise KeysFileError(
            f"{where}: expires: expected a date such as 2027-01-31, or a time such as 2027-01-31T18:00:00+00:00"
        )
    return (value if value.tzinfo else value.replace(tzinfo=datetime.UTC)).timestamp()


def _salt(value: Any, where: str) -> str:
    if not isinstance(value, str) or len(value) > _MOST_SALT_CHARS:
        raise KeysFileError(f"{where}: cache_salt: expected a text of at most {_MOST_SALT_CHARS} characters")
    return value


def check_classes(value: Any, where: str) -> tuple[str, ...]:
    """Return a tenant's classes, sorted; () for None. Raises KeysFileError."""
    if value is None:
        return ()
    names = value if isinstance(value, list) else []
    if not 1 <= len(names) <= _MOST_CLASSES or not all(
        isinstance(each, str) and re.fullmatch(NAME, each) for each in names
    ):
        raise KeysFileError(
            f"{where}: expected a list of 1 to {_MOST_CLASSES} names of classes of objectives; omit it to allow all"
        )
    return tuple(sorted(set(names)))


def _limits(fields: dict[str, Any], where: str) -> Iterable[tuple[str, int]]:
    for name in _QUOTAS:
        value = fields.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST:
            raise KeysFileError(f"{where}: {name}: expected an integer of at least 1; omit it for no limit")
        yield name, value


def _plain(text: str) -> Any:
    # The YAML parser's messages quote the content, so only the position is reported.
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in events_of(text)):
            raise KeysFileError("YAML aliases (*name) are not allowed: write each entry out")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        _refuse_twice(node)
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise KeysFileError(f"invalid YAML{place}") from None
    except (yaml.YAMLError, RecursionError, ValueError):
        raise KeysFileError("invalid YAML") from None


def _refuse_twice(node: yaml.Node | None) -> None:
    # YAML parsers silently use the last of two equal fields, which could change a scope.
    if isinstance(node, yaml.MappingNode):
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if len(set(names)) < len(names):
            raise KeysFileError(f"duplicate field in the mapping that begins at line {node.start_mark.line + 1}")
        for _, value in node.value:
            _refuse_twice(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _refuse_twice(value)
