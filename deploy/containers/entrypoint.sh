#!/bin/sh
# Runs a command with the image's compiled kernels where they can be read and added to: numba takes no folder that it
# cannot write to. A second container of the pod that shares the folder finds them there.
set -eu
kernels=${PRECOMPILED_KERNELS:-/opt/moonpool/kernels}
if [ -d "$kernels" ] && [ ! -d "$NUMBA_CACHE_DIR" ]; then
  partial=$NUMBA_CACHE_DIR.$$
  cp -a "$kernels" "$partial"
  mv "$partial" "$NUMBA_CACHE_DIR" 2>/dev/null || rm -rf "$partial"
fi
exec "$@"
