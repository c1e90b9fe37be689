"""What a caller has set for his own tensors, and is not to reach ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def untouched() -> Iterator[None]:
    """A block in which tensors lie on a CPU where no device is named, and no product is computed in another dtype.

    A default device and autocast are a thread's own, so an engine's thread needs no such block.
    """
    with ExitStack() as stack:
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
