"""Clients of others, unchanged, against a server behind a real socket: what they read is what the engine gives."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from outrider import LLM

TALK: Any = [{"role": "user", "content": "Tell me of the sea."}]
PROMPT = "Once upon a time there was a little girl who"


@pytest.fixture
def spoken_to(live, tiny_llm: LLM) -> tuple[str, Any]:
    """The API's address, drafting by n-grams, and what it should say."""
    expected = tiny_llm.chat(TALK, max_tokens=12, seed=3)
    tiny_llm.speculative_config = {"method": "ngram", "num_speculative_tokens": 4}
    return live(api_keys=("key",)) + "/v1", expected


@pytest.mark.slow
def test_litellm(spoken_to, tiny_llm, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network for prices
    litellm = pytest.importorskip("litellm")
    url, expected = spoken_to
    for provider in ("openai", "hosted_vllm"):
        options: Any = {"model": f"{provider}/tiny", "api_base": url, "api_key": "key", "messages": TALK}
        options |= {"max_tokens": 12, "seed": 3, "num_retries": 0}
        answer = litellm.completion(**options)
        assert answer.choices[0].message.content == expected.text
        assert answer.usage.completion_tokens == len(expected.token_ids)
        chunks = list(litellm.completion(**options, stream=True, stream_options={"include_usage": True}))
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected.text
        assert answer.choices[0].finish_reason == expected.finish_reason
        with pytest.raises(litellm.BadRequestError, match="top_p"):
            litellm.completion(**options, top_p=7)
        with pytest.raises(litellm.AuthenticationError):
            litellm.completion(**{**options, "api_key": "other"})
    text = litellm.text_completion(
        model="text-completion-openai/tiny", api_base=url, api_key="key", prompt=PROMPT, max_tokens=8, temperature=0
    )
    assert text.choices[0].text == tiny_llm.generate(PROMPT, max_tokens=8, temperature=0)[0].text


@pytest.mark.slow
def test_langchain(spoken_to):
    langchain = pytest.importorskip("langchain_openai")
    url, expected = spoken_to
    model = langchain.ChatOpenAI(
        model="tiny", base_url=url, api_key="key", max_completion_tokens=12, seed=3, temperature=1, max_retries=0
    )
    said = model.invoke("Tell me of the sea.")
    assert said.content == expected.text and said.usage_metadata["output_tokens"] == len(expected.token_ids)
    chunks = list(model.stream("Tell me of the sea.", stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == expected.text
    assert sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks) == len(expected.token_ids)
    assert [each.content for each in model.batch(["Tell me of the sea."] * 3)] == [expected.text] * 3
    pytest.importorskip("llguidance")
    schema: Any = {"title": "answer", "type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}
    schema["additionalProperties"] = False
    patient = langchain.ChatOpenAI(model="tiny", base_url=url, api_key="key", max_completion_tokens=200, seed=1)
    found = patient.with_structured_output(schema, method="json_schema").invoke("Is it so?")
    assert isinstance(found["yes"], bool)


@pytest.mark.slow
def test_responses_of_openais_client(spoken_to):
    import openai

    url, expected = spoken_to
    client = openai.OpenAI(base_url=url, api_key="key", max_retries=0)
    asked: Any = {"model": "tiny", "input": "Tell me of the sea.", "max_output_tokens": 12, "extra_body": {"seed": 3}}
    assert client.responses.create(**asked).output_text == expected.text
    with client.responses.stream(**asked) as stream:
        events = list(stream)
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == expected.text
    assert events[0].type == "response.created" and events[-1].type == "response.incomplete"
    with client.chat.completions.stream(model="tiny", messages=TALK, max_tokens=12, seed=3) as chunks:
        assert "".join(e.delta for e in chunks if e.type == "content.delta") == expected.text


def test_the_clients_of_these_tests_are_not_the_packages():
    """A server runs where none of them is installed."""
    script = "import sys, outrider.serve.app; print([m for m in ('openai', 'httpx', 'litellm') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "[]"
