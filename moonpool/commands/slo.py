"""Commands `moonpool slo …`: show, change and roll back the objectives of a running cluster."""

import asyncio
import getpass
import hashlib
import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moonpool.commands.arguments import ClusterArguments, Json, command_group, on_cluster, wide_console
from moonpool.errors import ConfigError, SloNotChanged
from moonpool.options import reported_errors
from moonpool.slo import rendering as preview
from moonpool.slo import rendering as view
from moonpool.slo.file import objectives_yaml, read_objectives

if TYPE_CHECKING:
    from moonpool_proto.v1 import conductor_pb2

_ALL_VERSIONS = 1 << 20

File = Annotated[Path, typer.Argument(help="YAML file with all objectives; omitted ones are removed.")]
Reason = Annotated[str, typer.Option("--reason", "-r", help="Reason of the change, stored with the version.")]
Author = Annotated[
    str,
    typer.Option("--author", help="Author of the change, stored with the version.", show_default="USER@HOST"),
]
Expect = Annotated[int | None, typer.Option("--expect-version", min=0, help="Fail if another version is in force.")]
Wait = Annotated[float, typer.Option(help="Seconds to wait until every conductor applies it; 0: do not wait.", min=0.0)]
Force = Annotated[bool, typer.Option("--force", help="Accept tenants that are unknown to all API servers.")]

app = command_group("slo", "Versioned latency objectives of a running cluster.\n\n[bold]moonpool slo show[/bold]")


@app.command()
@on_cluster
def show(
    cluster: ClusterArguments,
    version: Annotated[int | None, typer.Option(min=1, help="Show an earlier version.")] = None,
    as_yaml: Annotated[
        bool, typer.Option("--yaml", help="Print only the objectives, in the form that `set` reads.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the objectives in force, their author and reason, and the conductors that apply them.

    Examples: moonpool slo show · moonpool slo show --yaml > slo.yaml · moonpool slo show --version 3
    """
    with reported_errors():
        from moonpool.slo.client import ask_slo

        located = cluster.locate()
        seen = asyncio.run(ask_slo(located.conductor, history=_ALL_VERSIONS if version else 0))
        found = _version(seen, version) if version else seen.current
        if as_json:
            print(json.dumps(view.version_json(found) if version else view.state_json(seen), indent=2))
        elif as_yaml:
            print(objectives_yaml(json.loads(found.content)), end="")
        else:
            print("\n".join([*view.version_lines(found), *([] if version else view.state_lines(seen))]))
            print()
            print(objectives_yaml(json.loads(found.content)), end="")


@app.command()
@on_cluster
def history(
    cluster: ClusterArguments,
    limit: Annotated[int, typer.Option(min=1, help="Number of versions, newest first.")] = 20,
    as_json: Json = False,
) -> None:
    """Show the versions with time, author, origin and reason. The last 100 are kept.

    Example: moonpool slo history --limit 5
    """
    with reported_errors():
        from moonpool.slo.client import ask_slo

        located = cluster.locate()
        seen = asyncio.run(ask_slo(located.conductor, history=limit))
        if as_json:
            print(json.dumps([view.version_json(each) for each in seen.history], indent=2))
        else:
            wide_console().print(view.history_table(seen.history))


@app.command("set")
@on_cluster
def set_(
    file: File,
    reason: Reason,
    cluster: ClusterArguments,
    author: Author = "",
    expect_version: Expect = None,
    force: Force = False,
    wait: Wait = 15.0,
) -> None:
    """Store the objectives of a file as a new version, and wait until every conductor applies it.

    Example: moonpool slo set slo.yaml --reason "tighter for the launch" --expect-version 3
    """
    with reported_errors():
        content = json.dumps(_readable(file))
        _change(
            cluster.locate().conductor,
            wait,
            author=author,
            reason=reason,
            content=content,
            expect_version=expect_version,
            force=force,
        )


@app.command()
@on_cluster
def rollback(
    version: Annotated[int, typer.Argument(min=1, help="Version to restore; `history` lists the versions.")],
    reason: Reason,
    cluster: ClusterArguments,
    author: Author = "",
    expect_version: Expect = None,
    wait: Wait = 15.0,
) -> None:
    """Store the objectives of an earlier version as a new version.

    Example: moonpool slo rollback 3 --reason "too many rejections"
    """
    with reported_errors():
        _change(
            cluster.locate().conductor,
            wait,
            author=author,
            reason=reason,
            rollback_to=version,
            expect_version=expect_version,
        )


@app.command()
@on_cluster
def check(
    file: File,
    cluster: ClusterArguments,
    force: Force = False,
) -> None:
    """Preview `set` without changing anything.

    It shows the differences, objectives that no node can meet, the longest possible prompts, and the effect on recent
    requests. Exits with 1 if there is a warning. Example: moonpool slo check slo.yaml
    """
    with reported_errors():
        from moonpool.slo.client import change_slo
        from moonpool_proto.v1 import conductor_pb2

        located = cluster.locate()
        change = conductor_pb2.ChangeSloRequest(
            author=_author(""), reason="check", content=json.dumps(_readable(file)), trial=True, force=force
        )
        reply = asyncio.run(change_slo(located.conductor, change))
        print(f"against version {reply.version.version}:")
        print("\n".join(reply.differences or ["nothing would change"]))
        print("\n".join([*reply.notes, *(f"warning: {text}" for text in reply.warnings)]))
        if reply.HasField("preview"):
            _print_preview(reply.preview)
        raise typer.Exit(1 if reply.warnings else 0)


@app.command()
def tenant() -> None:
    """Print the name of the tenant whose API key is on standard input, so that it does not appear in the process list.

    Example: moonpool slo tenant < key.txt
    """
    with reported_errors():
        key = sys.stdin.read().strip()
        if not key or "\n" in key:
            raise ConfigError("expected one API key on standard input")
        print(hashlib.sha256(key.encode()).hexdigest()[:16])


def _change(conductor: str, wait_s: float, *, author: str, expect_version: int | None, **change: Any) -> None:
    from moonpool.slo.client import change_slo, wait_until_acknowledged
    from moonpool_proto.v1 import conductor_pb2

    request = conductor_pb2.ChangeSloRequest(author=_author(author), **change)
    if expect_version is not None:
        request.expect_version = expect_version
    reply = asyncio.run(change_slo(conductor, request))
    for text in reply.warnings:
        print(f"warning: {text}", file=sys.stderr)
    if not reply.differences:
        print(f"nothing to change: version {reply.version.version} has the same objectives")
        return
    print(f"version {reply.version.version} is in force:")
    print("\n".join(reply.differences), flush=True)
    if wait_s:
        seen = asyncio.run(wait_until_acknowledged(conductor, reply.version.version, wait_s=wait_s))
        print(f"acknowledged by {', '.join(each.node_id for each in seen.acknowledged)}")


def _print_preview(found: "conductor_pb2.SloPreview") -> None:
    print(f"\n{preview.preview_title(found)}")
    if found.rows:
        wide_console().print(preview.preview_table(found))
    for text in preview.caveats(found):
        print(f"note: {text}")


def _readable(file: Path) -> Any:
    """Return the file's content if JSON can represent it. Raises ConfigError."""
    content = read_objectives(file)
    try:
        json.dumps(content, allow_nan=False)
    except ValueError as error:
        raise ConfigError(f"{file} must not contain infinite numbers, NaN or cycles") from error
    except TypeError as error:
        raise ConfigError(f"{file} must contain only strings, numbers, lists and mappings: {error}") from error
    for name in _other_names(content):  # JSON would turn it into a text, perhaps a different one
        raise ConfigError(f"{file}: the name {name!r} must be a string: quote it")
    return content


def _other_names(value: Any) -> Iterator[Any]:
    """Yield keys, at any depth, that are not texts."""
    if isinstance(value, dict):
        yield from (key for key in value if not isinstance(key, str))
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _other_names(part)


def _author(given: str) -> str:
    if given:
        return given
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):  # a user id without a name, as in containers
        return f"unknown@{socket.gethostname()}"


def _version(seen: "conductor_pb2.ShowSloReply", number: int) -> "conductor_pb2.SloVersion":
    for each in seen.history:
        if each.version == number:
            return each
    kept = f"{seen.history[-1].version} to {seen.history[0].version}" if seen.history else "none"
    raise SloNotChanged(f"version must be one of those kept ({kept}), got {number}")
