"""The command `keys`: draws API keys for the file that front doors read. A key is shown once and kept nowhere."""

import os
import secrets
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Final

import typer
import yaml

from frontend.errors import KeysFileError
from frontend.keys.api_keys import digest_of
from frontend.keys.caller import Quota
from frontend.keys.entries import KeyEntry, callers_of, check_name, expiry, parse_keys, plain
from moonpool.errors import ConfigError
from moonpool.options import reported_errors

app = typer.Typer(
    name="keys",
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_enable=False,
    help="API keys: draw one, and the entry by which front doors know it.",
)

_PREFIX: Final = "mp-"  # by which scanners for leaked secrets can know one
_KEY_NBYTES: Final = 32

Bound = Annotated[int | None, typer.Option(min=1, show_default=False)]


@app.callback()
def keys() -> None:
    """Has `new` be a command of its own even while it is the only one."""


@app.command()
def new(
    name: Annotated[str, typer.Option(help="Of the key, for logs and for people.")],
    tenant: Annotated[str, typer.Option(help="Whose requests these are: shares, objectives and quotas go by it.")],
    admin: Annotated[bool, typer.Option("--admin", help="It may act as an operator, too.")] = False,
    expires: Annotated[str, typer.Option(help="Day (from its beginning, UTC) or time, e.g. 2027-01-31.")] = "",
    requests_per_minute: Bound = None,
    tokens_per_minute: Bound = None,
    max_concurrent: Bound = None,
    file: Annotated[
        Path | None, typer.Option(help="File of keys to add the entry to, made if there is none; else it is printed.")
    ] = None,
) -> None:
    """Draw a key. It goes to standard output alone; where it is to be put, to standard error.

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
            )
        except KeysFileError as error:
            raise ConfigError(str(error)) from error
        text = yaml.safe_dump([plain(entry)], sort_keys=False)
        if file is None:
            print(f"# below `keys:` in the file of --api-keys-file\n{text}", file=sys.stderr, end="")
        else:
            _add(file, text)
            print(f"added {name} to {file}; the key is shown this once:", file=sys.stderr)
        print(key)


def _add(path: Path, entry: str) -> None:
    """Put the file anew, whole, with one entry more. Raises ConfigError for one that would be of no use."""
    try:
        before = path.read_text(encoding="utf-8") if path.exists() else "keys:\n"
        after = before.replace("keys: []", "keys:").rstrip("\n") + "\n" + entry
        callers_of(parse_keys(after))
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
        descriptor, partial = tempfile.mkstemp(dir=path.resolve().parent, prefix=".keys-")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), mode)
            file.write(after)
        Path(partial).replace(path.resolve())
    except KeysFileError as error:
        raise ConfigError(f"{path} would be of no use with this entry: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot change {path}: {error}") from error
