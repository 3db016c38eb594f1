"""The command `moonpool keys`: creates, lists and revokes API keys in a file. A key is shown once, never stored."""

import json
import os
import re
import secrets
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer
import yaml
from rich.console import Console
from rich.table import Table

from frontend.api_keys import digest_of
from frontend.callers import ApiCaller, Quota
from frontend.errors import KeysFileError
from frontend.keys_file import TENANT_FIELDS, KeyEntry, callers_of, check_classes, check_name, expiry, parse_keys, plain
from moonpool.commands.arguments import command_group
from moonpool.errors import ConfigError
from moonpool.options import reported_errors

app = command_group("keys", "Create, list and revoke API keys: the entries by which the API server recognises them.")

_PREFIX: Final = "mp-"  # lets scanners for leaked secrets recognise a key
_KEY_NBYTES: Final = 32

Bound = Annotated[int | None, typer.Option(min=1, show_default=False)]
KeysFile = Annotated[Path, typer.Option(help="Keys file.", show_default=False)]


@app.command()
def new(
    name: Annotated[str, typer.Option(help="Name of the key, for logs and operators.")],
    tenant: Annotated[str, typer.Option(help="Tenant of its requests, for shares, objectives and quotas.")],
    admin: Annotated[bool, typer.Option("--admin", help="Allow it to act as an operator.")] = False,
    expires: Annotated[str, typer.Option(help="Expiry: a day (from 00:00 UTC) or a time, e.g. 2027-01-31.")] = "",
    requests_per_minute: Bound = None,
    tokens_per_minute: Bound = None,
    max_concurrent: Bound = None,
    slo_class: Annotated[
        list[str] | None,
        typer.Option(
            help="Class of objectives that the tenant may use; may be repeated. Default: all.", metavar="NAME"
        ),
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="Keys file to add the entry to, created if missing. Default: print the entry.")
    ] = None,
) -> None:
    """Create a key. Only the key goes to standard output; instructions go to standard error.

    Example: moonpool keys new --name acme-2027 --tenant acme --file keys.yaml
    """
    with reported_errors():
        key = _PREFIX + secrets.token_urlsafe(_KEY_NBYTES)
        quota = Quota(requests_per_minute, tokens_per_minute, max_concurrent)
        try:
            entry = KeyEntry(
                check_name(name, "--name"),
                digest_of(key.encode()),
                check_name(tenant, "--tenant"),
                admin,
                expiry(expires, "--expires") if expires else None,
                quota=quota,
                slo_classes=check_classes(slo_class or None, "--slo-class"),
            )
        except KeysFileError as error:
            raise ConfigError(str(error)) from error
        text = yaml.safe_dump([plain(entry)], sort_keys=False)
        if file is None:
            print(f"# below `keys:` in the file of --api-keys-file\n{text}", file=sys.stderr, end="")
        else:
            _change(file, lambda before: _with_entry(before, text), creates=True)
            print(f"added {name} to {file}; the key is shown only now:", file=sys.stderr)
        print(key)


@app.command("list")
def list_keys(
    file: KeysFile,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the keys of a file: names, tenants, scopes, expiries and limits, but no hashes.

    Example: moonpool keys list --file keys.yaml
    """
    with reported_errors():
        rows = [_row(entry, caller, time.time()) for entry, caller in _callers(file, _text(file))]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("name", "tenant", "scope", "expires", "limits", "classes"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        expires = f"{row['expires'] or 'never'}{' (expired)' if row['expired'] else ''}"
        limits = ", ".join(f"{name} {value}" for name, value in row["limits"].items())
        classes = ", ".join(row["slo_classes"])
        table.add_row(row["name"], row["tenant"], row["scope"], expires, limits or "none", classes or "all")
    Console(highlight=False).print(table)


@app.command()
def revoke(
    name: Annotated[str, typer.Argument(help="Name of the key.", show_default=False)],
    file: KeysFile,
) -> None:
    """Remove a key from a file. Frontends that read the file refuse the key within a second or two.

    What the entry says for its whole tenant (quotas, classes, salt) moves to another key of the tenant.

    Example: moonpool keys revoke acme-2027 --file keys.yaml
    """
    with reported_errors():
        _change(file, lambda before: _without_entry(before, name))
    print(f"removed {name} from {file}", file=sys.stderr)


def _row(entry: KeyEntry, caller: ApiCaller, now_s: float) -> dict[str, Any]:
    shown = plain(entry)
    return {
        "name": entry.name,
        "tenant": entry.tenant,
        "scope": shown["scope"],
        "expires": shown.get("expires"),
        "expired": entry.expires_s is not None and entry.expires_s <= now_s,
        "limits": {name: value for name, value in asdict(caller.quota).items() if value is not None},
        "slo_classes": list(caller.slo_classes),
    }


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"there is no {path}; `moonpool keys new --file {path}` creates it with a first key"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _callers(path: Path, text: str) -> list[tuple[KeyEntry, ApiCaller]]:
    try:
        return callers_of(parse_keys(text))
    except KeysFileError as error:
        raise ConfigError(f"{path} is invalid: {error}") from error


def _change(path: Path, edit: Callable[[str], str], *, creates: bool = False) -> None:
    """Replace the file by its edited text. Raises ConfigError, and changes nothing, if either is invalid."""
    before = "keys:\n" if creates and not path.exists() else _text(path)
    _callers(path, before)
    try:
        after = edit(before)
        callers_of(parse_keys(after))
        _write(path.resolve(), after)
    except KeysFileError as error:
        raise ConfigError(f"{path} would be invalid after this change: {error}") from error
    except OSError as error:
        raise ConfigError(f"cannot change {path}: {error}") from error


def _without_entry(before: str, name: str) -> str:
    """Return the text without an entry; what it says for its tenant moves to the tenant's first other entry.

    Raises ConfigError if there is no such entry, or if the result would change another key.
    """
    pairs = callers_of(parse_keys(before))
    entries = {entry.name: entry for entry, _ in pairs}
    if name not in entries:
        raise ConfigError(f"no key is named {name!r}; the file has {', '.join(entries) or 'no keys'}")
    lines, places = before.splitlines(keepends=True), _places(before)
    heir = next((each for each in entries.values() if each.tenant == entries[name].tenant and each.name != name), None)
    if heir is not None:
        said = plain(heir)
        moved = {key: value for key, value in plain(entries[name]).items() if key in TENANT_FIELDS and key not in said}
        last = places[heir.name].end - 1
        if moved:
            more = textwrap.indent(yaml.safe_dump(moved, sort_keys=False), " " * places[heir.name].indent)
            lines[last] = lines[last].rstrip("\n") + "\n" + more
    for at in range(places[name].start, places[name].end):
        lines[at] = ""
    after = "".join(lines)
    try:
        is_right = [each for _, each in callers_of(parse_keys(after))] == [
            each for _, each in pairs if each.key_name != name
        ]
    except KeysFileError:
        is_right = False
    if not is_right:
        raise ConfigError(f"the entry of {name!r} shares its lines with others: remove it by hand")
    return after


class _Place(NamedTuple):
    """Lines [start, end) of an entry, without the comments after it, and the indentation of its fields."""

    start: int
    end: int
    indent: int


def _places(text: str) -> dict[str, _Place]:
    """Return the place of each entry of a valid file, by name."""
    root: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    ((_, entries),) = root.value
    lines, places = text.splitlines(), {}
    for node in entries.value:
        start, end = node.start_mark.line, node.end_mark.line
        # A block ends where the next token begins, which may be in the middle of its own last line.
        end += bool(lines[end][: node.end_mark.column].strip()) if end < len(lines) else 0
        while end > start + 1 and re.fullmatch(r"\s*(#.*)?", lines[end - 1]):
            end -= 1
        (name,) = (value.value for key, value in node.value if key.value == "name")
        places[name] = _Place(start, end, node.start_mark.column)
    return places


def _with_entry(before: str, entry: str) -> str:
    """Return the text with the entry appended, indented like the existing ones."""
    found = re.search(r"^( *)- ", before, re.MULTILINE)
    opened = re.sub(r"^keys: *\[ *\]", "keys:", before, flags=re.MULTILINE)
    return opened.rstrip("\n") + "\n" + textwrap.indent(entry, found[1] if found else "")


def _write(path: Path, text: str) -> None:
    """Replace the file atomically, keeping its mode and owner."""
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=".keys-")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            if path.exists():
                kept = path.stat()
                os.fchmod(descriptor, kept.st_mode & 0o777)
                if (kept.st_uid, kept.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(descriptor, kept.st_uid, kept.st_gid)
            file.write(text)
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
