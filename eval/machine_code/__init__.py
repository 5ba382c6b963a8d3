"""What kernels are compiled to, counted without a GPU: instructions of the inner loop, registers, shared memory."""
