"""SECURITY.md names tests that are there; and nothing that the project's programs read can make them run code."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    *(
        "frontend",
        "conductor",
        "prefill_node",
        "decode_node",
        "vllm_worker",
        "worker",
        "kvpool",
        "messenger",
        "engine",
        "loadtest",
        "rpc",
        "jit",
        "endpoint_picker",
        "examples",
    ),
    *("loadtest", "simulator", "traces", "telemetry", "settings", "moonpool", "proto", "tools", "benchmarks", "deploy"),
    ".ci",
)
UNSAFE_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "marshal", "shelve", "dill", "joblib", "jsonpickle"}
UNSAFE_NAMES = {"eval", "exec", "compile", "__import__"}
SAFE_LOADERS = {"SafeLoader", "CSafeLoader", "_StrictLoader"}
UNSAFE_YAML = {"unsafe_load", "unsafe_load_all", "full_load", "full_load_all", "UnsafeLoader", "FullLoader", "Loader"}
JUSTIFIED = {
    ("loadtest/senders.py", "import pickle"): "between a load test and its own senders, by pipes that it made",
    ("jit/fast_dataclass.py", "exec"): "an __init__ made of a dataclass's own field names, at import",
    ("tools/fuzz/coverage.py", "compile"): "the repository's own files, to count their lines; nothing of it is run",
    ("tools/prove/imports.py", "__import__"): "the repository's own import statements, with some modules replaced",
    ("tools/prove/world/disk_modules.py", "__import__"): "the standard library's own import statements",
}


def unsafe(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, what) of everything that could run code which was read."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [name.name for name in node.names if name.name.partition(".")[0] in UNSAFE_MODULES]
            yield from ((node.lineno, f"import {name}") for name in found)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in UNSAFE_MODULES:
            yield node.lineno, f"import {node.module}"
        elif isinstance(node, ast.ImportFrom) and node.module == "yaml":
            yield from ((node.lineno, name.name) for name in node.names if name.name in UNSAFE_YAML)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "yaml" and node.attr in UNSAFE_YAML:
            yield node.lineno, f"yaml.{node.attr}"
        elif isinstance(node, ast.Call):
            yield from ((node.lineno, what) for what in unsafe_call(node))


def unsafe_call(call: ast.Call) -> Iterator[str]:
    name = ast.unparse(call.func)
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if name.removeprefix("builtins.") in UNSAFE_NAMES:
        yield name.removeprefix("builtins.")
    if name in ("yaml.load", "yaml.load_all"):
        loader = given.get("Loader") or (ast.unparse(call.args[1]) if len(call.args) > 1 else "")
        if loader.rpartition(".")[2] not in SAFE_LOADERS:
            yield f"{name} without a safe loader"
    if name == "torch.load" and given.get("weights_only") != "True":
        yield "torch.load without weights_only=True"
    if given.get("allow_pickle", "False") != "False" or given.get("trust_remote_code", "False") != "False":
        yield f"{name} with allow_pickle or trust_remote_code"
    if given.get("shell", "False") != "False" or name.endswith(("create_subprocess_shell", "os.system", "os.popen")):
        yield f"{name} through a shell"


def test_nothing_that_is_read_can_run_code() -> None:
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    assert len(paths) > 400
    found: set[tuple[str, str]] = set()
    for path in paths:
        name = str(path.relative_to(ROOT))
        found |= {(name, what) for _, what in unsafe(ast.parse(path.read_text(encoding="utf-8"), name))}
    assert found - JUSTIFIED.keys() == set(), (
        "take another way, or say in JUSTIFIED why nobody else can write what is read"
    )
    assert JUSTIFIED.keys() - found == set(), "no longer there: take it out of JUSTIFIED"


def test_every_package_is_looked_at() -> None:
    found = {path.parent.relative_to(ROOT).parts[0] for path in ROOT.glob("*/*.py")} - {"tests"}
    assert {name for name in found if name == ".ci" or not name.startswith(".")} <= set(PACKAGES)


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import marshal as m",
        "from dill import load",
        "eval(text)",
        "exec(text)",
        "builtins.exec(text)",
        "yaml.load(text)",
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.unsafe_load(text)",
        "from yaml import FullLoader",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "subprocess.run(text, shell=True)",
        "asyncio.create_subprocess_shell(text)",
        "os.system(text)",
    ],
)
def test_what_would_run_code_is_noticed(code: str) -> None:
    assert list(unsafe(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    ["yaml.safe_load(t)", "yaml.load(t, Loader=yaml.SafeLoader)", "torch.load(p, weights_only=True)", "re.compile(t)"],
)
def test_what_is_safe_is_left_alone(code: str) -> None:
    assert not list(unsafe(ast.parse(code)))


def test_the_security_page_names_tests_that_are_there(pages: list[Any]) -> None:
    (page,) = [page for page in pages if page.path.name == "SECURITY.md"]
    named = [code for code in page.inline() if code.startswith("tests/")]
    assert len(named) >= 15
    for name in named:
        file, _, test = name.partition("::")
        if (ROOT / file).is_dir():
            continue
        text = (ROOT / file).read_text(encoding="utf-8")
        assert not test or re.search(rf"^(async )?def {test}\(", text, re.MULTILINE), name
