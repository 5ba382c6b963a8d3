"""Bases of cache layers: states that stay compressed until attention reads them, and layers that return them.

Importing this package registers `attention_functions` in the places of those of Transformers' table that would not ask
such states.
"""

from . import attention_functions as attention_functions
