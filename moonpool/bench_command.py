"""`moonpool bench`, as a command that is imported when it is run: its HTTP client and its pictures take seconds."""

import typer


def add_bench(app: typer.Typer) -> None:
    """Add `bench` to `app`; all its arguments, --help too, go to replay.bench.cli."""

    @app.command(
        "bench",
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        help="Load-test any OpenAI-compatible server with vLLM's flags, or find the rate that it can bear.\n\n"
        "[bold]moonpool bench serve --num-prompts 100 --request-rate 4[/bold]",
    )
    def bench(context: typer.Context) -> None:
        from replay.bench.cli import app as bench_app

        bench_app(args=context.args, prog_name="moonpool bench")
