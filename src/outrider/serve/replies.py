"""What the server answers, as JSON Schema, for /openapi.json; the tests hold every answer against it."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
REF = "#/components/schemas/"

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
COUNT: Schema = {"type": "integer", "minimum": 0}
INTEGER: Schema = {"type": "integer"}
TRUTH: Schema = {"type": "boolean"}
ANY: Schema = {}


def _object(fields: Schema, **optional: Schema) -> Schema:
    """An object of these fields, and of `optional` ones that may be missing."""
    return {
        "type": "object",
        "properties": {**fields, **optional},
        "required": [*fields],
        "additionalProperties": False,
    }


def _list(of: Schema) -> Schema:
    return {"type": "array", "items": of}


def _map(to: Schema) -> Schema:
    return {"type": "object", "additionalProperties": to}


def _maybe(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _one(*values: Any) -> Schema:
    return {"enum": [*values]}


def _ref(name: str) -> Schema:
    return {"$ref": REF + name}


IDS = _list(COUNT)
REASON = _one("stop", "length", "tool_calls")
END = {"finish_reason": REASON, "stop_reason": _maybe({"type": ["string", "integer"]})}
TOKENS = {"token_ids": _maybe(IDS)}
EXTRAS = {"drafted_by": _list(_maybe(TEXT)), "token_texts": _list(TEXT)}  # with return_token_ids
RANKED = _object({"logprob": NUMBER, "rank": _maybe(COUNT), "decoded_token": TEXT})
OF_PROMPT = {"prompt_logprobs": _maybe(_list(_maybe(_map(RANKED)))), "prompt_token_ids": _maybe(IDS)}
SPELT = {"token": TEXT, "logprob": NUMBER, "bytes": _list(COUNT)}
LOGPROB = _object({**SPELT, "top_logprobs": _list(_object(SPELT))})
REFUSAL = {"refusal": {"type": "null"}}  # OpenAI's types have it in each message, and in its log-probabilities
HEAD = {"id": TEXT, "created": INTEGER, "model": TEXT, "system_fingerprint": TEXT, "usage": _ref("Usage")}
CALL = _object({"id": TEXT, "type": _one("function"), "function": _object({"name": TEXT, "arguments": TEXT})})

SPECULATION = {
    "mean_acceptance_length": NUMBER, "draft_acceptance_rate": NUMBER, "acceptance_histogram": IDS,
    "acceptance_histogram_by_draft_length": _map(IDS), "num_spec_steps": COUNT, "num_accepted_draft_tokens": COUNT,
    "num_draft_tokens": COUNT, "num_spec_tokens": COUNT, "per_step_accepted": IDS, "per_step_drafted": IDS,
}  # fmt: skip

ITEM = {"id": TEXT, "status": _one("completed", "incomplete")}
PART = _object({"type": _one("output_text"), "text": TEXT, "annotations": _list(ANY), "logprobs": _list(LOGPROB)})
MESSAGE = _object({**ITEM, "type": _one("message"), "role": _one("assistant"), "content": _list(PART)})
FUNCTION_CALL = _object({**ITEM, "type": _one("function_call"), "call_id": TEXT, "name": TEXT, "arguments": TEXT})

REASONING = _object({
    **ITEM, "type": _one("reasoning"), "summary": _list(ANY),
    "content": _list(_object({"type": _one("reasoning_text"), "text": TEXT})),
})  # fmt: skip

REPLIES: dict[str, Schema] = {
    "Refusal": _object({"error": _object({"message": TEXT, "type": TEXT, "param": _maybe(TEXT), "code": INTEGER})}),
    "Usage": _object(
        {
            "prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT,
            "prompt_tokens_details": _object({"cached_tokens": COUNT}),
        },
        completion_tokens_details=_object(
            {}, accepted_prediction_tokens=COUNT, rejected_prediction_tokens=COUNT, reasoning_tokens=COUNT
        ),
    ),
    "Speculation": _object(SPECULATION, inner=_ref("Speculation")),
    "Metrics": _object({
        "speculative_decoding": _ref("Speculation"), "queue_time_ms": NUMBER, "time_to_first_token_ms": NUMBER,
        "generation_time_ms": NUMBER, "tokens_per_second": NUMBER, "method": TEXT,
        "exactness": _one("bitwise", "law", "lossy"), "acceptance_method": TEXT, "drafter_error": _maybe(TEXT),
        "seed": INTEGER,
    }, mean_itl_ms=NUMBER),
    "CompletionReply": _object(
        {
            **HEAD, "object": _one("text_completion"),
            "choices": _list(_object(
                {
                    "index": COUNT, "text": TEXT, **END, **TOKENS, **OF_PROMPT,
                    "logprobs": _maybe(_object({
                        "tokens": _list(TEXT), "token_logprobs": _list(_maybe(NUMBER)), "text_offset": IDS,
                        "top_logprobs": _list(_maybe(_map(NUMBER))),
                    })),
                },
                **EXTRAS,
            )),
        },
        metrics=_ref("Metrics"),
    ),
    "ChatReply": _object(
        {
            **HEAD, "object": _one("chat.completion"), **OF_PROMPT,
            "choices": _list(_object(
                {
                    "index": COUNT, **END, **TOKENS,
                    "logprobs": _maybe(_object({"content": _list(LOGPROB), **REFUSAL})),
                    "message": _object(
                        {"role": _one("assistant"), "content": _maybe(TEXT), **REFUSAL},
                        reasoning=TEXT, tool_calls=_list(CALL),
                    ),
                },
                **EXTRAS,
            )),
        },
        metrics=_ref("Metrics"),
    ),
    "ResponsesReply": _object(
        {
            "id": TEXT, "object": _one("response"), "created_at": INTEGER, "completed_at": _maybe(INTEGER),
            "status": ITEM["status"], "model": TEXT, "background": _one(False), "service_tier": _one("default"),
            "user": _maybe(TEXT), "safety_identifier": _maybe(TEXT), "prompt_cache_key": _maybe(TEXT),
            "reasoning": _object({"effort": _maybe(TEXT), "summary": {"type": "null"}}),
            "max_tool_calls": {"type": "null"}, "presence_penalty": NUMBER, "frequency_penalty": NUMBER,
            "output": _list({"anyOf": [MESSAGE, FUNCTION_CALL, REASONING]}), "error": {"type": "null"},
            "incomplete_details": _maybe(_object({"reason": _one("max_output_tokens")})), "instructions": _maybe(TEXT),
            "max_output_tokens": _maybe(COUNT), "metadata": _map(ANY), "parallel_tool_calls": TRUTH,
            "previous_response_id": {"type": "null"}, "store": _one(False), "temperature": NUMBER, "top_p": NUMBER,
            "text": _object({"format": _map(ANY)}), "tool_choice": ANY, "tools": _list(_map(ANY)),
            "top_logprobs": COUNT, "truncation": _one("disabled"),
            "usage": _object({
                "input_tokens": COUNT, "output_tokens": COUNT, "total_tokens": COUNT,
                "input_tokens_details": _object({"cached_tokens": COUNT, "cache_write_tokens": COUNT}),
                "output_tokens_details": _object({"reasoning_tokens": COUNT}),
            }),
        },
        metrics=_ref("Metrics"),
    ),
    "MessagesRefusal": _object({
        "type": _one("error"),
        "error": _object(
            {"type": TEXT, "message": TEXT}, details=_object({"error_code": TEXT, "unsupported": _list(TEXT)})
        ),
    }),
    "MessagesReply": _object(
        {
            "id": TEXT, "type": _one("message"), "role": _one("assistant"), "model": TEXT,
            "content": _list({"anyOf": [
                _object({"type": _one("text"), "text": TEXT}),
                _object({"type": _one("thinking"), "thinking": TEXT, "signature": TEXT}),
                _object({"type": _one("tool_use"), "id": TEXT, "name": TEXT, "input": _map(ANY)}),
            ]}),
            "stop_reason": _one("end_turn", "max_tokens", "stop_sequence", "tool_use"), "stop_sequence": _maybe(TEXT),
            "usage": _object({
                "input_tokens": COUNT, "cache_read_input_tokens": COUNT, "cache_creation_input_tokens": _one(0),
                "output_tokens": COUNT,
            }),
        },
        metrics=_ref("Metrics"),
    ),
    "Counted": _object({"input_tokens": COUNT}),
    "Model": _object({
        "id": TEXT, "object": _one("model"), "created": INTEGER, "owned_by": TEXT, "root": TEXT,
        "parent": {"type": "null"}, "max_model_len": COUNT,
    }),
    "Models": _object({"object": _one("list"), "data": _list(_ref("Model"))}),
    "Tokenized": _object({
        "count": COUNT, "max_model_len": COUNT, "tokens": IDS, "token_strs": _maybe(_list(TEXT)),
    }),
    "Detokenized": _object({"prompt": TEXT}),
    "TokenizerInfo": {
        "type": "object", "properties": {"tokenizer_class": TEXT, "chat_template": _maybe(TEXT)},
        "required": ["tokenizer_class", "chat_template"],
    },
    "Version": _object({"version": TEXT}),
}  # fmt: skip
