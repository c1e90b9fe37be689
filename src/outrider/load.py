"""From the files of a checkpoint to a model in memory.

Weights come from safetensors or GGUF only, are fused as they are read (one qkv and one gate-up product per layer, the
dimensions of its heads in the order that rope wants) and are held once: on a CPU the linears keep only their packed
form and the embedding stays a mapping of the file, of which a token touches one row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from weakref import finalize

import torch
from torch import Tensor

from outrider import families, gguf, packed, quantize
from outrider.config import DTYPES, HEAD, ModelConfig, Names
from outrider.errors import CheckpointError, ConfigError, UnsupportedArchitecture, VocabularyMismatch, brief, message_of
from outrider.files import check_regular, read_json
from outrider.find import find, kind_of
from outrider.model import Layer, Model, head_order
from outrider.ops import MLP, Experts, Linear, Quantized, join, native, packs, quantises, untouched
from outrider.parallel import Cut, CutExperts, CutModel, Gathered, Group, Normed, Summed, cut, cut_quantized, within
from outrider.weights import IN_MEMORY, GGUFWeights, HeldWeights, PackedWeights, Weights

logger = logging.getLogger(__name__)
LARGE = 1e35  # scales and offsets from which weights may be too large for bfloat16
KINDS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # dtypes, as safetensors names them
NEEDS_INTEGERS = "need weights of 4 to 8 bits that are integers; give quantization='int8', or a checkpoint of such"
Progress = Callable[[str, int, int], None]
"""`progress(what, done, total)`, called as long work advances."""


@dataclass
class Checkpoint:
    """A loaded model, its tokenizer (None if the folder has none) and the folder it came from."""

    model: Model
    tokenizer: Any
    path: Path


def load(
    name: str | Path,
    dtype: str = "auto",
    device: str = "auto",
    progress: Progress | None = None,
    quantization: str | None = None,
    activations: str | None = None,
    group: Group | None = None,
) -> Checkpoint:
    """Load a model and its tokenizer.

    `name`: what `find` takes. `dtype`: auto (the checkpoint's; bfloat16 for quantised weights), float32, bfloat16,
    float16. `device`: auto (CUDA if there is one), cpu, cuda, cuda:N. `quantization`: None, int8 or int4 (quantize.py).
    `activations`: None, or int8: rows of products with weights of 4 to 8 bits are rounded to 8 bits.
    `group`: ranks to cut it over (parallel/); each reads its part, and the others are told to by rank 0.
    Raises ModelNotFound, UnsupportedArchitecture, CheckpointError, ConfigError.
    """
    where = group.ranks.device if group else device_named(device)
    if dtype != "auto" and dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is unknown; valid: auto, {', '.join(DTYPES)}")
    source = open_source(name)
    tokenizer = source.tokenizer()
    config = replace(source.config, eos=ends_of(source.config, tokenizer))
    own = source.config.dtype if quantization is None else "bfloat16"  # what rounded weights are multiplied in
    kind: torch.dtype = getattr(torch, own if dtype == "auto" else dtype)
    if quantization is not None:
        quantize.check(quantization, kind, where)
    if activations is not None:
        quantize.check_activations(activations, kind, where)
        if quantization is None and not source.weights.quantised:
            raise ConfigError(f"activations {activations} {NEEDS_INTEGERS}")
        source.weights.rounds = activations
    share = Cut(config, group) if group else None
    number = group.announce("load", str(name), dtype, quantization, activations) if group else 0
    with untouched(where):
        model = Builder(config, source.weights, kind, where, quantization, cut=share).model(progress)
    if group and isinstance(model, CutModel) and number:
        model.number = number
        finalize(model, group.ranks.tell, "drop", number)
    if activations is not None and not model.rounded:
        raise ConfigError(f"activations {activations} {NEEDS_INTEGERS}")
    return Checkpoint(model, tokenizer, source.path)


def ends_of(config: ModelConfig, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end a text: a config's, and the tokenizer's, as in vLLM.

    A fine-tuned model often keeps its base model's `generation_config.json`, and ends with a token of its own.
    """
    own = getattr(tokenizer, "eos_token_id", None)
    if not isinstance(own, int) or own in config.eos or not 0 <= own < config.vocab_size:
        return config.eos
    return (*config.eos, own)


@dataclass
class Source:
    """A checkpoint that is opened and not read: its shape, its tensors, and how to get its tokenizer (or None)."""

    path: Path
    config: ModelConfig
    weights: Weights
    tokenizer: Callable[[], Any]
    hf: dict[str, Any]  # what config.json says, or would


def open_source(name: str | Path) -> Source:
    """Open what `find` takes: a folder's safetensors or a GGUF file. Raises as `load` does."""
    path = find(name)
    if path.is_dir():
        config, hf = read_config(path), read_json(path / "config.json")
        inner = families.text_part(hf)
        weights = Weights(path, None if inner is hf else families.text_name)
        weights.split(config)
        if not families.said_dtype(inner):  # then, as in transformers, what the weights are
            own = weights.kinds.get("model.embed_tokens.weight", "")
            config = replace(config, dtype=KINDS.get(own, config.dtype))
        if inner.get("quantization_config"):
            weights = PackedWeights(weights, inner)
            if weights.reader.packed:
                config = replace(config, dtype="bfloat16")  # what the kernels take
            else:
                logger.warning("%s: no tensor is quantised, whatever its quantization_config says", path.name)
        if "lm_head.weight" in weights.files:
            config = replace(config, tied=False)  # a head that is there is meant, whatever the config says
        return Source(path, config, weights, lambda: read_tokenizer(path), dict(inner))
    file = gguf.File(path)
    hf = file.config()
    try:
        config = file.adapted(families.read(hf, tuple(hf["eos_token_id"])))
    except (CheckpointError, UnsupportedArchitecture) as error:  # in words for a folder
        raise type(error)(f"{path}: {str(error).removeprefix('config.json: ')}") from None
    blocks = GGUFWeights(file)
    blocks.split(config)
    return Source(path, config, blocks, lambda: _gguf_tokenizer(file), hf)


class Sizes(NamedTuple):
    """A model's shape, and what its weights take where that is not by its dtype."""

    config: ModelConfig
    held: int = 0  # bytes of the weights that a forward multiplies by, if they lie here and are quantised
    bits: float | None = None  # of a weight, scales included, if they do not and the config says how they are stored
    experts: bool = False  # only those of experts are


def sizes(name: str | Path) -> Sizes:
    """What `find` takes, for which a checkpoint's weights need not be there. Raises as `load`."""
    path = find(name, weights=False)
    if path.is_dir():
        inner, here = families.text_part(read_json(path / "config.json")), any(path.glob("*.safetensors"))
        quantised, dtype = inner.get("quantization_config"), families.said_dtype(inner)
        if not here or (dtype and not quantised):
            config, said = read_config(path), quantised if isinstance(quantised, dict) else {}
            if quantised or not dtype:  # by rounded weights it multiplies so, and most that do not say are so
                config = replace(config, dtype="bfloat16")
            return Sizes(config, 0, packed.stored_bits(said), said.get("quant_method") == "mxfp4")
    source = open_source(path)
    config, weights = source.config, source.weights
    if isinstance(weights, GGUFWeights):
        tensors = dict(weights.file.tensors)
        if "output.weight" in tensors:
            tensors.pop("token_embd.weight", None)  # of which a forward reads a few rows
        known = [(t.kind in quantize.GGUF, t.blocks.nbytes, 2 * torch.Size(t.shape).numel()) for t in tensors.values()]
        held = sum(stored if packs else dense for packs, stored, dense in known)  # others are held in bfloat16
        return Sizes(config, held if any(packs for packs, *_ in known) else 0)
    if not isinstance(weights, PackedWeights) or not weights.reader.packed:
        return Sizes(config)
    held = sum(file.stat().st_size for file in {*weights.files.values()})
    return Sizes(config, held - (0 if config.tied else 2 * config.vocab_size * config.hidden_size))


def _gguf_tokenizer(file: gguf.File) -> Any:
    """The file's own, or the `tokenizer.json` beside it if it has none that can be read."""
    beside = (file.path.parent / "tokenizer.json").is_file()
    try:
        return _tried(file.path, file.tokenizer) or (read_tokenizer(file.path.parent) if beside else None)
    except CheckpointError:
        if not beside:
            raise
        return read_tokenizer(file.path.parent)


def device_named(name: str) -> torch.device:
    """auto, cpu, cuda, or cuda:N, of which CUDA's have their number. Raises ConfigError."""
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    except (RuntimeError, TypeError):
        raise ConfigError(f"device {brief(name)} is unknown; valid: auto, cpu, cuda, cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported; valid: auto, cpu, cuda, cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name!r}: this machine has {torch.cuda.device_count()} CUDA devices; use cpu")
    if device == torch.device("cuda"):  # tensors there say which, and are not of this device
        return torch.device("cuda", torch.cuda.current_device())
    return device


def read_config(path: Path) -> ModelConfig:
    """Read config.json and generation_config.json. Raises UnsupportedArchitecture or CheckpointError."""
    raw = read_json(path / "config.json")
    if "model_type" not in raw and "architectures" not in raw:
        raise CheckpointError(f"{path / 'config.json'} names neither model_type nor architectures")
    inner = families.text_part(raw)  # our own words for an unknown architecture, before transformers tries
    try:
        family = families.check(inner)
    except UnsupportedArchitecture:
        if (kind := kind_of(path)) == "draft_model":
            raise
        raise UnsupportedArchitecture(f"{path} holds no model but a head for one: give it to method {kind}") from None
    if not isinstance(inner.get("quantization_config") or {}, Mapping):
        raise CheckpointError(f"{path / 'config.json'}: quantization_config must be an object")
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    meant = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind := str(inner.get("model_type")))  # by this transformers goes
    if kind != family.model_type and families.FAMILIES.get(str(meant), family) is not family:
        said = f"its architectures mean {family.model_type}, its model_type is {kind}"
        raise CheckpointError(f"{path / 'config.json'} contradicts itself: {said}; make them agree")
    try:
        hf = AutoConfig.from_pretrained(path, trust_remote_code=False).to_dict()
    except MemoryError:
        raise
    except Exception as error:
        families.read(raw)  # which may say it in our words
        raise CheckpointError(f"{path / 'config.json'}: {_reason(error)}") from None
    generation = read_json(path / "generation_config.json") if (path / "generation_config.json").exists() else {}
    eos = generation.get("eos_token_id", inner.get("eos_token_id"))  # what the file says: hf has a class's default
    eos = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if any(type(token) is not int for token in eos):
        raise CheckpointError(f"{path}: eos_token_id must be a token id or a list of them, not {brief(eos)}")
    return families.read(hf, tuple(eos))


def _reason(error: BaseException) -> str:
    """What transformers says, in one line; never that one should run the checkpoint's own code."""
    if "trust_remote_code" in str(error):
        return "it asks to run Python code of its own, which is never done; convert it to a known family's format"
    return message_of(error)


def read_tokenizer(path: Path) -> Any:
    """The folder's tokenizer, or None if it has none. A `tokenizer.json` is taken as it is, whatever class is named."""
    if not any((path / name).exists() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        return None
    for file in path.glob("*.*"):
        if file.suffix in (".json", ".jinja", ".model", ".txt"):
            check_regular(file)
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # AutoTokenizer builds another of some files' vocabularies, with its class's rules in place of the file's
    kind = PreTrainedTokenizerFast if (path / "tokenizer.json").exists() else AutoTokenizer
    try:
        tokenizer = _tried(path, lambda: kind.from_pretrained(path, trust_remote_code=False))
    except CheckpointError as error:
        if (path / "tokenizer.json").exists() or not (path / "tokenizer.model").exists():
            raise
        # without them transformers takes the file for one of tiktoken's, and asks for that
        needs = "SentencePiece's tokenizer.model needs `pip install sentencepiece protobuf`"
        raise CheckpointError(f"{error} ({needs})") from None
    beside = path / "chat_template.json"  # where models of text and pictures had it, and only their processors look
    if not getattr(tokenizer, "chat_template", None) and beside.exists():
        tokenizer.chat_template = read_json(beside).get("chat_template")
    return tokenizer


def _tried(path: Path, read: Callable[[], Any]) -> Any:
    """What `read` gives, once it has read a text and written one: of what is damaged, some is seen only then.

    `tokenizers` panics, which raises no Exception. The text is empty: not every tokenizer has a token for another.
    """
    try:
        if (tokenizer := read()) is not None:
            tokenizer.decode(tokenizer("")["input_ids"])
        return tokenizer
    except (CheckpointError, MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise CheckpointError(f"{path}: the tokenizer cannot be read: {_reason(error)}") from None


def adopt(config: ModelConfig, tensors: Mapping[str, Tensor], path: Path, share: bool = True) -> Model:
    """A model from parameters that another one holds, by their names in a checkpoint: all of one dtype and device.

    With `share` there is no second copy: what is fused here is fused once and the parameters are made views of it
    (`parameter.data = fused[a:b]`), so the other model goes on working; linears then are not packed. Without it, they
    are copied and packed as those of a file. `path` is named in errors. Raises CheckpointError.
    """
    some = next(iter(tensors.values()))
    held = HeldWeights(path, tensors)
    held.split(config)
    return Builder(config, held, some.dtype, some.device, share=share).model()


def _fuse(parts: list[Tensor]) -> Tensor:
    """The parts (rows, ...) in one tensor, of which each becomes a view; as it is if they already are."""
    first, at = parts[0], parts[0].data_ptr()
    for part in parts:
        if not part.is_contiguous() or part.data_ptr() != at:
            break
        at += part.nbytes
    else:
        if at <= first.untyped_storage().data_ptr() + first.untyped_storage().nbytes():
            shape = (sum(len(part) for part in parts), *first.shape[1:])
            return first.detach().as_strided(shape, first.stride())
    fused, at = torch.cat([part.detach() for part in parts]), 0
    for part in parts:
        part.data = fused[at : at + len(part)]
        at += len(part)
    return fused


class Builder:
    """Makes a Model of a checkpoint's tensors, layer by layer: no more than one layer is held twice.

    `share`: the tensors stay where they are (see `adopt`). `scheme`: how linears are quantised. `cut`: which part of
    them this rank holds; nothing else is read.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        dtype: torch.dtype,
        device: torch.device,
        scheme: str | None = None,
        share: bool = False,
        cut: Cut | None = None,
    ) -> None:
        self.config, self.weights, self.dtype, self.device, self.cut = config, weights, dtype, device, cut
        self.scheme, self.share, self.rounded = scheme, share, weights.rounds is not None
        order = torch.tensor(head_order(config))
        moves = not torch.equal(order, torch.arange(config.head_dim))
        self.order = order if moves else None  # of the dimensions of a query or key, where the checkpoint has another
        shuffled = moves or bool(config.norm_offset) or config.names.transposed
        if share and shuffled:
            raise ConfigError(f"{config.architecture}: weights change as they load and cannot be shared; share=False")
        self.widened: set[str] = set()  # types of blocks that are held dense
        self.staging = torch.empty(0, dtype=dtype)  # one buffer in which packed weights are fused: no holes in the heap

    def model(self, progress: Progress | None = None) -> Model:
        """The whole. Raises CheckpointError for what is missing, left over, shaped otherwise or not finite."""
        c, layers = self.config, list[Layer]()
        with torch.no_grad():  # not inference mode: shared parameters must stay trainable
            for i in range(c.num_layers):
                if progress:
                    progress("loading weights", i, c.num_layers)
                layers.append(self.layer(i))
            embedding, head = self.ends()
            norm = self.norm("model.", "norm", c.hidden_size)
            assert norm is not None
            parts = embedding, layers, norm, head, self.dtype, self.device
            model = CutModel(self.cut.config, *parts, self.cut) if self.cut else Model(c, *parts)
        self.weights.check_unused()
        if progress:
            progress("loading weights", c.num_layers, c.num_layers)
        if self.widened:
            logger.warning(
                "%s: no kernel here reads %s as stored; such weights are held as %s, all weights in %.0f MB",
                self.weights.path.name, ", ".join(sorted(self.widened)), self.dtype, model.nbytes / 1e6,
            )  # fmt: skip
        return model

    def check(self, progress: Progress | None = None) -> None:
        """Read all and keep nothing, a layer at a time. Raises as `model`."""
        with torch.no_grad():
            for i in range(self.config.num_layers):
                if progress:
                    progress("checking weights", i, self.config.num_layers)
                self.layer(i)
            self.ends()
            self.norm("model.", "norm", self.config.hidden_size)
        self.weights.check_unused()
        if progress:
            progress("checking weights", self.config.num_layers, self.config.num_layers)

    def layer(self, i: int) -> Layer:
        """One decoder layer."""
        c, names, at = self.config, self.config.names, f"model.layers.{i}."
        attn, hidden, q, kv = f"{at}self_attn.", c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        qkv = dict(zip(names.qkv, (q, kv, kv), strict=True)) if len(names.qkv) > 1 else {names.qkv[0]: q + 2 * kv}
        sparse = c.mixture is not None and i in c.mixture.layers
        normed = {"head": (c.head_dim, c.head_dim), "full": (q, kv)}.get(c.qk_norm or "")
        q_norm = self.turned(self.norm(attn, "q_norm", normed[0])) if normed else None
        k_norm = self.turned(self.norm(attn, "k_norm", normed[1])) if normed else None
        cut = self.cut
        rows = cut.qkv_rows() if cut else None
        first = self.linear(attn, qkv, hidden, c.qkv_bias, orders=self.qkv_order, rows=rows)
        if cut and c.qk_norm == "full" and q_norm is not None and k_norm is not None:
            first, q_norm, k_norm = Normed(first, cut, (q_norm, k_norm)), None, None
        return Layer(
            input_norm=self.norm(at, names.before_attention, hidden),
            qkv=first,
            o=self.last(attn, "o_proj", q, c.o_bias, cut.queries() if cut else []),
            post_norm=self.norm(at, names.before_mlp, hidden),
            mlp=self.experts(at) if sparse else self.mlp(f"{at}{names.mlp}.", c.intermediate_size, c.mlp_bias),
            q_norm=q_norm,
            k_norm=k_norm,
            attention_norm=self.norm(at, names.after_attention, hidden),
            mlp_norm=self.norm(at, names.after_mlp, hidden),
            sinks=self.sinks(attn) if c.sinks else None,
        )

    def sinks(self, at: str) -> Tensor:
        """Those of the heads that this rank holds."""
        found = self.tensor(f"{at}sinks", self.config.num_heads).float()
        return cut(found, [self.cut.mine([q for q, _ in self.cut.heads])]) if self.cut else found

    def mlp(
        self,
        prefix: str,
        wide: int,
        bias: bool,
        names: tuple[tuple[str, ...], str] | None = None,
        turns: bool = False,
        expert: bool = False,
    ) -> MLP:
        """A dense MLP, or an expert, whose results are not brought together here.

        `names` of its gate_up and down, whose rows take turns if it `turns`.
        """
        c, (gate_up, down) = self.config, names or (self.config.names.gate_up, self.config.names.down)
        parts = dict.fromkeys(gate_up, 2 * wide // len(gate_up))
        held, own, rows = [range(wide)], range(wide), None
        if self.cut:
            held = self.cut.wide(wide)
            own = self.cut.mine(held)
            rows = [range(2 * own.start, 2 * own.stop)] if turns else [own, range(wide + own.start, wide + own.stop)]
        order = (lambda: torch.arange(2 * len(own)).view(-1, 2).T.flatten()) if turns else None
        return MLP(
            self.linear(prefix, parts, c.hidden_size, bias, c.activation == "silu", orders=order, rows=rows),
            (self.branch if expert else self.last)(prefix, down, wide, bias, held),
            c.activation,
            c.clamp,
        )

    def experts(self, at: str) -> Experts:
        """The experts of a layer; where transformers has them in memory, under its names."""
        m, names, files = self.config.mixture, self.config.names, self.weights.files
        assert m is not None
        if f"{at}{names.router}.weight" not in files:
            for router, experts in IN_MEMORY:
                if f"{at}{router}.weight" in files:
                    names = replace(names, router=router, experts=experts, expert_down=Names.expert_down)
        prefix, fused = f"{at}{names.experts}.", ("gate_up_proj",)
        gate_up = fused if f"{prefix}0.{fused[0]}.weight" in files else names.expert_gate_up
        own = gate_up, names.expert_down
        found = [self.mlp(f"{prefix}{e}.", m.width, m.bias, own, m.interleaved, True) for e in range(m.count)]
        router, scores = f"{at}{names.router}", {"": m.count}
        if m.shared:
            above, _, name = router.rpartition(".")
            router, scores = above, {f".{name}": m.count, ".shared_expert_gate": 1}
            found.append(self.mlp(f"{above}.shared_expert.", m.shared, m.bias, expert=True))
        scored = self.linear(router, scores, self.config.hidden_size, m.bias, scheme=None)
        made = scored, found, m.chosen, m.normalised, bool(m.shared)
        return CutExperts(*made, self.cut) if self.cut else Experts(*made)

    def branch(self, at: str, name: str, inputs: int, bias: bool, held: list[range]) -> Linear:
        """Of the product that ends a branch what this rank has: some of its outputs, or all of the inputs it `held`."""
        cut, hidden = self.cut, self.config.hidden_size
        if cut is None or not cut.sums:
            return self.linear(at, {name: hidden}, inputs, bias, rows=[cut.mine(cut.hidden)] if cut else None)
        own = self.linear(at, {name: hidden}, inputs, bias, rows=[range(hidden)], columns=cut.mine(held))
        if own.bias is not None and cut.group.rank:
            own.bias.zero_()  # added once, by rank 0
        return own

    def last(self, at: str, name: str, inputs: int, bias: bool, held: list[range]) -> Linear:
        """The product that ends a branch, of whose inputs each rank has those it `held`."""
        own, cut = self.branch(at, name, inputs, bias, held), self.cut
        if cut is None:
            return own
        if cut.sums:
            return Summed(own, cut.group, inputs, own.out_features)
        return Gathered(own, cut.group, cut.hidden, held)

    def norm(self, at: str, name: str | None, width: int) -> Tensor | None:
        """The weight of a norm, if there is one of that name."""
        if name is None:
            return None
        weight = self.tensor(f"{at}{name}.weight", width)
        return weight + self.config.norm_offset if self.config.norm_offset else weight

    def turned(self, norm: Tensor | None) -> Tensor | None:
        """The weight of queries' or keys' norm in the model's order of their dimensions."""
        if norm is None or self.order is None:
            return norm
        return norm.view(-1, len(self.order))[:, self.order].reshape(-1)

    def qkv_order(self) -> Tensor | None:
        """Where the rows of qkv are in the checkpoint's, if its heads have another order than the model's."""
        if self.order is None:
            return None
        c = self.cut.config if self.cut else self.config
        dim = c.head_dim
        heads = torch.arange(c.num_heads + c.num_kv_heads)[:, None] * dim
        values = torch.arange(c.num_kv_heads * dim) + (c.num_heads + c.num_kv_heads) * dim
        return torch.cat([(heads + self.order).flatten(), values])

    def ends(self) -> tuple[Tensor | Callable[[Tensor], Tensor], Linear]:
        """The embedding (vocab, hidden) and the head, which may be one."""
        c, scheme, cut = self.config, HEAD if self.scheme else None, self.cut
        name, shape = "model.embed_tokens.weight", (c.vocab_size, c.hidden_size)
        stored = self.weights.stored(name, *shape)
        if cut is not None:
            which = "model.embed_tokens" if c.tied else "lm_head"
            own = self.linear("", {which: shape[0]}, shape[1], False, scheme=scheme, rows=[cut.mine(cut.vocab)])
            head: Linear = Gathered(own, cut.group, cut.vocab, first=True)
        elif not c.tied:
            head = self.linear("", {"lm_head": c.vocab_size}, c.hidden_size, False, scheme=scheme)
        elif stored and not scheme and (found := self.quantized(stored, name)):
            head = Linear(found, rounded=self.rounded, device=self.device)
            return head.rows, head
        else:
            weight = self.weights.mapped(name, *shape).detach().to(device=self.device, dtype=self.dtype)
            weight = finite(weight, self.weights.path, name)
            kept = sound(quantize.quantize(weight, scheme, self.rounded), self.weights.path, name) if scheme else weight
            head = Linear(kept, pack=not self.share, rounded=self.rounded, device=self.device)
        self.staging = torch.empty(0)
        looked_at = c.tied or self.share or (stored is not None and self.quantized(stored, name) is not None)
        if not looked_at:
            for begin in range(0, c.vocab_size, 4096):
                end = min(begin + 4096, c.vocab_size)
                some = stored.rows(torch.arange(begin, end)) if stored else self.weights.mapped(name, *shape)[begin:end]
                finite(some.detach().to(self.dtype), self.weights.path, name)
        if stored and self.device.type == "cpu":
            return stored.rows, head
        embedding = self.weights.mapped(name, *shape).detach()  # anew: pages that packing the head has read can go
        if cut is not None and self.device.type != "cpu":  # of the file, too: a token touches one row
            return (lambda at: embedding[at.cpu()].to(self.device)), head
        return embedding if self.device.type == "cpu" else embedding.to(device=self.device, dtype=self.dtype), head

    def quantized(self, stored: gguf.Stored | packed.Packed, name: str) -> Quantized | None:
        """A matrix as it is stored, if the kernels read it so; else None."""
        if self.dtype != torch.bfloat16 or not quantises(self.dtype, self.device):
            return None
        found = stored.quantized()
        return found if found is None else sound(found, self.weights.path, name)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A tensor of its own, such as a norm or a bias."""
        found = self.weights.mapped(name, *shape).detach()
        found = found if self.share else found.to(device=self.device, dtype=self.dtype, copy=True)
        return finite(found, self.weights.path, name)

    def linear(
        self,
        prefix: str,
        parts: dict[str, int],
        inputs: int,
        bias: bool,
        gated: bool = False,
        scheme: str | None = "",
        orders: Callable[[], Tensor | None] | None = None,
        rows: list[range] | None = None,
        columns: range | None = None,
    ) -> Linear:
        """The parts (name: rows), each (rows, inputs), fused into one product, its rows as `orders` gives them.

        It is asked behind the check of the shapes: those that a damaged config says may fit no memory. `scheme` ""
        means the model's. Of all `rows`, counted through the parts, and of their `columns`, only these.
        """
        if self.share:
            held = [self.weights.mapped(f"{prefix}{name}.weight", n, inputs) for name, n in parts.items()]
            also = [self.weights.mapped(f"{prefix}{name}.bias", n) for name, n in parts.items()] if bias else []
            return Linear(_fuse(held), _fuse(also) if bias else None, pack=False, gated=gated)
        scheme = self.scheme if scheme == "" else scheme
        names, sizes = [f"{prefix}{name}.weight" for name in parts], list(parts.values())
        mine = within(rows, sizes) if rows else [[range(n)] for n in sizes]  # of each part
        biases = [
            cut(self.tensor(f"{prefix}{name}.bias", n), own)
            for (name, n), own in zip(parts.items(), mine, strict=True) if bias
        ]  # fmt: skip
        added = torch.cat(biases) if biases else None
        stored = [self.weights.stored(name, n, inputs) for name, n in zip(names, sizes, strict=True)]
        order = orders() if orders else None
        found = [
            self.quantized(part, name) if part and not scheme else None
            for part, name in zip(stored, names, strict=True)
        ]  # fmt: skip
        pieces: list[Tensor | Quantized] = []
        if any(found):
            each = zip(found, names, sizes, mine, strict=True)
            pieces = join([
                cut(self.tensor(name, n, inputs), own, columns) if q is None
                else cut_quantized(q, own, columns) if self.cut else q
                for q, name, n, own in each
            ])  # fmt: skip
        kept = bool(pieces) and not ((gated or order is not None) and len(pieces) > 1)
        if kept and order is not None:
            pieces = [piece.take(order) if isinstance(piece, Quantized) else piece[order] for piece in pieces]
            added = None if added is None else added[order]
        if not scheme:  # what becomes dense is said, once for all
            self.widened |= {part.kind for part, q in zip(stored, found, strict=True) if part and not (q and kept)}
        if kept:
            return Linear(pieces, added, gated=gated, rounded=self.rounded, device=self.device)
        width = inputs if columns is None else len(columns)
        size = sum(len(r) for own in mine for r in own) * width
        if not packs(self.dtype, self.device):
            out = torch.empty(size, dtype=self.dtype, device=self.device).view(-1, width)
        else:
            if len(self.staging) < size:
                self.staging = torch.empty(size, dtype=self.dtype)
            out = self.staging[:size].view(-1, width)
        at = 0
        for name, n, ranges in zip(names, sizes, mine, strict=True):
            whole = self.weights.mapped(name, n, inputs)
            for r in ranges:
                own = out[at : at + len(r)]
                own.copy_(cut(whole, [r], columns))
                finite(own, self.weights.path, name)
                at += len(r)
        if order is not None:
            out.copy_(out[order])
            added = None if added is None else added[order]
        weight = sound(quantize.quantize(out, scheme, self.rounded), self.weights.path, names[0]) if scheme else out
        return Linear(weight, added, gated=gated, rounded=self.rounded, device=self.device)


def sound(x: Quantized, path: Path, name: str) -> Quantized:
    """x itself. Raises CheckpointError if some weight it stands for is NaN or infinite in bfloat16."""
    most = 0.0
    for factors in (x.scales, x.offsets):
        for numbers in factors if isinstance(factors, tuple) else (factors,):
            if numbers is not None and numbers.is_floating_point():
                finite(numbers, path, name)
                most = max(most, float(numbers.abs().max())) if numbers.numel() else most
    if most > LARGE:
        finite(x.dense().bfloat16(), path, name)
    return x


def finite(x: Tensor, path: Path, name: str) -> Tensor:
    """x itself. Raises CheckpointError if some of it is NaN or infinite, in the dtype it will be used in."""
    if native.runs(x.dtype, x.device) and x.is_contiguous():
        well = native.kernels.all_finite(x.data_ptr(), x.numel(), native.TYPES[x.dtype], torch.get_num_threads())
    else:  # one pass, if all is well
        well = not x.numel() or x.sum(dtype=torch.float32).isfinite() or x.isfinite().all()
    if not well:
        raise CheckpointError(f"{path}: {name} is not finite: it holds NaN or infinite numbers in {x.dtype}")
    return x


def check_vocabulary(target: Checkpoint, draft: Checkpoint) -> None:
    """Draft and target must mean the same text by the same ids. Raises VocabularyMismatch saying what differs.

    Equal up to padding rows: the embeddings may have more rows than the tokenizer has tokens.
    """
    if target.tokenizer is None or draft.tokenizer is None:
        sizes = [c.model.config.vocab_size for c in (draft, target)]
        if sizes[0] != sizes[1]:
            raise VocabularyMismatch(
                f"the draft model has {sizes[0]} tokens, the target {sizes[1]}; use a fitting pair"
            )
        return
    ours, theirs = ({i: t for t, i in c.tokenizer.get_vocab().items()} for c in (target, draft))
    if ours == theirs:
        return
    first = min(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
    raise VocabularyMismatch(
        f"the draft model's vocabulary ({len(theirs)} tokens) is not the target's ({len(ours)}): id {first} is "
        f"{theirs.get(first)!r} there and {ours.get(first)!r} here; use a draft that shares the target's tokenizer"
    )
