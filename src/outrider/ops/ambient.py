"""What a caller has set for his own tensors, and is not to reach ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def untouched(device: torch.device | None = None) -> Iterator[None]:
    """A block in which tensors lie on a CPU where no device is named, and no product is computed in another dtype.

    `device`: where kernels are launched, if it is a GPU: that is the current one, whatever tensors they are given.
    """
    with ExitStack() as stack:
        if device is not None and device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
