"""Runs other projects' own tests as they are, and fused (every jitted function, and more that fused_jit.py names) or with
every Flax layer exchanged.

    python tests/others/run.py jax ~/src/jax              # a checkout that fits the installed version
    python tests/others/run.py flax ~/src/flax --mode layers

Where a test has failed, the file's tests run without jaxfuse: with `jax.jit` in the place of `jaxfuse.fuse`, or with Flax's own layers. A
test that fails only fused, or only with our layers, is an error of jaxfuse: it is listed, and the exit status is 1.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

HERE = pathlib.Path(__file__).resolve().parent
JAX = ("lax_test", "lax_autodiff_test", "lax_vmap_test", "nn_test", "lax_control_flow_test", "api_test", "export_test")
HAIKU = ("basic", "batch_norm", "conv", "depthwise_conv", "group_norm", "layer_norm", "rms_norm", "attention", "recurrent", "pool")
KERAS = ("activations", "attention", "convolutional", "core", "normalization", "pooling", "rnn")
LINEN = ("linen_test", "linen_activation_test", "linen_attention_test", "linen_linear_test", "linen_recurrent_test", "linen_dtypes_test")
SUITES = {
    "jax": [f"tests/{name}.py" for name in JAX],
    "flax": [*[f"tests/linen/{name}.py" for name in LINEN], "tests/nnx/nn", "tests/nnx/integration_test.py"],
    "equinox": ["tests/test_nn.py"],
    "haiku": [f"haiku/_src/{name}_test.py" for name in HAIKU],
    "keras": [f"keras/src/layers/{name}" for name in KERAS],
}
# Parts of names of tests that must fail, and why.
EXPECTED = {
    "jax": {
        "test_eval_shape_trace_cache_share": "counts traces of a function both plain and jitted; a fused one is traced apart from plain",
        "test_select_jvp_complexity": "counts the equations of a function, which is one jit here",
        "testNestedBatchingMatMat": "the same",
        "testDotAlgorithmConfig": "reads the algorithm of the product in the text; float32 is multiplied and added in float32",
        "test_ordered_effects_basic": "looks for an inner jit in the text; a fused function within another is part of it",
        "test_leak_checker_catches_a_sublevel_leak": "so it has no trace of its own that could leak into the outer one",
        "JitTest::test_jit_bad_input": "passes a string; it is part of the signature here",
        "APITest::test_bad_input": "the same",
        "test_jit_of_noncallable": "matches the words of jit's error; ours has its type, and names fuse",
        "test_static_argnum_on_static_method_is_not_supported": "the same",
        "test_jit_of_nonweakreferenceable_function": "expects a refusal; such a function is taken here",
        "test_jit_repr": "reads the repr of jit's class",
        "test_fun_name": "reads the private state that jit's class pickles",
        "test_cache_miss_explanations": "reads what tracing logs, with the place of the caller: that is jaxfuse",
        "test_user_trace_context_hooks": "counts traces; the function is traced within its jit",
        "test_inner_jit_function_retracing": "counts traces; within another fused function it is traced apart",
        "test_name_stack_annotation": "counts a name in the text, which every equation of a rewritten program has",
        "cache_hit": "counts traces, and what was traced plain is traced again fused",
        "test_compilation_cache_miss_when_devices_change": "the same",
        "test_changing_abstract_device": "the same",
        "test_jax_set_mesh_trace_only_once": "the same",
    },
    "flax": {
        "NormalizationTest::test_instance_norm3": "compares to 1e-6 beside a mean of 1e4, which has steps of 1e-3",
        "NormalizationTest::test_layer_norm4": "compares to 1e-3 beside a mean of 1e6, which has steps of 0.06",
        "test_attention_alias_submodule": "compares the bits of `apply` with those of `init`, which runs as it is",
        "test_normalization_equivalence": "compares two norms to 1e-7 of which one is fused; they differ by 2.4e-7",
        "TestLinenConsistency::test_nnx_linen_": "compares bits of linen and nnx, which are not fused in the same pieces",
    },
    "haiku": {
        "test_precision": "reads operand_precision in the text; a kernel of float32 is as precise as any asks",
        "test_connect_conv_padding_function": "counts calls of a Python function; it is traced twice here",
    },
}


class Outcome(NamedTuple):
    tests: int
    failed: dict[str, str]  # name -> the first line of the error
    sites: int


def run(project: str, checkout: pathlib.Path, paths: list[str], mode: str, arguments: list[str]) -> Outcome:
    """One run of these tests in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        results, sites = pathlib.Path(folder, "results.xml"), pathlib.Path(folder, "sites")
        roots = [str(HERE), str(HERE.parent.parent), str(checkout)]
        environment = os.environ | {
            "JAXFUSE_OTHERS": mode, "JAXFUSE_OTHERS_PROJECT": project, "JAXFUSE_OTHERS_SITES": str(sites),
            "KERAS_BACKEND": "jax",
            "PYTHONPATH": os.pathsep.join([*roots, os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "fused_jit", "--junitxml", str(results), *arguments, *paths]
        status = subprocess.run(command, cwd=checkout, env=environment, stdout=sys.stderr).returncode
        if status > 1:
            raise SystemExit(f"{' '.join(paths)}: pytest ended with status {status}; does the checkout fit the installed version?")
        cases = list(ElementTree.parse(results).getroot().iter("testcase"))
        counts = sites.read_text().split()
    failed = {}
    for case in cases:
        for kind in ("failure", "error"):
            if (found := case.find(kind)) is not None:
                failed[f"{case.get('classname')}::{case.get('name')}"] = (found.get("message") or "").splitlines()[0]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return Outcome(len(cases) - skipped, failed, sum(map(int, counts)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("project", choices=SUITES)
    parser.add_argument("checkout", type=pathlib.Path)
    parser.add_argument("--mode", choices=["fused", "layers"], default="fused")
    parser.add_argument("--only", action="append", help="a path within the checkout, instead of the project's list")
    parser.add_argument("--json", type=pathlib.Path, help="a file to which a row for each path is added")
    options, arguments = parser.parse_known_args()
    counted = {"fused": "sites fused", "layers": "layers made"}[options.mode]
    columns = ("run", f"fail {options.mode}", "not expected to", "without jaxfuse too", counted)
    table = Table("tests of", *columns, title=f"{options.project}, {options.mode}")
    control = {"fused": "jitted", "layers": "plain"}[options.mode]
    new: dict[str, str] = {}
    total = 0
    for path in options.only or SUITES[options.project]:
        fused = run(options.project, options.checkout, [path], options.mode, arguments)
        expected = EXPECTED.get(options.project, {})
        total += fused.sites
        failed = {name: text for name, text in fused.failed.items() if not any(part in name for part in expected)}
        without = run(options.project, options.checkout, [path], control, arguments).failed if failed else {}
        new |= {name: text for name, text in failed.items() if name not in without}
        row = [path, *map(str, (fused.tests, len(fused.failed), len(failed), len(failed.keys() & without.keys()), fused.sites))]
        table.add_row(*row)
        if options.json:
            with options.json.open("a") as file:
                print(json.dumps([options.project, options.mode, *row, sorted(new)]), file=file)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for name, text in new.items():
        console.print(f"only {options.mode}: {name}\n    {text}", markup=False)
    if not total:
        console.print(f"no {counted} at all: nothing was tested")
    return bool(new) or not total


if __name__ == "__main__":
    sys.exit(main())
