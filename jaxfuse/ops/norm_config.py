"""What is static about a norm, and how the norms are one op.

Layer, RMS, group and instance norm are this one op. x is seen as (outer, spatial, groups, length): the statistics are those
of each (outer, group); gamma and beta have one number for each (group, length), or for `repeats` of them:

    layer norm, RMS norm           (rows, 1, 1, features)                    RMS norm is not centered: mean is 0
    group norm, channels last      (batch, positions, groups, channels/group)
    group norm, channels first     (batch, 1, groups, channels/group · positions), gamma and beta for `repeats` = positions each
    instance norm                  a group norm with one channel in each group
"""

import dataclasses

from jaxfuse.ops.activations import NO_ACTIVATION, Activation


@dataclasses.dataclass(frozen=True)
class NormConfig:
    """Everything static. Arguments: x, residual if any, gamma, beta [groups, length/repeats]; outputs: y, the sum if wanted, more."""

    inner: tuple[int, int, int]  # spatial, groups, length: the product of the last axes of x
    inner_rank: int  # how many axes of x these are; what is before them is the batch, at least one axis
    epsilon: float
    repeats: int = 1
    epsilon_outside: bool = False  # 1/(sqrt(var) + epsilon)
    centered: bool = True
    has_residual: bool = False
    wants_sum: bool = False
    activation: Activation = NO_ACTIVATION
    with_residuals: bool = False  # also return what the gradient needs: mean, rstd [*batch, groups], and the sum if not wanted

    @property
    def gives_sum(self) -> bool:
        return self.has_residual and (self.wants_sum or self.with_residuals)

    @property
    def residual_outs(self) -> int:
        return (2 + (self.has_residual and not self.wants_sum)) * self.with_residuals

    def unpack(self, args):
        """(x, residual or None, gamma, beta)"""
        x, *rest = args
        return x, rest[0] if self.has_residual else None, *rest[self.has_residual :]

    @property
    def parameter_shape(self) -> tuple[int, int]:
        return self.inner[1], self.inner[2] // self.repeats

    def batch(self, x) -> tuple[int, ...]:
        return tuple(x.shape[: x.ndim - self.inner_rank])
