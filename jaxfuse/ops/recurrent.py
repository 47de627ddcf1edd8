"""What lstm and gru share: sequences of steps, `[length, batch, ...]`, and the gradient of the recurrent weights."""

from itertools import compress

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxfuse.ops.arrays import wide
from jaxfuse.ops.batch_axes import completed
from jaxfuse.ops.dense import OP as DENSE, DenseConfig
from jaxfuse.ops.stage import refused_array
from jaxfuse.runtime import ffi
from jaxfuse.runtime.private import known

WORTH_A_CALL = 1 << 20  # multiplications of a product from which the kernel of dense layers is as fast as XLA, see xla_ext/KERNELS.md


def ordered(array, given: str, wanted: str):
    """The last axis in the order of the gates that is wanted."""
    if given == wanted:
        return array
    parts = dict(zip(given, jnp.split(array, len(given), -1)))
    return jnp.concatenate([parts[gate] for gate in wanted], -1)


def initial_state(arguments, name: str, state, others: dict, x, hidden: int):
    """The state before the first step, `[batch, hidden]`, checked; zeros unless given, in the dtype of one of the `others` or of x."""
    given = next((s for s in (state, *others.values()) if s is not None), None)
    shape, dtype = (x.shape[1], hidden), x.dtype if given is None else given.dtype
    if state is None:
        return jnp.broadcast_to(jnp.zeros_like(x[0, :, :1], dtype), shape)  # sharded as x is
    arguments.floats(**{name: state})
    arguments.check(state.shape == shape, name, f"of shape {state.shape}", f"{shape}, (batch, hidden)", "broadcast it")
    arguments.check(state.dtype == dtype and dtype in (x.dtype, jnp.float32), name, str(state.dtype),
                    f"{x.dtype}, as x is, or float32, and like the other state", "cast it")
    return state


def scan_steps(step, initial, xs, reverse: bool):
    """What a step gives at every place of the sequence, without the last state."""
    return tuple(lax.scan(step, initial, xs, reverse=reverse)[1])


def previous_states(initial, steps, reverse: bool):
    """The state before each step."""
    if reverse:
        return jnp.concatenate([steps[1:], initial[None].astype(steps.dtype)])
    return jnp.concatenate([initial[None].astype(steps.dtype), steps[:-1]])


def input_tangent(tangents, dwh, states, like):
    """That of the gates' arguments, from what is added to them and from the weights, the states fixed."""
    total = jnp.zeros_like(like)
    for tangent in tangents:
        total = total if tangent is None else total + wide(tangent)
    return total if dwh is None else total + jnp.dot(states, wide(dwh))


def is_worth_a_call(size: int, columns: int) -> bool:
    """Whether the kernel of dense layers is as fast as XLA for a product of all steps: of so many numbers with such a matrix."""
    return known(size * columns) >= WORTH_A_CALL


def summed_wide(x, w, dtype, dimension_numbers, **params):
    """`lax.dot_general` in this dtype, with sums in float32 at least. So are those of its gradients then: of a product of bfloat16
    jax 0.12 sums a weight's gradient in bfloat16 on a CPU, with an error of 2 % in place of 0.2 %."""
    params |= dict(preferred_element_type=jnp.promote_types(dtype, jnp.float32))
    return lax.dot_general(x, w, dimension_numbers, **params).astype(dtype)


def input_product(x, w):
    """x·w at every step."""
    return summed_wide(x, w, x.dtype, (((x.ndim - 1,), (0,)), ((), ())))


def weight_gradient(states, dgates, dtype):
    """Σ states ⊗ dgates over steps and batch, one product of two matrices."""
    states, dimensions = states.astype(dgates.dtype), (((0, 1), (0, 1)), ((), ()))
    sharding = jax.typeof(dgates).sharding
    if not any(sharding.spec) and is_worth_a_call(states.size, dgates.shape[-1]):
        return DENSE.forward.run(DenseConfig(*dimensions[0], *dimensions[1], str(dtype)), (states, dgates), "cpu")[0]
    # of explicit axes JAX asks what becomes of those that are summed over
    whole = NamedSharding(sharding.mesh, PartitionSpec()) if any(sharding.spec) else None
    return lax.dot_general(states, dgates, dimensions, preferred_element_type=jnp.float32, out_sharding=whole).astype(dtype)


def complete(linear, gradients, forward_axes, mesh_axes):
    """The gradients that are wanted; those that are sums over a sharded batch, over all its shards."""
    axes = forward_axes(linear.config, None).inputs
    return completed(compress(gradients, linear.active), compress(axes, linear.active), mesh_axes)


def types_of(function, *args) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(out.shape, out.dtype) for out in jax.eval_shape(function, *args)]


def refuse(target: str, gates, states) -> str | None:
    """Why the kernel does not take these arguments; `gates` are the arrays of the gates' dtype, `states` those of the state's."""
    if refused := next(filter(None, map(refused_array, (*gates, *states))), None):
        return refused
    dtypes = [sorted({str(a.dtype) for a in arrays}) for arrays in (gates, states)]
    if any(len(found) > 1 for found in dtypes) or states[0].dtype not in (gates[0].dtype, jnp.float32):
        of_gates, of_states = map(" and ".join, dtypes)
        return f"gates and weights of {of_gates} with states of {of_states}: the kernel takes one dtype, or states of float32"
    return ffi.unavailable(target)
