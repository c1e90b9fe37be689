"""The soak: it sees wrong tokens, growing memory and what is left, and finds none of these in our server."""

from __future__ import annotations

import pytest

from outrider import LLM
from tools import soak


@pytest.mark.slow
def test_a_short_soak():
    pytest.importorskip("llguidance")
    report = soak.soak("tiny", "ngram", minutes=0.1, users=4, requests=8)
    assert not report.faults and report.counts["answered"] > 3 and report.memory
    assert "answered" in str(report)


def test_what_it_finds_wrong(tiny_llm: LLM):
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "seed": 1, "logprobs": 0, "return_token_ids": True}
    (output,) = soak.alone(tiny_llm, body)
    right = {name: getattr(output, name) for name in ("token_ids", "text", "finish_reason", "stop_reason")}
    right["logprobs"] = {"token_logprobs": [each.logprob for each in output.logprobs]}
    assert soak.difference([output], [right]) is None
    for wrong in ({"text": "x"}, {"token_ids": [1]}, {"finish_reason": None}, {"logprobs": {"token_logprobs": [0.0]}}):
        assert soak.difference([output], [right | wrong])
    assert soak.difference([output], [right, right])


def test_what_it_says_of_memory():
    steady = soak.Report(seconds=600, memory=[(float(at), 100 + at % 2) for at in range(600)])
    grows = soak.Report(seconds=600, memory=[(float(at), 1000 + at) for at in range(600)])
    fills = soak.Report(seconds=600, memory=[(float(at), min(1100, 1000 + at)) for at in range(600)])
    assert not steady.faults and not fills.faults and "memory grew" in grows.faults[0]
    assert soak.Report(left={"vllm:kv_cache_usage_perc": 0.25}).faults and not soak.Report(left={"x": 0.0}).faults


def test_what_a_server_holds():
    text = '# TYPE x gauge\nvllm:num_requests_running{engine="0"} 2.0\nvllm:num_preemptions_total{engine="0"} 5.0\n'
    assert soak._held(text) == {"vllm:num_requests_running": 2.0}
