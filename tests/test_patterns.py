"""Every pattern in each spelling it is written in, and beside it the near-misses, each with the reason it must give: the tables are
in spellings/."""

import jax
import pytest
from jax import lax

import spellings
from layers import W, X, conv
from recognition import correct, correct_with_gradients, differentiated, directions, fuse, patterns

HITS, MISSES = spellings.rows("HITS"), spellings.rows("MISSES")

# What is allowed more than the rule of compare.py, in roundings, and why.
TIMES = {
    "dense: gate, float16": 4,  # a product of two rounded values
    "layouts: pads with a parameter": 2,  # its gradient is one sum over the border, whose terms cancel
}


@pytest.mark.parametrize("name", HITS)
def test_hit(name):
    """One fused site; the values, and the gradients through it and of autodiff's whole program, and under vmap."""
    hit = HITS[name]
    fused, left = patterns(hit.function, *hit.args)
    assert fused == hit.fused or hit.left is None and sorted(fused) == sorted(hit.fused)
    assert hit.left is None or [pattern for pattern, _ in left] == hit.left
    if hit.step is not None:
        assert directions(differentiated(hit.function, *hit.args), *hit.args) == hit.step
    correct_with_gradients(hit.function, *hit.args, times=TIMES.get(name, 1), vmapped=True)


@pytest.mark.parametrize("name", MISSES)
def test_near_miss(name):
    miss = MISSES[name]
    fused, left = patterns(miss.function, *miss.args)
    if miss.fused is not None:
        assert fused == miss.fused and [pattern for pattern, _ in left] == [pattern for pattern, _ in miss.left]
    for pattern, words in miss.left:
        reason = dict(left)[pattern]
        assert all(part in reason for part in ([words] if isinstance(words, str) else words)), reason
    (correct_with_gradients if miss.has_gradient else correct)(miss.function, *miss.args, times=TIMES.get(name, 1))


def test_debug_print_between_stays(capfd):
    def fn(x, w):
        y = conv(x, w)
        jax.debug.print("sum {}", y.sum())
        return jax.nn.relu(y)

    fused, skipped = patterns(fn, X, W)
    assert fused == ["conv"] and "read 2 times" in skipped[0][1]
    fuse(fn)(X, W)
    jax.effects_barrier()
    printed = capfd.readouterr().out
    assert printed.startswith("sum") and printed.count("sum") == 1


@pytest.mark.parametrize("border", ["scan", "cond", "remat"])
def test_across_a_border_only_inside(border):
    """A value that crosses into a loop, a branch or a rematerialised body is not fused across; the body is entered."""

    def body(y):
        return jax.nn.relu(conv(y, W[..., :4]))

    def fn(x):
        y = conv(x, W[..., :4])
        if border == "scan":
            return lax.scan(lambda c, _: (body(c), None), y, None, length=2)[0]
        if border == "cond":
            return lax.cond(x.sum() > 0, body, lambda v: v, y)
        return jax.checkpoint(body)(y)

    fused, skipped = patterns(fn, X)
    assert sorted(fused) == ["conv", "conv+relu"] and not skipped
    correct_with_gradients(fn, X)
