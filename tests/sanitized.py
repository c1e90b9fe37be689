"""A plugin, `pytest -p tests.sanitized`: the compiled kernels are those in the folder that OUTRIDER_SANITIZED names.

A sanitizer writes to file descriptor 2 and ends the process: pytest must not keep that to itself (--capture=sys).
"""

import os
import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

NAME = "outrider.ops._kernels"
(path,) = Path(os.environ["OUTRIDER_SANITIZED"]).glob("_kernels*.so")
spec = spec_from_file_location(NAME, path)
assert spec and spec.loader
sys.modules[NAME] = module = module_from_spec(spec)
spec.loader.exec_module(module)

# A forked child whose parent had another thread inside GCC's address sanitizer, which locks nothing for it, waits for
# ever. Other processes have the installed kernels, and one test takes the file apart. The portable kernels' largest
# product takes minutes in all, and its rows and columns others walk, too.
LEFT_OUT = re.compile("fork|environment|processor|outlives|portable.*96-1120")


def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if not LEFT_OUT.search(item.name)]
