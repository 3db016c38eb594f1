"""The commands `moonpool bench …`: `serve` loads a server, `messenger` the way between two hosts."""

from loadtest.bench.cli import app
from moonpool.transfer_bench.command import ListenAnywhere, messenger

app.command("messenger", cls=ListenAnywhere)(messenger)
