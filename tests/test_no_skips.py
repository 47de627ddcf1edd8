"""--no-skips: a test that is skipped for want of something that could be installed fails; one that the machine cannot run does not,
nor one that takes gigabytes."""

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
