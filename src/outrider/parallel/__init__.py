"""A model cut over ranks: processes that torchrun has started, each with a part of every matrix.

Rank 0 decides, the others replay (follow.py). What it decides goes to them over a socket, a few numbers a forward;
tensors go through torch.distributed, gloo on CPUs and NCCL on CUDA, of which this package is the only user. The sockets
are lifelines, too: a process that ends closes them, whatever the others wait for, and then all end.

Heads are cut by groups that share a key-value head, which ranks hold twice where there are fewer than ranks. Queries,
keys, values, gate and up are cut by outputs, and so is the head. Of the two products that end a branch, in three modes:

- `gather`: they are cut by outputs, too. Nothing is ever summed across ranks, so the bits are those of one rank's run.
- `ordered`: they are cut by inputs (Shoeybi et al. 1909.08053); all ranks get all partial sums and add them in the
  order of the ranks. A row's bits depend on how many ranks there are, and on nothing else.
- `reduce`: the same sums by an all-reduce, whose order depends on how much is summed at once: exactness is `law`.
"""

from __future__ import annotations

from outrider.parallel.cuts import Cut, cut, cut_quantized, within
from outrider.parallel.group import MODES, Group
from outrider.parallel.layers import CutExperts, Gathered, Normed, Summed
from outrider.parallel.model import CutModel, columns_alone
from outrider.parallel.ranks import Ranks, dismiss, launched, ranks_for

__all__ = [
    "MODES", "Cut", "CutExperts", "CutModel", "Gathered", "Group", "Normed", "Ranks", "Summed", "columns_alone", "cut",
    "cut_quantized", "dismiss", "launched", "ranks_for", "within",
]  # fmt: skip
