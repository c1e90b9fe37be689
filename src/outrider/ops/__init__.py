"""Linear and attention, the two operations that read the weights and the KV cache, and what lies between them.

All are *row-invariant* by construction where the libraries below allow it (Law 2): what they compute for one row does
not depend on how many rows ride along. `runner.check_exactness` tests that on the loaded model.
"""

from outrider.ops.attention import KEY_BLOCK, attention, attention_mask
from outrider.ops.elementwise import rotate, swiglu
from outrider.ops.linear import Linear, packs

__all__ = ["KEY_BLOCK", "Linear", "attention", "attention_mask", "packs", "rotate", "swiglu"]
