"""What a training run can be told. Apart from the training, which needs torch: `--help` shows these defaults."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import ConfigError


@dataclass(frozen=True)
class Settings:
    """One training of Medusa heads. Raises ConfigError for what cannot be."""

    model: str = "tiny"
    heads: int = 4
    layers: int = 1  # residual blocks of a head
    sees_token: bool = True  # the first of them sees the last token, too; Medusa's own do not
    own_projection: bool = False  # else the heads share the target's
    windows: int = 2048  # texts read, evenly spread over the data
    length: int = 256  # their tokens, at most
    generated: float = 0.5  # share of them whose beginning only is kept, and continued by the target
    steps: int = 400
    batch: int = 8  # windows a step
    lr: float = 1e-3
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        least = {"heads": 1, "layers": 1, "windows": 2, "length": self.heads + 2, "steps": 1, "batch": 1}
        for name, low in least.items():
            if (value := getattr(self, name)) < low:
                raise ConfigError(f"{name} must be at least {low}, not {value}")
        for name, high in {"layers": 64, "batch": 2**16}.items():  # length bounds the heads
            if (value := getattr(self, name)) > high:
                raise ConfigError(f"{name} must be at most {high}, not {value}")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must be a whole number of at least 0 and below 2**63, not {self.seed}")
        if not 0 <= self.generated <= 1:
            raise ConfigError(f"generated is a share between 0 and 1, not {self.generated}")
        if not 0 < self.lr < 1:
            raise ConfigError(f"lr must be above 0 and below 1, not {self.lr}")
