"""Errors against the float64 reference, and whether the fused ones are at least as small as the unfused."""

from collections import defaultdict

import numpy as np

from .peers import PEERS

# Below this a relative error is rounding of the output itself and nothing to compare: a few units of f32, half a unit of
# bf16. A network repeats every rounding through tens of layers and relu decisions, so that two equally careful runs
# differ by chance, the more so in a single number like the loss.
_OP = {"f32": 4 * 2.0**-23, "bf16": 2.0**-8}
FLOOR = {"model": {"f32": 32 * 2.0**-23, "bf16": 2.0**-8}}
FACTOR = {"dense": 1.1, "recurrent": 1.1, "transformer": 1.1, "model": 2.0}
# Relative rms error that no rounding makes. In bf16 PyTorch 2.13 adds up the gradients of a layer norm's scale and shift in bf16: over 1024
# rows they are off by 0.03, over 25,088 by 0.13.
ANOTHER = {"f32": 0.05, "bf16": 0.3}
NOT_FINITE = 1e30  # for the infinity that JSON has not


def errors(folder, reference, peer):
    """{output: {"rms", "max"}} of one peer. The leaves of a tree ("gradient['Conv_0']['kernel']") count as one output: some of them,
    the shift before a batch norm for one, have no gradient but rounding, so that their own relative errors would say nothing."""
    with np.load(folder / f"{reference}.npz") as truth, np.load(folder / f"{peer}.npz") as output:
        leaves = defaultdict(list)
        for name in truth.files:
            leaves[name.partition("[")[0]].append(name)

        def joined(arrays, names):
            return np.concatenate([arrays[name].ravel() for name in names])

        return {tree: error(joined(output, names), joined(truth, names)) for tree, names in leaves.items()}


def error(output, truth):
    """{"rms", "max"}: root mean square and largest difference, each relative to the truth's root mean square and largest
    value; NOT_FINITE if the output is not finite where the truth is."""
    output, truth = np.asarray(output, np.float64), np.asarray(truth, np.float64)
    if not np.isfinite(output[np.isfinite(truth)]).all():
        return {"rms": NOT_FINITE, "max": NOT_FINITE}
    difference, tiny = np.abs(output - truth), np.finfo(np.float32).tiny
    return {
        "rms": float(np.sqrt(np.mean(difference**2) / (np.mean(truth**2) + tiny))),
        "max": float(difference.max() / (np.abs(truth).max() + tiny)),
    }


def floor(kind, dtype):
    return FLOOR.get(kind, _OP)[dtype]


def worse(fused, unfused, kind, dtype):
    """Sentences, one for each output whose fused rms error is above what is allowed; none if all is well."""
    return [
        f"{name}: rms error {fused[name]['rms']:.2g} fused, {unfused[name]['rms']:.2g} unfused"
        for name in unfused
        if not fused[name]["rms"] <= max(FACTOR.get(kind, 1.0) * unfused[name]["rms"], floor(kind, dtype))
    ]


def astray(errors, dtype):
    """A sentence for each output so far from the truth that it is that of another program; of PyTorch's peers, whose programs are
    written twice."""
    return [
        f"{name}: {output}: rms error {error['rms']:.2g}: this is not the same program"
        for name, outputs in errors.items()
        if PEERS[name].framework == "torch"
        for output, error in outputs.items()
        if not error["rms"] < ANOTHER[dtype]
    ]
