"""The command `moonpool explain`: finds what was decided on a request, in a log's folder or at the live conductors."""

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from conductor.decision_log import find_records
from moonpool import explain_view as view
from moonpool.errors import ClusterNotFound, DecisionLogError
from moonpool.locate import DEFAULT_URL, Located, locate
from moonpool.options import reported_errors
from moonpool.questions import ANSWER_DEADLINE_S, conductors_of
from moonpool.status_command import Conductor, Json, ReadyPath, Url
from moonpool_proto.v1 import conductor_pb2
from moonpool_proto.v1.conductor_pb2_grpc import ConductorStub
from rpc.control import ControlError, call, open_channel

__all__ = ["app"]

app = typer.Typer(rich_markup_mode="rich", add_completion=False, pretty_exceptions_enable=False)
_SEARCH_DEADLINE_S = 6 * ANSWER_DEADLINE_S  # files are read, perhaps many


@app.command()
def explain(
    request_id: Annotated[
        str, typer.Argument(help="As in the answer: its `id`, and `request_id` under `moonpool`.", show_default=False)
    ],
    log: Annotated[
        list[Path] | None,
        typer.Option("--log", help="Folder of a decision log, instead of asking the cluster; may be given again."),
    ] = None,
    url: Url = DEFAULT_URL,
    conductor: Conductor = "",
    ready_file: ReadyPath = None,
    as_json: Json = False,
) -> None:
    """Tell why a request went where it went, or was rejected: predictions, objectives, losers, what became of it.

    The conductor must keep a decision log: moonpool serve --decision-log FOLDER.

    Exits with 1 when nothing is known of the request. Example: moonpool explain cmpl-4a1c --log out/decisions
    """
    with reported_errors():
        answers = _read(log, request_id) if log else asyncio.run(_ask(_located(conductor, url, ready_file), request_id))
        records = sorted((one for answer in answers.values() for one in answer["records"]), key=lambda one: one["at"])
        if as_json:
            print(json.dumps({"request_id": request_id, "records": records, "logs": _about(answers)}, indent=2))
        else:
            console = Console(highlight=False)
            for number, record in enumerate(records):
                if number:
                    console.print("")
                try:
                    console.print(view.record_picture(record))
                except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
                    text = f"the record of {record['request_id']} is damaged, or of another version of this program"
                    raise DecisionLogError(f"{text} ({error!r}); --json shows what is there") from error
            for name, answer in answers.items():
                for text in answer["damaged"]:
                    console.print(f"Not read, in {name}: {text}", style="red")
            if not records:
                console.print(_unknown(request_id, answers))
        raise typer.Exit(0 if records else 1)


def _located(conductor: str, url: str, ready_file: Path | None) -> Located:
    try:
        return locate(conductor=conductor, url=url, ready_file=ready_file)
    except ClusterNotFound as error:
        raise ClusterNotFound(f"{error}, or --log FOLDER for what a conductor left") from error


def _read(folders: list[Path], request_id: str) -> dict[str, Any]:
    answers = {}
    for folder in folders:
        if not (folder / "log.json").is_file():
            raise DecisionLogError(f"{folder} is no decision log: it has no log.json")
        try:
            answers[str(folder)] = find_records(folder, request_id).to_json()
        except OSError as error:
            raise DecisionLogError(f"the decision log {folder} cannot be read: {error}") from error
    return answers


async def _ask(located: Located, request_id: str) -> dict[str, Any]:
    """Of every conductor: each has a log of what it decided itself."""
    targets = sorted(set(conductors_of(located).values()))
    replies = await asyncio.gather(*(_ask_one(target, request_id) for target in targets), return_exceptions=True)
    answers: dict[str, Any] = {}
    for target, reply in zip(targets, replies, strict=True):
        if isinstance(reply, ControlError):
            answers[target] = _silent(str(reply))
        elif isinstance(reply, BaseException):
            raise reply
        elif reply["log"] is not None:
            answers[reply["log"]] = reply
    if not answers:
        raise DecisionLogError("the conductor keeps no decision log: start it with --decision-log FOLDER")
    if all(answer.get("silent") for answer in answers.values()):
        raise ClusterNotFound("; ".join(answer["damaged"][0] for answer in answers.values()))
    return answers


async def _ask_one(target: str, request_id: str) -> Any:
    async with open_channel(target) as channel:
        rpc = ConductorStub(channel).Explain(conductor_pb2.ExplainRequest(request_id=request_id))
        reply = await call(rpc, what="Conductor.Explain", target=target, deadline_s=_SEARCH_DEADLINE_S)
    return json.loads(reply.json)


def _silent(why: str) -> dict[str, Any]:
    return {"records": [], "oldest_at": None, "removed_files": 0, "damaged": [why], "silent": True}


def _about(answers: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {key: answer[key] for key in ("oldest_at", "removed_files", "damaged")}
        for name, answer in answers.items()
    }


def _unknown(request_id: str, answers: dict[str, Any]) -> str:
    lines = [f"Nothing is known of request {request_id!r}."]
    for name, answer in answers.items():
        if answer.get("silent"):
            continue
        if answer["oldest_at"] is None:
            lines.append(f"The log {name} has no ended request yet.")
        else:
            lines.append(f"The log {name} begins with requests of {view.day(answer['oldest_at'])}.")
        if answer["removed_files"]:
            count = answer["removed_files"]
            lines.append(f"{count} older file{'s were' if count > 1 else ' was'} removed to keep its size.")
    lines.append("Requests that a front door refused by itself are not in it: the conductor never saw them.")
    return "\n".join(lines)
