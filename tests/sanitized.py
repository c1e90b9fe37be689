"""python tests/sanitized.py FOLDER TESTS...: pytest with the compiled kernels that lie in another folder."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

NAME = "outrider.ops._kernels"
(path,) = Path(sys.argv[1]).glob("_kernels*.so")
spec = spec_from_file_location(NAME, path)
assert spec and spec.loader
sys.modules[NAME] = module = module_from_spec(spec)
spec.loader.exec_module(module)
# A sanitizer writes to file descriptor 2 and ends the process: pytest must not keep that to itself. No fork: a child
# whose parent had another thread inside GCC's address sanitizer, which locks nothing for it, waits for ever.
sys.exit(pytest.main(["--capture=sys", "-x", "-k", "not fork", *sys.argv[2:]]))
