"""The benchmark's own machinery; nothing here is about speed."""

import json
import os
import signal
import sys

import numpy as np
import pytest

from benchmarks import cases, checks, communication, inputs, peer, peers, plan, report, resident, run, swapped, turns
from benchmarks.__main__ import main
from processes import printed_by


def test_case_table_is_well_formed():
    names = [case.name for case in cases.CASES]
    assert len(set(names)) == len(names)
    for case in cases.CASES:
        assert cases.Case.from_json(json.loads(json.dumps(case.to_json()))) == case
        assert case.dtype in ("f32", "bf16") and case.task in report.TASKS and case.kind in report.SECTIONS
        if case.kind == "conv":
            assert case.shape.inputs % case.shape.groups == case.shape.outputs % case.shape.groups == 0


def test_select_by_kind_and_by_parts_of_the_name():
    assert cases.select([]) == list(cases.CASES)
    assert {case.kind for case in cases.select(["batch_norm"])} == {"batch_norm"}
    assert [case.name for case in cases.select(["bf16.resnet50.training"])] == ["resnet50.b8.bf16.training"]
    with pytest.raises(ValueError, match="resnet50"):
        cases.select(["resnet5"])


@pytest.mark.parametrize("name", [
    "conv7x7_stride2_c3_c64_s224.b1.f32.gradient", "bn_add_relu_c2048_s7.b8.f32.gradient", "group_norm_silu_c96_s56.b8.bf16.gradient",
    "gru_h28.b8.f32.gradient", "attention_h12_c768.b8.f32.gradient"])
def test_inputs_are_the_same_in_every_process_and_fit_the_function(name):
    jax_peer = pytest.importorskip("benchmarks.jax_peer")
    (case,) = cases.select([name])
    case = cases.quick(case)
    arrays, cotangent = inputs.operands(case)
    again, _ = inputs.operands(case)
    assert all(np.array_equal(arrays[key], again[key]) and arrays[key].dtype == np.float32 for key in arrays)
    prepared = jax_peer.JaxPeer("xla").prepare(case, None)
    assert prepared.outputs["y"].shape == cotangent.shape
    assert {f"d{key}" for key in arrays} <= prepared.outputs.keys()


def test_an_optimizer_updates_what_the_network_has():
    (case,) = cases.select(["momentum_resnet50"])
    parameters, gradients = inputs.parameters(case)
    assert len(parameters) == 161 and sum(p.size for p in parameters) == 25_557_032
    assert [p.shape for p in parameters] == [g.shape for g in gradients]
    jax_peer = pytest.importorskip("benchmarks.jax_peer")
    small = cases.quick(case)
    updated = jax_peer.JaxPeer("xla").prepare(small, None).outputs
    for i, (p, g) in enumerate(zip(*inputs.parameters(small))):
        np.testing.assert_allclose(updated[f"parameters[{i}]"], p - 1e-3 * (g + 1e-4 * p), rtol=1e-5, atol=1e-7)


def test_time_calls_counts_three_short_calls_or_one_long_one():
    def calls_of(seconds_each, seconds):
        now = [0.0]

        def run():
            now[0] += seconds_each

        return peer.time_calls(run, seconds, clock=lambda: now[0])

    assert len(calls_of(0.25, 0.3)) == 3
    assert len(calls_of(0.0625, 1.0)) == 16
    assert len(calls_of(5.0, 0.3)) == 1


class FakeWorker:
    def __init__(self, name):
        self.name = name


def test_turns_alternate_and_disturbed_ones_are_repeated():
    order, foreign = [], iter([0.0, 0.5, 0.1, 0.0, 0.0, 0.0])

    def turn(worker, seconds):
        order.append(worker.name)
        return turns.Turn(ms=float(len(order)), calls=3, foreign=next(foreign))

    # In the first round b is disturbed, disturbed again, and then quiet.
    taken, failed = turns.take_turns([FakeWorker("a"), FakeWorker("b")], 2, 0.3, turn=turn, wait=0)
    assert order == ["a", "b", "b", "b", "a", "b"] and not failed
    assert [one.ms for one in taken["a"]] == [1.0, 5.0] and [one.ms for one in taken["b"]] == [4.0, 6.0]


def test_a_turn_that_stays_disturbed_counts_and_says_so():
    foreign = iter([0.5, 0.2, 0.4])
    taken, _ = turns.take_turns([FakeWorker("a")], 1, 0.3, turn=lambda *_: turns.Turn(1.0, 3, next(foreign)), wait=0)
    assert [one.foreign for one in taken["a"]] == [0.2]
    assert turns.summary(taken["a"]) == {"ms": 1.0, "turns_ms": [1.0], "calls": 3, "disturbed": 1}


def test_a_worker_that_fails_leaves_the_others_their_turns():
    def turn(worker, seconds):
        if worker.name == "a":
            raise turns.WorkerError("it ended")
        return turns.Turn(2.0, 3, 0.0)

    taken, failed = turns.take_turns([FakeWorker("a"), FakeWorker("b")], 3, 0.3, turn=turn, wait=0)
    assert failed == {"a": "it ended"} and turns.summary(taken["b"])["turns_ms"] == [2.0] * 3 and "a" not in taken


def test_a_real_worker_answers_and_its_end_is_an_error():
    worker = turns.Worker("xla", sys.executable, "default")
    try:
        assert "jax" in worker.versions
        case = cases.quick(cases.select(["conv3x3_c256_s14.b1.f32.forward"])[0])
        assert "error" not in worker.ask({"do": "prepare", "case": case.to_json(), "folder": None})
        assert worker.ask({"do": "time", "seconds": 0.0})["calls"] == 3
        assert "error" in worker.ask({"do": "time", "minutes": 1})
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(turns.WorkerError, match="the process of xla ended"):
            worker.ask({"do": "time", "seconds": 0.0})
    finally:
        worker.end()


@pytest.mark.costly
def test_every_issue_runs_small_with_the_right_numbers(tmp_path):
    names = [case.name for case in cases.CASES if case.kind == "issue"]
    path = tmp_path / "issues.json"
    pytest.importorskip("flax")
    assert main(["issue", "--quick", "--peers", "jaxfuse,xla", "--turns", "1", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["case"] for row in rows] == names
    for row in rows:
        assert not row["unchecked"] and not row["worse_than_xla"]
        assert row["peers"].keys() == {"jaxfuse", "xla"} and all(answer["ms"] > 0 for answer in row["peers"].values())


def test_issues_is_the_benchmark_of_its_kind():
    assert printed_by("-m", "benchmarks.issues", "--small", "--list").split() == [case.name for case in cases.CASES if case.kind == "issue"]


def test_environments_differ_only_in_the_peers_own_settings(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_of_the_shell")
    monkeypatch.setenv("MALLOC_PERTURB_", "1")
    plain, tuned = peers.environment("xla", "tuned"), peers.environment("xla-tuned", "tuned")
    assert "MALLOC_PERTURB_" not in plain and {**plain, **peers.PEERS["xla-tuned"].environment} == tuned
    assert plain == peers.environment("jaxfuse", "tuned") and "XLA_FLAGS" not in plain


def test_errors_are_relative_and_trees_count_as_one(tmp_path):
    truth = {"y": np.array([3.0, 4.0]), "gradient['a']": np.array([1.0]), "gradient['b']": np.array([0.0])}
    np.savez(tmp_path / "reference.npz", **truth)
    np.savez(tmp_path / "xla.npz", **{**truth, "y": np.array([3.0, 4.5]), "gradient['b']": np.array([0.5])})
    np.savez(tmp_path / "jaxfuse.npz", **{**truth, "y": np.array([3.0, np.nan])})
    unfused, fused = checks.errors(tmp_path, "reference", "xla"), checks.errors(tmp_path, "reference", "jaxfuse")
    assert unfused["y"] == pytest.approx({"rms": 0.1, "max": 0.125})
    assert unfused["gradient"] == pytest.approx({"rms": 0.5, "max": 0.5})
    assert checks.worse(unfused, unfused, "conv", "f32") == []
    assert [sentence.partition(":")[0] for sentence in checks.worse(fused, unfused, "conv", "f32")] == ["y"]


def test_a_program_written_twice_that_computes_something_else_is_a_failure():
    right, wrong = {"y": {"rms": 1e-3, "max": 1e-3}}, {"y": {"rms": 1.4, "max": 2.0}}
    assert checks.astray({"torch": right, "xla": wrong}, "f32") == []
    (sentence,) = checks.astray({"torch": right, "torch-compile": wrong}, "bf16")
    assert sentence == "torch-compile: y: rms error 1.4: this is not the same program"


def test_the_interval_of_a_median():
    """Its ends are the order statistics of tables of the sign test, at 5 %."""
    ends = {5: (1, 5), 6: (1, 6), 10: (2, 9), 20: (6, 15), 50: (18, 33)}
    assert {n: swapped.of_median([float(i) for i in range(n, 0, -1)]) for n in ends} == ends
    calls = []
    pairs = swapped.turns({"one": lambda: calls.append("one"), "other": lambda: calls.append("other")}, (), 2)
    assert len(pairs) == 2 and calls[2:] == ["one", "other", "other", "one"]
    assert "+0.0% (+0.0% to +0.0%), 2 turns" in swapped.summary("linen", [(1.0, 1.0)] * 2)


def test_inference_runtimes_take_networks_in_inference_only():
    """In the dtypes that they have, and they are neither waited for nor missed elsewhere."""
    takes = {name: {(c.task, c.dtype) for c in cases.CASES if p.takes(c)} for name, p in peers.PEERS.items() if p.dtypes}
    assert takes.pop("frozen") == takes["openvino"]
    assert takes == {"openvino": {("inference", "f32"), ("inference", "bf16")}, "onnxruntime": {("inference", "f32")}}
    (case,) = cases.select(["resnet50.b8.f32.training"])
    row = {"case": case.name, "allocator": "tuned", "kind": case.kind, "peers": {"xla": {"ms": 1.0, "prepare_s": 1.0}}}
    assert plan.seconds([(case, "tuned")], ["openvino"], 5, 0.15, [row])["model"] == plan.UNKNOWN["model"] / 4  # the reference's


def test_a_peer_that_is_not_installed_is_left_out_by_name(monkeypatch):
    monkeypatch.setitem(peers.NEEDS, "openvino", ("json", "a_module_that_nobody_has"))
    interpreters, left_out = peers.available(["openvino"], sys.executable)
    assert not interpreters and left_out == [f"openvino is left out: {sys.executable} cannot import a_module_that_nobody_has; "
                                             "--torch-python names an interpreter that can."]


@pytest.mark.parametrize("name", cases.MODELS)
def test_a_network_has_the_parameters_of_its_papers(name):
    """PyTorch's counts its own when it is built."""
    jax = pytest.importorskip("jax")
    models = pytest.importorskip("benchmarks.models")
    (case,) = cases.select([f"{name}.b1.f32.inference"])
    variables = jax.eval_shape(models.NETWORKS[name]().init, jax.random.key(0), inputs.network(case))
    assert sum(leaf.size for leaf in jax.tree.leaves(variables["params"])) == case.shape.parameters


@pytest.mark.costly
def test_transformers_run_small_with_the_right_numbers(tmp_path):
    """The frozen network is held to XLA's error, too."""
    path = tmp_path / "transformers.json"
    pytest.importorskip("flax")
    assert main(["vit_s16.b1.f32", "--quick", "--peers", "jaxfuse,frozen,xla", "--turns", "1", "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert not row["unchecked"] and row["worse_than_xla"] == [] and row["errors"].keys() == {"jaxfuse", "frozen", "xla"}


def test_a_frozen_network_that_is_worse_than_xla_is_a_failure(monkeypatch):
    (case,) = cases.select(["vit_s16.b1.f32"])
    found = {"jaxfuse": {"logits": {"rms": 1e-6, "max": 1e-6}}, "frozen": {"logits": {"rms": 1e-3, "max": 1e-3}}}
    monkeypatch.setattr(run, "_check", lambda *_: ({}, found | {"xla": found["jaxfuse"]}, None))
    row = run.measure(case, FakeCrew(), 1, 0.1)
    assert run.failures(row) == [f"{case.name}: frozen: logits: rms error 0.001 fused, 1e-06 unfused"]


class FakeCrew:
    allocator, workers = "tuned", {}


@pytest.mark.costly
def test_memory_of_a_process_that_loads_a_network():
    case = cases.quick(cases.select(["mobilenet_v2.b1.f32.inference"])[0])
    found = resident.in_processes("frozen", case, sys.executable, 2)
    weights = 4 * case.shape.parameters / 2**20
    assert 20 < found["before"] < found["after"] - weights and found["after"] <= found["peak"] < found["before"] + 2000


def test_tokens_are_of_the_vocabulary_and_images_are_not():
    (bert,), (vit,) = cases.select(["bert_base.b8.bf16"]), cases.select(["vit_s16.b8.bf16.inference"])
    tokens, images = inputs.network(bert), inputs.network(vit)
    assert tokens.shape == (8, 128) and tokens.dtype == np.int32 and 0 <= tokens.min() and 20000 < tokens.max() < bert.shape.vocabulary
    assert images.shape == (8, 224, 224, 3) and images.dtype == np.float32


def test_collectives_are_counted_with_their_bytes():
    text = """
      %sums = (f32[8]{0}, bf16[4,2]{1,0}) all-reduce(%a, %b), channel_id=1
      %more = f32[] all-reduce-start(%c)
      %rows = f32[16,4]{1,0} all-gather(%d), dimensions={0}
      %y = f32[64]{0} add(%e, %all-reduce.1)"""
    assert communication.sent(text) == (3, 8 * 4 + 8 * 2 + 4 + 64 * 4, frozenset({"all-reduce", "all-gather"}))
