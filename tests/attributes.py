"""What the kernels' targets are told of an activation."""

import numpy as np

from jaxfuse.ops.activations import TABLE, named


def attributes(activation: str, alpha: float = 0.0) -> dict:
    """Of one in the table; a name that nothing knows goes through as it is."""
    if activation in TABLE:
        return named(activation, alpha).attributes()
    return dict(activation=activation, parameters=np.zeros(0, np.float32))
