"""Bases of the cache layers: states that stay compressed until attention asks for them, and layers that hand them out.

`lazy_states` has the tensor that attention gets and the base of layers that hand it out, `recorded_operations` what
models do to it before, `prompt_layer` the base of those that store a prompt only after it was attended to,
`packing` how tokens are packed and held, `residual_buffer` the newest tokens, exact. `attention_functions` has the
entries of Transformers' table of attention functions that would not ask such states: importing this package registers
them.
"""

from . import attention_functions as attention_functions
