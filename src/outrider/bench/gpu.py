"""`outrider bench gpu`: what the CUDA kernels compute, how near the machine's limits they are, and what decoding gains.

Parts, each of some minutes and written as soon as it is done: a run that was cut short goes on with the next one.
Where only costs count, models have random weights in the shapes of known ones, and caches hold random numbers; what
depends on acceptance is measured on the embedded model, or given for an acceptance that is assumed, and says so.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from outrider import families
from outrider.bench.forwards import filled
from outrider.bench.report import markdown_table
from outrider.bench.run import provenance
from outrider.config import ModelConfig, SamplingParams, SpeculativeConfig
from outrider.draft import Draft
from outrider.drafters import create
from outrider.errors import ConfigError, brief
from outrider.files import make_folder, write_text
from outrider.kv import Entry, OffloadKV, PagedKV
from outrider.llm import LLM
from outrider.load import Progress, device_named
from outrider.model import Layer, Model
from outrider.ops import MLP, DevicePlan, Experts, Graphs, Linear, launches, untouched
from outrider.ops.native import PAGE
from outrider.ops.triton import launch
from outrider.ops.triton.graph import Captures
from outrider.ops.triton.plan import make, queries_tile
from outrider.plan import DEVICES, expected
from outrider.quantize import quantize
from outrider.runner import Runner, check_exactness
from outrider.sampling import gumbel, noise_key
from outrider.sequence import Sequence
from outrider.speculate import Autoregressive, Drafter, step
from outrider.verify import COUPLED

MINUTES = 38.0  # after which no part begins
TRIES = 4  # of what is timed, of which the first does not count
INNER = 0.35  # of TriForce's smallest model: guesses that pass the target's view, as its authors say
CACHE = 2**28  # bytes of weights that a measurement goes through, so that none come from the device's own cache
Line = dict[str, Any]


def _llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, **more: Any) -> ModelConfig:
    """A shape of Llama's family, or of another `model_type`."""
    kind = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]} | more
    return families.read({
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": hidden // heads, "vocab_size": vocab, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072, "tie_word_embeddings": False, "rope_theta": 500000.0, "hidden_act": "silu",
        "torch_dtype": "bfloat16", **kind,
    })  # fmt: skip


def shapes() -> dict[str, ModelConfig]:
    """The models whose costs are measured."""
    qwen = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 128}
    return {
        "Llama-3.2-1B": _llama(2048, 8192, 16, 32, 8, 128256),
        "Llama-3.2-3B": _llama(3072, 8192, 28, 24, 8, 128256),
        "Llama-3.1-8B": _llama(4096, 14336, 32, 32, 8, 128256),
        "Qwen3-0.6B": _llama(1024, 3072, 28, 16, 8, 151936, **qwen),
        "Qwen3-4B": _llama(2560, 9728, 36, 32, 8, 151936, **qwen),
        "Llama-2-7B": _llama(4096, 11008, 32, 32, 32, 32000),  # the seeds'
    }


def chosen(names: list[str] | None) -> dict[str, ModelConfig]:
    """Some of the models, or all. Raises ConfigError for one that is none of them."""
    every = shapes()
    if unknown := [name for name in names or [] if name not in every]:
        raise ConfigError(f"model {brief(unknown[0])} is unknown; valid: {', '.join(every)}")
    return {name: every[name] for name in names or every}


def smallest() -> ModelConfig:
    """TriForce's draft model, JackFram/llama-68m."""
    return _llama(768, 3072, 2, 12, 12, 32000)


@dataclass(frozen=True)
class Settings:
    """One run. Sizes are the real ones unless a test says otherwise."""

    output: Path
    device: str = "cuda"
    parts: list[str] = field(default_factory=list)  # none: all
    models: dict[str, ModelConfig] = field(default_factory=shapes)
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    contexts: tuple[int, ...] = (1024, 8192, 32768, 131072)
    formats: tuple[str | None, ...] = (None, "int8", "int4")
    mixture: tuple[int, int, int, int] = (2048, 768, 128, 8)  # hidden, width, experts, chosen: Qwen3-30B-A3B's
    cache: int = CACHE
    seeds: tuple[str, str] = ("Llama-2-7B", "Llama-3.1-8B")  # for TriForce and MagicDec
    smallest: ModelConfig = field(default_factory=smallest)  # that TriForce drafts with
    views: tuple[str, str] = ("retrieval:budget=4096,chunk=8", "streaming:budget=512")
    batch: int = 32  # MagicDec's
    tokens: int = 256
    decoded: int = 24  # tokens of each sequence behind long contexts

    def __post_init__(self) -> None:
        if unknown := [part for part in self.parts if part not in PARTS]:
            raise ConfigError(f"part {unknown[0]!r} is unknown; valid: {', '.join(PARTS)}")

    def shape(self, name: str) -> ModelConfig:
        """Of a model, be it one of those that are measured or not."""
        return self.models.get(name) or shapes()[name]

    @property
    def where(self) -> torch.device:
        """The device. Raises ConfigError for one that is none."""
        return device_named(self.device)


def run(settings: Settings, progress: Progress | None = None) -> dict[str, Any]:
    """Measure the parts that the output folder lacks, or has of other models; returns all results.

    Raises ConfigError without CUDA, or that device.
    """
    report = progress or (lambda *_: None)
    absent = settings.device != "cpu" and not torch.cuda.is_available()
    if absent or not launches(torch.bfloat16, settings.where):
        has = "no CUDA device" if absent else "no Triton, or a GPU older than Ampere"
        raise ConfigError(f"bench gpu measures the CUDA kernels, and here is {has}; `outrider bench` measures a CPU")
    make_folder(settings.output, "--output")
    path, began = settings.output / "gpu.json", time.perf_counter()
    results: dict[str, Any] = _read(path)
    wanted, models = settings.parts or list(PARTS), sorted(settings.models)
    for i, name in enumerate(wanted):
        report(name, i, len(wanted))
        there = name in results["parts"] and results["parts"][name].get("models", sorted(shapes())) == models
        if (there and not settings.parts) or time.perf_counter() - began > 60 * MINUTES:
            continue
        started = time.perf_counter()
        try:
            with untouched(settings.where), torch.inference_mode():
                done: Line = {"models": models, "lines": list(PARTS[name](settings))}
        except Exception as error:  # out of memory, a kernel that does not fit: the next part may
            done = {"error": f"{type(error).__name__}: {error}"}
        done |= {"seconds": time.perf_counter() - started, **provenance(settings.where)}
        results["parts" if "lines" in done else "failed"][name] = done
        if "lines" in done:
            results["failed"].pop(name, None)
        write_text(path, json.dumps(results, indent=1) + "\n")
        write_text(settings.output / "gpu.md", tables(results))
        if settings.where.type == "cuda":
            torch.cuda.empty_cache()
    return results


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"parts": {}, "failed": {}}
    try:
        found = json.loads(path.read_text("utf-8"))
        if isinstance(found, dict) and isinstance(found["parts"], dict) and isinstance(found["failed"], dict):
            return found
    except (OSError, ValueError, KeyError):
        pass
    raise ConfigError(f"{path} is no result of bench gpu; give another --output, or remove it")


def tables(results: dict[str, Any]) -> str:
    """All parts as Markdown."""
    text = []
    for name, part in results["parts"].items():
        about = results | part  # results from before each part had its own say it once
        made = f"{about['hardware']['gpu']}; outrider {about['commit']}, {about['date'][:10]}."
        lines: list[Line] = part["lines"]
        titles = list(dict.fromkeys(title for line in lines for title in line))
        body = [[cell(line.get(title, "")) for title in titles] for line in lines]
        text.append(f"## {name}\n\n{markdown_table(titles, body)}\n\n{made}\n")
    text += [f"## {name}\n\nfailed: {part['error']}\n" for name, part in results["failed"].items()]
    return "\n".join(text)


def cell(x: Any) -> str:
    """As tables show it."""
    return f"{x:.4g}" if isinstance(x, float) else str(x)


def seconds(compute: Callable[[], Any], device: torch.device) -> float:
    """Of one call, on the device: the median of three times as many calls as take 20 ms, in a graph if it takes one."""
    if device.type != "cuda":
        began = time.perf_counter()
        compute()
        return time.perf_counter() - began
    replay, _ = Captures()(lambda: [compute()])
    return _timed(replay, device)


def _timed(call: Callable[[], Any], device: torch.device) -> float:
    """Of one call that cannot be captured, host included."""
    count, taken = 1, list[float]()
    for _ in range(TRIES):
        _wait(device)
        began = time.perf_counter()
        for _ in range(count):
            call()
        _wait(device)
        taken.append((time.perf_counter() - began) / count)
        count = max(1, min(1000, math.ceil(0.02 / taken[-1]))) if device.type == "cuda" else 1
    return median(taken[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _rate(size: float, each: float, settings: Settings) -> Line:
    """Bytes a second, and what share that is of what reading alone gives, and of a known device's on paper."""
    name = torch.cuda.get_device_name(settings.where).lower() if settings.where.type == "cuda" else ""
    known = ("b200", "h200", "h100", "a100", "l40s", "l4", "rtx5090", "rtx4090")
    limit = next((DEVICES[kind].bandwidth / 0.8 for kind in known if kind in name.replace(" ", "")), None)
    found = {"GB/s": size / each / 1e9, "of reading": size / each / reading(settings.where)}
    return found | ({"of paper": size / each / limit} if limit else {})


@cache
def reading(device: torch.device) -> float:
    """Bytes a second of a kernel of PyTorch's that only reads: what can be had."""
    many = torch.arange(2**28 if device.type == "cuda" else 2**18, device=device)  # whole words: sums of others convert
    return many.nbytes / seconds(partial(torch.sum, many), device)


# --- parts ------------------------------------------------------------------------------------------------------------


def bits(s: Settings) -> Iterator[Line]:
    """Whether rows have the same bits alone and in company: products of all formats, attention, the choice."""
    device, config = s.where, next(iter(s.models.values()))
    for n, k in _products(config).values():
        for scheme, rounded in _kinds(s):
            weights = _weights(n, k, scheme, device, rounded)
            x, most = torch.randn(max(s.rows) + 5, k, device=device).bfloat16(), max(s.rows)
            whole = _product(x[:most], weights)
            same = [
                torch.equal(_product(x[at : at + rows], weights), _product(x, weights)[at : at + rows])
                for rows in s.rows for at in (0, 3)
            ]  # fmt: skip
            exact = x[:most].double() @ launch.rows(weights, torch.arange(n, device=device)).double().T
            off = float((whole.double() - exact).abs().max() / exact.abs().max())
            yield {"what": f"product {n} x {k}", "format": _kind(scheme, rounded), "same bits": all(same), "off": off}
    yield from _instructions(s, config)
    long = min(700, max(s.contexts) - 64)
    q, new_k, v, kv, plan = _attention(config, device, long, 8)
    whole = _attend(q, new_k, v, kv, plan)
    for rows in (1, 2, 7):
        alone = _attend(q[:rows], new_k[:rows], v[:rows], kv, _chain(config, device, long, rows))
        yield {"what": f"attention, {rows} rows of 8", "format": "bf16", "same bits": torch.equal(alone, whole[:rows])}
    parents = [-1, 0, 0, 1, 3, 2, 5, 4]
    tree = _attend(q, new_k, v, kv, _chain(config, device, long, 8, parents))
    path = [0, 1, 3, 4, 7]
    chain = _attend(q[path], new_k[path], v[path], kv, _chain(config, device, long, len(path)))
    yield {"what": "attention, a branch and its chain", "format": "bf16", "same bits": torch.equal(chain, tree[path])}
    logits = torch.randn(4, config.vocab_size, device=device) * 4
    keys = torch.tensor([noise_key(7, i) for i in range(4)], device=device)
    chosen = launch.choose(logits, keys, torch.ones(4, device=device))[0].tolist()
    law = [int((row - row.max() + gumbel(7, i, len(row), device)).argmax()) for i, row in enumerate(logits)]
    yield {"what": "the choice", "format": "float32", "same bits": chosen == law}


def _instructions(s: Settings, config: ModelConfig) -> Iterator[Line]:
    """Whether mma.sync and wgmma give the same bits: tiles of 32 outputs take the former, of 64 the latter (Hopper)."""
    n, k = _products(config)["qkv"]
    weights, x = _weights(n, k, None, s.where), torch.randn(16, k, device=s.where).bfloat16()
    arch = launch.architecture(s.where)
    before, found = launch.TABLE[arch], []
    try:
        for outputs in (64, 32):
            launch.TABLE[arch] = replace(before, plain={16: launch.Tile(outputs, 5)})
            found.append(_product(x, weights))
    finally:
        launch.TABLE[arch] = before
    yield {"what": "tiles of 64 and of 32 outputs", "format": "bf16", "same bits": torch.equal(*found)}


def orders(s: Settings) -> Iterator[Line]:
    """What shares of K cost each product, at one row and at many: entries of launch.SHARES, to be frozen by hand."""
    arch = launch.architecture(s.where)
    for n, k in {shape for config in s.models.values() for shape in _products(config).values()}:
        for scheme in s.formats:
            one = _weights(n, k, scheme, s.where)
            held = [one, *(_weights(n, k, scheme, s.where) for _ in range(min(63, s.cache // one.nbytes)))]
            key, took = (arch, n, k, one.group, one.halves), dict[int, float]()
            now = launch.order(n, k, one.group, arch, one.halves).shares
            frozen = launch.SHARES.get(key)
            try:
                for shares in {now, *(some for some in (1, 2, 4, 8) if some * launch.LEAST <= max(k, launch.LEAST))}:
                    launch.SHARES[key] = shares
                    launch.order.cache_clear()
                    took[shares] = sum(
                        seconds(
                            partial(_each, _product, torch.randn(rows, k, device=s.where).bfloat16(), held), s.where
                        )
                        for rows in (s.rows[0], s.rows[-1])
                    ) / len(held)
            finally:
                launch.SHARES.pop(key)
                launch.SHARES.update({} if frozen is None else {key: frozen})
                launch.order.cache_clear()
            best = min(took, key=lambda shares: took[shares])
            yield {
                "product": f"{n} x {k}", "format": scheme or "bf16", "shares now": now, "best": best,
                "us now": 1e6 * took[now], "us best": 1e6 * took[best], "entry": f"{key}: {best}",
            }  # fmt: skip
            del held, one


def linear(s: Settings) -> Iterator[Line]:
    """Bytes a second by rows, against torch.mm, for the products of every shape and format."""
    for model, config in s.models.items():
        for name, (n, k) in _products(config).items():
            for scheme, rounded in _kinds(s):
                one = _weights(n, k, scheme, s.where, rounded)
                held = [one, *(_weights(n, k, scheme, s.where, rounded) for _ in range(min(63, s.cache // one.nbytes)))]
                first = 0.0
                for rows in s.rows:
                    x = torch.randn(rows, k, device=s.where).bfloat16()
                    each = seconds(partial(_each, _product, x, held), s.where) / len(held)
                    first = first or each
                    line = {
                        "model": model, "product": f"{name} {n} x {k}", "format": _kind(scheme, rounded), "rows": rows,
                        "us": 1e6 * each, "to one row": each / first, **_rate(one.nbytes, each, s),
                    }  # fmt: skip
                    if scheme is None:
                        plain = seconds(partial(_each, _library, x, held), s.where) / len(held)
                        line["to torch.mm"] = each / plain
                    yield line
                del held, one


def experts(s: Settings) -> Iterator[Line]:
    """Bytes of chosen experts a second by rows, which choose at random; and whether company changes a bit."""
    hidden, wide, count, chosen = s.mixture
    for scheme in s.formats:
        each = [
            MLP(_linear(2 * wide, hidden, scheme, s.where, gated=True), _linear(hidden, wide, scheme, s.where))
            for _ in range(count)
        ]
        layer = Experts(_linear(count, hidden, None, s.where), each, chosen, normalised=True)
        x = torch.randn(max(s.rows), hidden, device=s.where).bfloat16()
        whole, first = layer(x, None, 0.0), 0.0
        for rows in s.rows:
            before = layer.read
            same, size = torch.equal(layer(x[:rows], None, 0.0), whole[:rows]), layer.read - before
            took = seconds(partial(layer, x[:rows], None, 0.0), s.where)
            first = first or took
            yield {
                "format": scheme or "bf16", "rows": rows, "same bits": same, "us": 1e6 * took,
                "to one row": took / first, **_rate(size, took, s),
            }  # fmt: skip


def attention(s: Settings) -> Iterator[Line]:
    """Bytes of keys a second by context and rows; and of what a tree's tail costs beside a chain's."""
    for name in ("Llama-3.1-8B", "Llama-2-7B"):
        if (config := s.models.get(name)) is None:
            continue
        for context in s.contexts:
            for rows, parents in ((1, None), (8, None), (8, [-1, 0, 0, 1, 1, 2, 2, 3])):
                q, k, v, kv, plan = _attention(config, s.where, context, rows, parents)
                each = seconds(partial(_attend, q, k, v, kv, plan), s.where)
                size = 4.0 * context * config.num_kv_heads * config.head_dim
                yield {
                    "model": name, "context": context, "rows": rows, "tree": parents is not None, "us": 1e6 * each,
                    **_rate(size, each, s),
                }  # fmt: skip
                del q, k, v, kv


def decode(s: Settings) -> Iterator[Line]:
    """Tokens a second of plain decoding, and what verification of more rows costs, with graphs and without."""
    for name, config in s.models.items():
        for scheme in s.formats:
            model = random_model(config, scheme, s.where)
            runner = Runner(model, PagedKV(config, model.dtype, model.device))
            seq = filled(runner, min(1024, max(s.contexts) // 2))
            for graphs in (True, False) if s.where.type == "cuda" else (False,):
                model.graphs = Graphs() if graphs else None
                line: Line = {"model": name, "format": scheme or "bf16", "graphs": graphs}
                for rows in (1, 2, 4, 8, 16):
                    draft = Draft.chain([1] * (rows - 1))
                    each = _timed(partial(runner.extend, [seq], [draft]), s.where)
                    line[f"ms of {rows}"] = 1e3 * each
                plain = line["ms of 1"] / 1e3
                line |= {"tokens/s": 1 / plain, **_rate(model.nbytes, plain, s)}
                yield line
            runner.free(seq)
            del model, runner


def speculation(s: Settings) -> Iterator[Line]:
    """The embedded model on real text: tokens a second, and whether they are plain decoding's, greedy and sampled."""
    llm = LLM("tiny", device=s.device, dtype="bfloat16", max_num_seqs=32)
    text = "Once upon a time there was a little girl who had a red ball. She liked to play with the ball. "
    prompts = [llm.encode(text * (1 + i % 3))[i % 7 :] for i in range(32)]
    methods = [None, *({"method": m, "num_speculative_tokens": 8} for m in ("ngram", "suffix", "lookahead", "recycle"))]
    methods += [{"method": "draft_model", "model": "tiny-draft", "num_speculative_tokens": 4}]
    for batch in (1, 32):
        for temperature in (0.0, 1.0):
            plain: list[list[int]] = []
            for method in methods:
                llm.speculative_config = method
                params = SamplingParams(max_tokens=s.tokens, temperature=temperature, seed=1, ignore_eos=True)
                llm.generate(prompts[:batch], SamplingParams(max_tokens=8, temperature=0))  # graphs are captured
                llm.speculative_config = method  # anew: of what it is to write it has just seen the beginning
                began = time.perf_counter()
                found = [out.token_ids for out in llm.generate(prompts[:batch], params)]
                took = time.perf_counter() - began
                plain = plain or found
                changed = sum(a != b for a, b in zip(plain, found, strict=True))
                yield {
                    "method": method["method"] if method else "plain", "batch": batch, "temperature": temperature,
                    "tokens/s": batch * s.tokens / took, "changed": f"{changed} of {batch}", "exactness": llm.exactness,
                }  # fmt: skip


def offload(s: Settings) -> Iterator[Line]:
    """Keys in host memory: seconds a step at long contexts, by layers on the chip, against all of them there."""
    config, length = s.shape(s.seeds[0]), max(s.contexts) // 4
    model = random_model(config, None, s.where)
    for layers in dict.fromkeys((None, 0, config.num_layers // 2)):
        kind = model.config, model.dtype, model.device
        kv = PagedKV(*kind) if layers is None else OffloadKV(*kind, layers)
        runner = Runner(model, kv)
        seq = filled(runner, length)
        each = _timed(partial(runner.extend, [seq]), s.where)
        moved = 0.0 if layers is None else kv.nbytes(length) * (config.num_layers - layers) / (config.num_layers + 2)
        yield {
            "model": s.seeds[0], "context": length, "layers on chip": "all" if layers is None else layers,
            "ms": 1e3 * each, "GB/s over the bus": moved / each / 1e9,
        }  # fmt: skip
        runner.free(seq)
        del runner, kv


def seeds(s: Settings) -> Iterator[Line]:
    """TriForce and MagicDec at their papers' settings: costs are measured, and acceptance is assumed.

    As a check, tokens are really decoded, plainly and speculatively: of random weights behind random keys, whose
    acceptance is as random.

    TriForce (2404.11912): Llama-2-7B, 120k tokens, retrieval of 4096 keys in chunks of 8, 6 ahead, on the chip; and 32k
    tokens with keys in host memory; once more with a model of 68M parameters before it, of whose guesses 0.35 pass the
    view, as its authors say. MagicDec (2408.11049): batch 32 behind up to 32k tokens, as many as fit, a view of
    512 keys, 3 ahead; of Llama-3.1-8B.
    """
    most, (far, near) = max(s.contexts), s.views
    cells = [
        ("TriForce on chip", s.seeds[0], 1, most * 15 // 16, far, 6, 0.92, False),
        ("TriForce offloaded", s.seeds[0], 1, most // 4, far, 6, 0.92, True),
        ("MagicDec", s.seeds[1], s.batch, _fitting(s, most // 4), near, 3, 0.85, False),
    ]
    first = _smallest(s)
    for name, which, batch, length, view, k, chance, off in cells:
        model = random_model(s.shape(which), None, s.where)
        kind = model.config, model.dtype, model.device
        runner = Runner(model, OffloadKV(*kind) if off else PagedKV(*kind))
        looking = runner.view(view)
        seqs = [filled(runner, length, i) for i in range(batch)]
        drafts = [Draft.chain([1] * k) for _ in seqs]
        plain = _timed(partial(runner.extend, seqs), s.where)
        checks = _timed(partial(runner.extend, seqs, drafts), s.where)
        gain, guesser = expected(chance, k), Autoregressive()
        guesser.runner, guesser.vocab = looking, model.config.vocab_size
        guess = _timed(partial(guesser.propose, [seq.shown(COUPLED) for seq in seqs], k), s.where) / k
        three = gain * plain / (k / (1 + INNER) * (guess + first) + checks)
        inner = {"tiny ms": 1e3 * first, "speedup of three": three} if view == far else {}
        tokens, slow, step_slow = _decoded(runner, create(SpeculativeConfig("none")), seqs, 0, s.decoded)
        same, fast, step_fast = _decoded(runner, guesser, seqs, k, s.decoded)
        yield {
            "setting": name, "model": which, "batch": batch, "context": length, "view": view, "k": k,
            "plain ms": 1e3 * plain,
            "verify ms": 1e3 * checks, "draft ms": 1e3 * guess, "acceptance (assumed)": chance,
            "speedup at it": gain * plain / (k * guess + checks), "same tokens": tokens == same,
            "speedup seen": slow / fast, "plain step ms": 1e3 * step_slow, "step ms": 1e3 * step_fast,
            "in whole steps": gain * step_slow / step_fast, **inner,
        }  # fmt: skip
        for seq in seqs:
            looking.free(seq)
            runner.free(seq)
        del model, runner, looking, guesser


def _smallest(s: Settings) -> float:
    """Seconds of a guess of TriForce's draft model, through its short cache."""
    model = random_model(s.smallest, None, s.where)
    short = Runner(model, PagedKV(model.config, model.dtype, model.device)).view("streaming:budget=256", alone=True)
    return _timed(partial(short.extend, [Sequence([1] * 250, SamplingParams(max_tokens=64), seed=0)]), s.where)


def _decoded(
    runner: Runner, drafter: Drafter, seqs: list[Sequence], k: int, count: int
) -> tuple[list[list[int]], float, float]:
    """The next `count` tokens of each sequence, which stays as it was; the seconds of these, and of a step of all."""
    began, ends, found, steps = time.perf_counter(), [len(seq.tokens) + count for seq in seqs], [], list[float]()
    while going := [seq for seq, end in zip(seqs, ends, strict=True) if len(seq.tokens) < end]:
        before = time.perf_counter()
        step(runner, drafter, going, k)
        if len(going) == len(seqs):
            steps.append(time.perf_counter() - before)
    took = time.perf_counter() - began
    for seq, end in zip(seqs, ends, strict=True):
        found.append(seq.tokens[end - count : end])
        del seq.tokens[end - count :]
        seq.mirror = None
    return found, took, mean(steps)


def _fitting(s: Settings, length: int) -> int:
    """So many tokens of each sequence of MagicDec's, or whole thousands of which the keys fill 3/4 of the device."""
    if s.where.type != "cuda":
        return length
    config = s.shape(s.seeds[1])
    room = torch.cuda.get_device_properties(s.where).total_memory * 3 // 4
    each = 4 * config.num_layers * config.num_kv_heads * config.head_dim * s.batch
    return min(length, room // each // 1024 * 1024)


def exactness(s: Settings) -> Iterator[Line]:
    """The self-check of every shape's first layers, in all formats: what `exactness` would say."""
    for name, config in s.models.items():
        for scheme in s.formats:
            model = random_model(config, scheme, s.where, layers=2)
            found = check_exactness(model, PagedKV(model.config, model.dtype, model.device))
            yield {"model": name, "format": scheme or "bf16", "layers": 2, "exactness": found}


def peers(s: Settings) -> Iterator[Line]:
    """transformers' and, where it is installed, vLLM's plain greedy decoding of the embedded model, beside ours."""
    from transformers import AutoModelForCausalLM

    llm = LLM("tiny", device=s.device, dtype="bfloat16")
    prompt = llm.encode("Once upon a time")
    found: dict[str, tuple[list[int], float]] = {}
    llm.generate(prompt, temperature=0, max_tokens=s.tokens, ignore_eos=True)  # each once untimed
    began = time.perf_counter()
    ours = llm.generate(prompt, temperature=0, max_tokens=s.tokens, ignore_eos=True)[0].token_ids
    found["outrider"] = ours, time.perf_counter() - began
    theirs: Any = AutoModelForCausalLM.from_pretrained(llm.checkpoint.path, dtype=torch.bfloat16)
    theirs = theirs.to(s.where)
    given = torch.tensor([prompt], device=s.where)
    theirs.generate(given, do_sample=False, min_new_tokens=s.tokens, max_new_tokens=s.tokens)
    began = time.perf_counter()
    out: Tensor = theirs.generate(given, do_sample=False, min_new_tokens=s.tokens, max_new_tokens=s.tokens)
    found["transformers"] = out[0, len(prompt) :].tolist(), time.perf_counter() - began
    if find_spec("vllm"):
        vllm = import_module("vllm")

        engine = vllm.LLM(str(llm.checkpoint.path), dtype="bfloat16", gpu_memory_utilization=0.3)
        params = vllm.SamplingParams(temperature=0, max_tokens=s.tokens, ignore_eos=True)
        engine.generate([{"prompt_token_ids": prompt}], params)
        began = time.perf_counter()
        answer = engine.generate([{"prompt_token_ids": prompt}], params)[0].outputs[0].token_ids
        found["vllm"] = list(answer), time.perf_counter() - began
    for name, (tokens, took) in found.items():
        same = next((i for i, (a, b) in enumerate(zip(ours, tokens, strict=False)) if a != b), len(tokens))
        yield {"peer": name, "tokens/s": len(tokens) / took, "same tokens before the first other one": same}


PARTS: dict[str, Callable[[Settings], Iterator[Line]]] = {
    "bits": bits, "exactness": exactness, "orders": orders, "linear": linear, "experts": experts,
    "attention": attention, "decode": decode, "speculation": speculation, "offload": offload, "seeds": seeds,
    "peers": peers,
}  # fmt: skip


# --- what they measure ------------------------------------------------------------------------------------------------


def _products(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of a layer's products, and the head's."""
    c = config
    q = c.num_heads * c.head_dim
    return {
        "qkv": (q + 2 * c.num_kv_heads * c.head_dim, c.hidden_size), "o": (c.hidden_size, q),
        "gate-up": (2 * c.intermediate_size, c.hidden_size), "down": (c.hidden_size, c.intermediate_size),
        "head": (c.vocab_size, c.hidden_size),
    }  # fmt: skip


def _kinds(s: Settings) -> list[tuple[str | None, bool]]:
    """Formats of weights, and whether the rows that they meet are rounded to 8 bits."""
    return [*((scheme, False) for scheme in s.formats), *((scheme, True) for scheme in s.formats if scheme)]


def _kind(scheme: str | None, rounded: bool) -> str:
    return f"{scheme or 'bf16'}{', int8 rows' if rounded else ''}"


def _weights(n: int, k: int, scheme: str | None, device: torch.device, rounded: bool = False) -> launch.Weights:
    """Random ones; of few bits, rounded from a few rows that repeat."""
    if scheme is None:
        return launch.pack(torch.randn(n, k, device=device, dtype=torch.bfloat16) * k**-0.5, device)
    few = quantize(torch.randn(min(n, 64), k) * k**-0.5, scheme, rounded)
    some = launch.pack(few, device, rounded)
    times = -(-n // some.outs)
    for name in ("data", "scales", "offsets"):
        if (part := getattr(some, name)) is not None:
            axis = part.ndim - 2  # of outputs
            setattr(some, name, torch.cat([part] * times, axis).narrow(axis, 0, n).contiguous())
    some.outs = n
    return some


def _linear(n: int, k: int, scheme: str | None, device: torch.device, gated: bool = False) -> Linear:
    """A product of random weights."""
    one = Linear(torch.zeros(2, 64, dtype=torch.bfloat16, device=device), gated=gated)
    one.packed, one.in_features, one.out_features = [_weights(n, k, scheme, device)], k, n // 2 if gated else n
    one.nbytes = one.packed[0].nbytes
    return one


def _product(x: Tensor, weights: launch.Weights) -> Tensor:
    y = torch.empty(len(x), weights.outs, dtype=x.dtype, device=x.device)
    launch.product(x, weights, y, architecture=launch.architecture(x.device))
    return y


def _library(x: Tensor, weights: launch.Weights) -> Tensor:
    return torch.mm(x, weights.data.T)


def _each(compute: Callable[[Tensor, launch.Weights], Tensor], x: Tensor, held: list[launch.Weights]) -> list[Tensor]:
    return [compute(x, weights) for weights in held]


def _chain(
    config: ModelConfig, device: torch.device, start: int, rows: int, parents: list[int] | None = None
) -> DevicePlan:
    """Rows behind so many tokens, whose pages lie in order in one slab."""
    pages = -(-(start + rows) // PAGE)
    group = config.num_heads // config.num_kv_heads
    step, capacity = queries_tile(group, config.head_dim) // group, -(-(start + 64) // PAGE) * PAGE
    entry = Entry(0, 0, rows, start, parents)
    return make([entry], [torch.arange(pages, dtype=torch.int32)], [(0, capacity)], step, device)


def _attention(
    config: ModelConfig, device: torch.device, start: int, rows: int, parents: list[int] | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, DevicePlan]:
    """Random queries, keys, values, a slab of keys, and a plan."""
    capacity = -(-(start + 64) // PAGE) * PAGE

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    kv = some(2, config.num_kv_heads, capacity, config.head_dim)
    new = [some(rows, heads, config.head_dim) for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
    return new[0], new[1], new[2], kv, _chain(config, device, start, rows, parents)


def _attend(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, plan: DevicePlan) -> Tensor:
    if kv.data_ptr() not in _slabs:
        _slabs.clear()
        _slabs[kv.data_ptr()] = torch.tensor([kv.data_ptr()], device=kv.device)
    return launch.attend(q, k, v, _slabs[kv.data_ptr()], plan, None, q.shape[2] ** -0.5)


_slabs: dict[int, Tensor] = {}  # the address of one slab, on its device


def random_model(config: ModelConfig, scheme: str | None, device: torch.device, layers: int | None = None) -> Model:
    """A model of this shape, or of its first layers, with random weights."""
    if layers is not None and layers < config.num_layers:
        config = replace(config, num_layers=layers, windows=config.windows[:layers])
    sizes, dtype = _products(config), torch.bfloat16

    def product(name: str, gated: bool = False) -> Linear:
        return _linear(*sizes[name], scheme, device, gated)

    def ones(width: int) -> Tensor:
        return torch.ones(width, dtype=dtype, device=device)

    heads = [ones(config.head_dim) if config.qk_norm else None for _ in range(2)]
    made = [
        Layer(ones(config.hidden_size), product("qkv"), product("o"), ones(config.hidden_size),
              MLP(product("gate-up", gated=True), product("down")), *heads)
        for _ in range(config.num_layers)
    ]  # fmt: skip
    table = torch.randn(config.vocab_size, config.hidden_size, device=device, dtype=dtype)
    return Model(config, table, made, ones(config.hidden_size), product("head"), dtype, device)
