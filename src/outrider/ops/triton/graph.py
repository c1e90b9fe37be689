"""CUDA graphs: a forward of few rows is captured once for its sizes, and then replayed in one call.

What differs from step to step lies in tensors that keep their places; rows, pages and spans are rounded up to a few
sizes, and what is beyond does nothing (plan.py). A row's bits do not know: its kernels are those of any forward.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

Compute = Callable[[dict[str, Tensor]], list[Tensor]]
Capture = Callable[[Callable[[], list[Tensor]]], tuple[Callable[[], None], list[Tensor]]]


def bucket(rows: int) -> int | None:
    """The rows of the graph that takes so many; None: too many for one."""
    return next((size for size in ROWS if size >= rows), None)


def upload(numbers: list[int] | list[float] | Tensor, device: torch.device) -> Tensor:
    """On the device, without waiting for what runs there."""
    return pinned(numbers, device).to(device, non_blocking=True)


def pinned(numbers: list[int] | list[float] | Tensor, device: torch.device) -> Tensor:
    """On the host, from where the device can fetch them by itself."""
    x = numbers if isinstance(numbers, Tensor) else torch.tensor(numbers)
    return x.pin_memory() if device.type == "cuda" else x


class Captures:
    """CUDA graphs that share their memory, but for their results: one runs at a time.

    So those of a model, which has one engine; another engine's thread may replay its own in between, or capture.
    """

    @cached_property
    def _shared(self) -> tuple[Any, Any, Any]:
        """A stream, memory, and a graph that is kept: PyTorch ends a pool with the last of its graphs.

        PyTorch's own stream for captures lies on the GPU of the first, and is all threads'.
        """
        stream: Any = torch.Stream(torch.device("cuda", torch.cuda.current_device()))
        pool, first = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(first, pool=pool, stream=stream, capture_error_mode="thread_local"):
            torch.zeros(1, device="cuda")
        return stream, pool, first

    def __call__(self, compute: Callable[[], list[Tensor]]) -> tuple[Callable[[], None], list[Tensor]]:
        """Compute once to have kernels compiled, then once more into a graph."""
        stream, pool, _ = self._shared
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            results = compute()  # while others may go on allocating
        return graph.replay, results


@dataclass
class Graphs:
    """Captured forwards, by their sizes. `capture` computes, and gives what repeats it and where results will be."""

    made: ClassVar[int] = 0  # so far, of all models: what took the time to make one tells nothing of the next
    capture: Capture = field(default_factory=Captures)
    held: dict[Hashable, tuple[dict[str, Tensor], Callable[[], None], list[Tensor]]] = field(default_factory=dict)
    given: dict[Hashable, dict[str, Tensor]] = field(default_factory=dict)  # what each was last called with

    def __call__(
        self, key: Hashable, inputs: dict[str, Tensor], compute: Compute, device: torch.device
    ) -> list[Tensor]:
        """compute(inputs), by the graph of that key. Results are overwritten by the next call: copy them.

        Inputs lie on the device or, `pinned`, on the host, and are not written to as long as they are given.
        """
        if key not in self.held:
            Graphs.made += 1
            places = {name: x.to(device, copy=True) for name, x in inputs.items()}
            self.held[key] = places, *self.capture(lambda: compute(places))
        (places, replay, results), before = self.held[key], self.given.pop(key, {})  # if a copy fails, all come anew
        for name, x in inputs.items():
            if before.get(name) is not x:
                places[name].copy_(x, non_blocking=True)
        self.given[key] = inputs
        replay()
        return results

    def clear(self) -> None:
        """Give all of them back, and what they were called with."""
        self.held.clear()
        self.given.clear()
