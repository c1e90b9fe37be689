"""What a forward of a model that lies cut over ranks receives, counted: the planner's formula is held against it."""

from __future__ import annotations

from outrider.config import SamplingParams
from outrider.draft import Draft
from outrider.llm import LLM
from outrider.parallel import CutModel
from outrider.sequence import Sequence


def counted(llm: LLM, rows: int) -> tuple[int, int]:
    """Collectives of a forward of so many rows, all of whose logits are asked for, and bytes that rank 0 receives."""
    runner, seq = llm.runner, Sequence([1, 2, 3], SamplingParams(), seed=0)
    assert isinstance(runner.model, CutModel)
    group = runner.model.group
    runner.extend([seq])
    calls, received = group.calls, group.received
    seq.tokens.append(4)
    runner.extend([seq], [Draft.chain([5] * (rows - 1))])
    runner.free(seq)
    return group.calls - calls, group.received - received
