"""Structural checks of the code base, and size figures.

    python tools/house.py [ROOT]

The exit status is 1 if a rule is broken: an import cycle, a function of more than eight parameters (except commands,
whose parameters are command-line flags), a docstring that opens with a fragment, a key declared in two classes, a class
name defined by two modules outside tests, or an import of a name that the imported module does not define. The last
line of output is a JSON object with all figures. They include the numbers of shipped files that name a request's id and
a TTFT objective, which measure how far these spread over the code. ROOT: checkout to measure, by default this one.
"""

import ast
import io
import json
import re
import sys
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_PARAMETERS = 8
FRAGMENTS = frozenset({"what", "who", "whose", "whom", "whether", "until", "of"})
UNSHIPPED = ("benchmarks", "tools", "tests", ".ci")
GENERATED = "moonpool_proto"
# Classes below these folders carry options of single commands, which only share words with the cluster's settings.
NOT_SERVING = ("benchmarks", "tools", "tests", ".ci", "loadtest", "simulator", "traces", "moonpool/doctor")
UNIT = re.compile(r"_(s|ms|ns|nbytes|bytes|tokens|path)$")
SHOWN = 25

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    name: str  # dotted
    path: Path  # relative to the root
    tree: ast.Module
    text: str

    @property
    def package(self) -> str:
        return self.name.split(".")[0]


def read_modules(root: Path) -> list[Module]:
    """Parse every Python file of the shipped packages, tools, benchmarks and tests, in order of their paths."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    shipped = [Path(package) for package in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]]
    unshipped = project["tool"]["mypy"]["packages"]
    folders = sorted({*(path for path in shipped if GENERATED not in path.parts), *map(Path, (*UNSHIPPED, *unshipped))})
    modules = []
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            relative = path.relative_to(root)
            parts = relative.with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            text = path.read_text(encoding="utf-8")
            modules.append(Module(name, relative, ast.parse(text, str(relative)), text))
    return modules


def import_cycles(modules: list[Module]) -> list[list[str]]:
    """Return the groups of modules that import each other; imports inside functions count, too."""
    names = {module.name for module in modules}
    graph = {module.name: set(_imported(module, names)) - {module.name} for module in modules}
    return sorted(sorted(group) for group in _strongly_connected(graph) if len(group) > 1)


def _imported(module: Module, names: set[str]) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                if submodule in names:
                    yield submodule
                elif node.module in names:
                    yield node.module


def _strongly_connected(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components, by an iterative version of Tarjan's algorithm."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []
    for start in sorted(graph):
        if start in order:
            continue
        work = [(start, iter(sorted(graph[start])))]
        order[start] = low[start] = len(order)
        stack.append(start)
        while work:
            node, successors = work[-1]
            for successor in successors:
                if successor not in order:
                    order[successor] = low[successor] = len(order)
                    stack.append(successor)
                    work.append((successor, iter(sorted(graph[successor]))))
                    break
                if successor in stack:
                    low[node] = min(low[node], order[successor])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == order[node]:
                    at = stack.index(node)
                    groups.append(stack[at:])
                    del stack[at:]
    return groups


def long_signatures(modules: list[Module]) -> list[str]:
    """Return the functions with more than `MAX_PARAMETERS` parameters, except commands of the command line, kernels of
    Triton and numba's intrinsics, which take single arrays and numbers.
    """
    found = []
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, Function) and not _is_command(node) and not _is_kernel(node):
                arguments = node.args
                named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
                count = sum(argument.arg not in {"self", "cls"} for argument in named)
                if count > MAX_PARAMETERS:
                    found.append(f"{module.path}:{node.lineno}: {node.name} has {count} parameters")
    return found


def _is_kernel(function: Function) -> bool:
    first = [argument.arg for argument in function.args.args[:1]]
    is_triton = any(ast.unparse(decorator) == "triton.jit" for decorator in function.decorator_list)
    return is_triton or first == ["typing_context"]


def _is_command(function: Function) -> bool:
    """Return True if the parameters are command-line flags: their annotations or defaults contain typer options."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    texts = [ast.unparse(argument.annotation) for argument in named if argument.annotation is not None]
    texts += [ast.unparse(default) for default in (*arguments.defaults, *arguments.kw_defaults) if default is not None]
    decorators = " ".join(ast.unparse(decorator) for decorator in function.decorator_list)
    return any("typer." in text or "options." in text for text in texts) or ".command(" in decorators


def fragment_docstrings(modules: list[Module]) -> list[str]:
    """Return the docstrings whose first word makes them a fragment instead of a sentence."""
    found = []
    for module in modules:
        for node, text in _docstrings(module.tree):
            words = re.findall(r"[A-Za-z]+", text)
            if words and words[0].lower() in FRAGMENTS:
                first = text.strip().splitlines()[0]
                found.append(f"{module.path}:{getattr(node, 'lineno', 1)}: {first}")
    return found


def _docstrings(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node, text


def keys_declared_twice(modules: list[Module]) -> list[str]:
    """Return the configuration keys that more than one configuration class of the cluster declares, ignoring units.

    A key is a field annotated with a `Key`; a configuration class is named ...Config, ...Settings or ...Options,
    or declares keys itself. Fields that contain another such class do not count as declarations.
    """
    keys: set[str] = set()
    declared: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        if any(map(module.path.is_relative_to, NOT_SERVING)):
            continue
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.ClassDef):
                continue
            fields = [
                item for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            ]
            own = {_field(item): _key(item) for item in fields if re.search(r"\bKey\(", ast.unparse(item.annotation))}
            keys |= set(own.values())
            if own or node.name.endswith(("Config", "Settings", "Options")):
                for item in fields:
                    if not re.search(r"ClassVar|Config\b|Settings\b|Options\b", ast.unparse(item.annotation)):
                        name = _field(item)
                        for key in {own[name]} if name in own else {name, _without_unit(name)}:
                            declared[key].add(f"{module.name}.{node.name}")
    return [f"{key}: {', '.join(sorted(declared[key]))}" for key in sorted(keys) if len(declared[key]) > 1]


def _field(item: ast.AnnAssign) -> str:
    assert isinstance(item.target, ast.Name)
    return item.target.id


def _key(item: ast.AnnAssign) -> str:
    """Return the YAML key of a field annotated with a `Key`: the field's name without the unit given in the `Key`."""
    unit = re.search(r"\bunit='(\w+)'", ast.unparse(item.annotation))
    return _field(item).removesuffix(f"_{unit[1]}") if unit else _field(item)


def _without_unit(name: str) -> str:
    return UNIT.sub("", name)


def classes_defined_twice(modules: list[Module]) -> list[str]:
    """Return the names of module-level classes that more than one module defines, with those modules."""
    places: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module.name)
    return [f"{name}: {', '.join(sorted(found))}" for name, found in sorted(places.items()) if len(found) > 1]


def missing_imports(modules: list[Module]) -> list[str]:
    """Return the `from` imports of names that the imported module of the project does not define.

    mypy finds them only in the packages that it checks, not in scripts such as those in `.ci`.
    """
    defined = {module.name: _defined(module.tree) for module in modules}
    found = []
    for module in modules:
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.ImportFrom) or node.level or node.module not in defined:
                continue
            names = defined[node.module]
            if "__getattr__" in names or "*" in names:
                continue
            found += [
                f"{module.path}:{node.lineno}: {alias.name} is not in {node.module}"
                for alias in node.names
                if alias.name not in {*names, "*"} and f"{node.module}.{alias.name}" not in defined
            ]
    return found


def _defined(tree: ast.Module) -> set[str]:
    """Return every name that the module binds, at any depth."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return names


def lines_of_code(module: Module) -> int:
    """Count the lines of code, without blank lines, comments and docstrings."""
    held: set[int] = set()
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type not in skipped:
            held.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            held.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(held)


def _num_naming(modules: list[Module], names: set[str]) -> int:
    """Count the modules with one of the identifiers, as a variable, an attribute, a parameter or a keyword."""
    found = 0
    for module in modules:
        tokens = tokenize.generate_tokens(io.StringIO(module.text).readline)
        found += any(token.type == tokenize.NAME and token.string in names for token in tokens)
    return found


def main(root: Path) -> int:
    modules = read_modules(root)
    shipped = [module for module in modules if module.path.parts[0] not in {*UNSHIPPED, "soak", "training", "rdma_bed"}]
    own = [module for module in modules if module.path.parts[0] != "tests"]
    per_package: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for module in modules:
        per_package[module.path.parts[0]][0] += 1
        per_package[module.path.parts[0]][1] += lines_of_code(module)
    print(f"{'package':<14}{'files':>7}{'lines of code':>15}")
    for package, (num_files, num_lines) in sorted(per_package.items()):
        print(f"{package:<14}{num_files:>7}{num_lines:>15}")
    broken = {
        "import_cycles": [" <-> ".join(group) for group in import_cycles(own)],
        "long_signatures": long_signatures(own),
        "fragment_docstrings": fragment_docstrings(modules),
        "keys_declared_twice": keys_declared_twice(modules),
        "classes_defined_twice": classes_defined_twice(own),
        "missing_imports": missing_imports(modules),
    }
    for rule, places in broken.items():
        if places:
            print(f"\n{rule}: {len(places)}")
            for place in places[: None if "--all" in sys.argv else SHOWN]:
                print(f"  {place}")
            if len(places) > SHOWN and "--all" not in sys.argv:
                print(f"  ... and {len(places) - SHOWN} more: --all shows them")
    figures = {
        **{rule: len(places) for rule, places in broken.items()},
        "policy_files": sum(module.name.startswith("conductor.policy") for module in shipped),
        "moonpool_lines": sum(len(module.text.splitlines()) for module in shipped if module.package == "moonpool"),
        "shipped_lines": sum(len(module.text.splitlines()) for module in shipped),
        "shipped_files": len(shipped),
        "files_naming_a_request": _num_naming(shipped, {"request_id"}),
        "files_naming_a_ttft_objective": _num_naming(shipped, {"ttft_objective", "ttft_objective_s"}),
        "packages": {
            package: {"files": num_files, "lines_of_code": num_lines}
            for package, (num_files, num_lines) in sorted(per_package.items())
        },
    }
    print(json.dumps(figures))
    return int(any(broken.values()))


if __name__ == "__main__":
    given = [argument for argument in sys.argv[1:] if argument != "--all"]
    sys.exit(main(Path(given[0]) if given else Path(__file__).resolve().parents[1]))
