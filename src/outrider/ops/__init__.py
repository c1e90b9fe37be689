"""Linear and attention, the two operations that read the weights and the KV cache, and what lies between them.

All are *row-invariant* by construction where the libraries below allow it (Law 2): what they compute for one row does
not depend on how many rows ride along. `runner.check_exactness` tests that on the loaded model.
"""

from outrider.ops.ambient import set_own_threads, untouched
from outrider.ops.attention import (
    KEY_BLOCK,
    Pages,
    attend,
    attend_all,
    attend_pages,
    dense_plan,
    device_plan,
    follows_paths,
    write,
)
from outrider.ops.elementwise import add, argmax, greatest, pick, picks, rms_norm, rope, softcap
from outrider.ops.experts import MLP, Experts
from outrider.ops.grow import Recurrence
from outrider.ops.linear import Linear, Quantized, join, packs, quantises
from outrider.ops.triton.graph import Graphs, bucket, pinned, upload
from outrider.ops.triton.launch import at_once, take
from outrider.ops.triton.launch import runs as launches
from outrider.ops.triton.plan import DevicePlan
from outrider.ops.walk import Block, Stores, Switches, Walk

__all__ = [
    "KEY_BLOCK", "MLP", "Block", "DevicePlan", "Experts", "Graphs", "Linear", "Pages", "Quantized", "Recurrence",
    "Stores", "Switches", "Walk", "add", "argmax", "at_once", "attend", "attend_all", "attend_pages", "bucket",
    "dense_plan", "device_plan", "follows_paths", "greatest", "join", "launches", "packs", "pick", "picks", "pinned",
    "quantises", "rms_norm", "rope", "set_own_threads", "softcap", "take", "untouched", "upload", "write",
]  # fmt: skip
