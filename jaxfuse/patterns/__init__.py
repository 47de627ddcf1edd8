"""The patterns, in the order in which they are tried. A pattern module has

    anchors(graph)                               nodes where a match may begin
    match(graph, node, claimed, unprofitable)    yields Match and Refusal; `claimed` are nodes of other matches, the anchor
                                                 is none of them; `unprofitable(op, config, types, direction)`
                                                 says why it is not worth it, or ""

`optimizer`, `batch_norm.inference` and `exported` have no kernels and give reports their rows. Where one pattern is part of another, the
larger comes first: a cell's dense layers belong to its row.
"""

from types import ModuleType

from jaxfuse.patterns import exported, global_average_pool, max_pool, optimizer
from jaxfuse.patterns.attention import forward as attention, scores as attention_scores
from jaxfuse.patterns.batch_norm import forward as batch_norm, inference as batch_norm_inference
from jaxfuse.patterns.conv import forward as conv, gradient as conv_grad, weight_gradient as conv_weight_grad
from jaxfuse.patterns.dense import forward as dense, gradient as dense_grad
from jaxfuse.patterns.norm import forward as norm
from jaxfuse.patterns.recurrent import forward as recurrent


def name_of(pattern: ModuleType) -> str:
    """The folder or the file of the pattern, which is its op's name too: "conv", "max_pool"."""
    return pattern.__name__.removeprefix(f"{__name__}.").split(".")[0]


ORDER = (batch_norm, conv_grad, conv_weight_grad, conv, max_pool, recurrent, attention, dense_grad, attention_scores, dense, norm,
         batch_norm_inference, global_average_pool, optimizer, exported)
NAMES = tuple(sorted(set(map(name_of, ORDER))))
