"""The server sends the page with its policy, and frames that the page can tint."""

from __future__ import annotations

import json

from starlette.testclient import TestClient

from outrider import LLM
from outrider.async_llm import AsyncLLM
from outrider.serve.app import create_app
from outrider.serve.page import page
from outrider.serve.settings import Settings


def test_the_page_and_the_frames_it_reads(tiny_llm: LLM) -> None:
    app = create_app(AsyncLLM(tiny_llm), Settings(("tiny",)))
    with TestClient(app) as client:
        answer, (body, headers) = client.get("/"), page()
        assert answer.status_code == 200 and answer.content == body
        assert answer.headers["content-security-policy"] == headers["Content-Security-Policy"]
        asked = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
        asked |= {"stream": True, "return_token_ids": True}
        lines = client.post("/v1/completions", json=asked).text.splitlines()
    choices = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    told = [choice for choice in choices if choice.get("token_ids")]
    assert sum(len(choice["token_ids"]) for choice in told) == 12
    assert all(len(c["token_texts"]) == len(c["drafted_by"]) == len(c["token_ids"]) for c in told)
    assert "".join(t for c in told for t in c["token_texts"]).strip() == "".join(c["text"] for c in choices).strip()
