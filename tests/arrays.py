"""Arrays for tests, rounded by numpy and put: what `jnp.asarray` does is compiled anew for every shape."""

import jax
import jax.numpy as jnp
import numpy as np


def array(values, dtype) -> jax.Array:
    """As `jnp.asarray(values, dtype)`: to float32 first, if that is the wider one."""
    return jax.device_put(np.asarray(values, jnp.promote_types(jnp.float32, dtype)).astype(dtype))
