"""What a caller has set for his own tensors, and is not to reach ours."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch


def _of_this_thread() -> Callable[[int], object]:
    library = Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"
    try:
        own: Callable[[int], object] = ctypes.PyDLL(str(library)).omp_set_num_threads
    except (OSError, AttributeError):  # built without OpenMP
        return torch.set_num_threads
    return own


set_own_threads = _of_this_thread()
"""How many threads PyTorch takes for this one's work. torch.set_num_threads sets as well what others begin with."""


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
