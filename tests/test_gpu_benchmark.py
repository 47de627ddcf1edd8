"""What of `benchmarks.gpu` needs no GPU: predictions, statistics, the file, and what it says where there is none."""

import json
import math

import numpy as np
import pytest

from benchmarks import gpu, gpu_measure as measure
from benchmarks.gpu_programs import PREDICTED, PROGRAMS, predictions


def test_without_a_gpu_it_says_what_is_missing(capsys, tmp_path):
    assert gpu.main(["--json", str(tmp_path / "result.json")]) == 1
    said = capsys.readouterr().err
    assert said.startswith("nothing was measured:\nJAX has no CUDA device; its default platform is cpu\n")
    assert not list(tmp_path.iterdir())


def test_predictions_are_bytes_over_bandwidth():
    first = predictions()[0]
    assert (first["program"], first["shape"], first["direction"]) == ("bn+add+relu", (128, 56, 56, 256), "forward")
    assert first["us"]["kernels"] == round(8.13 * math.prod(first["shape"]) / PREDICTED["copy bandwidth"] * 1e6, 1)
    assert {p.name for p in PROGRAMS} == {row["program"] for row in predictions()}


def test_times():
    time = measure.Time.of([0.1, 0.2, 0.3, 0.4, 0.5], calls=10)
    assert time.us == pytest.approx(30_000) and time.spread == pytest.approx(0.3 / 0.3)
    assert measure.rotations(1 << 30) == 1 and measure.rotations(1) == 16


def test_the_profiler_says_that_it_saw_nothing():
    with pytest.raises(RuntimeError, match="the profiler saw 0 kernels in 2 runs of one program"):
        measure.profiled(lambda x: -x, lambda i: [np.float32(i)], runs=2)


def test_errors():
    one, nan = np.ones(4), np.array([1, 1, 1, math.nan])
    assert measure.errors([one, 1.5 * one, nan], [one, one, one]) == [0.0, 0.5, math.inf]
    assert measure.wrong([math.inf], [1.0], "bfloat16") and measure.wrong([2.1e-6], [1e-6], "float32")
    assert not measure.wrong([1.9e-6], [1e-6], "float32")
    assert measure.bitwise_equal([one], [one.copy()]) and not measure.bitwise_equal([np.zeros(1)], [-np.zeros(1)])


def test_a_section_that_fails_leaves_the_others(monkeypatch, tmp_path):
    def broken():
        raise RuntimeError("no memory")

    monkeypatch.setattr(gpu, "missing", list)
    monkeypatch.setattr(gpu, "versions", lambda: dict(device="NVIDIA H200"))
    monkeypatch.setattr(gpu, "SECTIONS", dict(ceilings=lambda: {"copy bandwidth": 1.0}, blocks=broken))
    path = tmp_path / "result.json"
    assert gpu.main(["--only", "ceilings", "blocks", "--json", str(path)]) == 1
    found = json.loads(path.read_text())
    assert found["ceilings"] == {"copy bandwidth": 1.0} and found["blocks"] == {"failed": "RuntimeError: no memory"}
    assert found["predicted"]["copy bandwidth"] == PREDICTED["copy bandwidth"] and found["machine"]["device"] == "NVIDIA H200"


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_a_program_is_checked_as_it_would_be_on_a_device(program):
    """By the CPU, here: XLA's numbers, and the fused ones."""
    small = program._replace(shapes=(program.odd,))
    rows = gpu._correct(small, "float32", program.odd)
    assert [row["peer"] for row in rows] == gpu.peers() and "plain" in gpu.peers()
    assert not any(row["wrong"] for row in rows) and all(row["repeatable"] for row in rows)
