"""Text for a draft model to learn from: what its target says, in the target's own words.

A draft model is asked about the target's text, not about people's. So part of what it learns from is sampled from the
target at temperature 1, from beginnings of training documents (as in DistillSpec, arXiv 2310.08461). The loss is in
`reference`: the divergence from the target's whole distribution at every token.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from outrider.config import SamplingParams
from outrider.engine import Request
from outrider.llm import LLM
from outrider.load import Progress
from tools.data import Corpus, read_corpus, write_tokens

BATCH, LENGTH = 512, 256  # sequences that are sampled between two reports, and their tokens at most


def write_samples(
    teacher: str | Path, corpus: Corpus, folder: Path, tokens: int, device: str, progress: Progress | None = None
) -> Corpus:
    """Sample about `tokens` tokens from a model and write them as the domain `samples` of `folder`, unless it is there
    already."""
    if (folder / "samples.train.npy").is_file():
        return read_corpus(folder, "train")
    llm = LLM(teacher, device=device, max_num_seqs=64)
    rng, domains, documents = np.random.default_rng(0), list(corpus.values()), list[list[int]]()
    while (done := sum(map(len, documents))) < tokens:
        if progress:
            progress("sampling from the target", done, tokens)
        requests: list[Request] = []
        for _ in range(BATCH):
            length = int(rng.integers(8, 65))
            start = domains[int(rng.integers(len(domains)))].window(rng, length).tolist()
            params = SamplingParams(max_tokens=LENGTH - length, seed=len(documents) + len(requests))
            requests += llm.engine.add(start, params)
        for _ in llm.engine.run():
            pass
        documents += [request.seq.tokens for request in requests]
    write_tokens(folder, "samples", "train", documents)
    if progress:
        progress("sampling from the target", tokens, tokens)
    return read_corpus(folder, "train")
