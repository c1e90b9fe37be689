"""Text for a draft model to learn from: what its target says, in the target's own words.

A draft model is asked about the target's text, not about people's. So part of what it learns from is sampled from the
target at temperature 1, from beginnings of training documents (as in DistillSpec, arXiv 2310.08461). The loss is in
`reference`: the divergence from the target's whole distribution at every token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.load import Progress
from outrider.train.data import Corpus, read_corpus, write_tokens

BATCH, LENGTH = 512, 256  # sequences that are sampled together, and their tokens


def write_samples(teacher: Any, corpus: Corpus, folder: Path, tokens: int, progress: Progress | None = None) -> Corpus:
    """Sample about `tokens` tokens from a transformers model and write them as the domain `samples` of `folder`, unless
    it is there already."""
    if (folder / "samples.train.npy").is_file():
        return read_corpus(folder, "train")
    rng, domains, documents = np.random.default_rng(0), list(corpus.values()), list[list[int]]()
    torch.manual_seed(0)
    stops = np.atleast_1d(teacher.generation_config.eos_token_id)
    while (done := sum(map(len, documents))) < tokens:
        if progress:
            progress("sampling from the target", done, tokens)
        length = int(rng.integers(8, 65))
        starts = [domains[int(d)].window(rng, length) for d in rng.integers(len(domains), size=BATCH)]
        prompts = torch.from_numpy(np.stack(starts).astype(np.int64)).to(teacher.device)
        with torch.autocast(teacher.device.type, torch.bfloat16):
            sampled = teacher.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                top_k=0,
                max_new_tokens=LENGTH - length,
            )
        for row in sampled.cpu().numpy():
            ends = np.flatnonzero(np.isin(row[length:], stops))
            documents.append(row[: length + ends[0] + 1 if len(ends) else None].tolist())
    write_tokens(folder, "samples", "train", documents)
    if progress:
        progress("sampling from the target", tokens, tokens)
    return read_corpus(folder, "train")
