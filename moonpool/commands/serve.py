"""Commands `moonpool serve`, which checks the configuration and runs a cluster, and `moonpool config`."""

import asyncio
import json
import shutil
from contextlib import ExitStack
from typing import Annotated

import typer

from moonpool.config import ServeConfig, Setting, all_settings
from moonpool.config.schema import file_schema
from moonpool.errors import ConfigError
from moonpool.model_files import check_model_folder, check_paced_profile, with_local_models, with_pinned_models
from moonpool.runtime.choice import chosen_runtime
from moonpool.supervision.http_port import open_listener
from moonpool.supervision.run_dir import OBJECTIVES, RunDirLock, default_run_dir, make_run_dir
from moonpool.transport_security import secure


def serve(config: ServeConfig) -> int:
    """Run the cluster until SIGINT or SIGTERM; 0 after a clean stop. Raises MoonpoolError when it cannot run."""
    from moonpool.supervision.cluster import ClusterRun

    secure(config.tls, config.access)
    ready_file = config.supervisor.ready_file
    if ready_file is not None and not ready_file.absolute().parent.is_dir():
        raise ConfigError(f"the ready file's folder {ready_file.absolute().parent} does not exist")
    with ExitStack() as stack:
        listener = None  # without frontends
        if not config.runtime.join:
            listener = stack.enter_context(open_listener(config.http.host, config.http.port))
        name = "joined" if listener is None else str(listener.getsockname()[1])
        run_dir = make_run_dir(config.supervisor.run_dir or default_run_dir(name))
        stack.enter_context(RunDirLock(run_dir))
        config = _with_checked_models(config)
        runtime = stack.enter_context(chosen_runtime(config, run_dir, listener))
        # Objectives of an earlier run: only a state folder outlives a run.
        shutil.rmtree(run_dir / OBJECTIVES, ignore_errors=True)
        asyncio.run(ClusterRun(config, run_dir, listener, runtime).run())
    return 0


def _with_checked_models(config: ServeConfig) -> ServeConfig:
    """Return the configuration with models that are on this machine, and on every host of a Ray cluster."""
    local = with_local_models(config)
    for entry in local.served:
        engine = entry.engine(local.engine)
        check_model_folder(entry.path, engine.engine)
        if engine.engine == "paced":
            check_paced_profile(engine.paced_profile)
    return with_pinned_models(config, local) if config.runtime.is_ray else local


def config_keys(
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the file's JSON Schema, for editors, instead.", show_default=False)
    ] = False,
) -> None:
    """Print a configuration file with every key, its default and its meaning, to save and edit.

    Example: moonpool config > cluster.yaml
    """
    if schema:
        print(json.dumps(file_schema(), indent=2))
        return
    settings = all_settings().values()
    for panel in dict.fromkeys(declared.panel for declared in settings):
        print(f"\n## {panel}")
        for declared in settings:
            if declared.panel == panel:
                print(_commented(declared))


def _commented(declared: Setting) -> str:
    choices = f" ({', '.join(declared.choices)})" if declared.choices else ""
    is_plain = declared.key.default_text is None and declared.default not in (None, "", ())
    value = declared.default_text if is_plain else f" # default: {declared.default_text}"
    return f"# {declared.key.help}{choices}\n# {declared.name}: {value}"
