"""The number of threads at run time, and what does not depend on it; processes that fork, are spawned, end or are interrupted."""

import concurrent.futures
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfuse
from cases import CASES
from compare import jit, pairs, value_and_gradients, with_cotangents
from jaxfuse import doctor, ffi, ops, threads

COUNTS = [1, 2, 3, 16]
# Of these no sum is oneDNN's, which cuts its own by the number of threads.
OURS = ["batch_norm-residual_relu", "batch_norm-relu", "max_pool-3x3_stride2", "layer_norm-rows", "group_norm-silu", "lstm-forward",
        "gru-forward", "attention-plain"]
FORWARD = ["conv-3x3", "conv-depthwise", "conv-groups_4", "dense-many_columns"]


@pytest.fixture(autouse=True)
def as_many_as_before():
    if ffi.native() is None:
        pytest.skip("the native module is not built")
    before = jaxfuse.get_num_threads()
    yield
    jaxfuse.set_num_threads(before)
