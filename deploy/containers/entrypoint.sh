#!/bin/sh
# Run a command with a writable copy of the image's compiled kernels: numba ignores a cache that it cannot write. Other
# containers of the pod that share the folder use the same copy.
set -eu
kernels=${PRECOMPILED_KERNELS:-/opt/moonpool/kernels}
if [ -d "$kernels" ] && [ ! -d "$NUMBA_CACHE_DIR" ]; then
  partial=$NUMBA_CACHE_DIR.$$
  cp -a "$kernels" "$partial"
  mv "$partial" "$NUMBA_CACHE_DIR" 2>/dev/null || rm -rf "$partial"
fi
exec "$@"
