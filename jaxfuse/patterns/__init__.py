"""The patterns, in the order in which they are tried. A pattern module has

    anchors(graph)                           nodes where a match may begin
    match(graph, node, claimed, measured)    yields Match and Refusal; `claimed` are nodes of other matches,
                                             `measured(op, config, types, direction)` says why a site is not worth it, or ""

Batch norm, convolution, max pool, dense layers and their gradients have kernels. The others are recognised only. Where one
pattern is part of another, the larger comes first: a cell's dense layers belong to its row.
"""

from jaxfuse.patterns import (
    attention, attention_scores, batch_norm, batch_norm_inference, conv, conv_grad, conv_per_sample, dense, dense_grad, max_pool, norm,
    optimizer, recurrent)

ORDER = (batch_norm, conv_grad, conv_per_sample, conv, max_pool, recurrent, attention, dense_grad, attention_scores, dense, norm,
         batch_norm_inference, optimizer)
