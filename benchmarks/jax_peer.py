"""The JAX side of a worker: plain user functions, compiled as they are, through jaxfuse.fuse, or in float64 (reference)."""

from functools import partial
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np

from . import inputs, issues, layers_jax
from .peers import OURS, REFERENCE

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
# A preactivation nearer to 0 than this may change sign by rounding alone.
SIGN_MARGIN = {"f32": 1e-4, "bf16": 2.0**-6}


class Prepared:
    """A compiled call. `run()` makes one, blocking; `outputs` are the first call's, by name, as numpy arrays."""

    def __init__(self, call, name_outputs, temp_bytes):
        self.run, self.temp_bytes = call, temp_bytes
        self.outputs = {name: _numpy(value) for name, value in name_outputs(call()).items()}


def _numpy(value):
    return np.asarray(value, np.float64 if value.dtype == jnp.float64 else np.float32)


class JaxPeer:
    def __init__(self, name):
        self.exact, self.fuse = name == REFERENCE, lambda function: function
        self.versions = {"jax": version("jax"), "jaxlib": version("jaxlib"), "flax": version("flax")}
        self.freeze = None
        if name in OURS:
            import jaxfuse
            from jaxfuse.runtime import ffi

            self.fuse = jaxfuse.fuse
            self.freeze = jaxfuse.freeze if name == "frozen" else None
            native = ffi.native().info() if ffi.native() else {}
            self.versions |= {"jaxfuse": version("jaxfuse"), "jaxfuse oneDNN": native.get("onednn"), "native": native}

    def prepare(self, case, folder):
        jax.clear_caches()
        prepare = {"issue": self._issue, "model": self._model, "optimizer": self._optimizer}.get(case.kind)
        return prepare(case) if prepare else self._op(case, folder)

    def _array(self, value, dtype):
        """bf16 inputs are rounded first: the float64 reference starts from what the others start from. Tokens stay integers."""
        if np.issubdtype(value.dtype, np.integer):
            return jnp.asarray(value)
        value = jnp.asarray(value, DTYPES[dtype])
        return value.astype(jnp.float64) if self.exact else value

    def _op(self, case, folder):
        arrays, cotangent = inputs.operands(case)
        names = list(arrays)
        arguments = [self._array(arrays[name], inputs.dtype(name, case)) for name in names]
        linear, activation = layers_jax.layer(case, self.exact)
        function = self.fuse(lambda *arguments: activation(linear(*arguments)))
        if case.task == "forward":
            return self._compiled(function, arguments, lambda y: {"y": y})
        if self.exact and folder:
            # Where the sign is within rounding of 0, one flipped relu bit, rightly or wrongly flipped, would drown the
            # errors to be seen.
            cotangent = np.where(np.abs(jax.jit(linear)(*arguments)) < SIGN_MARGIN[case.dtype], 0, cotangent)
            np.save(folder / "cotangent.npy", cotangent)
        elif folder and (folder / "cotangent.npy").exists():
            cotangent = np.load(folder / "cotangent.npy")

        def forward_and_gradients(cotangent, *arguments):
            y, pullback = jax.vjp(function, *arguments)
            return y, pullback(cotangent)

        def named(result):
            return {"y": result[0], **{f"d{name}": value for name, value in zip(names, result[1], strict=True)}}

        return self._compiled(forward_and_gradients, [self._array(cotangent, case.dtype), *arguments], named)

    def _compiled(self, function, arguments, name_outputs):
        compiled = jax.jit(function).lower(*arguments).compile()
        temp_bytes = compiled.memory_analysis().temp_size_in_bytes
        return Prepared(lambda: jax.block_until_ready(compiled(*arguments)), name_outputs, temp_bytes)

    def _issue(self, case):
        from . import issues_jax

        arrays = {name: self._array(value, case.dtype) for name, value in issues.arrays(case).items()}
        program = issues_jax.program(case, self.fuse)
        return self._compiled(lambda *values: program(**dict(zip(arrays, values))), list(arrays.values()), dict)

    def _model(self, case):
        from . import models

        model = models.NETWORKS[case.shape.network](dtype=jnp.float64 if self.exact else DTYPES[case.dtype])
        given = self._array(inputs.network(case), case.dtype)
        variables = jax.tree.map(partial(self._array, dtype="f32"), models.random_variables(model, given))
        if case.task == "inference" and self.freeze:
            frozen = self.freeze(model.apply, variables)
            return Prepared(lambda: jax.block_until_ready(frozen(given)), lambda logits: {"logits": logits}, None)
        if case.task == "inference":
            return self._compiled(self.fuse(model.apply), [variables, given], lambda logits: {"logits": logits})
        params, batch_stats = variables["params"], variables.get("batch_stats", {})
        state = models.TrainState(params, batch_stats, jax.tree.map(jnp.zeros_like, params))
        train_step = models.make_train_step(model, self.fuse)

        def named(result):
            # The momentum after the first step is the gradient.
            state, loss = result
            return {"loss": loss, **_leaves("gradient", state.momentum), **_leaves("batch_stats", state.batch_stats)}

        return self._donating(train_step, state, (given, jnp.asarray(inputs.labels(case))), named)

    def _optimizer(self, case):
        init, update = layers_jax.optimizer(case.shape.rule)
        parameters, gradients = ([self._array(a, case.dtype) for a in arrays] for arrays in inputs.parameters(case))
        state = parameters, init(parameters)
        return self._donating(self.fuse(update), state, (gradients,), lambda result: _leaves("parameters", result[0][0]))

    def _donating(self, step, state, arguments, name_outputs):
        """Of step(state, *arguments) -> (state, what else), its old state given up for the new one."""
        compiled = jax.jit(step, donate_argnums=0).lower(state, *arguments).compile()

        def run():
            nonlocal state
            state, rest = jax.block_until_ready(compiled(state, *arguments))
            return state, rest

        return Prepared(run, name_outputs, compiled.memory_analysis().temp_size_in_bytes)


def _leaves(name, tree):
    return {name + jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
