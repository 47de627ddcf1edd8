"""A native module that is there and does not load gives the reason when a kernel is asked for."""

import importlib.machinery
import re

import pytest

from jaxfuse.runtime import ffi
from processes import python


def test_a_file_that_is_no_library(tmp_path, monkeypatch):
    broken = tmp_path / f"_native{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(ffi, "_native_path", lambda: broken)
    with pytest.raises(RuntimeError, match=f"native module {re.escape(str(broken))} does not load: .*; reinstall jaxfuse"):
        ffi._native.__wrapped__()


def test_built_for_another_ffi(tmp_path):
    with pytest.raises(RuntimeError, match=r"is built for XLA's FFI 99\.0, and jaxlib .* has .*; reinstall jaxfuse"):
        ffi.check_api("99.0", tmp_path / "_native.so")


HEADERLESS = """
import jax
jax.ffi.include_dir = lambda: "/nowhere"
import jaxfuse
try:
    jaxfuse.get_num_threads()
except RuntimeError as error:
    print(error)
"""


@pytest.mark.skipif(ffi.native() is None, reason="the native module is not built")
def test_a_jaxlib_without_headers():
    """They say what it may be built for. The import goes well all the same: the program may need no kernel."""
    done = python("-c", HEADERLESS)
    assert "does not load: " in done.stdout and "/nowhere/xla/ffi/api/c_api.h" in done.stdout, done.stderr
