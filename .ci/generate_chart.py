"""Generated files of the deployment, written or checked: `generate_chart.py write | check`.

From all settings: deploy/cluster.schema.json, the JSON Schema of the configuration file. The rest is the Helm chart's.
From the roles' settings: the parts `config`, `modelConfig` and `groupConfig` of values.schema.json. From the vLLM
workers' checks: files/vllm-arguments.yaml. From values.yaml and its comments: the table of
README.md. From all of it: the golden renders of the examples, tests/deploy/golden, which a change is reviewed by.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "proto")]

from moonpool.config import ServeConfig, Setting, all_settings, composite_settings  # noqa: E402
from moonpool.config.models import model_settings  # noqa: E402
from moonpool.config.schema import file_schema, former_names_schema, setting_schema  # noqa: E402
from moonpool.config.serve import RuntimeSettings, SupervisorSettings  # noqa: E402
from settings.keys import group_settings  # noqa: E402
from settings.messenger import TransportSettings  # noqa: E402
from settings.node import LogSettings  # noqa: E402
from settings.worker import EngineSettings, KvSettings  # noqa: E402
from vllm_worker.engine_args import OWN_ARGUMENTS, SHORT_NAMES, UNSUPPORTED_ARGUMENTS  # noqa: E402

CHART = ROOT / "deploy" / "helm" / "moonpool"
CLUSTER_SCHEMA = ROOT / "deploy" / "cluster.schema.json"
GOLDEN = ROOT / "tests" / "deploy" / "golden"
KUBERNETES = "v1.32.0"
# What the chart says itself, by its own values.
OWN = {
    *(
        "model",
        "served_model_name",
        "models",
        "host",
        "port",
        "api_key",
        "api_keys_file",
        "http_tls_cert",
        "http_tls_key",
        "drain_grace",
        "worker_drain_grace",
    ),
    *("pool_bytes", "pool_hugepages", "pool_ssd_dir", "pool_ssd_bytes", "slo_file", "slo_force", "slo_dir"),
    *("redis_url", "redis_password", "cluster_name", "state_dir", "data_host", "rdma_devices"),
    *("tls_cert", "tls_key", "tls_ca", "join_token_file"),
    *("prefill_nodes", "decode_nodes", "aggregated", "pool_nodes", "conductors"),
}
_SERVE_ONLY = {*group_settings(SupervisorSettings), *group_settings(RuntimeSettings)}
# What a group of workers has values for, and what all groups of a model have in common.
_OF_GROUPS = {"vllm_args"}
_OF_MODELS = {"engine"}
_VALUES_OF_FLAGS = {"--model": "the values below model", "--served-model-name": "model.servedNames"}
# vLLM's arguments that only the chart refuses.
_SIZES = {
    **dict.fromkeys(("tensor-parallel-size", "tp"), "the chart sets it; use tensorParallelSize"),
    **dict.fromkeys(
        ("pipeline-parallel-size", "pp"), "a worker has as many GPUs as tensorParallelSize; raise that or replicas"
    ),
}
_BEFORE = "The chart's values. Generated from values.yaml"


def settable() -> dict[str, Setting]:
    """The keys that a user of the chart may set under `config`: those that are neither a node's own nor the chart's."""
    common = composite_settings(ServeConfig)
    return {name: key for name, key in all_settings().items() if name in common and name not in OWN | _SERVE_ONLY}


def config_schema() -> dict[str, Any]:
    """JSON schema of `config`."""
    properties = {name: setting_schema(declared) for name, declared in sorted(settable().items())}
    former = former_names_schema(settable(), setting_schema)
    return {"type": "object", "additionalProperties": False, "properties": properties | former}


def model_config_schema() -> dict[str, Any]:
    """JSON schema of `config` of one of `models`: what a model may set for itself, but for its numbers of workers."""
    own = {name: key for name, key in model_settings().items() if name not in OWN | _OF_GROUPS}
    properties = {name: setting_schema(declared) for name, declared in sorted(own.items())}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def group_config_schema() -> dict[str, Any]:
    """JSON schema of `config` of a group of workers: how its workers compute, keep KV, send it and log."""
    groups = (EngineSettings, KvSettings, TransportSettings, LogSettings)
    own = {name for group in groups for name in group_settings(group)} - _OF_GROUPS - _OF_MODELS
    properties = {name: setting_schema(declared) for name, declared in sorted(settable().items()) if name in own}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def schema_text() -> str:
    """values.schema.json with the settings as they are now."""
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    schema["properties"]["config"] = config_schema()
    schema["$defs"]["modelConfig"] = model_config_schema()
    schema["$defs"]["groupConfig"] = group_config_schema()
    return json.dumps(schema, indent=2) + "\n"


def vllm_arguments_text() -> str:
    """Reasons for which `vllmArgs` must not contain an argument of vLLM, by its name, in the chart's terms."""
    ours = {name: _in_chart(instead) for name, instead in OWN_ARGUMENTS.items()}
    unsupported = {name: f"a worker does not support {what}" for name, what in UNSUPPORTED_ARGUMENTS.items()}
    head = "# Arguments that vllmArgs must not contain. Generated from vllm_worker/engine_args.py by `make chart`.\n"
    known = ours | unsupported | _SIZES
    short = {name: known[full] for name, full in SHORT_NAMES.items()}
    # Quoted, since Helm would read a key such as n as a boolean.
    return head + yaml.safe_dump(known | short, width=200, default_style='"')


def _in_chart(instead: str) -> str:
    """Why an argument is Moonpool's own: the reason itself, or the chart's value for a flag."""
    if not instead.startswith("--"):
        return instead.removeprefix("nothing: ")
    return f"Moonpool sets it; use {_VALUES_OF_FLAGS.get(instead, 'config.' + instead[2:].replace('-', '_'))}"


def value_rows() -> Iterator[tuple[str, str, str]]:
    """(path, default, meaning) of every value with a comment above it."""
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    defaults = yaml.safe_load(text)
    path: list[tuple[int, str]] = []
    comment = ""
    for line in text.splitlines():
        said = re.match(r"\s*# (.+)", line)
        key = re.match(r"( *)([A-Za-z]\w*):", line)
        if said:
            comment = said[1]
        elif key:
            path = [*(above for above in path if above[0] < len(key[1])), (len(key[1]), key[2])]
            names = [name for _, name in path]
            if comment:
                yield ".".join(names), _default_text(defaults, names), comment
            comment = ""
        else:
            comment = ""


def _default_text(defaults: Any, names: list[str]) -> str:
    for name in names:
        defaults = defaults[name]
    text = json.dumps(defaults)
    return f"`{text}`" if len(text) <= 60 else "see values.yaml"


def readme_text() -> str:
    """README.md with its table as it is now."""
    text = (CHART / "README.md").read_text(encoding="utf-8")
    start = text.index(_BEFORE)
    table = "".join(f"| `{path}` | {default} | {meaning} |\n" for path, default, meaning in value_rows())
    before = f"{_BEFORE} by `make chart`.\n\n| value | default | |\n|---|---|---|\n"
    return text[:start] + before + table


def render(values: dict[str, Any], folder: Path = CHART, **release: Any) -> dict[str, str]:
    """The files of a chart by name, rendered by Helm; raises what Helm says."""
    import helm_python
    from helm_python import _native

    options = {"name": "moonpool", "namespace": "llm", "kube_version": KUBERNETES, **release}
    with helm_python.Chart.load(folder) as chart:
        files = json.loads(_native.call_string("helm_render", chart._raw(), json.dumps(values), json.dumps(options)))
    return {name.removeprefix("moonpool/templates/"): text for name, text in files.items()}


def golden_texts() -> Iterator[tuple[Path, str]]:
    """The golden file of every example, and what should be in it."""
    for example in sorted((CHART / "examples").glob("values-*.yaml")):
        values = yaml.safe_load(example.read_text(encoding="utf-8"))
        # Alerts and dashboards are files, which are read where they lie.
        unseen = {"prometheusRule": {"enabled": False}, "dashboards": {"enabled": False}}
        files = render(values | {"monitoring": values.get("monitoring", {}) | unseen})
        parts = [f"# {name}\n{text.strip()}\n" for name, text in sorted(files.items()) if text.strip()]
        notes = [part for part in parts if part.startswith("# NOTES.txt")]
        manifests = "---\n".join(part for part in parts if part not in notes)
        name = example.stem.removeprefix("values-")
        yield GOLDEN / f"{name}.yaml", re.sub(r"\n{2,}", "\n", manifests)
        yield GOLDEN / f"{name}.notes.txt", notes[0]


def made() -> Iterator[tuple[Path, str]]:
    """Every file that this makes, with what should be in it; the order matters, as renders use the schema."""
    yield CLUSTER_SCHEMA, json.dumps(file_schema(), indent=2) + "\n"
    yield CHART / "values.schema.json", schema_text()
    yield CHART / "files" / "vllm-arguments.yaml", vllm_arguments_text()
    yield CHART / "README.md", readme_text()
    yield from golden_texts()


def main(what: str) -> int:
    stale = []
    for path, text in made():
        if what == "write":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(str(path.relative_to(ROOT)))
    if stale:
        print(f"out of date: {', '.join(stale)}; run `make chart`, and look at what changed")
    return 1 if stale else 0


if __name__ == "__main__":
    if sys.argv[1:] not in (["write"], ["check"]):
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
