"""The command `moonpool bench messenger`."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from messenger import AddressInUse, InvalidArgument, MessengerConfig
from moonpool.errors import ConfigError, TransferBenchFailed
from moonpool.options import reported_errors, size_of
from moonpool.supervision.parent_death import die_with_supervisor
from moonpool.transfer_bench.plan import BenchPlan, table
from moonpool.transfer_bench.run import BenchOutcome, measure_all, measure_here
from moonpool.transfer_bench.server import WILDCARDS, Listening, serve_bench
from moonpool.transport_security import secure_from_environment, settings_of_environment
from rpc.control import run
from rpc.errors import NetworkError
from settings.keys import assemble
from settings.messenger import TlsSettings

DEFAULT_PORT = 7011
ANYWHERE = f"0.0.0.0:{DEFAULT_PORT}"
EXIT_INTERRUPTED = 130


class ListenByDefault(TyperCommand):
    """Command whose `--listen` without a value listens on all addresses."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Add the default value to a bare --listen."""
        given = list(args)
        for place, flag in enumerate(args):
            if flag == "--listen" and (place + 1 == len(args) or args[place + 1].startswith("-")):
                given.insert(place + 1, ANYWHERE)
        return super().parse_args(ctx, given)


def messenger(
    listen: Annotated[
        str,
        typer.Option(
            help=f"Serve as the other side of a measurement, by default at {ANYWHERE}.", metavar="[HOST:PORT]"
        ),
    ] = "",
    to: Annotated[str, typer.Option(help="Address of the other side to measure against.", metavar="HOST[:PORT]")] = "",
    local: Annotated[
        bool, typer.Option("--local", help="Measure against a process on this host; the default.")
    ] = False,
    size: Annotated[list[str] | None, typer.Option(help="Bytes per slice; repeatable. [64KiB, 1MiB, 16MiB]")] = None,
    slices: Annotated[list[int] | None, typer.Option(help="Slices per batch; repeatable. [1]")] = None,
    direction: Annotated[list[str] | None, typer.Option(help="write or read; repeatable. [both]")] = None,
    transport: Annotated[
        list[str] | None, typer.Option(help="auto, rdma, tcp or shm; repeatable. [auto; with --local: shm and tcp]")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.01, help="Seconds for each line of the table.")] = 2.0,
    window: Annotated[int, typer.Option(min=1, max=1024, help="Concurrent batches, for throughput.")] = 8,
    deadline: Annotated[float, typer.Option(min=0.1, help="Deadline of a batch in seconds.")] = 30.0,
    digests: Annotated[
        bool, typer.Option("--digests", help="Send and compare digests, as the cluster does for each block.")
    ] = False,
    priority: Annotated[str, typer.Option(help="Priority of all batches: urgent, normal or background.")] = "normal",
    data_port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="With --listen: port for the bytes. [the next one]", show_default=False),
    ] = 0,
    tls_cert: Annotated[Path | None, typer.Option(help="This host's certificate, as for `serve`.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Private key of the certificate.")] = None,
    tls_ca: Annotated[Path | None, typer.Option(help="CA of both sides.")] = None,
    tls_name: Annotated[str, typer.Option(help="DNS name in both certificates. [moonpool]")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on the last line.")] = False,
) -> None:
    """Measure the speed of KV transfers between two hosts with the cluster's messenger, and verify their bytes.

    Run it with --listen on one host, and with --to on the other. Before every line a whole batch is verified; the
    command fails if a byte is wrong.

    Examples: moonpool bench messenger · moonpool bench messenger --listen · moonpool bench messenger --to 10.0.0.2
    --size 16KiB --slices 2000 --digests
    """
    with reported_errors():
        if sum(map(bool, (listen, to, local))) > 1:
            raise ConfigError("--listen, --to and --local conflict: one side listens, the other measures")
        if data_port and not listen:
            raise ConfigError("--data-port needs --listen: only the listening side has a port for the bytes")
        tls = tls_of(tls_cert, tls_key, tls_ca, tls_name)
        secure_from_environment()  # for join tokens; certificates are passed on explicitly, since flags override them
        try:
            if listen:
                die_with_supervisor()
                _listen(*host_and_port(listen), data_port, tls, as_json)
                return
            plan = BenchPlan(
                sizes=tuple(size_of("--size", text) for text in size or ("64KiB", "1MiB", "16MiB")),
                slices=tuple(slices or (1,)),
                directions=tuple(direction or ("write", "read")),
                transports=tuple(transport or (("auto",) if to else ("shm", "tcp"))),
                window=window,
                seconds=seconds,
                digests=digests,
                deadline_s=deadline,
                priority=priority,
            )
            console = Console(stderr=True)
            outcome = measure_all(plan, *host_and_port(to), tls, console) if to else measure_here(plan, tls, console)
        except AddressInUse as error:
            raise ConfigError(f"{error} (--listen HOST:PORT, --data-port)") from error
        except InvalidArgument as error:
            raise ConfigError(str(error)) from error
        except NetworkError as error:
            raise TransferBenchFailed(str(error)) from error
        _show(outcome, plan, as_json)
        raise typer.Exit(EXIT_INTERRUPTED if outcome.interrupted else 0)


def host_and_port(text: str) -> tuple[str, int]:
    """Parse HOST, HOST:PORT, [ADDRESS]:PORT or :PORT. Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    if not colon or (":" in host and not host.startswith("[")):
        host, port = text, str(DEFAULT_PORT)
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"address must be HOST:PORT, such as {ANYWHERE}, with a port up to 65535, got {text!r}")
    return host.strip("[]") or "0.0.0.0", int(port)


def tls_of(cert: Path | None, key: Path | None, ca: Path | None, name: str) -> TlsSettings:
    """Return the flags' values, otherwise those of MOONPOOL_TLS_* and MOONPOOL_CONFIG. Raises InvalidSetting."""
    configured = settings_of_environment().tls
    return replace(
        configured,
        tls_cert=cert or configured.tls_cert,
        tls_key=key or configured.tls_key,
        tls_ca=ca or configured.tls_ca,
        tls_name=name or configured.tls_name,
    )


def _listen(host: str, port: int, data_port: int, tls: TlsSettings, as_json: bool) -> None:
    if port == 65535 and not data_port:
        raise ConfigError(
            "the port for the bytes must be at most 65535: choose one with --data-port, or listen on another port"
        )
    config = assemble(
        MessengerConfig,
        data_host=host,
        data_advertise=host if host in WILDCARDS else "",
        data_port=data_port or (port and port + 1),
        tls=tls,
    )

    clients = "Clients with a certificate of the CA" if tls.tls_cert else "All clients that can reach these ports"

    def on_listening(listening: Listening) -> None:
        if as_json:
            print(json.dumps(asdict(listening)), flush=True)
            return
        print(
            f"Listening at {listening.target}, the bytes at port {listening.data_port}: open both in firewalls.\n"
            f"On the other host: moonpool bench messenger --to {_bracketed(host)}:"
            f"{listening.target.rpartition(':')[2]}\n"
            f"{clients} may use memory here. Ctrl-C stops it.",
            flush=True,
        )

    stop = asyncio.Event()
    run(serve_bench(host, port, config, stop, on_listening), stop=stop)


def _bracketed(host: str) -> str:
    return "THIS_HOST" if host in WILDCARDS else host


def _show(outcome: BenchOutcome, plan: BenchPlan, as_json: bool) -> None:
    if as_json:
        print(json.dumps(outcome.to_json(plan)))
        return
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    console.print(table(outcome.results))
    for line in _remarks(outcome):
        console.print(line)


def _remarks(outcome: BenchOutcome) -> Sequence[str]:
    checked = sum(result.checked_bytes for result in outcome.results)
    lines = [f"{checked:,} bytes were compared one by one, and are correct."]
    compared = sum(result.digests_compared for result in outcome.results)
    if compared:
        lines.append(f"{compared:,} batches had correct digests.")
    if outcome.trouble:
        lines.append("Retries and errors: " + ", ".join(f"{name} {count}" for name, count in outcome.trouble.items()))
    if outcome.interrupted:
        lines.append("Interrupted: the rest was not measured.")
    return lines
