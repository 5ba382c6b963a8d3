"""Bases of the cache layers: states that stay compressed until attention asks for them, and layers that hand them out.

`lazy_states` has the tensor that attention gets, `prompt_layer` the base of layers that store a prompt only after it
was attended to, `residual_buffer` the newest tokens, exact.
"""
