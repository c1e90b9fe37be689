"""What the reference models can do, as the tables of docs/models.md. Everything runs on Outrider's own forward."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from collections.abc import Sequence as Row
from pathlib import Path
from statistics import mean

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.bench.report import markdown_table
from outrider.config import SamplingParams
from outrider.draft import Draft
from outrider.errors import ConfigError
from outrider.files import write_text
from outrider.llm import LLM
from outrider.load import Progress
from outrider.sequence import Sequence
from tools.data import Corpus
from tools.recall import Recall

MARKS = "<!-- evaluation: made by `python -m tools evaluate` -->", "<!-- end of evaluation -->"
ROWS = 256  # tokens whose logits are asked for at once
WINDOWS, WINDOW = 24, 1024  # of each domain's held-out text
BORDERS = 1024, 2048, 4096, 8192, 16384, 32768, 65536, 128000
NEAR = 2048  # context that every token has in the comparison by position
DISTANCES = 256, 1024, 4096, 16384
EXAMPLES = 16
TASKS = {"quote": 1024, "correct": 1024, "sentence": 16384, "lookup": 16384, "repeat": 16384}  # and farthest distance
OPENINGS = {
    "a story": "Once upon a time there was a small grey donkey who lived behind the mill. Every morning she carried",
    "prose": "The old clock in the hall had struck twelve when Mr. Harding",
    "code": "def read_lines(path):\n    \"\"\"Return the lines of a file",
}  # fmt: skip
QUESTIONS = (
    "Tom has 5 apples. He buys 7 more and gives 4 to his sister. How many apples does Tom have now?",
    "Quote this passage word for word.\n\nThe ferry left at noon, and nobody waved except a boy with a kite.",
)


class Reader:
    """Logits for given text: what a model says after each token, asked for in blocks as if they were drafts."""

    def __init__(self, llm: LLM) -> None:
        self.runner = llm.runner

    def logits(self, tokens: list[int], first: int = 0) -> Iterator[Tensor]:
        """Blocks of rows (n, vocab); row by row what the model expects after tokens[first], [first + 1] ... [-2]."""
        seq = Sequence(tokens[: first + 1], SamplingParams(), seed=0)
        try:
            for at in range(first, len(tokens) - 1, ROWS):
                block = tokens[at + 1 : min(at + ROWS, len(tokens) - 1)]
                yield self.runner.extend([seq], [Draft.chain(block)]).logits[0].float()
                seq.tokens += tokens[len(seq.tokens) : at + ROWS + 1]
        finally:
            self.runner.free(seq)

    def losses(self, tokens: list[int], first: int = 0) -> Tensor:
        """Nats of tokens[first + 1:], each given all before it."""
        at, found = first + 1, []
        for rows in self.logits(tokens, first):
            labels = torch.tensor(tokens[at : at + len(rows)], device=rows.device)
            found.append(F.cross_entropy(rows, labels, reduction="none").cpu())
            at += len(rows)
        return torch.cat(found)

    def greedy(self, tokens: list[int], first: int = 0) -> Tensor:
        """The likeliest token at each place of tokens[first + 1:]."""
        return torch.cat([row.argmax(-1).cpu() for row in self.logits(tokens, first)])


def held_out(reader: Reader, held: Corpus) -> dict[str, float]:
    """Nats per token by domain, over windows of held-out text."""
    found = {}
    for domain, tokens in held.items():
        rng = np.random.default_rng(0)
        length = min(WINDOW + 1, len(tokens.ids))
        windows = [tokens.window(rng, length).tolist() for _ in range(WINDOWS)]
        found[domain] = float(torch.cat([reader.losses(window) for window in windows]).mean())
    return found


def by_position(reader: Reader, books: list[list[int]]) -> dict[str, tuple[float, float]]:
    """Nats per token between each two of BORDERS, given all of the book before; and the same tokens' given only the
    NEAR to 2 * NEAR tokens before, which says how hard that part of the text is."""
    full, near = [], []
    for book in books:
        tokens = book[: BORDERS[-1] + 1]
        full.append(reader.losses(tokens))
        parts = [reader.losses(tokens[: 2 * NEAR + 1])]
        for at in range(2 * NEAR, len(tokens) - 1, NEAR):
            parts.append(reader.losses(tokens[:1] + tokens[at - NEAR : at + NEAR + 1], NEAR + 1))
        near.append(torch.cat(parts))

    def average(kind: list[Tensor], a: int, b: int) -> float:
        return float(torch.cat([losses[a:b] for losses in kind]).mean())

    longest = max(map(len, full))
    return {
        f"{_k(a)}-{_k(b)}": (average(full, a, b), average(near, a, b))
        for a, b in itertools.pairwise(BORDERS)
        if b <= longest
    }


def recall(reader: Reader, task: Recall, name: str, distance: int) -> float:
    """Share of the answers' tokens that are the model's greedy choice."""
    right, rng = [], np.random.default_rng(0)
    for _ in range(EXAMPLES):
        ids, answers = task.example(rng, name, distance)
        first = answers.index(True)
        same = reader.greedy(ids, first - 1) == torch.tensor(ids[first:])
        right.append(float(same[torch.tensor(answers[first:])].float().mean()))
    return mean(right)


def agreement(target: Reader, draft: Reader, texts: list[list[int]]) -> tuple[float, float]:
    """Share of places where both models' likeliest token is the same, and mean 1 - TV of their laws at T = 1."""
    same, overlap = [], []
    for text in texts:
        for a, b in zip(target.logits(text), draft.logits(text), strict=True):
            same.append((a.argmax(-1) == b.argmax(-1)).float())
            overlap.append(torch.minimum(a.softmax(-1), b.softmax(-1)).sum(-1))
    return float(torch.cat(same).mean()), float(torch.cat(overlap).mean())


def acceptance(
    llm: LLM, draft: str | Path, prompts: list[list[int]], k: int, temperature: float
) -> tuple[float, float]:
    """Draft acceptance rate and acceptance length of this draft model. With k = 1 at T = 1 the rate is the
    coupled acceptance: how often both models' noisy choices agree."""
    llm.speculative_config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": k}
    stats = [
        output.metrics["speculative_decoding"]
        for prompt in prompts
        for output in llm.generate(prompt, max_tokens=96, temperature=temperature, seed=0)
    ]
    accepted, drafted, steps = (
        sum(s[key] for s in stats) for key in ("num_accepted_draft_tokens", "num_draft_tokens", "num_spec_steps")
    )
    return accepted / max(1, drafted), 1 + accepted / max(1, steps)


def report(targets: Row[str], drafts: Row[str], held: Corpus, farthest: int, books: int, progress: Progress) -> str:
    """All tables as Markdown: a column for each target; `drafts` belong to the targets, in their order.

    `farthest` bounds contexts, `books` how many of the held-out books are read for the loss by position.
    """
    llms = [LLM(name) for name in targets]
    readers = [Reader(llm) for llm in llms]
    names = [Path(name).name if Path(name).is_dir() else f"{name} (package)" for name in targets]
    done, total = 0, 4 * len(targets)

    def each(what: str) -> Iterator[int]:
        nonlocal done
        for i in range(len(targets)):
            progress(what, done, total)
            yield i
            done += 1

    losses = [held_out(readers[i], held) for i in each("held-out loss")]
    blocks = [
        "**Held-out loss**, nats per token.",
        markdown_table(["", *names], [[d, *(f"{l[d]:.3f}" for l in losses)] for d in held]),
    ]

    texts = [held["books"].document(i).tolist()[: farthest + 1] for i in range(books)]
    positions = [by_position(readers[i], texts) for i in each("loss by position")]
    rows = [[b, *(f"{a:.3f} / {n:.3f} ({a / n:.3f})" for a, n in (p[b] for p in positions))] for b in positions[0]]
    blocks += [
        f"**Loss by position** on {books} held-out books: given all of the book before / the same tokens given at most "
        f"{2 * NEAR} tokens (ratio). Above 1 the context harms.",
        markdown_table(["position", *names], rows),
    ]

    tasks = [Recall(held, llm.tokenizer, ("books", "stories")) for llm in llms]
    rows = [
        [name, str(d), f"{recall(readers[i], tasks[i], name, d):.2f}"]
        for i in each("recall") for name, most in TASKS.items() for d in DISTANCES if d <= min(most, farthest)
    ]  # fmt: skip
    rows = [
        [*rows[j][:2], *(row[2] for row in rows[j :: len(rows) // len(llms)])] for j in range(len(rows) // len(llms))
    ]
    blocks += [
        "**Recall**: share of the answer's tokens that are the greedy choice.",
        markdown_table(["task", "distance", *names], rows),
    ]

    stories = [held["stories"].document(i).tolist() for i in range(min(24, len(held["stories"].starts)))]
    rows = []
    for i in each("draft and target"):
        if i < len(drafts):
            draft = Reader(LLM(drafts[i]))
            prompts = [story[:32] for story in stories]
            llms[i].speculative_config = None
            own = [
                o.prompt_token_ids + o.token_ids
                for o in llms[i].generate(prompts, max_tokens=96, temperature=1, seed=0)
            ]
            values = [*agreement(readers[i], draft, stories), *agreement(readers[i], draft, own)]
            values += [acceptance(llms[i], drafts[i], prompts, 1, 1.0)[0]]
            values += [acceptance(llms[i], drafts[i], prompts, 4, t)[1] for t in (0.0, 1.0)]
            rows.append([names[i], *(f"{v:.3f}" for v in values)])
    head = ["target", "greedy match", "1 - TV", "match, own text", "1 - TV, own text", "coupled acceptance",
            "acceptance length k=4 T=0", "T=1"]  # fmt: skip
    blocks += [
        "**Draft and target** on held-out stories and on the target's own continuations of them (T = 1). Coupled "
        "acceptance: k = 1, T = 1; its bound is 1 - TV on own text.",
        markdown_table(head, rows),
    ]
    blocks += ["**Samples** of the last column (T = 0.7, seed 0; the questions greedily).", *samples(llms[-1])]
    progress("done", total, total)
    return "\n\n".join(blocks)


def samples(llm: LLM) -> Iterator[str]:
    """Continuations and answers, as Markdown quotations."""
    llm.speculative_config = None
    for kind, prompt in OPENINGS.items():
        yield f"{kind}:\n```text\n{prompt}|{llm.generate(prompt, max_tokens=100, temperature=0.7, seed=0)[0].text}\n```"
    for question in QUESTIONS:
        answer = llm.chat([{"role": "user", "content": question}], max_tokens=100, temperature=0)
        yield f"a question:\n```text\n{question}\n|{answer.text}\n```"


def write(page: Path, text: str) -> None:
    """Put the tables between the page's marks. Raises ConfigError if it has none."""
    old = page.read_text("utf-8") if page.is_file() else ""
    before, first, rest = old.partition(MARKS[0])
    _, last, after = rest.partition(MARKS[1])
    if not (first and last):
        raise ConfigError(f"{page} has no place for the tables: it must contain the lines {MARKS[0]} and {MARKS[1]}")
    write_text(page, f"{before}{first}\n\n{text}\n\n{last}{after}")


def _k(tokens: int) -> str:
    return f"{tokens // 1000 if tokens % 1024 else tokens // 1024}k"
