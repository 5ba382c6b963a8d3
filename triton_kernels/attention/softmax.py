"""The online softmax: what was summed so far is scaled anew whenever a larger score comes."""

# The parameters of kernels are pointers, numbers and blocks: no Python types
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def update_softmax(scores, maximum, total, AXIS: tl.constexpr):
    """One step of the online softmax in base 2: probabilities, decay of what was summed so far, maximum, total."""
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=AXIS))
    # A row that may attend to nothing so far has no maximum to subtract
    reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    probabilities = tl.exp2(scores - tl.expand_dims(reference, AXIS))
    decay = tl.exp2(maximum - reference)
    return probabilities, decay, new_maximum, total * decay + tl.sum(probabilities, axis=AXIS)
