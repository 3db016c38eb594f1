"""`moonpool replay`, as a command that is imported when it is run: its plots and its reference engine take seconds."""

import typer


def add_replay(app: typer.Typer) -> None:
    """Add `replay` to `app`; all its arguments, --help too, go to replay.cli."""

    @app.command(
        "replay",
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        help="Replay a real trace against a running server and report what it saw; can verify every token.\n\n"
        "[bold]moonpool replay conversation --sample-families 0.1 --speed 15 --verify --out out/replay[/bold]",
    )
    def replay(context: typer.Context) -> None:
        from replay.cli import app as replay_app

        replay_app(args=context.args, prog_name="moonpool replay")
