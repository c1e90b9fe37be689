"""What a test of several ranks runs in each of them: `python ranks.py CASES RESULTS`; see test_parallel.py."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from outrider import LLM, SamplingParams
from outrider.engine import Engine
from outrider.errors import OutriderError
from outrider.sequence import Sequence


def run_case(case: dict[str, Any], **ranks: Any) -> dict[str, Any]:
    """All of a case's methods one after the other, each with all of its requests at once."""
    llm, found = LLM(case["model"], device="cpu", **case.get("options", {}), **ranks), dict[str, Any]()
    for name, config in case["methods"].items():
        llm.speculative_config = config
        engine: Engine = llm.engine
        requests = [request for ids, params in case["requests"] for request in engine.add(ids, _sampling(params), k=4)]
        engine.finish(requests)
        found[name] = [request.seq.output for request in requests]
        assert not any(request.drafter_error for request in requests), requests[0].drafter_error
    about = {"exactness": llm.exactness, "preemptions": llm.engine.preemptions, "parallelism": llm.parallelism}
    seq = Sequence(case["requests"][0][0], SamplingParams(), 0)
    about["bits"] = hashlib.sha256(llm.runner.extend([seq]).flat.numpy().tobytes()).hexdigest()
    llm.runner.free(seq)
    about["weights"] = sum(linear.nbytes for layer in llm.runner.model.layers for linear in layer.linears)
    return {"tokens": found, "leaked": llm.engine.leaked, **about}


def _sampling(params: dict[str, Any]) -> SamplingParams:
    """JSON's keys are text."""
    bias = params["logit_bias"] and {int(token): by for token, by in params["logit_bias"].items()}
    return SamplingParams(**{**params, "logit_bias": bias})


def traffic(case: dict[str, Any], mode: str) -> list[Any]:
    """Collectives and bytes of one forward of five rows, of which all logits are asked for, and what was predicted."""
    from outrider.bench.ranks import counted
    from outrider.plan import traffic as predicted

    llm = LLM(case["model"], device="cpu", tensor_parallel_mode=mode, **case.get("options", {}))
    model = llm.runner.model
    return [counted(llm, 5), predicted(model.cut.whole, model.group.size, mode, 5, 5, model.dtype.itemsize)]


def main() -> None:
    torch.set_num_threads(1)
    cases, results = json.loads(Path(sys.argv[1]).read_text()), dict[str, Any]()
    for name, case in cases.items():
        try:
            modes = case.pop("modes", ["gather"])
            results[name] = {mode: run_case(case, tensor_parallel_mode=mode) for mode in modes}
            if case.get("traffic"):
                results[name]["traffic"] = {mode: traffic(case, mode) for mode in modes}
        except OutriderError as error:
            results[name] = {"error": f"{type(error).__name__}: {error}"}
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
