"""`moonpool replay` and `moonpool dialogues`, imported when they are run: plots and the engine take seconds."""

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


def add_dialogues(app: typer.Typer) -> None:
    """Add `dialogues` to `app`; all its arguments, --help too, go to replay.dialogue_cli."""

    @app.command(
        "dialogues",
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        help="Lead many-turn chats with a running server and report what of each prompt was reused.\n\n"
        "[bold]moonpool dialogues --dialogues 8 --turns 50 --think-time 0.5 --verify --out out/dialogues[/bold]",
    )
    def dialogues(context: typer.Context) -> None:
        from replay.dialogue_cli import app as dialogues_app

        dialogues_app(args=context.args, prog_name="moonpool dialogues")
