"""The target drafts for itself, through a view of its own cache: same weights or coarser ones, few keys or all.

Few keys pay where reading the keys, not the weights, is what a forward waits for: long contexts, large batches.
`streaming` and `snapkv` views are MagicDec's (2408.11049), `quantized` is QuantSpec's (2502.10424). The other half of
QuantSpec is `weights`: the same weights once more, rounded to 8 or 4 bits, over the keys that the target has verified,
for any model and without training. It pays where weights are what a forward waits for, short contexts at small
batches, as far as products with rounded weights take less time; it costs their memory. With `weights` and no `view` all
keys are seen, and held twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outrider import quantize
from outrider.config import MOST_NODES, option
from outrider.errors import ConfigError
from outrider.kv import parse
from outrider.load import load as load_checkpoint
from outrider.runner import Runner
from outrider.speculate import Autoregressive


@dataclass
class SelfDraft(Autoregressive):
    """`view`: which keys it sees, such as `retrieval:budget=4096,chunk=8` (kv/views.py)."""

    num_speculative_tokens: int = 4
    view: str = option("", "which keys it sees; empty: streaming:budget=512, or with weights all")
    weights: str = option("", "int8 or int4: round the weights it drafts with; empty: the target's own")

    def __post_init__(self) -> None:
        if self.view:
            parse(self.view)
        if self.weights and self.weights not in quantize.SCHEMES:
            raise ConfigError(
                f"weights of method self are rounded to {' or '.join(quantize.SCHEMES)}, not {self.weights!r}"
            )

    def attach(self, target: Runner, load: Callable[[str], Runner]) -> None:
        """Look through the view, and round the weights if asked. Raises ConfigError where that cannot be."""
        everything = f"streaming:budget={min(2**30, target.max_len + 2 * MOST_NODES)}"
        self.runner = target.view(self.view or (everything if self.weights else "streaming:budget=512"))
        self.vocab = target.model.config.vocab_size
        if self.weights:
            if target.path is None:
                raise ConfigError("weights of method self are read from the target's folder, and it has none")
            model = target.model
            dtype, device = str(model.dtype).removeprefix("torch."), str(model.device)
            self.runner.model = load_checkpoint(target.path, dtype, device, quantization=self.weights).model
