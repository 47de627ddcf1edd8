"""When the fused kernels are worth it: one module for each op, its rules beside the way to measure them again.

A new op is a module with `RULES = OpRules(unit, size, rules, size_sweeps)` and a line in `TABLE`. Write `size` and the sweeps
first, let `python -m jaxfuse bench --tune` measure on a quiet machine, and put the times into the rules: one for each dtype
and shape class. The pattern asks `unprofitable(op, config, types)`, or `unprofitable(op, config, types, "backward")` for a gradient
that autodiff has already made, with the types of the forward op in both cases.
"""

from jaxfuse.tuning.rules import attention, batch_norm, conv, dense, max_pool, norm, recurrent
from jaxfuse.tuning.rules.rule import OpRules

TABLE: dict[str, OpRules] = dict(
    attention=attention.RULES, conv=conv.RULES, batch_norm=batch_norm.RULES, dense=dense.RULES, gru=recurrent.GRU, lstm=recurrent.LSTM,
    max_pool=max_pool.RULES, norm=norm.RULES)
