"""The commands `moonpool bench …`: `serve` loads a server, `messenger` the way between two hosts."""

from moonpool.transfer_bench.command import ListenAnywhere, messenger
from replay.bench.cli import app

app.command("messenger", cls=ListenAnywhere)(messenger)
