#!/bin/bash
# Builds the native module with sanitizers of GCC and runs its tests on it:
#     xla_ext/sanitize.sh address,undefined
#     xla_ext/sanitize.sh thread -k concurrency        # what follows goes to pytest
#     xla_ext/sanitize.sh address --complete           # all cases: hours; without it a share of them, another with --salt WORD
#     xla_ext/sanitize.sh emulated                     # no sanitizer: the loops for AVX-512 and AMX on a processor without them
#     xla_ext/sanitize.sh emulated,address,undefined   # those with sanitizers, which do not see what AMX's instructions read
#     xla_ext/sanitize.sh absent                       # no sanitizer: without oneDNN, as where its packages do not exist
#     AARCH64_ROOT=FOLDER xla_ext/sanitize.sh aarch64  # no sanitizer: for Arm, run by qemu; xla_ext/aarch64_root.sh makes FOLDER
# In a virtual environment with `pip install '.[test]'` and what pyproject.toml's [build-system] requires, cmake and ninja. For Arm
# that is one of FOLDER's Python, and Debian's g++-aarch64-linux-gnu, qemu-user-binfmt and debootstrap are needed too.
set -euo pipefail
kinds=$1
shift
source=$(cd "$(dirname "$0")/.." && pwd)
build=$source/build/sanitize-$kinds
python=$(command -v python)
case $kinds in
  aarch64)
    python=$AARCH64_ROOT/usr/bin/python3
    export QEMU_LD_PREFIX=$AARCH64_ROOT
    read -ra flags < <(cd "$source" && python -m tools.aarch64) ;;
  emulated) flags=(-DJAXFUSE_EMULATE_AVX512=ON) ;;
  absent) flags=(-DJAXFUSE_ONEDNN=OFF) ;;
  *) flags=(-DCMAKE_BUILD_TYPE=Sanitize "-DCMAKE_CXX_FLAGS=-O1 -g -fno-omit-frame-pointer -fsanitize=${kinds#emulated,}") ;;
esac
[[ $kinds != emulated,* ]] || flags+=(-DJAXFUSE_EMULATE_AVX512=ON)
cmake -G Ninja -S "$source" -B "$build" -DJAXFUSE_CUDA=off -DPython_EXECUTABLE="$(command -v python)" \
  -Dpybind11_DIR="$(python -m pybind11 --cmakedir)" "${flags[@]}"
cmake --build "$build"

# A copy of the package, because the source tree may hold a module of its own.
tree=$build/tree
rm -rf "$tree"
mkdir "$tree"
cp -r "$source/jaxfuse" "$source/tests" "$source/xla_ext" "$source/pyproject.toml" "$tree"
rm -f "$tree"/jaxfuse/_native*.so
cp "$build"/_native*.so "$tree/jaxfuse"

# Python itself is not built with them, so their runtimes are loaded before it; what it never frees is no leak of ours.
case $kinds in
  aarch64|emulated|absent) runtime= ;;
  thread) runtime=$(g++ -print-file-name=libtsan.so) ;;
  *) runtime="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so)" ;;
esac
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export TSAN_OPTIONS=report_signal_unsafe=0:ignore_noninstrumented_modules=1

# The pool by itself is a program. The thread sanitizer has a thread of its own, and ends where a process with threads forks. The
# address sanitizer's memory may be locked for ever in the child of a process that forks while another thread allocates.
case $kinds in
  aarch64|emulated*|absent) ;;
  thread) own="not forks and not only_the_team_wakes" ;;
  *) own="thread_pool and not primitives" ;;
esac
if [ -n "${own:-}" ]; then
  (cd "$source" && CXXFLAGS="-g -fsanitize=$kinds" setarch -R python -m pytest -q -n 0 -p no:cacheprovider tests/test_thread_pool.py -k "$own")
fi
cd "$tree"
# Left out: by the thread sanitizer, which ends them, the children of a fork that start threads; by qemu, which has threads and memory
# of its own, the number of threads. Child processes get the sanitizers' runtimes by the environment, as this one does.
case $kinds in
  aarch64) left=(tests/test_threads.py) ;;
  thread) left=(tests/test_threads.py::test_{a_forked_child,children_of_a_process_that_computed_nothing}) ;;
  *) left=() ;;
esac
# setarch: the thread sanitizer wants memory where it was before kernels randomised more of it. -s: so that reports are seen.
[ "$kinds" = absent ] || [ "$kinds" = aarch64 ] || LD_PRELOAD=$runtime setarch -R python -c "
from jaxfuse.runtime import ffi
reason = ffi.no_onednn()
raise SystemExit(reason and f'the tests of convolutions would all be skipped: {reason}')"
LD_PRELOAD=$runtime setarch -R "$python" -m pytest -q -s -p no:cacheprovider --share "${left[@]/#/--deselect=}" "$@" \
  tests/test_attention.py tests/test_batch_norm_grad.py tests/test_concurrency.py tests/test_conv_channels_last.py \
  tests/test_dense.py tests/test_filter_gradient_sums.py tests/test_global_average_pool.py tests/test_max_pool.py \
  tests/test_native_{batch_norm,bounds,contraction,conv,depthwise,int8,onednn,refusals}.py tests/test_nonfinite.py tests/test_norm.py \
  tests/test_freeze.py tests/test_freeze_{expansions,gates,int8,packed,pixels}.py tests/test_int8.py tests/test_ops.py tests/test_per_sample_gradients.py \
  tests/test_piecewise.py tests/test_products_and_taps.py tests/test_recurrent_loops.py tests/test_repeated_calls.py tests/test_threads.py
