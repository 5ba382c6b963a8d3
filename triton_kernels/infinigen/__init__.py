"""Kernels of a decode step that attends to chosen tokens: speculated queries, scores, choice, attention, push.

    speculate: rms_norm -> projection (the model's own) -> rotate      queries of a layer, while the layer before runs
    scores -> choose -> gather                                         tokens of the pool, and their rows
    push -> decode (coded rows only) -> attend -> merge                once the layer runs

Nothing that depends on the tokens is known to the host: counts and slots stay on the device.
"""
