"""Commands that are imported when they are run: plots, an HTTP client or the engine take seconds to import."""

from importlib import import_module

import typer


def add_lazy(app: typer.Typer, name: str, module: str, help: str) -> None:
    """Add command `name` to `app`; all its arguments, --help too, go to the typer application `app` of `module`."""

    @app.command(
        name,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        help=help,
    )
    def run(context: typer.Context) -> None:
        import_module(module).app(args=context.args, prog_name=f"moonpool {name}")
