"""The patterns, in the order in which they are tried. A pattern module has

    anchors(graph)                           nodes where a match may begin
    match(graph, node, claimed, measured)    yields Match and Refusal; `claimed` are nodes of other matches,
                                             `measured(op, config, types)` says why a site is not worth it, or ""

Batch norm, convolution, max pool and their gradients have kernels, and norms forward. The others are recognised only; they come after all that have one, the larger first: a cell's
dense layers belong to its row.
"""

from jaxfuse.patterns import (
    attention, batch_norm, batch_norm_inference, conv, conv_grad, dense, dense_grad, max_pool, norm, optimizer, recurrent,
    space_to_batch)

ORDER = (batch_norm, space_to_batch, conv_grad, conv, max_pool, recurrent, attention, dense, norm, batch_norm_inference, dense_grad,
         optimizer)
