"""Kernels run at the same time: on several Python threads, and in the independent branches of one program."""

import concurrent.futures

import jax
import numpy as np
import pytest

from cases import CASES
from compare import fused, pairs, value_and_gradients, with_cotangents

NAMES = ["conv-3x3", "conv-groups_4", "conv-depthwise", "batch_norm-residual_relu", "batch_norm-relu"]
THREADS, ROUNDS = 6, 20


def arguments(name):
    return with_cotangents(CASES[name], CASES[name].inputs())


@pytest.mark.parametrize("name", NAMES)
def test_threads_get_what_one_thread_gets(name, kernel):
    args, run = arguments(name), fused(CASES[name])
    alone = run(*args)
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        results = list(pool.map(lambda _: jax.block_until_ready(run(*args)), range(THREADS * ROUNDS)))
    for result in results:
        same_bits(result, alone)


def test_threads_that_compile_at_the_same_time(kernel):
    def fresh(name):
        return fused(CASES[name])(*arguments(name))

    alone = [fresh(name) for name in NAMES]
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        for result, expected in zip(pool.map(fresh, NAMES * 2), alone * 2):
            same_bits(result, expected)


def test_branches_of_one_program(kernel):
    args = {name: arguments(name) for name in NAMES}
    run = jax.jit(lambda args: {name: value_and_gradients(CASES[name].fused, *args[name]) for name in NAMES})
    together, alone = run(args), {name: fused(CASES[name])(*args[name]) for name in NAMES}
    for result, expected in pairs(together, alone):
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)
    for _ in range(ROUNDS):
        same_bits(run(args), together)


def same_bits(result, expected):
    for value, other in pairs(result, expected):
        np.testing.assert_array_equal(value, other)
