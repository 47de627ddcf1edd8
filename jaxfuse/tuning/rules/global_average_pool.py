"""When a fused mean over the places of an image is worth it: its gradient is XLA's."""

from jaxfuse.tuning.rules.rule import OpRules, SizeSweep, elements


def _centred(x):
    return x - x.mean((1, 2), keepdims=True)


_SHAPES = tuple(((n, s, s, c),) for n, s, c in ((1, 7, 96), (1, 14, 672), (1, 28, 240), (1, 56, 144), (8, 56, 144)))
RULES = OpRules("elements", elements, size_sweeps={"any": SizeSweep(_centred, _SHAPES)}, directions_apart=True)
