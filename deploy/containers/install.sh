#!/bin/sh
# Part of the image's build: install.sh cpu TORCH_INDEX, install.sh cuda, or install.sh vllm, installs the wheel and its
# dependencies in /opt/moonpool, and compiles its kernels. Every file must have a hash of the lock files; torch's CPU
# build comes from TORCH_INDEX alone, torch of vllm from vLLM's image, all else from PyPI.
set -eu
prefix=${PREFIX:-/opt/moonpool} src=${SRC:-/src} dist=${DIST:-/dist}
install() { "$prefix/bin/pip" install --no-cache-dir --no-compile --no-deps "$@"; }
locked() { install --require-hashes --only-binary=:all: "$@"; }
product() {
  locked -r "$src/requirements.lock"
  install --no-index "$dist"/moonpool-*.whl
}
case $1 in
cpu) locked --index-url "$2" -r "$src/requirements-cpu.lock"; product ;;
cuda) locked -r "$src/requirements-cuda.lock"; product ;;
vllm) "$prefix/bin/python" "$src/add_to_vllm.py" "$src/requirements-vllm.lock" "$dist"/moonpool-*.whl ;;
*) echo "install.sh cpu TORCH_INDEX, install.sh cuda or install.sh vllm, got: $*" >&2 && exit 2 ;;
esac
"$prefix/bin/python" -m compileall -q -j 0 --invalidation-mode unchecked-hash "$prefix/lib" || true # some sources of dependencies do not compile
find "$prefix" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
NUMBA_CACHE_DIR="$prefix/kernels" NUMBA_CPU_NAME=$NUMBA_CPU_NAME NUMBA_CPU_FEATURES=$NUMBA_CPU_FEATURES \
  "$prefix/bin/python" -P -m moonpool.kernel_compilation
