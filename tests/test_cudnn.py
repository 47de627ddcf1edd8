"""cuDNN's graphs, plans and kernel, as far as they go without cuDNN: a graph computes what the op's reference does, a plan is
kept under all that it depends on, and what does not fit is refused by name. `tests/gpu/cudnn_plans.py` builds the plans."""

import dataclasses
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

import jaxfuse
from jaxfuse import ops
from jaxfuse.ops.activations import TABLE, named
from jaxfuse.ops.conv import cudnn as conv_cudnn
from jaxfuse.ops.conv.conv import OP
from jaxfuse.runtime import cuda, platforms
from jaxfuse.runtime.cudnn import backend, graph, plans
from jaxfuse.runtime.cudnn.devices import KNOWN
from jaxfuse.runtime.reasons import Unprofitable

random = np.random.default_rng(0)

# --- what a graph computes: cuDNN's documented formulas, in float64 ------------------------------------------------

MODES = {
    "relu": lambda v, upper=np.inf, slope=0.0: np.minimum(np.where(v < 0, slope * v, v), upper),
    "add": np.add, "mul": np.multiply, "tanh": np.tanh, "sigmoid": scipy.special.expit,
    "elu": lambda v, elu_alpha: np.where(v < 0, elu_alpha * np.expm1(v), v),
    "swish": lambda v, swish_beta: v / (1 + np.exp(-swish_beta * v)),
    "softplus": lambda v, softplus_beta: np.log1p(np.exp(softplus_beta * v)) / softplus_beta,
    "gelu": lambda v: v / 2 * (1 + scipy.special.erf(v / np.sqrt(2))),
    "gelu_tanh": lambda v: v / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (v + 0.044715 * v**3))),
}


def strided(buffer, layout):
    """The array in a flat buffer, its axes in cuDNN's order."""
    steps = [stride * buffer.itemsize for stride in layout.strides]
    return np.lib.stride_tricks.as_strided(buffer, layout.extents, steps)


def convolved(x, w, settings):
    padding = list(zip(settings["low"], settings["high"]))
    with jax.enable_x64(True):
        return np.asarray(jax.lax.conv_general_dilated(x, w, settings["strides"], padding, rhs_dilation=settings["dilation"]))


def computed(described: graph.Graph, operands):
    """The results as flat buffers in memory order, of operands that lie row-major."""
    tensors = {tensor.uid: tensor for tensor in described.tensors}
    values = {}
    for uid, operand in zip(described.bound, operands):
        values[uid] = strided(np.ascontiguousarray(operand, np.float64).reshape(-1), tensors[uid].layout)
    for kind, roles, settings in described.operations:
        roles, settings = dict(roles), dict(settings)
        x = values[roles["x"]]
        if kind == "convolution":
            values[roles["y"]] = convolved(x, values[roles["w"]], settings)
        else:
            assert kind == "pointwise"
            others = [values[roles["b"]]] if "b" in roles else []
            values[roles["y"]] = MODES[settings.pop("mode")](x, *others, **settings)
    results = []
    for uid in described.bound[len(operands) :]:
        layout = tensors[uid].layout
        assert not tensors[uid].virtual and values[uid].shape == layout.extents
        results.append(np.full(values[uid].size, np.nan))
        strided(results[-1], layout)[...] = values[uid]
    return results


def case(activation="silu", *, size=6, channels=3, features=5, extras=("bias",), dtype=jnp.bfloat16, bias_dtype=jnp.float32, **kw):
    """(config, args) of a convolution op."""
    rank = kw.pop("rank", 4)
    x = jnp.asarray(random.normal(size=(2, *[size] * (rank - 2), channels)), dtype)
    w = jnp.asarray(random.normal(size=(*[3] * (rank - 2), channels // kw.get("feature_group_count", 1), features)), dtype)
    y = jax.eval_shape(lambda x, w: ops.conv(x, w, **{name: value for name, value in kw.items() if name != "residual_last"}), x, w)
    types = dict(scale=(features, jnp.float32), bias=(features, bias_dtype), residual=(y.shape, dtype))
    rest = {name: jnp.asarray(random.normal(size=size), dtype) for name, (size, dtype) in types.items() if name in extras}
    plain = dict(activation=activation, alpha=0.5, residual_last=False) | kw
    jaxpr = jax.make_jaxpr(lambda x, w, rest: ops.conv(x, w, **rest, **plain))(x, w, rest)
    (equation,) = [e for e in jaxpr.eqns if e.primitive.name == "jaxfuse_conv"]
    return equation.params["config"], (x, w, *rest.values())


ACTIVATIONS = [name for name in TABLE if named(name, 0.5).cudnn]
GRAPHS = {
    "everything before the activation": dict(extras=("scale", "bias", "residual")),
    "the residual last": dict(extras=("bias", "residual"), residual_last=True, activation="elu"),
    "strides, dilation, padding that differs": dict(
        window_strides=(2, 1), rhs_dilation=(1, 2), padding=((0, 2), (1, 3)), extras=("bias", "residual")),
    "three spatial axes": dict(rank=5, size=4),
    "bias of x's dtype": dict(bias_dtype=jnp.bfloat16),
    **{name: dict(activation=name) for name in ACTIVATIONS if name not in ("silu", "elu")},
}


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_computes_what_the_reference_does(name):
    config, args = case(**GRAPHS[name])
    config = dataclasses.replace(config, residual_outs=int(config.activation.name in ("silu", "elu")))
    w = np.transpose(np.asarray(args[1], np.float64), conv_cudnn._filter_axes(config))
    found = computed(conv_cudnn._graph(config, args), [args[0], w, *args[2:]])
    for result, expected in zip(found, OP.forward.reference(config, *args), strict=True):
        np.testing.assert_allclose(result.reshape(expected.shape), np.asarray(expected, np.float64), rtol=0.02, atol=0.06)


def test_what_is_not_a_result_is_not_in_memory():
    config, args = case(extras=("scale", "bias", "residual"))
    described = conv_cudnn._graph(config, args)
    assert described.bound == tuple(t.uid for t in described.tensors if not t.virtual)
    assert {t.layout.dtype for t in described.tensors if t.virtual} == {"float32"}
    assert described == conv_cudnn._graph(config, args) and hash(described) == hash(conv_cudnn._graph(config, args))


# --- plans that are kept -------------------------------------------------------------------------------------------


@pytest.fixture
def built(monkeypatch, tmp_path):
    """The graphs that plans were built for, without cuDNN."""
    calls = []

    def build(described, device):
        calls.append((described, device))
        return backend.Plan(f"plan {len(calls)}", 512, 4)

    monkeypatch.setenv("JAXFUSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(backend, "build", build)
    monkeypatch.setattr(backend, "version", lambda: 92800)
    plans._plan.cache_clear()
    yield calls
    plans._plan.cache_clear()


A, B = (conv_cudnn._graph(*case(**options)) for options in (dict(), dict(activation="gelu")))


def test_a_plan_is_built_once_and_then_read(built):
    first = plans.plan(A, KNOWN["H100"])
    assert first == plans.plan(A, KNOWN["H100"]) == backend.Plan("plan 1", 512, 4)
    plans._plan.cache_clear()  # as another process
    assert plans.plan(A, KNOWN["H100"]) == first and len(built) == 1


def test_a_plan_is_for_one_graph_device_and_version(built, monkeypatch):
    keys = {plans.key(g, d, v) for g in (A, B) for d in KNOWN.values() for v in (92800, 92801)}
    assert len(keys) == 8 and plans.key(A, "d", 1) == plans.key(conv_cudnn._graph(*case()), "d", 1)
    texts = {plans.plan(g, d).text for g in (A, B) for d in KNOWN.values()}
    monkeypatch.setattr(backend, "version", lambda: 92801)
    assert plans.plan(A, KNOWN["H100"]).text not in texts and len(built) == 5


@pytest.mark.parametrize("spoil", [
    lambda text: text[:-9], lambda text: text.replace("plan 1", "plan X"), lambda text: "[]", lambda text: "\0",
    lambda text: json.dumps(json.loads(text) | {"workspace": None})])
def test_a_spoiled_file_is_made_anew(built, spoil):
    plans.plan(A, KNOWN["H200"])
    file = plans.path(plans.key(A, KNOWN["H200"], 92800))
    file.write_text(spoil(file.read_text()))
    plans._plan.cache_clear()
    assert plans.plan(A, KNOWN["H200"]).text == "plan 2" and json.loads(file.read_text())["text"] == "plan 2"


def test_a_folder_that_takes_nothing(built, tmp_path):
    (tmp_path / "cache").write_text("a file")
    assert plans.plan(A, KNOWN["H200"]).text == "plan 1" and plans.plan(A, KNOWN["H200"]).text == "plan 1"


def test_what_cudnn_says_is_the_reason(built, monkeypatch):
    def build(described, device):
        raise backend.CudnnError("finalising: CUDNN_STATUS_NOT_SUPPORTED: stride")

    monkeypatch.setattr(backend, "build", build)
    assert plans.plan(A, KNOWN["H200"]) == "finalising: CUDNN_STATUS_NOT_SUPPORTED: stride"


def test_gpus_of_several_models_get_no_plan(monkeypatch):
    """Which of them will run the program is not known while it is lowered."""
    kinds = ["NVIDIA H200", "NVIDIA H200", "NVIDIA L4"]
    gpus = [types.SimpleNamespace(device_kind=kind, local_hardware_id=i) for i, kind in enumerate(kinds)]
    monkeypatch.setattr(jax, "local_devices", lambda backend: gpus)
    monkeypatch.setattr(backend, "properties", lambda ordinal: KNOWN["H200"])
    monkeypatch.setattr(plans, "at_hand", plans.at_hand.__wrapped__)
    assert "this machine has NVIDIA H200 and NVIDIA L4" in plans.plan(A)
    del gpus[2]
    assert plans.at_hand() == KNOWN["H200"]


# --- the kernel ----------------------------------------------------------------------------------------------------


@pytest.fixture
def on_cuda(built, monkeypatch):
    monkeypatch.setattr(cuda, "unavailable", lambda target: None)
    monkeypatch.setattr(plans, "at_hand", lambda: KNOWN["H200"])


REFUSED = {
    "cuDNN has no mish": dict(activation="mish"),
    "dtype float32: cuDNN's kernel is used for bfloat16 and float16": dict(dtype=jnp.float32),
    "x of rank 3": dict(rank=3), "feature_group_count 3": dict(feature_group_count=3, features=6),
    "negative padding": dict(padding=((-1, 2), (1, 1))), "lhs_dilation (2, 2)": dict(lhs_dilation=(2, 2), padding=((1, 2), (1, 2))),
}


@pytest.mark.usefixtures("on_cuda")
class TestTheKernel:
    @pytest.mark.parametrize("reason", REFUSED)
    def test_near_misses(self, reason):
        assert reason in conv_cudnn.KERNEL.refuse(*case(**REFUSED[reason]))

    def test_channels_first(self):
        config, args = case()
        swapped = dataclasses.replace(config, lhs_spec=(0, 1, 2, 3))
        assert "cuDNN's kernel takes channels-last" in conv_cudnn.KERNEL.refuse(swapped, args)

    @pytest.mark.parametrize("options", [
        dict(), dict(activation="relu"), dict(activation="relu", extras=("scale",)), dict(activation="none", extras=()),
        dict(activation="relu", extras=("residual",), residual_last=True), dict(activation="relu", bias_dtype=jnp.bfloat16)])
    def test_what_it_takes(self, options):
        assert conv_cudnn.KERNEL.refuse(*case(**options)) is None

    def test_no_library(self, monkeypatch):
        monkeypatch.setattr(cuda, "unavailable", lambda target: f"{target} is not built")
        assert conv_cudnn.KERNEL.refuse(*case()) == "jaxfuse_cudnn_graph is not built"

    def test_no_plan(self, monkeypatch):
        monkeypatch.setattr(plans, "plan", lambda described: "no engine")
        assert conv_cudnn.KERNEL.refuse(*case()) == "no plan by cuDNN: no engine"

    def test_one_call_and_nothing_around_it_but_the_filters_transpose(self):
        config, args = case(extras=("scale", "bias", "residual"))
        specs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args]
        run = jax.jit(lambda *args: OP(config, *args)[0])
        text = run.trace(*specs).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("stablehlo.custom_call @jaxfuse_cudnn_graph") == 1 and "tensor<512xui8>" in text
        assert text.count("stablehlo.transpose") == 1 and "stablehlo.convolution" not in text
        assert 'plan = "plan 1"' in text and "operands = 5 : i64" in text

    @pytest.mark.parametrize("bias", [jnp.bfloat16, jnp.float32])
    @pytest.mark.parametrize("end", ["silu", "relu"])
    def test_policy_alone_decides_what_is_worth_it(self, monkeypatch, end, bias):
        """What XLA makes one kernel of, too: a kernel refuses what it cannot do."""
        monkeypatch.setattr(platforms, "current", lambda: "cuda")

        def program(x, w, b):
            z = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) + b
            return getattr(jax.nn, end)(z).astype(x.dtype)

        specs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (
            ((2, 8, 8, 8), jnp.bfloat16), ((3, 3, 8, 8), jnp.bfloat16), ((8,), bias))]
        (site,) = jaxfuse.explain(program, *specs, policy="always").fused
        assert (site.pattern, site.kernel) == (f"conv+bias+{end}", "cudnn")
        (site,) = jaxfuse.explain(program, *specs).skipped
        assert type(site.reason) is Unprofitable and site.reason.startswith("conv (full) has not been measured on cuda")
