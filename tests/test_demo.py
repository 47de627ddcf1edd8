"""The command line, and the demo's pieces on sizes that take seconds."""

import collections
import functools
import importlib.util
import io
import types
from unittest import mock

import jax
import numpy as np
import pytest
from rich.console import Console

import jaxfuse
from jaxfuse import __main__ as cli
from jaxfuse.commands import demo, doctor
from jaxfuse.commands.demo import digits, network, photo, training
from jaxfuse.runtime import cuda, ffi, memory
from processes import printed_by


def console():
    return Console(file=io.StringIO(), width=80)


def shown(screen):
    text = screen.file.getvalue()
    # a path is not broken: it is there to be copied
    assert all(len(line) <= 80 for line in text.splitlines() if not line.startswith("Loss curves:")), text
    return text


def all_sites(report):
    """But the dense layer's, and the mean of the last image, which may be too small to gain. Without native kernels every site is found
    too, and skipped."""
    small = "dense", "global_average_pool"
    fused, skipped = ([site for site in sites if not site.pattern.startswith(small)] for sites in (report.fused, report.skipped))
    assert len(fused) + len(skipped) < len(report.fused) + len(report.skipped) and not (fused and skipped), report
    return (*fused, *skipped)


@pytest.fixture
def small_digits(monkeypatch):
    monkeypatch.setattr(digits, "load", functools.partial(digits.load, 8))
    return digits.load()


@pytest.mark.parametrize("arguments, quick, out", [([], False, "."), (["--quick"], True, "."), (["--out", "there"], False, "there")])
def test_demo_takes_its_options(monkeypatch, tmp_path, arguments, quick, out):
    monkeypatch.chdir(tmp_path)
    calls = []
    monkeypatch.setattr(demo, "run", lambda *given: calls.append(given))
    assert cli.main(["demo", *arguments]) == 0
    assert [(given[0], str(given[1])) for given in calls] == [(quick, out)]


def test_demo_names_what_is_missing(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("optax", "sklearn") else find(name))
    assert cli.main(["demo"]) == 1
    assert "the demo needs optax and scikit-learn; to install: python -m pip install optax scikit-learn" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["demo", "--fast"], ["train"]])
def test_unknown_arguments_end_with_the_usage(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)
    assert "usage: python -m jaxfuse" in capsys.readouterr().err


def test_without_arguments_the_help_is_shown(capsys):
    assert not cli.main([])
    assert "usage: python -m jaxfuse" in capsys.readouterr().out


def test_bench_passes_everything_on(monkeypatch, tmp_path):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__main__.py").touch()
    (tmp_path / "pyproject.toml").touch()
    calls = []
    monkeypatch.setattr(cli, "CHECKOUT", tmp_path)
    monkeypatch.setattr(cli, "subprocess", types.SimpleNamespace(call=lambda command, env: calls.append((command, env)) or 3))
    assert cli.main(["bench", "--quick", "conv", "--turns", "2", "-h"]) == 3
    (command, env), = calls
    assert command[1:] == ["-m", "benchmarks", "--quick", "conv", "--turns", "2", "-h"]
    assert env["PYTHONPATH"].startswith(str(tmp_path))


def test_bench_without_a_checkout_says_where_it_is(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cli, "CHECKOUT", tmp_path)
    assert cli.main(["bench"]) == 1
    assert "run this from the root of a clone" in capsys.readouterr().err


def test_doctor_speaks(capsys):
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert out.split(":")[0] in ("WORKS", "IN PART", "NOT BUILT", "BROKEN") and len(out.splitlines()) < 60
    assert "page faults a call" in out and "What to do next:" in out


@pytest.mark.parametrize("module, words", [
    (mock.Mock(side_effect=RuntimeError("it does not load")), "install again"),
    (lambda: None, "with a C++17 compiler"),
])
def test_doctor_ends_with_what_mends_it(monkeypatch, module, words):
    monkeypatch.setattr(doctor.ffi, "native", module)
    assert words in doctor._next()[-1]


@pytest.mark.parametrize("missing, no_onednn, words", [
    ({"jaxfuse_conv_fwd": "of another version"}, None, "pip install --force-reinstall"),
    ({}, "there is no file", "oneDNN comes with the wheels for Linux on x86-64"),
])
def test_doctor_says_it_in_words(monkeypatch, missing, no_onednn, words):
    """Nothing to read that an installed package does not bring."""
    for name, found in (("native", object()), ("no_onednn", no_onednn)):
        monkeypatch.setattr(doctor.ffi, name, lambda found=found: found)
    for name, found in (("_unusable", missing), ("_unknown_level", "")):
        monkeypatch.setattr(doctor, name, lambda found=found: found)
    steps = doctor._next()
    assert words in steps[0] and "docs/" not in " ".join(steps)


@pytest.mark.skipif(doctor.ffi.native() is None, reason="the native module is not built")
def test_doctor_says_that_no_kernel_runs_with_an_unknown_instruction_set():
    said = printed_by("-m", "jaxfuse", "doctor", JAXFUSE_SIMD="avx9")
    assert said.startswith('BROKEN: the environment variable JAXFUSE_SIMD is "avx9", expected portable, avx2, avx512 or avx512_amx')
    assert "unset JAXFUSE_SIMD" in said


def test_doctor_lists_the_rules_of_this_cpu_only(monkeypatch):
    monkeypatch.setattr(doctor.tuned, "isa", lambda: ("avx2",))
    said = doctor.doctor(rules=True)
    assert "avx512" not in said.split("the fused kernel is used")[1] and "never" not in doctor.doctor()
    assert len(doctor.doctor().splitlines()) < len(said.splitlines())


def test_the_demo_says_when_the_machine_is_busy(monkeypatch):
    monkeypatch.setattr(demo.time, "sleep", lambda seconds: None)
    for idle, words in ((10, "keep 90% of this machine busy"), (90, "")):
        ticks = iter([[5, 0, 0, 5, 0], [5 + 100 - idle, 0, 0, 5 + idle, 0]])
        monkeypatch.setattr(demo, "_ticks", lambda: next(ticks))
        assert words in (said := demo._others_running()) and bool(said) == bool(words)
    monkeypatch.undo()
    assert len(demo._ticks()) in (0, 8)


@pytest.mark.parametrize("isa, words", [
    (("avx2", "avx2"), "tested with these instruction sets on AMD Zen 1"),
    (("avx2", "avx2_vnni_2"), "not tested with these instruction sets, but with avx512 and avx512_core_amx;")])
def test_doctor_says_which_instruction_sets_were_tested(monkeypatch, isa, words, some_kernel):
    monkeypatch.setattr(doctor.tuned, "isa", lambda: isa)
    assert words in " ".join(doctor.doctor().replace("│", " ").split())


def test_doctor_says_what_the_cuda_library_lacks(monkeypatch, capsys):
    """Built, on a machine that has neither a GPU nor cuDNN; words in brackets are no markup."""
    monkeypatch.setattr(doctor.jax, "devices", mock.Mock(side_effect=RuntimeError("Unknown backend cuda.")))
    monkeypatch.setattr(cuda, "library", lambda: object())
    monkeypatch.setattr(cuda, "info", lambda: dict(nvcc="13.0.88", architectures="80 90, PTX 90", ffi_api="0.3"))
    monkeypatch.setattr(cuda, "targets", lambda: ["jaxfuse_norm_fwd"])
    monkeypatch.setattr(doctor.backend, "version", mock.Mock(side_effect=doctor.backend.CudnnError("pip install 'jax[cuda13]'")))
    words = " ".join(doctor.doctor().replace("│", " ").split())
    for text in ("nvcc 13.0.88 for sm_80 90, PTX 90", "so the library is not used here. JAX says: Unknown backend cuda.",
                 "'jax[cuda13]'", "CUDA kernels jaxfuse_norm_fwd"):
        assert text in words


def test_digits_are_real_and_split(small_digits):
    assert small_digits.train_images.shape == (1437, 8, 8, 1) and small_digits.test_images.shape == (360, 8, 8, 1)
    assert small_digits.train_images.min() == 0 and small_digits.train_images.max() == 1
    assert np.bincount(small_digits.test_labels).min() > 30


def test_batches_repeat_and_cover_an_epoch(small_digits):
    first, second = ([labels for _, labels in digits.batches(small_digits, 100, 20)] for _ in range(2))
    assert np.array_equal(first, second)
    assert not np.array_equal(first[0], first[14])  # the second epoch has another order
    images = np.concatenate([images for images, _ in digits.batches(small_digits, 1437, 1)])
    assert np.array_equal(np.sort(images.sum((1, 2, 3))), np.sort(small_digits.train_images.sum((1, 2, 3))))


@pytest.mark.costly
def test_training_is_shown_with_the_networks_own_lines(small_digits, tmp_path):
    screen = console()
    demo.show_training(screen, 3, tmp_path / "loss.png")
    text = shown(screen)
    for part in ("conv+bias+relu", "bn+add+relu", "bn+relu6", "ms per step", "test accuracy", "in step 1", str(tmp_path / "loss.png"),
                 "the same, freed memory kept" if memory.is_glibc() else "ms per step"):
        assert part in text, text
    lines = open(network.__file__).read().splitlines()
    sites = all_sites(jaxfuse.explain(training.loss_fn, *training.example(small_digits)))
    assert len(sites) == 21
    for site in sites:
        file, line = site.source.rsplit(":", 1)
        assert file.endswith("network.py") and ("conv" in lines[int(line) - 1].lower()) == site.pattern.startswith("conv")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_other_setting_of_memory_is_that_of_another_process(monkeypatch):
    given = []
    monkeypatch.setattr(demo.subprocess, "run", lambda command, env, **_: given.append(env) or types.SimpleNamespace(stdout="[2.5, 1.5]"))
    for retained, asked in ((True, "0"), (False, "1")):
        monkeypatch.setattr(demo.memory, "is_retained", lambda: retained)
        assert demo._with_the_other_setting(8, 3) == [2.5, 1.5] and given.pop()[memory.ENVIRONMENT] == asked


def test_fused_training_starts_like_unfused(small_digits):
    arguments = training.example(small_digits)
    (unfused, _), gradients = jax.jit(jax.value_and_grad(training.loss_fn, has_aux=True))(*arguments)
    (fused, _), fused_gradients = jax.jit(jax.value_and_grad(jaxfuse.fuse(training.loss_fn), has_aux=True))(*arguments)
    assert abs(unfused - fused) < 1e-5
    for before, after in zip(jax.tree.leaves(gradients), jax.tree.leaves(fused_gradients)):
        # relu has a kink: a value within rounding of it may take its gradient from the other side
        np.testing.assert_allclose(after, before, rtol=0, atol=2e-2 * np.abs(before).max())


def test_photo_is_shown(monkeypatch):
    monkeypatch.setattr(photo, "MODEL", network.DigitNet(features=4))
    monkeypatch.setattr(photo, "load", functools.partial(photo.load, 16))
    screen = console()
    demo.show_photo(screen, 1)
    text = shown(screen)
    assert "china.jpg" in text and "ms per image" in text and "Largest difference of the logits" in text


def test_photo_is_normalised():
    image = photo.load()
    assert image.shape == (1, 224, 224, 3) and image.dtype == np.float32
    assert abs(image.mean()) < 1 and 0.5 < image.std() < 2


@pytest.mark.skipif(ffi.no_onednn() is not None, reason="nothing is fused without the native kernels")
def test_every_convolution_of_resnet50_is_fused():
    image = jax.ShapeDtypeStruct((1, 224, 224, 3), np.float32)
    model = photo.MODEL
    report = jaxfuse.explain(model.apply, jax.eval_shape(model.init, jax.random.key(0), image), image)
    assert set(all_sites(report)) <= set(report.fused)
    patterns = collections.Counter(site.pattern for site in all_sites(report))
    assert patterns == {"conv+bn+relu": 33, "conv+bn+add+relu": 16, "conv+bn": 4, "max_pool": 1}
