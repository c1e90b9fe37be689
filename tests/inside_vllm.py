"""What test_vllm.py runs in vLLM's environment: `python inside_vllm.py JOB METHOD RESULT`.

A job has a `model`, `prompts` (token ids) by suite, `tokens` to write, and `methods`: None for plain decoding, else the
keys of a speculative_config and, as `proposer`, what OUTRIDER_VLLM says. The result has by suite the tokens, the drafts
and accepted tokens as vLLM counts them, and seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

COUNTED = {"vllm:spec_decode_num_drafts": "drafts", "vllm:spec_decode_num_accepted_tokens": "accepted"}


def main() -> None:
    job, result = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[3])
    config = dict(job["methods"][sys.argv[2]] or {})
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OUTRIDER_VLLM": config.pop("proposer", "auto")}
    import vllm

    llm = vllm.LLM(
        job["model"], dtype="float32", max_model_len=768, max_num_seqs=4, enforce_eager=True, skip_tokenizer_init=True,
        speculative_config=config or None, disable_log_stats=False, enable_prefix_caching=False,
    )  # fmt: skip
    params = vllm.SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True, detokenize=False)
    found, before = dict[str, Any](), dict.fromkeys(COUNTED.values(), 0)
    for suite, prompts in job["prompts"].items():
        began = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - began
        counts = {COUNTED[own.name]: own.value for own in llm.get_metrics() if own.name in COUNTED}
        found[suite] = {"tokens": [list(output.outputs[0].token_ids) for output in outputs], "seconds": seconds}
        found[suite] |= {name: counts.get(name, 0) - before[name] for name in before}
        before |= counts
    result.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
