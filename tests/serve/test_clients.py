"""Clients of others, unchanged, against a server behind a real socket: what they read is what the engine gives."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any, Literal

import openai
import pydantic
import pytest

from outrider import LLM
from outrider.serve.calls import HERMES
from tests.serve.test_tools_served import TEMPLATE

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


@pytest.fixture
def hermes_at(live, tiny_llm: LLM, monkeypatch) -> str:
    """The API's address; the chat template has tools."""
    pytest.importorskip("llguidance")
    monkeypatch.setattr(tiny_llm.tokenizer, "chat_template", TEMPLATE % vars(HERMES))
    return live() + "/v1"


class Sea(pydantic.BaseModel):
    """A sea."""

    deep: bool
    kind: Literal["salt", "sweet"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_instructor(hermes_at, mode):
    instructor = pytest.importorskip("instructor")
    client = instructor.from_openai(openai.OpenAI(base_url=hermes_at, api_key="x"), mode=instructor.Mode[mode])
    asked: Any = {"messages": TALK, "response_model": Sea, "max_tokens": 600, "max_retries": 0}
    assert isinstance(client.chat.completions.create(model="tiny", **asked), Sea)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai(hermes_at, kind):
    ai = pytest.importorskip("pydantic_ai")
    models, providers = (pytest.importorskip(f"pydantic_ai.{name}.openai") for name in ("models", "providers"))
    model = getattr(models, kind)("tiny", provider=providers.OpenAIProvider(base_url=hermes_at, api_key="x"))
    for output in (ai.NativeOutput(Sea), ai.ToolOutput(Sea)):
        agent = ai.Agent(model, output_type=output, model_settings={"max_tokens": 200})
        assert isinstance(agent.run_sync("Tell me of the sea.").output, Sea)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_openais_agents(hermes_at, kind):
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    heard: list[str] = []

    @agents.function_tool
    def listen(to: Literal["wind", "waves"]) -> str:
        heard.append(to)
        return "a roar"

    async def talk() -> Any:
        model = getattr(agents, kind)(model="tiny", openai_client=openai.AsyncOpenAI(base_url=hermes_at, api_key="x"))
        settings = agents.ModelSettings(max_tokens=60, tool_choice="listen", extra_body={"seed": 1, "stop": ["."]})
        agent = agents.Agent(name="a", model=model, tools=[listen], model_settings=settings)
        run = agents.Runner.run_streamed(agent, "Tell me of the sea.", max_turns=3)
        async for _ in run.stream_events():
            pass
        return run.final_output

    assert isinstance(asyncio.run(talk()), str) and heard and set(heard) <= {"wind", "waves"}


@pytest.mark.slow
def test_llama_index(spoken_to):
    like = pytest.importorskip("llama_index.llms.openai_like").OpenAILike
    url, expected = spoken_to
    given: Any = {"api_base": url, "api_key": "key", "max_tokens": 12, "context_window": 2048, "temperature": 1}
    model = like(model="tiny", is_chat_model=True, additional_kwargs={"seed": 3}, max_retries=0, **given)
    assert model.complete("Tell me of the sea.").text == expected.text
    assert [*model.stream_complete("Tell me of the sea.")][-1].text == expected.text


def test_the_clients_of_these_tests_are_not_the_packages():
    """A server runs where none of them is installed."""
    script = "import sys, outrider.serve.app; print([m for m in ('openai', 'httpx', 'litellm') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "[]"
