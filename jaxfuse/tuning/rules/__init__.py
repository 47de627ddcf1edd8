"""The rules of each op: how the size of a site is counted, which kinds of sites are told apart, and what to measure for them.

A new op is a module with `RULES = OpRules(unit, size, size_sweeps)` and a line in `TABLE`. Then `python -m jaxfuse bench --tune`
measures it on a quiet machine; its file goes to `tuning/measured/`. The pattern asks `unprofitable(op, config, types)`, or
`unprofitable(op, config, types, "backward")` for a gradient that autodiff has already made, with the types of the forward op in
both cases.
"""

from jaxfuse.tuning.rules import attention, batch_norm, conv, dense, global_average_pool, max_pool, norm, recurrent
from jaxfuse.tuning.rules.rule import OpRules

TABLE: dict[str, OpRules] = dict(
    attention=attention.RULES, conv=conv.RULES, batch_norm=batch_norm.RULES, dense=dense.RULES,
    global_average_pool=global_average_pool.RULES, gru=recurrent.GRU, lstm=recurrent.LSTM, max_pool=max_pool.RULES, norm=norm.RULES)
