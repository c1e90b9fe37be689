"""What a training run can be told. Apart from the training, which needs torch: `--help` shows these defaults."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.config import at_least, real
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
        at_least(self, {"heads": 1, "layers": 1, "windows": 2, "length": self.heads + 2, "steps": 1, "batch": 1})
        for name, high in {"layers": 64, "batch": 2**16}.items():  # length bounds the heads
            if (value := getattr(self, name)) > high:
                raise ConfigError(f"{name} must be at most {high}, not {value}")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must be a whole number of at least 0 and below 2**63, not {self.seed}")
        if not 0 <= self.generated <= 1:
            raise ConfigError(f"generated is a share between 0 and 1, not {self.generated}")
        if not 0 < self.lr < 1:
            raise ConfigError(f"lr must be above 0 and below 1, not {self.lr}")


@dataclass(frozen=True)
class ConversationSettings:
    """What `outrider train data` writes. Raises ConfigError for what cannot be."""

    model: str = "smollm2"
    own: float = 0.5  # share of the conversations whose question the target writes, too, if there are prompts
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.7, 1.0)  # of answers, drawn from these
    max_tokens: int = 512  # of an answer; some get half of it
    turns: float = 0.35  # how often a conversation that has ended goes on
    longest: int = 2600  # prompt tokens; longer ones are left out
    batch: int = 32  # conversations at a time
    seed: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.own <= 1 and 0 <= self.turns < 1):
            raise ConfigError(f"own and turns are shares, not {self.own} and {self.turns}")
        if min(self.max_tokens, self.longest, self.batch) < 1 or not self.temperatures:
            raise ConfigError("max_tokens, longest and batch are at least 1, and there is a temperature")
        if self.batch > 4096:
            raise ConfigError(f"batch must be at most 4096, not {self.batch}")
        if bad := [t for t in self.temperatures if real(t, 0, 1e6) is None]:
            raise ConfigError(f"temperatures are between 0 and 1000000, not {bad[0]}")


@dataclass(frozen=True)
class HeadSettings:
    """One training of a head from conversations. Raises ConfigError for what cannot be."""

    model: str = "smollm2"
    vocab: int = 8192  # draft tokens
    depth: int = 3  # steps of the training-time test
    length: int = 512  # tokens of a conversation, its last ones
    prompt: int = 1  # of these, at most, before the output
    batch: int = 2048  # tokens of answers a step, about
    train_head: bool = False  # the projection to the draft vocabulary, which begins as the target's, learns as well
    replay: int = 3  # how often a batch is learnt from before the next new one, where there is one
    lr: float = 1e-3  # of AdamW; Muon's is twice that
    start: str = ""  # a head of this shape to begin from, instead of from what can be had of the target
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"  # a run may go on on another

    def __post_init__(self) -> None:
        at_least(self, {"vocab": 1, "depth": 1, "length": self.depth + 3, "prompt": 1, "batch": 1, "replay": 1})
        if not 0 < self.lr < 1:
            raise ConfigError(f"lr must be above 0 and below 1, not {self.lr}")


@dataclass(frozen=True)
class RecurrentSettings(HeadSettings):
    """One training of a recurrent head. Raises ConfigError for what cannot be."""

    wide: int = 512  # the gated layer

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.wide <= 2**16:
            raise ConfigError(f"wide must be at least 1 and at most {2**16}, not {self.wide}")


@dataclass(frozen=True)
class Eagle3Settings(HeadSettings):
    """One training of an EAGLE-3 head. Raises ConfigError for what cannot be."""

    taps: tuple[int, ...] = ()  # the layers whose inputs are seen; default 2, half way, and behind the last
    heads: int = 0  # of the attention, each with its own keys; default: as many as the target's
    prompt: int = 128
    first: int = 16384  # tokens that the first weights are fitted to

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads < 0:
            raise ConfigError(f"heads must be at least 0, not {self.heads}")
        if any(layer < 0 for layer in self.taps):
            raise ConfigError(f"taps must be layers, 0 for the first, not {', '.join(map(str, self.taps))}")
