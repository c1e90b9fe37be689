"""Triton's interpreter for tests: with one order of sums, and several times as fast.

Its language is patched once, not in every call; a type and a shape are made once, not for every value; and sums are not
repeated in int64 for an overflow that it tells nobody of, as its asserts are off.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def dot(_, a, b, d, *__):
    """A sum over k in its order, whatever the shapes: numpy's own follows them, and the machine."""
    x, y = (part.data.astype(d.data.dtype) for part in (a, b))
    product = np.zeros_like(d.data)
    for k in range(x.shape[-1]):
        product += x[..., :, k : k + 1] * y[..., k : k + 1, :]
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def converted(x, of, to, rounding, others=interpreter._convert_float):
    """The bits in another format: bfloat16 is the upper half of float32, whose lower one is cut off."""
    if (of, to) == (core.bfloat16, core.float32):
        return x.astype(np.uint32) << 16
    if (of, to) == (core.float32, core.bfloat16):
        return (x.view(np.uint32) >> 16).astype(np.uint16)
    return others(x, of, to, rounding)


def once(compute):
    """compute(type), kept by the type's name: types of pointers and blocks have no hash."""
    known = {}

    def kept(dtype):
        if dtype.name not in known:
            known[dtype.name] = compute(dtype)
        return known[dtype.name]

    return kept


make, blocks, broadcast = core.block_type.__init__, {}, TritonSemantic.broadcast_impl_value


def new_block(cls, element, shape):
    """The one type of blocks of these elements and sizes."""
    key = element.name, *map(int, shape)
    if key not in blocks:
        made = object.__new__(cls)
        make(made, element, shape)
        blocks[key] = made
    return blocks[key]


@cache
def sizes(*shape):
    """The one shape, and how many numbers there are."""
    return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(int(np.prod(shape)))


def new_tensor(self, handle, dtype):
    self.handle, self.type, self.dtype = handle, dtype, dtype.scalar
    self.shape, self.numel = sizes(*dtype.shape.values) if dtype.is_block() else sizes()


def use():
    """From now on, in this process."""
    interpreter.InterpreterBuilder.create_dot = dot
    interpreter._LangPatchScope.restore = lambda scope: None
    interpreter._patch_lang = cache(interpreter._patch_lang)
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter._get_np_dtype = once(interpreter._get_np_dtype)
    interpreter._convert_float = converted
    core.block_type.__new__, core.block_type.__init__ = new_block, lambda *_: None
    core.tensor.__init__ = new_tensor
    TritonSemantic.broadcast_impl_value = lambda self, a, b: (a, b) if a.shape is b.shape else broadcast(self, a, b)
