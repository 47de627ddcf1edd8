"""When the fused kernels are worth it: one module for each op, its rules beside the way to measure them again."""

from jaxfuse.rules import batch_norm, conv, max_pool
from jaxfuse.rules.rule import OpRules

TABLE: dict[str, OpRules] = dict(conv=conv.RULES, batch_norm=batch_norm.RULES, max_pool=max_pool.RULES)
