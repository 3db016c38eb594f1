#!/bin/sh
# Part of the image's build: install.sh TORCH_INDEX installs the wheel and its dependencies in /opt/moonpool, and compiles
# its kernels.
set -eu
prefix=${PREFIX:-/opt/moonpool} src=${SRC:-/src} dist=${DIST:-/dist}
for wheel in "$dist"/moonpool-*.whl; do
  "$prefix/bin/pip" install --no-cache-dir --no-compile -c "$src/constraints.txt" --extra-index-url "$1" "$wheel[ray]"
done
"$prefix/bin/python" -m compileall -q -j 0 --invalidation-mode unchecked-hash "$prefix/lib" || true # some sources of dependencies do not compile
find "$prefix" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
NUMBA_CACHE_DIR="$prefix/kernels" NUMBA_CPU_NAME=$NUMBA_CPU_NAME NUMBA_CPU_FEATURES=$NUMBA_CPU_FEATURES \
  "$prefix/bin/python" "$src/.ci/compile_kernels.py"
