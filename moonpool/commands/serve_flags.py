"""Command line of `moonpool serve`: the options that its short help shows, and flags of `vllm serve`."""

from collections.abc import Mapping
from typing import Any, Final

import typer

from moonpool.options import ListsTakeSeveral

# The options that `serve --help` shows, by name of the setting; `--help-all` shows all.
SHOWN: Final = (
    *("model", "served_model_name", "models"),
    *("prefill_nodes", "decode_nodes", "aggregated"),
    *("host", "port", "api_key", "api_keys_file"),
    *("engine", "device", "dtype", "max_model_len", "capacity_tokens", "max_batch"),
    *("pool_bytes", "pool_ssd_dir"),
    *("ttft_slo", "tbt_slo"),
    *("decision_log", "state_dir", "verbose", "config"),
)

_VLLM_ARGS: Final = "with --engine vllm give it in --vllm-args '{flag} …'"
_SUPERFLUOUS: Final = "omit it, since {what}"

# Flags of `vllm serve` without an equal here, and what to give instead. Those with one are aliases in `settings`.
SUBSTITUTES: Final[Mapping[str, str]] = {
    "--gpu-memory-utilization": "give --capacity-tokens auto with --memory-fraction, a share of the memory that is "
    "free; or " + _VLLM_ARGS,
    "--tensor-parallel-size": _VLLM_ARGS,
    "--pipeline-parallel-size": _VLLM_ARGS,
    "--quantization": _VLLM_ARGS,
    "--load-format": _VLLM_ARGS,
    "--trust-remote-code": _VLLM_ARGS,
    "--data-parallel-size": "start several workers: --aggregated, or --prefill-nodes and --decode-nodes",
    "--kv-cache-dtype": "give --kv-dtype int8",
    "--swap-space": "give --pool-bytes: the KV pool keeps KV in the host's memory",
    "--cpu-offload-gb": _VLLM_ARGS,
    "--kv-transfer-config": _SUPERFLUOUS.format(what="Moonpool moves KV itself"),
    "--kv-events-config": _SUPERFLUOUS.format(what="Moonpool moves KV itself"),
    "--enable-prefix-caching": _SUPERFLUOUS.format(what="prefixes are always reused"),
    "--no-enable-prefix-caching": _SUPERFLUOUS.format(
        what="prefixes are always reused; a request that must not share has a cache_salt of its own"
    ),
    "--enable-chunked-prefill": _SUPERFLUOUS.format(what="prompts are always computed in chunks"),
    "--enforce-eager": "give --cuda-graphs off; " + _VLLM_ARGS,
    "--enable-auto-tool-choice": _SUPERFLUOUS.format(what="tools are always accepted"),
    "--tokenizer": _SUPERFLUOUS.format(what="the tokenizer is that of the model's folder"),
    "--disable-log-requests": _SUPERFLUOUS.format(what="requests are not logged"),
    "--allowed-origins": "give --cors-origins, once for each origin",
    "--uvicorn-log-level": "give --log-level",
    "--seed": _SUPERFLUOUS.format(what="each request has a seed of its own"),
}


class ServeCommand(ListsTakeSeveral):
    """Command `serve`: a short help, and errors for flags of vLLM that name the substitute."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        every = self.params
        try:
            if not ctx.meta.get(_SHOWS_ALL):
                self.params = [param for param in every if param.name in SHOWN or param.name == "help_all"]
            super().format_help(ctx, formatter)
        finally:
            self.params = every

    def unknown_flag(self, flag: str) -> None:
        """Raise BadParameter for a flag of vLLM, with or without a value after `=`."""
        name = flag.partition("=")[0].replace("_", "-")
        if advice := SUBSTITUTES.get(name):
            raise typer.BadParameter(
                f"{name} is a flag of vLLM that Moonpool does not have: {advice.format(flag=name)}"
            )


_SHOWS_ALL: Final = "moonpool.help_all"


def show_all(context: typer.Context, shows: bool) -> None:
    """Print the help with all options and exit: callback of `--help-all`."""
    if shows:
        context.meta[_SHOWS_ALL] = True
        print(context.get_help())
        raise typer.Exit
