"""Command `bench serve`, and the click command that accepts vLLM's flag syntax (lists after a flag, underscores)."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from loadtest.bench.config import ENDPOINTS, BenchConfig
from loadtest.bench.results import Saving, result_of, save, table
from loadtest.bench.runner import run_bench
from loadtest.cli import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_INVALID, bundled_model
from loadtest.config import MAX_SEND_LAG_S
from loadtest.errors import ReplayError, SettingInvalid
from loadtest.model_folder import parse_model_path
from loadtest.options import URL_VARIABLE, key_in_file, one_key
from loadtest.report import finite

LIST_FLAGS = ("--goodput", "--header", "--metadata")


def normalised(arguments: Sequence[str]) -> list[str]:
    """Rewrite `--goodput a b` as `--goodput a --goodput b` and `--num_prompts` as `--num-prompts`."""
    found: list[str] = []
    current = ""
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            name = name.replace("_", "-")
            current = "" if equals or name not in LIST_FLAGS else name
            found += [] if current else [name + equals + value]
        elif current:
            found += [current, argument]
        else:
            found.append(argument)
    return found


class VllmFlags(TyperCommand):
    """Click command that accepts vLLM's flag syntax."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments with click after `normalised`."""
        return super().parse_args(ctx, normalised(args))


def bounds_of(pairs: Sequence[str]) -> dict[str, float]:
    """Parse KEY:MILLISECONDS pairs. Raises SettingInvalid."""
    found: dict[str, float] = {}
    for pair in pairs:
        key, _, value = pair.partition(":")
        try:
            found[key] = float(value)
        except ValueError:
            raise SettingInvalid(f"--goodput is {pair!r}; expected KEY:MILLISECONDS, as in ttft:500") from None
    return found


def header_of(pair: str) -> tuple[str, str]:
    """Parse KEY=VALUE. Raises SettingInvalid."""
    key, equals, value = pair.partition("=")
    if not equals or not key.strip():
        raise SettingInvalid(f"--header is {pair!r}; expected KEY=VALUE")
    return key.strip(), value.strip()


def json_object(text: str, flag: str) -> dict[str, Any]:
    """Parse a JSON object; return {} for an empty text. Raises SettingInvalid."""
    if not text:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise SettingInvalid(f"{flag} is {text!r}, which is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise SettingInvalid(f"{flag} is {text!r}; expected a JSON object")
    return value


def numbers(text: str, flag: str) -> tuple[float, ...]:
    """Parse comma-separated numbers. Raises SettingInvalid."""
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise SettingInvalid(f"{flag} is {text!r}; expected numbers separated by commas") from None


app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Load tests of a server or of the network between hosts."
)

_SERVER, _PROMPTS, _TRAFFIC, _SAMPLING, _REPORT, _CAPACITY = (
    *("Server", "Prompts", "Traffic", "Sampling", "Report"),
    "Capacity (--find-capacity)",
)
_OWN_CAPACITY = Path("out/capacity")


@app.callback()
def bench() -> None:
    """Keep `serve` a subcommand: Typer merges an app's only command into the app unless it has a callback."""


def _option(panel: str, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


@app.command("serve", cls=VllmFlags)
def serve(
    backend: Annotated[str, _option(_SERVER, f"One of {', '.join(ENDPOINTS)}.")] = "openai",
    base_url: Annotated[str, _option(_SERVER, "URL of the server; default: http://HOST:PORT.")] = "",
    host: Annotated[
        str | None,
        _option(_SERVER, "Host name or address of the server; default: that of MOONPOOL_URL, otherwise 127.0.0.1."),
    ] = None,
    port: Annotated[
        int | None, _option(_SERVER, "Port of the server; default: that of MOONPOOL_URL, otherwise 8000.")
    ] = None,
    endpoint: Annotated[str, _option(_SERVER, "Endpoint path; default: the backend's.")] = "",
    model: Annotated[str, _option(_SERVER, "Model name in requests; default: the first model served.")] = "",
    served_model_name: Annotated[str, _option(_SERVER, "Model name in requests if it differs from --model.")] = "",
    tokenizer: Annotated[
        Path | None,
        _option(
            _SERVER,
            "Folder or Hugging Face id of the served model, for its tokenizer; default: the bundled model.",
            parser=parse_model_path,
            metavar="MODEL",
        ),
    ] = None,
    api_key: Annotated[
        str,
        _option(
            _SERVER, "API key, sent as bearer token.", envvar=["OPENAI_API_KEY", "MOONPOOL_API_KEY"], callback=one_key
        ),
    ] = "",
    api_key_file: Annotated[
        str | None,
        _option(_SERVER, "File with the API key, in place of --api-key.", parser=key_in_file, metavar="FILE"),
    ] = None,
    header: Annotated[
        list[str] | None, _option(_SERVER, "Extra headers of every request.", metavar="KEY=VALUE ...")
    ] = None,
    ready_check_timeout_sec: Annotated[float, _option(_SERVER, "Seconds to wait for the server to be ready.")] = 0.0,
    request_timeout: Annotated[float, _option(_SERVER, "Timeout of a request in seconds.")] = 6 * 3600.0,
    dataset_name: Annotated[str, _option(_PROMPTS, "random, sharegpt, custom or prefix_repetition.")] = "random",
    dataset_path: Annotated[Path | None, _option(_PROMPTS, "Dataset file: sharegpt (JSON) or custom (JSONL).")] = None,
    num_prompts: Annotated[int, _option(_PROMPTS, "Number of requests.")] = 1000,
    seed: Annotated[int, _option(_PROMPTS, "Random seed of prompts, lengths and arrivals.")] = 0,
    input_len: Annotated[int | None, _option(_PROMPTS, "Alias of --random-input-len.")] = None,
    output_len: Annotated[int | None, _option(_PROMPTS, "Output tokens per request, for any dataset.")] = None,
    random_input_len: Annotated[int, _option(_PROMPTS, "Prompt tokens per random request.")] = 1024,
    random_output_len: Annotated[int, _option(_PROMPTS, "Output tokens per random request.")] = 128,
    random_range_ratio: Annotated[
        float, _option(_PROMPTS, "Lengths vary by up to this fraction in either direction.")
    ] = 0.0,
    random_prefix_len: Annotated[int, _option(_PROMPTS, "Tokens of the prefix shared by all random prompts.")] = 0,
    prefix_repetition_prefix_len: Annotated[int, _option(_PROMPTS, "Tokens of each prefix.")] = 256,
    prefix_repetition_suffix_len: Annotated[int, _option(_PROMPTS, "Tokens after the prefix.")] = 256,
    prefix_repetition_num_prefixes: Annotated[int, _option(_PROMPTS, "Number of distinct prefixes.")] = 10,
    prefix_repetition_output_len: Annotated[int, _option(_PROMPTS, "Output tokens per request.")] = 128,
    sharegpt_output_len: Annotated[
        int | None, _option(_PROMPTS, "Output tokens per request; default: the length of the recorded answer.")
    ] = None,
    custom_output_len: Annotated[
        int, _option(_PROMPTS, "Output tokens per request; -1: each line's output_tokens.")
    ] = 256,
    disable_shuffle: Annotated[
        bool, _option(_PROMPTS, "Keep the order of the dataset file.", "--disable-shuffle")
    ] = False,
    no_oversample: Annotated[
        bool, _option(_PROMPTS, "Do not repeat the dataset's prompts.", "--no-oversample")
    ] = False,
    request_rate: Annotated[float, _option(_TRAFFIC, "Requests per second; inf sends all at once.")] = math.inf,
    burstiness: Annotated[
        float, _option(_TRAFFIC, "Arrival process: 1 is Poisson, below 1 burstier, above 1 more even.")
    ] = 1.0,
    max_concurrency: Annotated[int | None, _option(_TRAFFIC, "Maximum number of requests in flight.")] = None,
    num_warmups: Annotated[int, _option(_TRAFFIC, "Warm-up requests, excluded from the results.")] = 0,
    on_429: Annotated[
        str, _option(_TRAFFIC, "Rejections (HTTP 429): count them as failed, or retry.", "--on-429")
    ] = "count",
    senders: Annotated[int, _option(_TRAFFIC, "Sender processes; 0: chosen from the load and the CPU cores.")] = 0,
    max_send_lag: Annotated[
        float,
        _option(_TRAFFIC, "The run is INVALID if over 1 % of the requests are sent later than this many seconds."),
    ] = MAX_SEND_LAG_S,
    ignore_eos: Annotated[
        bool, _option(_SAMPLING, "Ignore end-of-sequence tokens: generate the full output length.", "--ignore-eos")
    ] = False,
    temperature: Annotated[float | None, _option(_SAMPLING, "Default: the server's.")] = None,
    top_p: Annotated[float | None, _option(_SAMPLING, "Default: the server's.")] = None,
    top_k: Annotated[int | None, _option(_SAMPLING, "Default: the server's.")] = None,
    min_p: Annotated[float | None, _option(_SAMPLING, "Default: the server's.")] = None,
    frequency_penalty: Annotated[float | None, _option(_SAMPLING, "Default: the server's.")] = None,
    presence_penalty: Annotated[float | None, _option(_SAMPLING, "Default: the server's.")] = None,
    repetition_penalty: Annotated[float | None, _option(_SAMPLING, "Default: the server's.")] = None,
    extra_body: Annotated[str, _option(_SAMPLING, "JSON object merged into every request body.")] = "",
    percentile_metrics: Annotated[
        str, _option(_REPORT, "Latency metrics to report: any of ttft,tpot,itl,e2el.")
    ] = "ttft,tpot,itl",
    metric_percentiles: Annotated[str, _option(_REPORT, "Percentiles to report, such as 50,90,99.")] = "99",
    goodput: Annotated[
        list[str] | None, _option(_REPORT, "Objectives for ttft, tpot, e2el in milliseconds.", metavar="KEY:MS ...")
    ] = None,
    save_result: Annotated[bool, _option(_REPORT, "Write the result to a JSON file.", "--save-result")] = False,
    append_result: Annotated[bool, _option(_REPORT, "Append the result to the file.", "--append-result")] = False,
    save_detailed: Annotated[
        bool, _option(_REPORT, "Include the data of every request in the result.", "--save-detailed")
    ] = False,
    result_dir: Annotated[Path | None, _option(_REPORT, "Folder for the result file.")] = None,
    result_filename: Annotated[str, _option(_REPORT, "Name of the result file.")] = "",
    label: Annotated[str, _option(_REPORT, "Prefix of the generated file name; default: the backend.")] = "",
    metadata: Annotated[
        list[str] | None, _option(_REPORT, "Additional keys of the result.", metavar="KEY=VALUE ...")
    ] = None,
    disable_tqdm: Annotated[bool, _option(_REPORT, "Do not show progress.", "--disable-tqdm")] = False,
    find_capacity: Annotated[
        bool, _option(_CAPACITY, "Search for the largest rate that meets --goodput.", "--find-capacity")
    ] = False,
    capacity_start: Annotated[float, _option(_CAPACITY, "First rate to try, in requests per second.")] = 1.0,
    capacity_resolution: Annotated[float, _option(_CAPACITY, "Relative precision of the result.")] = 0.1,
    capacity_percentile: Annotated[float, _option(_CAPACITY, "Percentile at which each objective must hold.")] = 90.0,
    capacity_max_lost: Annotated[
        float, _option(_CAPACITY, "Fraction of requests that may be rejected or fail.")
    ] = 0.01,
    capacity_step: Annotated[
        float, _option(_CAPACITY, "Duration of a step in seconds; at least 50 requests are sent.")
    ] = 30.0,
    capacity_min_rate: Annotated[
        float, _option(_CAPACITY, "Lowest rate to try; 0: a hundredth of --capacity-start.")
    ] = 0,
    capacity_max_rate: Annotated[float, _option(_CAPACITY, "Highest rate to try.")] = 10_000.0,
) -> None:
    """Send prompts to an OpenAI-compatible server and report latency and throughput.

    Flags, metric definitions and result keys match those of vLLM's `bench serve`.

    Example: moonpool bench serve --num-prompts 100 --random-input-len 256 --random-output-len 32 --request-rate 4

    Example: moonpool bench serve --find-capacity --goodput ttft:1000 tpot:100 --random-input-len 256
    """
    given = dict(locals())
    given["api_key"] = api_key_file or api_key
    console = None if disable_tqdm else Console()
    try:
        config = config_of(given)
        saving = Saving(
            save=save_result,
            append=append_result,
            detailed=save_detailed,
            folder=result_dir or Path(),
            filename=result_filename,
            label=label,
            metadata=tuple(metadata or ()),
        )
        if find_capacity:
            status = _search(config, given, result_dir or _OWN_CAPACITY, console)
        else:
            status = _measure(config, saving, console)
    except ReplayError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_BAD_INPUT) from error
    raise typer.Exit(status)


def config_of(given: dict[str, Any]) -> BenchConfig:
    """Return the configuration for these flag values. Raises SettingInvalid."""
    taken = {name: given[name] for name in BenchConfig.__dataclass_fields__ if name in given}
    sampling = (
        *("temperature", "top_p", "top_k", "min_p"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty"),
    )
    output_len = given["output_len"]
    lengths = {} if given["input_len"] is None else {"random_input_len": given["input_len"]}
    if output_len is not None:
        names = ("random_output_len", "prefix_repetition_output_len", "sharegpt_output_len", "custom_output_len")
        lengths |= dict.fromkeys(names, output_len)
    return BenchConfig(
        **{
            **taken,
            **lengths,
            "base_url": given["base_url"] or _default_url(given["host"], given["port"]),
            "headers": tuple(header_of(pair) for pair in given["header"] or ()),
            "sampling": {name: given[name] for name in sampling if given[name] is not None},
            "extra_body": json_object(given["extra_body"], "--extra-body"),
            "ready_check_timeout_s": given["ready_check_timeout_sec"],
            "request_timeout_s": given["request_timeout"],
            "max_send_lag_s": given["max_send_lag"],
            "keep_text": given["save_detailed"],
            "percentile_metrics": tuple(name.strip() for name in given["percentile_metrics"].split(",") if name),
            "metric_percentiles": numbers(given["metric_percentiles"], "--metric-percentiles"),
            "goodput": bounds_of(given["goodput"] or ()),
        }
    )


def _default_url(host: str | None, port: int | None) -> str:
    """Return the URL of the server that is named by host or port, otherwise that of the environment."""
    if host is None and port is None and (url := os.environ.get(URL_VARIABLE)):
        return url.rstrip("/")
    return f"http://{_bracketed(host or '127.0.0.1')}:{8000 if port is None else port}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _tokenizer(config: BenchConfig) -> Path:
    return config.tokenizer or bundled_model(flag="--tokenizer")


def _measure(config: BenchConfig, saving: Saving, console: Console | None) -> int:
    result = run_bench(config, _tokenizer(config), console)
    figures = result_of(result, config, saving, datetime.now())
    for notice in result.notices:
        print(f"note: {notice}")
    for reason in result.invalid_reasons:
        print(f"INVALID: {reason}")
    print(table(figures, config))
    for reason in sorted({r.reason for r in result.records if r.reason})[:5]:
        print(f"not completed: {reason}")
    if (path := save(figures, config, saving)) is not None:
        print(f"Result: {path}")
    if result.interrupted:
        return EXIT_INTERRUPTED
    if not figures["completed"] or figures["failed"] > figures["rejected"]:
        return EXIT_FAILED
    return 0 if figures["valid"] else EXIT_INVALID


def _check_alone(config: BenchConfig, given: dict[str, Any]) -> None:
    """Raise SettingInvalid for flags that apply only to a single run and have no effect on a search."""
    saving = [
        f"--{name.replace('_', '-')}" for name in ("save_result", "append_result", "save_detailed") if given[name]
    ]
    if saving:
        raise SettingInvalid(
            f"{saving[0]} cannot be combined with --find-capacity, which always writes capacity.json and "
            "capacity.html; choose their folder with --result-dir"
        )
    if math.isfinite(config.request_rate):
        raise SettingInvalid(
            f"--request-rate is {config.request_rate:g}, but --find-capacity varies the rate, starting at "
            "--capacity-start; omit --request-rate"
        )


def _search(config: BenchConfig, given: dict[str, Any], folder: Path, console: Console | None) -> int:
    # Imported late: matplotlib takes a second to import.
    from loadtest.capacity import CapacityObjective, CapacitySearch
    from loadtest.capacity.page import capacity_page, headline, step_line
    from loadtest.capacity.runner import find_capacity
    from loadtest.report import check_writable, write_text

    objective = CapacityObjective(
        bounds_ms=config.goodput,
        percentile=given["capacity_percentile"],
        max_lost_share=given["capacity_max_lost"],
        step_s=given["capacity_step"],
    )
    _check_alone(config, given)
    try:
        start = given["capacity_start"]
        search = CapacitySearch(
            start,
            given["capacity_resolution"],
            least=given["capacity_min_rate"] or start / 100,
            most=given["capacity_max_rate"],
        )
    except ValueError as error:
        raise SettingInvalid(
            f"{error}; expected --capacity-min-rate ≤ --capacity-start ≤ --capacity-max-rate, above 0, and a "
            "--capacity-resolution above 0, at most 1"
        ) from error
    check_writable(folder)
    print(f"Objectives: {objective.describe()}")
    result = find_capacity(
        config,
        objective,
        search,
        _tokenizer(config),
        on_step=lambda number, step: print(step_line(number, step), flush=True),
        console=console,
    )
    write_text(folder / "capacity.html", capacity_page(result))
    line = json.dumps(finite(result.as_json()), allow_nan=False, ensure_ascii=False)
    write_text(folder / "capacity.json", line + "\n")
    for reason in result.invalid_reasons:
        print(f"INVALID: {reason}")
    print(headline(result))
    print(f"Pictures: {folder / 'capacity.html'}")
    print(line)
    if result.interrupted:
        return EXIT_INTERRUPTED
    if result.invalid_reasons:
        return EXIT_INVALID
    return 0 if result.finding.rate is not None else EXIT_FAILED
