#!/usr/bin/env bash
# A machine like a small container: one CPU, no libgomp, a home that cannot be written.
#     tests/small_machine.sh                 # runs doctor, the short demo and a part of the tests
#     tests/small_machine.sh COMMAND …       # runs the command there
# In a virtual environment with `pip install '.[demo,test]'`. Needs Linux with user namespaces.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH=$PATH:/usr/sbin:/sbin  # for ldconfig, which is on no user's path everywhere
if [ $# = 0 ]; then
  set -- bash -ec '
    python -m jaxfuse doctor
    python -m jaxfuse demo --quick --out "$(mktemp -d)"
    python -m pytest -q -n 0 -p no:cacheprovider tests/test_fuse.py tests/test_thread_pool.py tests/test_native_conv.py tests/test_jit.py'
fi
unshare --user --map-root-user --mount bash -ec '
  for library in $(ldconfig -p | sed -n "s/.*libgomp.* => //p"); do mount --bind /dev/null "$library"; done
  if python -c "import ctypes; ctypes.CDLL(\"libgomp.so.1\")" 2>/dev/null; then echo "libgomp is still here"; exit 1; fi
  export HOME=$(mktemp -d)
  mount -t tmpfs -o ro tmpfs "$HOME"
  if touch "$HOME/file" 2>/dev/null; then echo "the home can be written"; exit 1; fi
  exec taskset --cpu-list "$(taskset --cpu-list --pid $$ | sed "s/.*: //; s/[-,].*//")" "$@"' bash "$@"
