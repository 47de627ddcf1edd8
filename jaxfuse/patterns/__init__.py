"""The patterns, in the order in which they are tried. A pattern module has

    anchors(graph)                           nodes where a match may begin
    match(graph, node, claimed, measured)    yields Match and Refusal; `claimed` are nodes of other matches,
                                             `measured(op, config, types)` says why a site is not worth it, or ""
"""

from jaxfuse.patterns import batch_norm, conv, given_norm, max_pool

ORDER = (batch_norm, conv, max_pool, given_norm)
