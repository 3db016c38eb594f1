"""The command `moonpool chat`. Its dependencies are imported when it runs."""

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from moonpool.cluster_view.locate import api_url
from moonpool.errors import ChatFailed
from moonpool.options import reported_errors

if TYPE_CHECKING:
    import aiohttp

_ASK_S = 15.0


def _key_in_file(text: str) -> str:
    from loadtest.options import key_in_file

    return key_in_file(text)


def _one_key(context: typer.Context, parameter: typer.CallbackParam, given: str) -> str:
    from loadtest.options import one_key

    return one_key(context, parameter, given)


def chat(
    url: Annotated[
        str,
        typer.Option(
            help="URL of the server. Default: the variable MOONPOOL_URL, otherwise this user's `moonpool serve` at "
            "port 8000, otherwise the newest one."
        ),
    ] = "",
    api_key: Annotated[
        str,
        typer.Option(
            envvar="MOONPOOL_API_KEY",
            callback=_one_key,
            help="Bearer key; if the variable holds several, the first is sent.",
        ),
    ] = "",
    api_key_file: Annotated[
        str | None,
        typer.Option(parser=_key_in_file, metavar="FILE", help="File with the bearer key, in place of --api-key."),
    ] = None,
    model: Annotated[str, typer.Option(help="Name of the model. Default: the first served.")] = "",
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
    temperature: Annotated[
        float | None, typer.Option(min=0.0, max=2.0, help="Sampling temperature; 0 is greedy. Default: the server's.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens of an answer. Default: the server's.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Sampling seed: the same seed gives the same answers.")] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds an answer may take.")] = 600.0,
    figures: Annotated[
        bool | None,
        typer.Option(
            "--figures/--no-figures",
            help="TTFT, tokens/s, cached tokens and nodes after each answer. Default: in a terminal.",
        ),
    ] = None,
) -> None:
    """Chat with a running cluster. Ctrl-C stops an answer, or exits at the prompt; /help shows the commands.

    Without a terminal it sends each line of its input as a question and prints only the answers; the first error ends
    it with exit status 1.

    Examples: moonpool chat · moonpool chat --url http://10.0.0.1:8000 --temperature 0 · moonpool chat < questions.txt
    """
    from loadtest.errors import ServerUnusable
    from loadtest.server import discover
    from moonpool.chat.client import AnswerOptions, ChatClient
    from moonpool.chat.conversation import Conversation
    from moonpool.chat.loop import ChatLoop, ChatView

    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    view = ChatView(interactive=interactive, figures=interactive if figures is None else figures)
    options = AnswerOptions(temperature=temperature, max_tokens=max_tokens, seed=seed)
    with reported_errors(), asyncio.Runner() as runner:
        session = runner.run(_open_session(api_key_file or api_key))
        try:
            found = runner.run(discover(session, api_url(url), model=model, deadline_s=_ASK_S))
            if interactive:
                limit = f", {found.max_model_len} tokens of context" if found.max_model_len else ""
                view.notice(f"{found.model} at {found.base_url}{limit}. /help shows the commands.")
            client = ChatClient(session, found, options, timeout_s=timeout)
            ChatLoop(runner, client, view, Conversation(system)).run()
        except ServerUnusable as error:
            raise ChatFailed(str(error)) from error
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        finally:
            runner.run(session.close())


async def _open_session(api_key: str) -> "aiohttp.ClientSession":
    import aiohttp

    # One connection per answer: the server may close an idle one while the user is typing.
    connector = aiohttp.TCPConnector(force_close=True)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return aiohttp.ClientSession(connector=connector, headers=headers)
