"""Tensors of the CPU that claim to lie on a GPU: what PyTorch would refuse there raises here, also within a graph.

Triton's interpreter runs the kernels, which refuse tensors of the CPU; graphs are computed anew where they are
replayed. What a GPU computes, how long it takes and what threads do to each other there, only a GPU can say.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from outrider.ops.triton import graph, launch

GPU, CPU = torch.device("cuda:0"), torch.device("cpu")
MOVES = ("copy_", "type_as", "is_floating_point", "set_")  # take tensors of two devices
TELLS = (
    "item", "tolist", "__bool__", "__int__", "__float__", "__index__", "numpy", "equal", "allclose",
    "nonzero", "masked_select", "unique", "unique_consecutive", "bincount", "repeat_interleave",
)  # fmt: skip # the host waits for numbers, or for how many there are
_capturing = False


class Mixed(Exception):
    """Tensors of two devices in one operation."""


class Waits(Exception):
    """Between host and GPU while a graph is captured."""


class Claims(torch.Tensor):
    """A tensor that says it lies on the GPU."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return call(func, args, kwargs or {})


class Everywhere(TorchFunctionMode):
    """Calls without such a tensor, too: they may make one."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return call(func, args, kwargs or {})


def plain(x: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor) if isinstance(x, Claims) else x


def claimed(x: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Claims) if isinstance(x, Tensor) else x


def tensors(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    parts = x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else ()
    return [tensor for part in parts for tensor in tensors(part)]


def mapped(do: Any, x: Any) -> Any:
    return tree_map(do, x, is_leaf=lambda part: isinstance(part, Tensor))


def apply(func: Any, args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*mapped(plain, args), **mapped(plain, kwargs))


def call(func: Any, args: Any, kwargs: Any) -> Any:
    """What the operation gives, on the device where it would lie. Raises Mixed."""
    name, first = func.__name__, args[0] if args else None
    if _capturing and waits(name, args, kwargs):
        raise Waits(name)
    if name == "__get__":  # an attribute
        own = {"device": GPU, "is_cpu": False, "is_cuda": True} if isinstance(first, Claims) else {}
        if (attribute := getattr(func.__self__, "__name__", "")) in own:
            return own[attribute]
    if name == "get_device" and isinstance(first, Claims):
        return 0
    if name in ("to", "cpu", "cuda"):
        return moved(func, args, kwargs)
    if name == "pin_memory":
        return first
    found = tensors((args, kwargs))
    here, there = ([x for x in found if isinstance(x, Claims) is on] for on in (False, True))
    if name == "numpy" and there:
        raise Mixed("numpy of a tensor on the GPU")
    if name in ("__getitem__", "__setitem__"):  # a GPU's may be chosen by places on the CPU, and slices are copied to
        places = tensors(args[1])
        if not isinstance(first, Claims) and any(isinstance(x, Claims) for x in places):
            raise Mixed("a tensor of the CPU, and places on the GPU")
        here = [x for x in here if places and x is not first and all(x is not own for own in places)]
        there = [first] if isinstance(first, Claims) else []
    if there and name not in MOVES and (odd := [tuple(x.shape) for x in here if x.dim()]):
        raise Mixed(f"{name} of {odd} on the CPU, and {[tuple(x.shape) for x in there]} on the GPU")
    on_gpu = isinstance(first, Claims) if name == "copy_" else bool(there)
    if kwargs.get("device") is not None:
        on_gpu, kwargs = torch.device(kwargs["device"]).type == "cuda", {**kwargs, "device": CPU}
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    result = apply(func, args, kwargs)
    if on_gpu and isinstance(first, Claims) and name.endswith("_") and not name.endswith("__"):
        return first  # changed in place
    return mapped(claimed, result) if on_gpu else result


def waits(name: str, args: Any, kwargs: Any) -> bool:
    """Whether the GPU tells the host something, or takes something that lies there."""
    found = tensors((args, kwargs))
    there = [x for x in found if isinstance(x, Claims)]
    told, made = name in TELLS, name in ("tensor", "as_tensor") and torch.device(kwargs.get("device") or CPU) != CPU
    if name in ("__getitem__", "__setitem__"):
        places = args[1] if isinstance(args[1], tuple) else (args[1],)
        told = any(isinstance(x, list) for x in places) or any(x.dtype == torch.bool for x in tensors(places))
    sent = len(there) < len(found) and any(x.dim() for x in found if not isinstance(x, Claims))
    return made or (bool(there) and (told or sent))


def moved(func: Any, args: Any, kwargs: Any) -> Tensor:
    """What `to`, `cpu` and `cuda` give: another tensor on another device."""
    x, target, rest = args[0], {"cpu": CPU, "cuda": GPU}.get(func.__name__), []
    for given in args[1:]:
        if isinstance(given, (torch.device, str)):
            target = torch.device(given)
        elif isinstance(given, Tensor):
            target, given = (GPU if isinstance(given, Claims) else CPU), given.dtype
            rest.append(given)
        else:
            rest.append(given)
    if kwargs.get("device") is not None:
        target = torch.device(kwargs["device"])
    kwargs = {name: value for name, value in kwargs.items() if name != "device"}
    was = isinstance(x, Claims)
    now = was if target is None else target.type == "cuda"
    if _capturing and was != now:
        raise Waits(func.__name__)
    result = apply(Tensor.to, [x, *rest], kwargs) if rest or kwargs else plain(x)
    if result.data_ptr() == plain(x).data_ptr():
        if was == now and result.dtype == x.dtype:
            return x
        result = result.clone()
    return claimed(result) if now else result


class Kernel:
    """One that refuses tensors of the CPU."""

    def __init__(self, name: str, kernel: Any) -> None:
        self.name, self.kernel = name, kernel

    def __getitem__(self, grid: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> None:
            if odd := [tuple(x.shape) for x in tensors(args) if not isinstance(x, Claims)]:
                raise Mixed(f"kernel {self.name} is given {odd} on the CPU")
            if 0 not in (grid if isinstance(grid, tuple) else (grid,)):
                with torch._C.DisableTorchFunction():
                    self.kernel[grid](*map(plain, args), **kwargs)

        return run


class Kernels:
    """All of them."""

    def __init__(self, own: Any) -> None:
        self.own = own

    def __getattr__(self, name: str) -> Kernel:
        return Kernel(name, getattr(self.own, name))


class Stream:
    """One that never runs behind."""

    def __init__(self, *_: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def synchronize(self) -> None: ...


def captured(compute: Any) -> Any:
    """A graph that computes anew, into the same tensors. Raises Waits for what none can hold."""
    global _capturing
    _capturing = True
    try:
        results = compute()
    finally:
        _capturing = False

    def replay() -> None:
        for own, new in zip(results, compute(), strict=True):
            own.copy_(new)

    return replay, results


def use(monkeypatch: Any) -> TorchFunctionMode:
    """From now on there is a GPU. Enter what this gives."""
    for name, value in {
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0,
        "get_device_name": lambda *_: "NVIDIA H200", "mem_get_info": lambda *_: (2**30, 2**31),
        "current_stream": Stream, "synchronize": lambda *_: None, "empty_cache": lambda: None,
        "stream": lambda _: nullcontext(), "device": lambda _: nullcontext(),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "Stream", Stream)
    kernels = Kernels(launch.load())
    monkeypatch.setattr(launch, "load", lambda: kernels)
    monkeypatch.setattr(launch, "_capability", lambda _: 90)
    monkeypatch.setattr(launch, "_emulates", lambda _: True)
    monkeypatch.setattr(launch, "_how", lambda *_: {"EARLY": False, "launch_pdl": False, **launch.NO_FUSION})
    monkeypatch.setattr(graph.Captures, "__call__", lambda _, compute: captured(compute))
    return Everywhere()
