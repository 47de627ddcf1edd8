"""What the tool that makes the wheels refuses, and what it hands on; nothing is built."""

import os
import types
import zipfile

import pytest

from tools import aarch64, pythons, wheels

WHEEL = "jaxfuse-0.1.0-cp313-cp313-manylinux_2_34_x86_64.whl"


@pytest.fixture
def repairing(tmp_path, monkeypatch):
    """Has auditwheel write a wheel with these files."""

    def repairing(*names: str):
        def run(python, *command, **_):
            assert command[:3] == ("-m", "auditwheel", "repair")
            with zipfile.ZipFile(tmp_path / WHEEL, "w") as archive:
                for name in names:
                    archive.writestr(name, "")

        monkeypatch.setattr(wheels, "run", run)
        return lambda: wheels.repaired(tmp_path / "python", tmp_path / "raw.whl", tmp_path)

    return repairing


def test_a_wheel_that_needs_a_library_is_refused(repairing, tmp_path):
    with pytest.raises(SystemExit, match=f"{WHEEL} needs libraries that are not part of it: jaxfuse.libs/libgomp.so.1"):
        repairing("jaxfuse/__init__.py", "jaxfuse.libs/libgomp.so.1")()


def test_the_repaired_wheel_is_the_new_one(repairing, tmp_path):
    for minor in range(20):
        (tmp_path / WHEEL.replace("313", str(minor))).touch()
    assert repairing("jaxfuse/__init__.py", "jaxfuse/_native.so")() == tmp_path / WHEEL


@pytest.mark.parametrize("more, refused", [(0, False), (1, True)])
def test_a_wheel_is_no_larger_than_the_limit(tmp_path, monkeypatch, capsys, more, refused):
    wheel = tmp_path / WHEEL
    with wheel.open("wb") as file:
        file.truncate(wheels.LARGEST + more)  # which takes no place on the disk
    monkeypatch.setattr(wheels, "built", lambda *_: None)
    monkeypatch.setattr(wheels, "repaired", lambda *_: wheel)
    arguments = tmp_path / "tools", "python3.13", tmp_path, tmp_path, tmp_path, tmp_path
    if refused:
        with pytest.raises(SystemExit, match=f"{WHEEL} is larger than 15 MB"):
            wheels.made(*arguments)
    else:
        assert wheels.made(*arguments) == wheel
    assert capsys.readouterr().out.startswith(f"{WHEEL}: 15.0 MB, built in 0 s")


def test_a_wheel_is_tried_without_compiler_and_source(monkeypatch, tmp_path):
    for name, value in dict(CC="gcc", PYTHONPATH="/source", PIP_INDEX_URL="https://here/simple").items():
        monkeypatch.setenv(name, value)
    seen = wheels.alone(tmp_path / "env/bin/python", tmp_path)
    assert seen["PATH"] == str(tmp_path / "env/bin") and seen["PIP_INDEX_URL"] == "https://here/simple" and seen["HOME"] == str(tmp_path)
    assert not {"CC", "PYTHONPATH", "LD_LIBRARY_PATH"} & {*seen} and os.environ["CC"] == "gcc"


def test_a_wheel_of_which_doctor_says_less_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(wheels.subprocess, "check_output", lambda *_, **__: "IN PART: without oneDNN\nmore")
    with pytest.raises(SystemExit, match="python: IN PART: without oneDNN"):
        wheels.tested(tmp_path / "python", tmp_path, ["test_fuse.py"])


def test_its_files_of_tests_are_there():
    named = [name for name in (*wheels.TESTS, *wheels.EMULATED_TESTS) if not name.startswith("-")]
    assert named and all((wheels.ROOT / "tests" / name).exists() for name in named)


def test_a_wheel_for_another_processor_is_tried_by_its_own_python_only(tmp_path):
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / "usr/bin/python3.13").touch()
    runs = [aarch64.runs(tmp_path, tmp_path / WHEEL.replace("313", minor)) for minor in ("313", "312", "31")]
    assert runs == [True, False, False]


@pytest.mark.parametrize("header, lacking", [
    ("#define HAVE_X 1", ""),
    ("# include <x86_64-linux-gnu/python3.14/pyconfig.h>\n# include <aarch64-linux-gnu/python3.99/pyconfig.h>",
     "aarch64-linux-gnu/python3.99/pyconfig.h"),
], ids=["one for all", "Debian's"])
def test_a_python_without_headers_for_another_processor_is_named(monkeypatch, tmp_path, header, lacking):
    (tmp_path / "pyconfig.h").write_text(header)
    monkeypatch.setattr(aarch64.subprocess, "check_output", lambda *_, **__: f"{tmp_path / 'pyconfig.h'}\n")
    assert aarch64.lacking("python3.99") == lacking


def test_pythons_are_those_that_say_so(monkeypatch, tmp_path):
    """Also where a name of another version leads to one. Names that are no Python's are not asked, nor is one before 3.11 taken."""
    says = {"python3.9": 9, "python3.12": 12, "python3.13": 12, "python3.14": 14, "python": 13}
    for name in (*says, "python3.12-config"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setattr(pythons.os, "get_exec_path", lambda: [str(tmp_path)])
    monkeypatch.setattr(pythons.Path, "home", lambda: tmp_path)
    monkeypatch.setattr(pythons.sys, "executable", str(tmp_path / "python"))
    ask = lambda command, **_: types.SimpleNamespace(returncode=0, stdout=f"{says[os.path.basename(command[0])]}\n")
    monkeypatch.setattr(pythons.subprocess, "run", ask)
    assert pythons.found() == {12: f"{tmp_path}/python3.12", 13: f"{tmp_path}/python", 14: f"{tmp_path}/python3.14"}
