"""Law 1: the token at position t is a pure function of (seed, t, processed logits).

At temperature 0 it is the argmax; otherwise argmax(logits / T + gumbel(seed, t)) over the tokens that top-k, top-p and
min-p keep, which is a draw from softmax(logits / T) (Gumbel-max). The noise is counter-based: it depends on seed,
position and token id alone, so every drafter, batch, device and process meets the same. Speculation then cannot change
what is sampled, and two models that agree on the distribution agree on the token (Gumbel coupling, arXiv 2408.07978).

Other acceptance rules than `coupled` (verify.py) need noise of their own: named streams, counter-based as well and
independent of the one above. This is the only place where a token is chosen.
"""

from __future__ import annotations

import hashlib
import math
import struct
import threading
from array import array
from collections import defaultdict
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.config import LogitsProcessor, SamplingParams
from outrider.constraint import unpacked
from outrider.draft import Draft
from outrider.errors import ConfigError, ConstraintError, OutriderError, RequestError, ends_one, told
from outrider.ops import argmax, greatest, native, pick, picks, set_own_threads, upload
from outrider.outputs import Logprob
from outrider.sequence import Sequence

SMALL = 2**20  # logits that one thread is done with before torch has woken another ...
WIDE = 2**17  # ... unless a single row is as long as this
NOISE_KEPT = 2**25  # bytes, more than a step's rows have as a rule
BANS = "logit_bias, stop_token_ids, min_tokens, bad_words or allowed_token_ids"
LARGEST = torch.finfo(torch.float32).max
SMALLEST = torch.finfo(torch.float32).tiny
GREEDY: native.Draw = (0.0, 0, 1.0, -math.inf, 0)


@dataclass
class Row:
    """A place where a token is wanted: after a sequence's tokens and then `path`."""

    seq: Sequence
    path: list[int] = field(default_factory=list)
    error: OutriderError | None = None  # why there is nothing to choose from, if a custom processor is to blame

    @property
    def position(self) -> int:
        """Index in the sequence of the token to choose."""
        return len(self.seq.tokens) + len(self.path)


def choose(logits: Tensor, rows: list[Row], stream: str = "", at: Seq[int] | None = None) -> list[int]:
    """One token for each row. logits (rows, vocab) float32, raw; a row's choice depends on that row alone.

    Without a `stream` this is Law 1. A named stream is other noise, independent of it and fresh at every step. -1 where
    there is nothing to choose: `refusal` says why. `at`: which of the logits the rows have, ascending, if not all.
    """
    if picks(logits):
        logits = logits if at is None or len(at) == len(logits) else logits[list(at)]
        own = [i for i, row in enumerate(rows) if row.seq.edited or _filters(row.seq.params, logits.shape[1])]
        chosen = _drawn(logits, rows, stream)[0].tolist()  # of all rows: the one time that a step waits
        others = argmax(scores(logits[own], [rows[i] for i in own], stream)) if own else []
        for i, token in zip(own, others, strict=True):
            chosen[i] = token
        return chosen
    at = range(len(rows)) if at is None else at
    settled = _settled(logits, rows, stream, at)
    if left := [i for i in range(len(rows)) if i not in settled]:
        some = logits if len(left) == len(logits) else logits[[at[i] for i in left]]
        settled |= dict(zip(left, argmax(scores(some, [rows[i] for i in left], stream)), strict=True))
    return [settled[i] for i in range(len(rows))]


def _settled(logits: Tensor, rows: list[Row], stream: str, at: Seq[int]) -> dict[int, int]:
    """The tokens of those rows that sample and are drawn by the kernels: all but a few, on a CPU.

    They find what the functions below would, or nothing where that is so close that last bits decide.
    """
    if not native.runs(logits.dtype, logits.device) or logits.dtype != torch.float32 or not logits.shape[1]:
        return {}
    logits = logits.contiguous()
    vocab, lies = logits.shape[1], logits.data_ptr()
    kept: list[Tensor] = []
    drawn: list[int] = []
    wishes: list[native.Wish] = []
    for i, (row, place) in enumerate(zip(rows, at, strict=True)):
        p = row.seq.params
        if not p.temperature:
            continue
        own = lies + 4 * vocab * place
        if row.seq.edited:
            try:
                kept.append(process(logits[place], row).contiguous())
            except OutriderError:  # the reference will meet it, too
                continue
            own = kept[-1].data_ptr()  # in use as long as it is kept
        drawn.append(i)
        wishes.append(_wish(own, row, vocab, stream))
    tokens = native.kernels.draw(wishes, vocab, torch.get_num_threads()) if wishes else []
    return {i: token for i, token in zip(drawn, tokens, strict=True) if token >= 0}


def _wish(at: int, row: Row, vocab: int, stream: str) -> native.Wish:
    p, (temperature, key) = row.seq.params, _heat(row, stream)
    least = _log(p.min_p) if p.min_p > 0 else -math.inf
    return at, temperature, p.top_k if 0 < p.top_k < vocab else 0, _single(p.top_p), least, key % 2**64


def draws(seqs: list[Sequence], drafts: list[Draft], vocab: int) -> list[native.Draw] | None:
    """How `choose` draws behind each sequence, and behind each node of its draft; None if it draws nowhere.

    The argmax stands for it where a request is greedy, or edits its logits, which is for `choose` alone.
    """
    if not any([seq.params.temperature and not seq.edited for seq in seqs]):
        return None
    found: list[native.Draw] = []
    for seq, draft in zip(seqs, drafts, strict=True):
        greedy = 1 + len(draft.tokens)
        if seq.params.temperature and not seq.edited:
            first, greedy = _wish(0, Row(seq), vocab, "")[1:], draft.riders
            found.append(first)
            for depth in draft.depths()[: draft.verifiable]:
                found.append((*first[:-1], noise_key(seq.seed, len(seq.tokens) + depth) % 2**64))
        found += [GREEDY] * greedy
    return found


def guess(
    logits: Tensor, rows: list[Row], known: Tensor, vocab: int, count: int
) -> list[tuple[list[int], list[float]]]:
    """Per row of a draft's logits (rows, n), of the tokens `known` (n,) int64 of a vocabulary, the `count` likeliest.

    With the logarithms of their chances, as the request's parameters shape them: what Law 1 would choose, if these were
    the target's logits, or, where a rule flips coins, what is likeliest without noise.
    """
    flips = rows[0].seq.rule.flips_coins
    if native.runs(logits.dtype, logits.device) and (flips or not any(row.seq.edited for row in rows)):
        size, at = logits.shape[1], logits.data_ptr()
        wishes = [
            (own, *GREEDY) if flips else _wish(own, row, size, "")
            for own, row in zip(range(at, at + 4 * size * len(rows), 4 * size), rows, strict=True)
        ]
        return native.kernels.guess(wishes, size, known.data_ptr(), count)  # type: ignore[no-any-return]
    if not flips and any(row.seq.edited or row.seq.params.temperature for row in rows):
        whole = logits.new_full((len(rows), vocab), -math.inf)
        whole[:, known] = logits
        logits = scores(whole, rows)[:, known]
    with few_threads(logits):
        best = logits.log_softmax(-1).topk(min(count, logits.shape[-1]))
    return list(zip(known[best.indices].tolist(), best.values.tolist(), strict=True))


def ahead(seq: Sequence, levels: int, size: int) -> tuple[native.Wish, list[int]] | None:
    """How `guess` shapes logits of `size` tokens behind a sequence, natively: its wish, and each level's key of noise.

    None where it would not do that natively.
    """
    if seq.rule.flips_coins or seq.greedy:
        return (0, *GREEDY), [0] * levels
    if seq.edited:
        return None
    wishes = [_wish(0, Row(seq, [0] * level), size, "") for level in range(max(1, levels))]
    return wishes[0], [key for *_, key in wishes[:levels]]


def surely(logits: Tensor, rows: list[Row], stream: str = "") -> tuple[list[int], list[float]]:
    """What a draft's logits (rows, vocab) choose, and the chance that the likeliest has by what the choice looked at.

    Noise included: where the best two are close, a slightly other distribution would have chosen otherwise.
    """
    if native.runs(logits.dtype, logits.device) and not stream and all(row.seq.greedy for row in rows):
        found = guess(logits.contiguous(), rows, _places(logits.shape[1]), logits.shape[1], 1)
        return [own[0] if own else -1 for own, _ in found], [math.exp(own[0]) if own else 0.0 for _, own in found]
    if picks(logits):
        tokens, sure = surest(logits, rows, stream)
        return tokens.tolist(), sure.tolist()
    with few_threads(logits):
        judged = scores(logits, rows, stream)
        return argmax(judged), _share(judged).tolist()


def surest(logits: Tensor, rows: list[Row], stream: str = "") -> tuple[Tensor, Tensor]:
    """As `surely`, left where the logits lie: nobody waits, but for rows whose requests edit them or have a top-p."""
    vocab = logits.shape[1]
    if picks(logits) and not any(row.seq.edited or _filters(row.seq.params, vocab) for row in rows):
        return _drawn(logits, rows, stream)
    judged = scores(logits, rows, stream)
    return greatest(judged), _share(judged)


def _share(judged: Tensor) -> Tensor:
    """What the likeliest token of each row has of the softmax of scores (rows, vocab)."""
    return (judged.amax(-1) - judged.logsumexp(-1)).exp()


@lru_cache(maxsize=4)
def _places(vocab: int) -> Tensor:
    return torch.arange(vocab)


@lru_cache(maxsize=256)
def _log(x: float) -> float:
    """As `keep_likely` takes it."""
    return float(torch.tensor([[x]], dtype=torch.float32).log())


def _single(x: float) -> float:
    return struct.unpack("f", struct.pack("f", x))[0]  # type: ignore[no-any-return]


def _drawn(logits: Tensor, rows: list[Row], stream: str) -> tuple[Tensor, Tensor]:
    """`surest` by Law 1's kernels, for rows whose requests ask for nothing but a temperature."""
    heats = [_heat(row, stream) for row in rows]
    return pick(logits, [key for _, key in heats], [temperature for temperature, _ in heats])


def _heat(row: Row, stream: str) -> tuple[float, int]:
    """What a row is divided by, and the key of its noise; zeros where it is not drawn."""
    if not row.seq.params.temperature:
        return 0.0, 0
    name = _fresh(row.seq, stream) if stream else ""
    return max(row.seq.params.temperature, SMALLEST), noise_key(row.seq.seed, row.position, name)


def refusal(logits: Tensor, row: Row) -> OutriderError:
    """Why `choose` found nothing in a row's raw logits (vocab,)."""
    if row.error:
        return row.error
    most = float(logits.max())
    if math.isfinite(most):
        if row.seq.constraint:
            return ConstraintError(f"every token that structured_outputs allow is banned, by {BANS}, or by a processor")
        return RequestError(f"every token is banned, by {BANS}; leave at least one")
    what = "NaN" if math.isnan(most) else "infinite" if most > 0 else "all -inf"
    return RequestError(f"the model's logits after {row.position} tokens are {what}; no token can be chosen")


def scores(logits: Tensor, rows: list[Row], stream: str = "") -> Tensor:
    """What `choose` takes the argmax of (rows, vocab): shaped logits, with noise where a request samples.

    May be `logits` itself.
    """
    if rows and not any(row.seq.params.temperature > 0 or row.seq.edited for row in rows):
        return logits
    with few_threads(logits):
        logits, drawn = _shaped(logits, rows)
        for i in drawn:  # `_shaped` made a copy
            _perturb(logits[i], rows[i], stream)
    return logits


def _filters(p: SamplingParams, vocab: int) -> bool:
    return p.top_p < 1 or p.min_p > 0 or 0 < p.top_k < vocab


def _perturb(logits: Tensor, row: Row, stream: str) -> None:
    """Add the noise of a place to its logits (vocab,); only to those that filters have left, if these are few."""
    vocab, device, p = len(logits), logits.device, row.seq.params
    if device.type == "cpu" and _filters(p, vocab):
        left = (logits > float("-inf")).nonzero()[:, 0]
        if 8 * len(left) < vocab:
            logits[left] += _noise(row, vocab, device, stream, left)
            return
    logits += _noise(row, vocab, device, stream)


def distribution(logits: Tensor, rows: list[Row]) -> Tensor:
    """What `choose` draws each row from: (rows, vocab) float64 probabilities, one-hot at temperature 0.

    NaN throughout where there is nothing to choose.
    """
    with few_threads(logits):
        shaped, drawn = _shaped(logits, rows)
        probs = even(shaped).double().softmax(-1)[:, : shaped.shape[-1]]
        if len(drawn) < len(rows):
            greedy = upload(sorted(set(range(len(rows))) - set(drawn)), probs.device)
            sure = F.one_hot(shaped[greedy].argmax(-1), shaped.shape[-1]).to(probs)
            probs[greedy] = sure.masked_fill(probs[greedy].isnan(), torch.nan)
    return probs


@contextmanager
def few_threads(logits: Tensor) -> Iterator[None]:
    """Work on few logits stays in this thread: others would have to be woken, and take a core from the kernels."""
    threads = torch.get_num_threads()
    if logits.numel() < SMALL and logits.shape[-1] < WIDE:
        set_own_threads(1)
    try:
        yield
    finally:
        set_own_threads(threads)


def draw(probs: Tensor, seq: Sequence, stream: str) -> int:
    """A token from probabilities (vocab,), with the noise of a named stream at the sequence's present end."""
    noise = gumbel(seq.seed, len(seq.tokens), len(probs), probs.device, _fresh(seq, stream))
    return int((probs.log() + noise).argmax())


def coins(seq: Sequence, n: int, stream: str) -> list[float]:
    """n uniform variates in (0, 1) of a named stream at the sequence's present end."""
    flips: list[float] = uniform(seq.seed, len(seq.tokens), n, stream=_fresh(seq, stream)).tolist()
    return flips


def _shaped(logits: Tensor, rows: list[Row]) -> tuple[Tensor, list[int]]:
    """Logits after all that the requests ask for, short of noise, and the rows to draw (the others are greedy).

    The result is a copy if there are any of these; else it may be `logits` itself.
    """
    edited = [i for i, row in enumerate(rows) if row.seq.edited]
    if edited:
        logits = logits.clone()
        for i in edited:
            try:
                logits[i] = process(logits[i], rows[i])
            except OutriderError as error:  # which ends this row's request, and no other
                rows[i].error, logits[i] = error, torch.nan
    drawn = [i for i, row in enumerate(rows) if row.seq.params.temperature > 0]
    if drawn:
        params = [rows[i].seq.params for i in drawn]
        at = None if len(drawn) == len(rows) else upload(drawn, logits.device)
        some = logits if at is None else logits[at]
        some = some - some.amax(-1, keepdim=True)  # so that a tiny temperature overflows downwards only
        some = keep_likely(some / _column(params, "temperature", some).clamp(min=SMALLEST), params)
        logits = some if at is None else logits.index_copy(0, at, some)
    return logits, drawn


def _column(params: list[SamplingParams], name: str, like: Tensor) -> Tensor:
    return upload(torch.tensor([[float(getattr(p, name))] for p in params], dtype=torch.float32), like.device)


# --- what a request's parameters do to its logits -------------------------------------------------------------------


def process(logits: Tensor, row: Row) -> Tensor:
    """Penalties, bias, bans, custom processors and the grammar's mask on one row (vocab,), for its prefix.

    Raises RequestError, naming the processor, for one that raises or returns anything but finite logits and -inf, and
    ConstraintError where the grammar leads nowhere.
    """
    p, seq = row.seq.params, row.seq
    logits = logits.clone()
    if p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty:
        ids, output = (x.to(logits.device) for x in _counts(row))
        some = logits[ids]
        if p.repetition_penalty != 1:  # CTRL (1909.05858), as in transformers and vLLM
            by = max(p.repetition_penalty, SMALLEST)
            some = torch.where(some > 0, some / by, some * by).clamp(max=LARGEST)
        logits[ids] = some - (p.frequency_penalty * output + p.presence_penalty * (output > 0).float())
    if p.logit_bias:
        ids, biases = _biases(seq, logits)
        logits[ids] = (logits[ids] + biases).clamp(max=LARGEST).to(logits)
    if row.position - seq.prompt_len < p.min_tokens and seq.barred:
        logits[list(seq.barred)] = float("-inf")
    if p.allowed_token_ids is not None:
        logits = torch.full_like(logits, float("-inf")).index_copy_(0, *_allowed(seq, logits))
    if seq.banned:
        longest, known = _banned(seq)
        tail = (*seq.tokens[max(seq.prompt_len, len(seq.tokens) - longest) :], *row.path)
        for before, tokens in (*known.get((), ()), *known.get(tail[-1:], ())):
            if tail[len(tail) - len(before) :] == before:
                logits[tokens] = float("-inf")
    if p.logits_processors and math.isfinite(float(logits.max())):  # else it is the model's fault, or the bans'
        for processor in p.logits_processors:
            logits = _custom(processor, seq.tokens + row.path, logits)
    if seq.constraint and (mask := seq.constraint.mask(seq, row.path)) is not None:
        logits = torch.where(unpacked(mask, len(logits)).to(logits.device), logits, float("-inf"))
    return logits


def _banned(seq: Sequence) -> tuple[int, dict[tuple[int, ...], list[tuple[tuple[int, ...], list[int]]]]]:
    """How far back its banned words reach, and they by the token before their last one: few are looked at each time."""
    if "banned" not in seq.memory:
        known = defaultdict(list)
        for before, tokens in seq.banned:
            known[before[-1:]].append((before, list(tokens)))
        seq.memory["banned"] = max(len(before) for before, _ in seq.banned), dict(known)
    return seq.memory["banned"]  # type: ignore[no-any-return]


def _allowed(seq: Sequence, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The ids that a request allows, and their logits."""
    if (ids := seq.memory.get("allowed")) is None:
        every = sorted(set(seq.params.allowed_token_ids or ()))
        ids = seq.memory["allowed"] = torch.tensor(every, device=logits.device)
    return ids, logits[ids]


def _biases(seq: Sequence, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The ids that a request biases, and by how much: made once, for there may be one for each of a vocabulary."""
    if "biases" not in seq.memory:
        given, device = seq.params.logit_bias or {}, logits.device
        by = torch.tensor([min(bias, LARGEST) for bias in given.values()], dtype=torch.float32, device=device)
        seq.memory["biases"] = torch.tensor([*given], device=device), by
    ids, by = seq.memory["biases"]
    return ids, by


def _custom(processor: LogitsProcessor, tokens: list[int], logits: Tensor) -> Tensor:
    name = f"logits processor {getattr(processor, '__name__', type(processor).__name__)}"
    wanted = tuple(logits.shape)  # before they may be resized
    try:
        edited = processor(tokens, logits)
    except BaseException as error:  # the caller's code: it raises what it likes
        if not ends_one(error):
            raise
        raise RequestError(f"{name} raised {told(error)}") from error
    shape = tuple(edited.shape) if isinstance(edited, Tensor) and not edited.is_nested else None  # which has none
    if shape != wanted:
        raise ConfigError(f"{name} must return logits of shape {wanted}, not {shape or type(edited).__name__}")
    try:
        own: Tensor = edited.to(logits).clamp(max=LARGEST)
        most = float(own.max())
    except RuntimeError as error:  # a sparse tensor, or one without data
        raise ConfigError(f"{name} must return a tensor like the logits it is given: {told(error)}") from None
    if not math.isfinite(most):
        raise RequestError(f"{name} " + ("returned NaN" if math.isnan(most) else "leaves no token to choose"))
    return own


def _counts(row: Row) -> tuple[Tensor, Tensor]:
    """The tokens (n,) int64 before a place, each once, and how often each stands in the output, (n,) float32."""
    seq = row.seq
    settled, ids, output, places = seq.memory.get("counts") or (0, array("q"), array("f"), {})
    _count(seq.tokens[settled : seq.settled], ids, output, places, seq.prompt_len - settled)
    seq.memory["counts"] = seq.settled, ids, output, places  # counted once and kept: settled tokens never change
    ids, output = ids[:], output[:]
    _count(seq.tokens[seq.settled :] + row.path, ids, output, dict(places))
    return torch.frombuffer(ids, dtype=torch.int64), torch.frombuffer(output, dtype=torch.float32)


def _count(tokens: list[int], ids: array[int], output: array[float], places: dict[int, int], prompt: int = 0) -> None:
    """Count tokens, of which the first ones may be the prompt's."""
    for i, token in enumerate(tokens):
        if (at := places.setdefault(token, len(ids))) == len(ids):
            ids.append(token)
            output.append(0)
        output[at] += i >= prompt


def keep_likely(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    """-inf for what top-k, then top-p, then min-p drop; (rows, vocab), one SamplingParams per row.

    A token as likely as the last one kept is kept too, so the outcome does not depend on an order among ties.
    """
    vocab = logits.shape[-1]
    ks = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
    if min(ks) < vocab:
        largest = logits.topk(min(vocab, max(k for k in ks if k < vocab)), -1).values
        wanted = upload(ks, logits.device)[:, None]
        floor = largest.gather(-1, wanted.clamp(max=largest.shape[-1]) - 1)
        logits = logits.masked_fill((logits < floor) & (wanted < vocab), float("-inf"))
    if any(p.top_p < 1 for p in params):
        probs = even(logits).softmax(-1)[:, :vocab]
        logits = logits.masked_fill(probs < _nucleus_floor(probs, _column(params, "top_p", logits)), float("-inf"))
    if any(p.min_p > 0 for p in params):
        least = logits.amax(-1, keepdim=True) + _column(params, "min_p", logits).log()
        logits = logits.masked_fill(logits < least, float("-inf"))
    return logits


def even(logits: Tensor) -> Tensor:
    """Logits (..., vocab) whose softmax is the same at any place of a batch; on CUDA some -inf may stand behind them.

    PyTorch's kernel sums a row in an order that follows its address modulo 16 bytes.
    """
    more = -logits.shape[-1] % 4
    return F.pad(logits, (0, more), value=-math.inf) if more and logits.is_cuda else logits


def _nucleus_floor(probs: Tensor, top_p: Tensor) -> Tensor:
    """Per row (rows, 1) the probability of the last token in the smallest set of mass >= top_p."""
    size, vocab = 64, probs.shape[-1]
    while True:  # few tokens hold most of the mass: sorting all of them is rarely needed
        largest = probs.topk(min(size, vocab), -1).values
        before = largest.double().cumsum(-1) - largest
        if size >= vocab or bool((before[:, -1:] >= top_p).all()):
            break
        size *= 8
    inside = (before < top_p) | (top_p >= 1)
    inside[:, 0] = True  # the likeliest stays, however small top_p
    floor = torch.where(inside, largest, torch.inf).amin(-1, keepdim=True)
    return floor.masked_fill(top_p >= 1, 0.0)


# --- the noise -----------------------------------------------------------------------------------------------------


def _fresh(seq: Sequence, stream: str) -> str:
    """A stream's name at this step, which the length of the settled text tells from all other steps.

    A position may be guessed at in several steps, and what became of the first guess may have depended on it.
    """
    return f"{stream}/{seq.settled}"


_kept: dict[tuple[int, int, int, torch.device], Tensor] = {}
_kept_lock = threading.Lock()


def _noise(row: Row, vocab: int, device: torch.device, stream: str, at: Tensor | None = None) -> Tensor:
    """gumbel(seed, position), or `at` some ids. Drafts and target ask for it in turn: the last NOISE_KEPT are kept."""
    if stream or at is not None:
        name = _fresh(row.seq, stream) if stream else ""
        return gumbel(row.seq.seed, row.position, vocab, device, name, at)
    key = row.seq.seed, row.position, vocab, device
    if (noise := _kept.get(key)) is None:
        noise = gumbel(row.seq.seed, row.position, vocab, device)
        with _kept_lock:
            _kept[key] = noise
            while 4 * vocab * len(_kept) > NOISE_KEPT and len(_kept) > 1:
                del _kept[next(iter(_kept))]  # the oldest
    return noise


def gumbel(
    seed: int, position: int, vocab: int, device: torch.device | str = "cpu", stream: str = "", at: Tensor | None = None
) -> Tensor:
    """(vocab,) float32 standard Gumbel noise, a pure function of (seed, position, stream, token id); or that `at` ids.

    The integers agree on every device, the two logarithms are taken in float64.
    """
    return uniform(seed, position, vocab, device, stream, at).log_().neg_().log_().neg_().float()


def uniform(
    seed: int, position: int, n: int, device: torch.device | str = "cpu", stream: str = "", at: Tensor | None = None
) -> Tensor:
    """(n,) float64 variates in (0, 1), a pure function of (seed, position, stream, index). No stream: Law 1's own.

    SplitMix64 (Steele et al. 2014) over the indices, from a key that hashes the rest; 52 bits each.
    """
    z = _golden(n, str(device))
    z = (z if at is None else z[at]) + noise_key(seed, position, stream)
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    z = z ^ _shift(z, 31)
    return (_shift(z, 12).double() + 0.5) * 2.0**-52  # never 0 or 1, nor rounded to either


def noise_key(seed: int, position: int, stream: str = "") -> int:
    """A place's key, as a signed number of 64 bits: what its noise is made of beside the token ids."""
    name = f"{seed % 2**64}/{position}" + (f"/{stream}" if stream else "")
    return _signed(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big"))


@lru_cache(maxsize=32)
def _golden(n: int, device: str) -> Tensor:
    return torch.arange(1, n + 1, dtype=torch.int64, device=device) * _signed(0x9E3779B97F4A7C15)


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return torch.bitwise_and(z >> bits, 2 ** (64 - bits) - 1)


def logprob(logits: Tensor, token: int, top: int) -> Logprob:
    """Of raw logits (vocab,): the chosen token's log-probability and those of the `top` likeliest."""
    logs: Tensor = even(logits).log_softmax(-1)[: len(logits)]
    values, ids = logs.topk(min(top, len(logs)))
    rank = 1 + int((logs > logs[token]).sum())
    return Logprob(token, float(logs[token]), dict(zip(ids.tolist(), values.tolist(), strict=True)), rank)
