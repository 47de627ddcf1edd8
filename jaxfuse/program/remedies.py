"""What to do about an error that a user's function raises when it is traced: a note below the error's own words."""

# By the error's name: Flax need not be there.
REMEDIES = {
    "ConcretizationTypeError": "what the function looks at must be static, as under jax.jit: fuse(fn, static_argnames=…)",
    "TracerArrayConversionError": "numpy's functions cannot be traced: jax.numpy has the same",
    "CallCompactUnboundModuleError": "a Flax linen module alone has no weights: fuse(model.apply)(variables, x), "
                                     "freeze(model.apply, variables)",
    "TraceContextError": "a Flax nnx module that changes must be an argument: fuse(lambda model, x: model(x))(model, x); in inference call "
                         "model.eval() first",
}


def remedy(error: BaseException) -> str:
    """Of the first of the error's classes that has one; "" where none has."""
    return next((REMEDIES[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in REMEDIES), "")
