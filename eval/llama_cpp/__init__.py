"""llama.cpp through llama-cpp-python's bindings: its decode step and its attention, for `bench llama-cpp`."""
