"""What is made of a benchmark's result: its files, tables and pictures. Nothing here is about speed."""

import json

import pytest

from benchmarks import __main__ as bench
from benchmarks import cases, pictures, plan, readme, report, roofline


def _result(name="resnet50.b8.f32.training", ms=200.0):
    times = {"jaxfuse": ms, "xla": 500.0, "torch": 150.0}
    answer = {"turns_ms": [1.0], "calls": 3, "disturbed": 0, "temp_bytes": 2**20}
    error = {peer: {"loss": {"rms": 1e-6, "max": 1e-6}} for peer in ("jaxfuse", "xla")}
    (case,) = cases.select([name])
    row = {"case": name, "kind": case.kind, "title": case.shape.title, "batch": 8, "dtype": "f32", "task": case.task}
    row |= {"allocator": "tuned", "errors": error, "peers": {peer: {**answer, "ms": value} for peer, value in times.items()}}
    settings = {peer: {"environment": {}, "versions": {"jax": "0.10.2"}} for peer in times}
    machine = {"cpu": "a CPU", "cores": 2, "memory_gib": 4.0, "os": "Linux"}
    result = {"date": "2025-01-01", "machine": machine, "settings": {"turns": 5, "quick": False}}
    return {**result, "peers": settings, "rows": [row]}


def test_markdown_has_times_ratios_errors_and_memory():
    text = report.markdown(_result())
    assert "| case | run | jaxfuse ms | XLA ms | PyTorch ms | ÷ XLA | ÷ PyTorch | error/XLA's |" in text
    assert "| ResNet-50 | f32, batch 8, training step | 200 | 500 | 150 | 2.5 | 0.75 | 1.0e-06 / 1.0e-06 |" in text
    assert "1 MiB fused" in text and "a CPU" in text


def test_a_file_keeps_its_other_cases_but_not_those_of_another_machine(tmp_path):
    path = tmp_path / "result.json"
    report.merge(path, _result())
    report.merge(path, _result("resnet50.b8.f32.inference"))
    report.merge(path, _result(ms=100.0))
    rows = json.loads(path.read_text())["rows"]
    assert [row["case"] for row in rows] == ["resnet50.b8.f32.inference", "resnet50.b8.f32.training"]
    assert rows[1]["peers"]["jaxfuse"]["ms"] == 100.0 and path.with_suffix(".md").exists()
    with pytest.raises(ValueError, match="another machine"):
        report.merge(path, {**_result(), "machine": {"cpu": "another"}})


def test_resuming_leaves_out_what_the_file_has_with_all_peers(tmp_path):
    path, new = tmp_path / "result.json", {**_result(), "peers": {}, "rows": []}
    chosen = cases.select(["resnet50.b8.f32"])
    everything = [(case, "tuned") for case in chosen]
    assert plan.left_to_do(chosen, ["tuned"], ["xla"], path, new) == everything
    report.merge(path, _result())
    (left,) = plan.left_to_do(chosen, ["tuned"], ["xla", "torch"], path, new)
    assert left[0].name == "resnet50.b8.f32.inference"
    assert plan.left_to_do(chosen, ["tuned"], ["xla", "torch-compile"], path, new) == everything
    assert plan.left_to_do(chosen, ["default"], ["xla"], path, new) == [(case, "default") for case in chosen]
    with pytest.raises(ValueError, match="another machine"):
        plan.left_to_do(chosen, ["tuned"], ["xla"], path, {**new, "machine": {"cpu": "another"}})


def test_the_plan_goes_by_what_was_measured_before():
    row = _result()["rows"][0]
    row["peers"] = {"xla": {"ms": 500.0, "prepare_s": 10.0}}
    work = [(case, "tuned") for case in cases.select(["resnet50.b8.f32.training", "conv1x1_c256_c64_s56.b1.f32.forward"])]
    found = plan.seconds(work, ["xla"], 3, 0.15, [row])
    assert found == {"model": 10 + 1 + 3 * 1.5 + 20 / 4, "conv": 2 + 2 / 4}
    words = plan.sentence(work, 7, ["xla"], found)
    assert words == "2 cases and 1 peers, about 33 s: model 1 (20 s), conv 1 (2 s); 7 are in the file already"


def test_readme_has_the_table_and_the_pictures(tmp_path):
    path, result = tmp_path / "README.md", tmp_path / "result.json"
    report.merge(result, _result())
    path.write_text(f"before\n{readme.BEGIN}\nstale\n{readme.END}\nafter\n")
    readme.refresh(tmp_path, result)
    readme.refresh(tmp_path, result)
    text = path.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "stale" not in text
    assert text.count("| ResNet-50, f32, batch 8, training step | 200 | – | 500 | **150** |") == 1
    assert {image.name for image in (tmp_path / "docs/images").iterdir()} == {"speed.png", "memory.png"}
    path.write_text("no markers")
    with pytest.raises(ValueError, match="benchmark table"):
        readme.refresh(tmp_path, result)


def test_readme_has_at_most_eight_networks_of_those_that_are_measured():
    assert len(readme.CASES) <= 8 and {*readme.CASES} <= {case.name for case in cases.CASES}


def test_a_run_ends_with_a_picture(tmp_path):
    assert pictures.ratios(_result()["rows"], tmp_path / "run.png") and (tmp_path / "run.png").stat().st_size > 5000
    assert not pictures.ratios([{**_result()["rows"][0], "peers": {"xla": {"ms": 1.0}}}], tmp_path / "none.png")


def test_an_op_is_held_against_the_roof_of_the_machine(tmp_path):
    peaks = roofline.Peaks(f32=100, bf16=200, memory=10, last_level=40, cache=32)
    row = dict(kind="conv", peers={"jaxfuse": {"ms": 20.0}, "xla": {"ms": 80.0}, "xla-tuned": {"ms": 40.0}})
    (point,) = roofline.points([row | dict(case="conv3x3_c64_s56.b8.f32.forward")], peaks)
    multiplications, image = 8 * 56 * 56 * 9 * 64 * 64, 8 * 56 * 56 * 64
    assert point.flops == 2 * multiplications and point.bytes == 4 * (2 * image + 9 * 64 * 64 + 64)
    assert (point.roof, point.ours, point.xla) == (100, point.flops / 20e6, point.flops / 40e6)
    (bound,) = roofline.points([row | dict(case="bn_add_relu_c256_s56.b8.bf16.gradient", kind="batch_norm")], peaks)
    assert bound.roof == pytest.approx(10 * bound.intensity)  # 90 MB are in no cache
    pictures.roofline([point, bound], peaks, tmp_path / "roof.png")
    assert (tmp_path / "roof.png").stat().st_size > 10_000


@pytest.mark.parametrize("isa", [["avx2", "avx512_vp2intersect", "avx_vnni"], ["avx2"]])
def test_a_run_ends_with_the_ops_under_the_roofs_of_a_known_machine(isa, tmp_path, capsys):
    """Of another it says how they are drawn; of shapes that are not the cases' nothing."""
    result = _result("conv3x3_c64_s56.b8.f32.forward")
    result["machine"] = {"cpu": "AMD EPYC", "cores": 2, "isa": isa}
    path, picture = tmp_path / "run.json", tmp_path / "run-roofline.png"
    bench._draw(result | {"settings": {"quick": True}}, path)
    said = capsys.readouterr().out.replace("\n", "")
    assert "run.png" in said and "roof" not in said and not picture.exists()
    bench._draw(result, path)
    said = capsys.readouterr().out.replace("\n", "")
    command = f"python -m benchmarks.roofline {path} --f32"
    assert (command in said, picture.exists()) == ((False, True) if len(isa) > 1 else (True, False))
