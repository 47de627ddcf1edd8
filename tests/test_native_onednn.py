"""Which oneDNN is used: our own copy, whatever other libraries the process has or lacks; and which of its kernels."""

import importlib.util
import pathlib
import re
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfuse
from compare import same
from jaxfuse import ops
from jaxfuse.ops.conv.conv import OP
from jaxfuse.runtime import ffi
from processes import ROOT, printed_by

CC = shutil.which("gcc") or shutil.which("clang")
needs_onednn = pytest.mark.skipif(ffi.no_onednn() is not None, reason=str(ffi.no_onednn()))
needs_compiler = pytest.mark.skipif(CC is None, reason="no C compiler")

FOREIGN = r"""
typedef struct { int major, minor, patch; const char *hash; unsigned cpu, gpu; } version;
static version ours = {VERSION, "", 0, 0};
const version *dnnl_version(void) { return &ours; }
int omp_get_max_threads(void);
int threads(void) { return omp_get_max_threads(); }
"""
LOAD = """
import ctypes, sys
gomp, foreign = (ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL) for path in sys.argv[1:3])
"""
PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jaxfuse import ops
from jaxfuse.runtime import ffi

def check_dense(dtype):
    x, w = (jnp.asarray(np.random.default_rng(0).standard_normal(s), dtype) for s in ((40, 96), (96, 48)))
    y = ops.dense(x, w, activation="relu")
    wide = np.maximum(np.float64(x) @ np.float64(w), 0)
    assert y.dtype == dtype and np.abs(np.float64(y) - wide).max() <= (0.2 if dtype == jnp.bfloat16 else 1e-4)

def check_conv(dtype=jnp.float32):
    x, w = (jnp.asarray(np.random.default_rng(0).standard_normal(s), dtype) for s in ((2, 9, 9, 16), (3, 3, 16, 32)))
    y = ops.conv(x, w, padding="SAME")
    wide = lax.conv_general_dilated(*map(jnp.float32, (x, w)), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    assert y.dtype == dtype and jnp.abs(y - wide).max() < (0.2 if dtype == jnp.bfloat16 else 1e-4)
"""

MISSING = """
import pathlib
with_name = pathlib.PurePath.with_name  # of the copy that `import jaxfuse` loads
pathlib.PurePath.with_name = lambda path, name: with_name(path, name.replace("_native_onednn", "_native_missing"))
"""
# Without oneDNN convolutions of channels last run by our own loops, and others stay XLA's.
WITHOUT = """
import importlib, itertools, jaxfuse
conv_op = importlib.import_module("jaxfuse.ops.conv.conv")

def convolved(x, w):
    groups = x.shape[3] // w.shape[2]
    numbers = "NHWC", "HWIO", "NHWC"
    return jax.nn.relu(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups))

def channels_first(x, w):
    return lax.conv(x, w, (1, 1), "SAME")

def check_without_onednn():
    assert ffi.no_onednn() and not ffi.native().info()["isa"], ffi.native().info()
    shapes = (2, 9, 9, 16), (3, 3, 16, 32), (3, 3, 1, 16)
    x, full, depthwise = (jnp.asarray(np.random.default_rng(0).standard_normal(s), "float32") for s in shapes)
    first = jnp.ones((2, 16, 9, 9)), jnp.ones((32, 16, 3, 3))
    (site,) = jaxfuse.explain(channels_first, *first, policy="always").skipped
    assert site.reason == f"the native module has no such kernel: {ffi.no_onednn()}", site
    gradient = lambda f: jax.jit(jax.grad(lambda x, w: jnp.sum(f(x, w) ** 2), (0, 1)))
    for w, dtype in itertools.product((full, depthwise, full[:1, :1]), ("float32", "bfloat16")):
        arrays = x.astype(dtype), w.astype(dtype)
        fused = jaxfuse.fuse(convolved, policy="always")
        assert [site.kernel for site in jaxfuse.explain(convolved, *arrays, policy="always").fused] == ["native"]
        assert not jaxfuse.explain(convolved, *arrays).fused  # nobody measured it
        targets = gradient(fused).lower(*arrays).as_text()
        assert "jaxfuse_conv_fwd" in targets and "jaxfuse_conv_bwd" in targets
        wide = [a.astype(jnp.float32) for a in arrays]
        for got, true in zip((fused(*arrays), *gradient(fused)(*arrays)), (convolved(*wide), *gradient(convolved)(*wide))):
            assert jnp.abs(got - true).max() < (1e-5 if dtype == "float32" else 2e-2) * jnp.abs(true).max(), (w.shape, dtype)
    config = jax.make_jaxpr(lambda: ops.conv(*first, dimension_numbers=("NCHW", "OIHW", "NCHW")))().eqns[0].params["config"]
    try:  # what a program would meet that was exported where there is oneDNN
        conv_op._run_forward(config, first, ())[0].block_until_ready()
    except Exception as error:
        assert "jaxfuse_conv_fwd: oneDNN would compute this" in str(error), error
    else:
        raise AssertionError("a convolution that nobody computes")
"""


def private_copy() -> pathlib.Path:
    return pathlib.Path(ffi.native().__file__).with_name("_native_onednn.so")


def script():
    spec = importlib.util.spec_from_file_location("private_copy", ROOT / "xla_ext/onednn/private_copy.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def exported(library: pathlib.Path) -> list[str]:
    """Names of the functions and objects that the library offers to others."""
    elf = script().Elf(library.read_bytes())
    return [elf.text(name).decode() for _, name, section in elf.symbols() if section]


def compiled(folder: pathlib.Path, name: str, source: str, *flags: str) -> pathlib.Path:
    """A library of that name, also its SONAME."""
    (folder / "source.c").write_text(source)
    path = folder / name
    subprocess.run([CC, "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(path), str(folder / "source.c"), *flags], check=True)
    return path


def openmp(folder: pathlib.Path) -> pathlib.Path:
    return compiled(folder, "libgomp.so.1", "int omp_get_max_threads(void) { return 77; }")


def foreign(folder: pathlib.Path, gomp: pathlib.Path, version: str, traps=()) -> pathlib.Path:
    """A libdnnl.so.3 that ends the process where one of the functions `traps` is called, and asks `gomp` for threads."""
    folder.mkdir(exist_ok=True)
    ends = "".join(f'asm(".globl {name}\\n.type {name}, @function\\n{name}: ud2");\n' for name in traps)
    return compiled(folder, "libdnnl.so.3", ends + FOREIGN.replace("VERSION", version), str(gomp))


@needs_onednn
@needs_compiler
def test_a_foreign_onednn_that_was_loaded_first_is_not_met(tmp_path):
    """It has every name that ours has, for everybody in the process, and each would end the process."""
    names = [name for name in exported(private_copy()) if re.fullmatch(r"\w+", name) and name not in ("dnnl_version", "_init", "_fini")]
    assert len(names) > 300
    gomp = openmp(tmp_path)
    library = foreign(tmp_path / "foreign", gomp, "9, 9, 9", [n for n in names if n.startswith("dnnl_") or "4dnnl" in n])
    printed_by("-c", LOAD + PROGRAM + """
check_conv(), check_dense(jnp.float32), check_dense(jnp.bfloat16)
assert ffi.native().info()["onednn"] == "3.2.0"
assert foreign.threads() == 77
""", gomp, library)


@needs_onednn
@needs_compiler
def test_a_library_that_is_not_ours_is_refused_untouched(tmp_path):
    """Of another version; of ours, but with one of the OpenMP functions only. Then our own loops run, and what they lack is XLA's."""
    gomp = openmp(tmp_path)
    names = re.findall(r"F\((dnnl_\w+)\)", (ROOT / "xla_ext/onednn/library.cc").read_text())
    traps = [name for name in names if name != "dnnl_version"]
    other, partial = (foreign(tmp_path / v.replace(", ", ""), gomp, v, traps) for v in ("9, 9, 9", "3, 2, 0"))
    printed_by("-c", "import ctypes, sys; ctypes.CDLL(sys.argv.pop(1), mode=ctypes.RTLD_GLOBAL)" + MISSING + PROGRAM + """
assert "_native_missing.so" in ffi.no_onednn(), ffi.no_onednn()
for path, words in zip(sys.argv[1:], ["its version is 9.9.9, and this was built and tested with 3.2.0", "not the OpenMP build"]):
    ffi.native().load_onednn(path)
    assert words in ffi.no_onednn(), ffi.no_onednn()
    assert ctypes.CDLL(path).threads() == 77
    check_conv(), check_dense(jnp.float32), check_dense(jnp.bfloat16)
""", gomp, other, partial)


@pytest.mark.costly
@pytest.mark.skipif(ffi.native() is None, reason="the native module is not built")
def test_without_onednn():
    """Where it was built without, or where its file is missing."""
    printed_by("-c", MISSING + PROGRAM + WITHOUT + """
check_without_onednn(), check_conv(), check_dense(jnp.float32), check_dense(jnp.bfloat16)
""")


@needs_onednn
def test_libgomp_is_not_needed():
    text = private_copy().read_bytes()
    assert b"libgomp" not in text and b"GOMP_parallel_start" in text
    path = ffi.native().__file__
    maps = printed_by("-c", f"""
import importlib.util
spec = importlib.util.spec_from_file_location("jaxfuse._native", {path!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.load_onednn({str(private_copy())!r})
assert module.info()["onednn"] and "no_onednn" not in module.info(), module.info()
print(open("/proc/self/maps").read())
""")
    assert "_native_onednn" in maps and "gomp" not in maps


@needs_onednn
@pytest.mark.parametrize("ours, onednns, kernels", [
    ("avx512", "AVX512_CORE_BF16", {"matmul f32", "matmul bf16", "convolution f32", "convolution bf16"}),
    ("avx512", "AVX512_CORE", {"matmul f32", "convolution f32"}),
    ("avx2", "AVX2", {"convolution f32"})])
def test_which_kernels_an_instruction_set_has(ours, onednns, kernels):
    """AVX-512 and its bf16 are two questions: on processors with the one alone bf16 is widened, by us."""
    levels = ["portable", "avx2", "avx512"]
    native = ffi.native().info()
    lacks_bf16 = native["isa"] in ("avx512_core", "avx512_core_vnni")
    if levels.index(ours) > levels.index(native["simd"]) or onednns.endswith("BF16") and lacks_bf16:
        pytest.skip(f"this CPU has {native['simd']}, oneDNN uses {native['isa']}")
    text = printed_by("-c", PROGRAM + """
for dtype in (jnp.float32, jnp.bfloat16):
    check_dense(dtype)
    check_conv(dtype)
print(ffi.native().info()["isa"])
""", ONEDNN_MAX_CPU_ISA=onednns, JAXFUSE_SIMD=ours, ONEDNN_VERBOSE="1")
    found = re.findall(r"^onednn_verbose,exec,cpu,(matmul|convolution),.*?,src_(\w+)::", text, re.M)
    assert {" ".join(pair) for pair in found} == kernels
    assert text.splitlines()[-1] == onednns.lower()


@needs_onednn
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("padding", [31, 63])
def test_what_onednn_has_no_fast_code_for_is_left_to_xla(dtype, padding):
    """A wide filter that is padded as widely: its reference code would run, without a word. With AMX it has fast code for most of them,
    on one CPU for other ones than on another."""
    options = dict(window_strides=(1,), padding=[(padding, padding)])

    def program(x, w):
        return jax.nn.relu(jax.lax.conv_general_dilated(x, w, **options, dimension_numbers=("NWC", "WIO", "NWC")))

    x, w = (jnp.asarray(np.random.default_rng(0).standard_normal(shape), dtype) for shape in ((1, 200, 2), (64, 2, 2)))
    config = jax.make_jaxpr(lambda x, w: ops.conv(x, w, **options))(x, w).eqns[0].params["config"]
    kernel, reason = OP.forward.kernel(config, (x, w), "cpu")
    is_fast = kernel is not None
    assert reason == ("" if is_fast else ffi.ONLY_REFERENCE)
    assert is_fast == (padding == 31) or padding == 63 and ffi.native().info()["isa"] == "avx512_core_amx"
    report = jaxfuse.explain(program, x, w, policy="always")
    assert [site.reason for site in report.skipped] == [ffi.ONLY_REFERENCE] * (not is_fast)
    assert [site.pattern for site in report.fused] == ["conv+relu"] * is_fast
    same(jaxfuse.fuse(program, policy="always")(x, w), program(x, w))
