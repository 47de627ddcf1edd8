"""--no-skips: a test that is skipped for want of something that could be installed fails; one that the machine cannot run does not,
nor one that takes gigabytes."""

import chromium
from processes import python

TESTS = """
import pytest

def test_of_a_package():
    pytest.importorskip("no_such_package")

@pytest.mark.skipif(True, reason="no such compiler")
def test_of_a_compiler():
    pass

def test_of_a_cpu():
    pytest.skip("this CPU has no such instructions")

def test_of_a_large_package():
    pytest.skip("torch is not installed, of gigabytes: pip install torch")
"""


def test_what_fails(tmp_path):
    (tmp_path / "test_skips.py").write_text(TESTS)
    options = "-q -rfs -n 0 -p conftest -p no:cacheprovider --no-skips --rootdir".split()
    run = python("-m", "pytest", *options, tmp_path, tmp_path)
    assert "1 failed, 2 skipped, 1 error" in run.stdout, run.stdout + run.stderr
    assert "no such compiler" in run.stdout and "this CPU has no such instructions" in run.stdout


def test_a_page_that_is_not_opened_for_want_of_a_package_fails(monkeypatch):
    """But not for want of a browser."""
    monkeypatch.setattr(chromium.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(chromium.shutil, "which", lambda name: None)
    assert "selenium" in chromium.why_absent() and "this machine has" not in chromium.why_absent()
    monkeypatch.setattr(chromium.importlib.util, "find_spec", lambda name: name)
    assert chromium.why_absent() == "this machine has no program chromium and no program chromedriver"
