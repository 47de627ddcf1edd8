"""Libraries with thread pools and a oneDNN of their own in the same process, used before and after fused calls: each computes
what it computes alone."""

import importlib.util
import textwrap

import pytest

from jaxfuse.runtime import ffi
from processes import printed_by

pytestmark = pytest.mark.skipif(ffi.unavailable("jaxfuse_conv_fwd") is not None, reason=str(ffi.unavailable("jaxfuse_conv_fwd")))

OF_GIGABYTES = {"torch", "tensorflow"}  # which CI does not install; docs/reliability.md has the last run with them

# `theirs()` gives what the library computes, and what that should be.
PROGRAMS = {
    "sklearn": """
        from sklearn.cluster import KMeans
        from sklearn.ensemble import HistGradientBoostingClassifier

        def theirs():
            points = np.concatenate([rng.normal(size=(2000, 8)) + 20 * i for i in range(4)])
            labels = np.repeat(np.arange(4), 2000)
            centres = KMeans(4, n_init=1, random_state=0).fit(points).cluster_centers_
            boosted = HistGradientBoostingClassifier(max_iter=3).fit(points, labels).predict(points)
            return [np.sort(centres[:, 0]), boosted], [points[:, 0].reshape(4, -1).mean(1), labels]
    """,
    "torch": """
        import torch

        def theirs():
            y = torch.nn.functional.conv2d(torch.tensor(image).permute(0, 3, 1, 2), torch.tensor(kernel).permute(3, 2, 0, 1), padding=1)
            total = torch.arange(1e6).sum()
            return [y.permute(0, 2, 3, 1).numpy(), total.numpy() / 1e12], [convolved, 0.5]
    """,
    "tensorflow": """
        import tensorflow as tf

        def theirs():
            return [tf.nn.conv2d(image, kernel, 1, "SAME").numpy()], [convolved]
    """,
}
COMMON = """
    import sys
    import numpy as np
    rng = np.random.default_rng(0)
    image, kernel = (rng.normal(size=s).astype("float32") for s in ((4, 20, 20, 16), (3, 3, 16, 16)))
    padded = np.pad(np.float64(image), ((0, 0), (1, 1), (1, 1), (0, 0)))
    convolved = sum(padded[:, i : i + 20, j : j + 20] @ np.float64(kernel[i, j]) for i in range(3) for j in range(3))

    def fused_calls():
        import jax
        import jaxfuse

        def f(x, w):
            return jax.nn.relu(jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))

        loss = lambda x, w: (f(x, w) ** 2).sum() / 2
        assert [site.pattern for site in jaxfuse.explain(f, image, kernel, policy="always").fused] == ["conv+relu"]
        y = jaxfuse.fuse(f, policy="always")(image, kernel)
        dw = jax.grad(jaxfuse.fuse(loss, policy="always"), 1)(image, kernel)
        g = np.maximum(convolved, 0)
        wanted = np.array([[np.einsum("nhwi,nhwo->io", padded[:, i : i + 20, j : j + 20], g) for j in range(3)] for i in range(3)])
        return [y, dw / 1000], [g, wanted / 1000]

    def check(run):
        for got, wanted in zip(*run()):
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-3)

    for run in (theirs, fused_calls, theirs, fused_calls)[sys.argv[1] == "after":]:
        check(run)
    print("right")
"""


def right(program: str, *args: str) -> None:
    assert printed_by("-c", program, *args, TF_CPP_MIN_LOG_LEVEL="2").splitlines()[-1:] == ["right"]


def of(library: str) -> str:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed" + f", of gigabytes: pip install {library}" * (library in OF_GIGABYTES))
    return textwrap.dedent(PROGRAMS[library])


@pytest.mark.costly
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("library", PROGRAMS)
def test_in_one_process(library, when):
    """Imported and used before jaxfuse is, or imported before and first used after."""
    right(of(library) + textwrap.dedent(COMMON), when)


@pytest.mark.costly
def test_threadpoolctl_leaves_our_threads_alone():
    """It knows libraries by their file's name and C functions; the pool is in a Python module that has neither."""
    pytest.importorskip("threadpoolctl")
    right(of("sklearn") + textwrap.dedent(COMMON) + textwrap.dedent("""
        import jaxfuse
        import threadpoolctl

        jaxfuse.set_num_threads(3)
        assert not [found for found in threadpoolctl.threadpool_info() if "jaxfuse" in found["filepath"]]
        with threadpoolctl.threadpool_limits(1):
            assert jaxfuse.get_num_threads() == 3
            check(theirs), check(fused_calls)
        print("right")
    """), "after")
