"""A plugin, `pytest -p tests.sanitized`: the compiled kernels are those in the folder that OUTRIDER_SANITIZED names.

A sanitizer writes to file descriptor 2 and ends the process: pytest must not keep that to itself (--capture=sys). No
fork (-k): a child whose parent had another thread inside GCC's address sanitizer, which locks nothing for it, waits for
ever. Nor other processes, whose kernels are the installed ones, nor what takes the file apart.
"""

import os
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

NAME = "outrider.ops._kernels"
(path,) = Path(os.environ["OUTRIDER_SANITIZED"]).glob("_kernels*.so")
spec = spec_from_file_location(NAME, path)
assert spec and spec.loader
sys.modules[NAME] = module = module_from_spec(spec)
spec.loader.exec_module(module)
