"""Generates Python from proto/: `write` replaces the files beside the sources, `check` fails if they differ.

Run by the environment's Python; protoc's mypy plug-ins are taken from beside it.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PROTO = Path(__file__).resolve().parent.parent / "proto"
PACKAGE = Path("moonpool_proto", "v1")
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")


def main(mode: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        fresh = generate(Path(folder))
        present = {path.name: path.read_bytes() for pattern in GENERATED for path in (PROTO / PACKAGE).glob(pattern)}
        if mode == "write":
            for name in present.keys() - fresh.keys():
                (PROTO / PACKAGE / name).unlink()
            for name in fresh:
                shutil.copyfile(Path(folder) / PACKAGE / name, PROTO / PACKAGE / name)
            return 0
    differing = sorted(name for name in present.keys() | fresh.keys() if present.get(name) != fresh.get(name))
    for name in differing:
        print(f"proto/{PACKAGE / name} is not what its .proto generates: run `make proto`")
    return 1 if differing else 0


def generate(out: Path) -> dict[str, bytes]:
    """Generated files by name, from every .proto of the package."""
    sources = sorted(str(path.relative_to(PROTO)) for path in (PROTO / PACKAGE).glob("*.proto"))
    outputs = [f"--{kind}_out={out}" for kind in ("python", "grpc_python")]
    outputs += [f"--{kind}_out=quiet:{out}" for kind in ("mypy", "mypy_grpc")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I", str(PROTO), *outputs, *sources],
        check=True,
        cwd=PROTO,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"},
    )
    return {path.name: path.read_bytes() for pattern in GENERATED for path in (out / PACKAGE).glob(pattern)}


if __name__ == "__main__":
    if sys.argv[1:] not in (["write"], ["check"]):
        print(__doc__)
        sys.exit(2)
    sys.exit(main(sys.argv[1]))
