"""The command `moonpool keys`: creates API keys for the API server's keys file. A key is shown once, never stored."""

import os
import re
import secrets
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Annotated, Final

import typer
import yaml

from frontend.api_keys import digest_of
from frontend.callers import Quota
from frontend.errors import KeysFileError
from frontend.keys_file import KeyEntry, callers_of, check_classes, check_name, expiry, parse_keys, plain
from moonpool.commands.arguments import command_group
from moonpool.errors import ConfigError
from moonpool.options import reported_errors

app = command_group("keys", "Create API keys, and the entries by which the API server recognises them.")

_PREFIX: Final = "mp-"  # lets scanners for leaked secrets recognise a key
_KEY_NBYTES: Final = 32

Bound = Annotated[int | None, typer.Option(min=1, show_default=False)]


@app.callback()
def keys() -> None:
    """Keep `new` a command of its own although it is the only one."""


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
            _add(file, text)
            print(f"added {name} to {file}; the key is shown only now:", file=sys.stderr)
        print(key)


def _add(path: Path, entry: str) -> None:
    """Replace the file by one with an additional entry. Raises ConfigError for an invalid file or entry."""
    try:
        before = path.read_text(encoding="utf-8") if path.exists() else "keys:\n"
        parse_keys(before)
    except KeysFileError as error:
        raise ConfigError(f"{path} is invalid: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    try:
        after = _with_entry(before, entry)
        callers_of(parse_keys(after))
        _write(path.resolve(), after)
    except KeysFileError as error:
        raise ConfigError(f"{path} would be invalid with this entry: {error}") from error
    except OSError as error:
        raise ConfigError(f"cannot change {path}: {error}") from error


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
