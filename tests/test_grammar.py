"""Structural tags: which texts each format takes, as a tokenizer writes them."""

import pytest

from outrider import grammar
from outrider.config import StructuredOutputsParams
from outrider.constraint import read
from outrider.errors import ConfigError

ANY = {"type": "any_text"}
ALL, WORD = {"type": "regex", "pattern": ".*"}, {"type": "regex", "pattern": "[a-z]+"}
NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
FLOAT = {"type": "json_schema", "json_schema": {"type": "number"}}
ENDS = "<|end|>"  # a token of its own in the vocabulary


def const(value: str) -> dict:
    return {"type": "const_string", "value": value}


def several(kind: str, *elements: dict) -> dict:
    return {"type": kind, "elements": [*elements]}


def tag(begin, content: dict, end) -> dict:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def of(kind: str, content: dict, **more) -> dict:
    return {"type": kind, "content": content, **more}


def token(which) -> dict:
    return {"type": "token", "token": which}


def gbnf(text: str) -> dict:
    return {"type": "grammar", "grammar": text}


A, B = tag("<f=a>", NUMBER, "</f>"), tag("<f=b>", {"type": "regex", "pattern": "x/y|z+"}, "</f>")
CALLS = {"type": "triggered_tags", "triggers": ["<f="], "tags": [A, B]}
LIST = {"type": "tags_with_separator", "tags": [A, B], "separator": ", "}
THOUGHT = tag("<think>", ANY, "</think>")
TAGS = {  # a format, what it takes, and what it does not
    "const": (const("Hello!"), ["Hello!"], ["Hello", "Hello!!", ""]),
    "json": (NUMBER, ["12", "-3"], ["x", ""]),
    "json, anything": ({"type": "json_schema", "json_schema": True}, ["[1]", "null"], ["nil"]),
    "regex": ({"type": "regex", "pattern": "a/b|[c]+"}, ["a/b", "cc"], ["ab"]),
    "regex, end": (tag("<a>", ALL, "</a>"), ["<a></a>", "<a>hi</a>", "<a>h</a></a>"], ["<a>hi", "<a>hi</a>x"]),
    "regex, ends": (tag("<a>", several("or", WORD, NUMBER), ["x", "ye"]), ["<a>bx", "<a>bye", "<a>1x"], ["<a>x"]),
    "regex, a token": (tag("<a>", WORD, ["1", ENDS]), ["<a>b1", "<a>b<|end|>"], ["<a>b"]),
    "regex, then": (several("sequence", WORD, const("x")), ["abx", "axbx"], ["x", "ab"]),
    "regex, then a tag": (several("sequence", WORD, tag("a", NUMBER, "")), ["ba5", "zza5"], ["a5", "ab"]),
    "regex, then more": (
        several("sequence", tag("<a>", ALL, "</a>"), WORD, const("e"), ALL), ["<a>hi</a>hell", "<a></a>hexe"], ["<a>"],
    ),
    "regex, then regex": (several("sequence", WORD, {"type": "regex", "pattern": "[0-9]+"}), ["ab12"], ["ab"]),
    "regex in tags": ({**CALLS, "tags": [tag("<f=", ALL, ">")]}, ["a<f=b> or <f=c>!", "<f=> d"], ["<f=b"]),
    "regex in a tag's tag": (tag("<a>", tag("", ALL, ")"), ";"), ["<a>b);"], ["<a>b)", "<a>b));"]),
    "maybe a regex": (tag("<a>", of("optional", ALL), "</a>"), ["<a>x</a>", "<a></a>"], ["<a>x", "<a>x</a>y"]),
    "maybe a regex, then": (several("sequence", of("optional", WORD), const("x")), ["abx", "x"], ["ab"]),
    "a regex further in, then": (
        several("sequence", several("sequence", const("q"), several("or", tag("<", ALL, ""), NUMBER)), const("x")),
        ["q<abx", "q7x"], ["q<ab", "q<axb"],
    ),
    "regex, then a sequence": (several("sequence", ALL, several("sequence", const("x"), NUMBER)), ["abx5"], ["ab5"]),
    "number, end": (tag("BEG", FLOAT, "END"), ["BEG12345END", "BEG-1.5e3END"], ["BEG1.END", "BEG1eEND", "BEG01END"]),
    "number, then": (several("sequence", FLOAT, const(". "), NUMBER, const("0")), ["1. 50", "2.5. 70"], ["1. 5", "1."]),
    "number, a token": (several("sequence", tag("<t>", FLOAT, ENDS), FLOAT), ["<t>1e+2<|end|>0.5"], ["<t>1<|end|>."]),
    "gbnf": (gbnf('root ::= "x" [0-9]+'), ["x12"], ["x"]),
    "gbnf, one in brackets": (gbnf('root ::= ([a-z]+)? (("x"{2} # )\n))* (d+ )* "."\nd ::= "1"'),
                              [".", "ab.", "xxxx.", "a11."], ["1a.", "x1x."]),
    "gbnf, start": (gbnf('root ::= start+ # start\nstart ::= "start" | [start]'), ["s", "starts"], [""]),
    "gbnf, names": (
        gbnf('root ::= a A b-c b_c dE d_e\na ::= "1"\nA ::= "2"\nb-c ::= "3"\nb_c ::= "4"\ndE ::= "5"\nd_e ::= "6"'),
        ["123456"], ["213456"],
    ),
    "gbnf, lines": (gbnf('root ::= "a"\n  | "b" # or\n  "c"'), ["a", "bc"], ["b", "ac"]),
    "gbnf, nothing": (gbnf('root ::= a "b" c\na ::=\nc ::= # nothing'), ["b"], ["", "bb"]),
    "gbnf, itself": (
        gbnf('root ::= a " " b " " c d\na ::= "x" a a | "y"\nb ::= ("z" b)? | "y"\nc ::= ws c | "."\nws ::= " "*\n'
             'd ::= "1" d | "2" d | "3" | "4"'),
        ["xyy zz  .123", "y  .4", "xxyyy y .2213"], ["xy z .3", "y  .", "y  .34"],
    ),
    "lark": ({"type": "grammar", "syntax": "lark", "grammar": 'start: "x" /[0-9]+/'}, ["x12"], ["x"]),
    "any": (ANY, ["", "what\never </think> it is"], []),
    "any but": ({**ANY, "excludes": ["bad", "evil"]}, ["ba d"], ["so bad it is", "evil"]),
    "sequence": (several("sequence", const("a:"), NUMBER, const(";")), ["a:12;"], ["a:;", "a:12"]),
    "or": (several("or", const("yes"), NUMBER), ["yes", "7"], ["yes7", ""]),
    "or any": (several("or", const("yes"), {**ANY, "excludes": ["no"]}), ["yes", "yesterday"], ["no"]),
    "optional": (of("optional", const("a")), ["", "a"], ["aa"]),
    "plus": (of("plus", const("ab")), ["ab", "abab"], ["", "aba"]),
    "star": (of("star", const("ab")), ["", "abab"], ["aba"]),
    "repeat": (of("repeat", const("ab"), min=2, max=3), ["abab", "ababab"], ["ab", "abababab"]),
    "repeat without bound": (of("repeat", const("ab"), min=2, max=-1), ["abab", "ab" * 7], ["ab"]),
    "tag": (THOUGHT, ["<think></think>", "<think>bla < / </thin </think>"], ["<think>bla", "<think>a</think>b"]),
    "tag, two ends": (tag("<t>", ANY, ["</t>", "!"]), ["<t>a!", "<t>a</t>"], ["<t>a!</t>"]),
    "tag without an end": (tag("<t>", ANY, ""), ["<t>", "<t>a</t>"], ["t"]),
    "thought, then": (several("sequence", of("optional", THOUGHT), NUMBER), ["<think>a</think>5", "5"], ["a5"]),
    "until": (several("sequence", ANY, const("END"), NUMBER), ["blaENEND7", "END7"], ["bla7", "blaENDx"]),
    "until, then more": (several("sequence", ANY, const("END"), ANY), ["aEND", "a END b END"], ["a EN"]),
    "until a tag": (several("sequence", ANY, A), ["bla<f=a>7</f>", "<f=a>7</f>"], ["bla<f=a>x</f>", "bla"]),
    "until, maybe": (several("sequence", of("optional", ANY), const("END")), ["END", "xEND"], ["x"]),
    "until, or": (several("sequence", several("or", ANY, NUMBER), tag("<a>", NUMBER, "")), ["q<a>5", "7<a>5"], ["7"]),
    "until, but": (several("sequence", {**ANY, "excludes": ["bad"]}, const("END")), ["goodEND"], ["badEND"]),
    "nested": (tag("<t>", several("sequence", A, ANY), "</t>"), ["<t><f=a>1</f>so</t>"], ["<t><f=a>1</f>so"]),
    "special": (several("sequence", ANY, tag("<|user|>", NUMBER, ENDS), const("!")), ["a<|user|>5<|end|>!"], ["a5!"]),
    "special end": (several("sequence", tag("<t>", ANY, ENDS + "\n"), NUMBER), ["<t>a<|end|>\n7"], ["<t>a<|end|>7"]),
    "lines, special end": (several("sequence", tag("<t>", ANY, "\n" + ENDS), NUMBER), ["<t>a\nb\n<|end|>7"], ["<t>a7"]),
    "tokens": (several("sequence", ANY, tag(token(3), ANY, token(ENDS)), token(4)), ["a<|user|>b<|end|><|assistant|>"],
               ["a<|user|>b<|end|>", "a<|user|>b<|assistant|>"]),
    "calls": (CALLS, ["", "none", "a<f=a>1</f>b<f=b>x/y</f> <f=a>2</f>"], ["a<f=c>1</f>", "a<f=a>x</f>", "<f=a>1"]),
    "calls, at least one": ({**CALLS, "at_least_one": True}, ["<f=a>1</f> and"], ["", "a<f=a>1</f>"]),
    "calls, one": ({**CALLS, "stop_after_first": True}, ["none", "a<f=b>zz</f>"], ["a<f=a>1</f>b"]),
    "calls, just one": ({**CALLS, "at_least_one": True, "stop_after_first": True}, ["<f=a>1</f>"], ["", "<f=a>1</f>b"]),
    "calls, but": ({**CALLS, "excludes": ["bad"]}, ["so<f=a>1</f>"], ["bad<f=a>1</f>", "bad"]),
    "calls in a tag": (tag("<t>", CALLS, "</t>"), ["<t></t>", "<t>a<f=a>1</f>b</t>"], ["<t>a<f=a>1</f>b"]),
    "calls by a token": ({**CALLS, "triggers": ["<|user"], "tags": [tag("<|user|>a", NUMBER, ENDS)]},
                         ["x<|user|>a1<|end|>y", "x"], ["x<|user|>1<|end|>"]),
    "list": (LIST, ["", "<f=a>1</f>", "<f=a>1</f>, <f=b>z</f>, <f=a>2</f>"], ["<f=a>1</f><f=b>z</f>", "<f=a>1</f>, "]),
    "list, at least one": ({**LIST, "at_least_one": True}, ["<f=a>1</f>, <f=b>z</f>"], [""]),
    "list, one": ({**LIST, "stop_after_first": True}, ["", "<f=a>1</f>"], ["<f=a>1</f>, <f=b>z</f>"]),
    "what XGrammar writes": (
        {**NUMBER, "style": "json", "any_order": False, "max_whitespace_cnt": None, "excludes": []}, ["1"], ["a"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TAGS)
def test_what_a_format_takes(tiny_llm, name):
    given, right, wrong = TAGS[name]
    matcher = read(StructuredOutputsParams(structural_tag={"format": given}), tiny_llm.tokenizer, 8192).matcher

    def taken(text: str) -> bool:
        mine, tokens = matcher.deep_copy(), tiny_llm.tokenizer(text, add_special_tokens=False)["input_ids"]
        return mine.validate_tokens(tokens) == len(tokens) and mine.consume_tokens(tokens) and mine.is_accepting()

    assert [text for text in right if not taken(text)] == []
    assert [text for text in wrong if taken(text)] == []


MANY = tag("<t>", several("or", *[WORD] * 300), [f"a{i}" for i in range(900)])
ENDINGS = tag("<t>", several("or", *[ANY] * 1500), [chr(19968 + i) for i in range(6000)])  # 9 million, if multiplied
WRONG = {
    "number": (5, "must be a format"), "no type": ({}, "has a type: any_text"), "type": ({"type": "xml"}, "not 'xml'"),
    "missing": ({"type": "tag"}, "lacks begin and content and end"), "no elements": (several("or"), "elements"),
    "unknown": ({**ANY, "max_tokens": 5}, "not 'max_tokens'"), "kind": (const(5), "must be a text, not 5"),
    "again": (of("star", ANY), "cannot come again"), "text, text": (several("sequence", ANY, ANY), "before any_text"),
    "style": ({**NUMBER, "style": "qwen_xml"}, "style must be json"), "token": (token("nope"), "no token of its own"),
    "syntax": ({"type": "grammar", "grammar": "x", "syntax": "abnf"}, "ebnf or lark"),
    "bounds": (of("repeat", const("a"), min=3, max=2), "at least min"), "begin": (tag(ANY, ANY, "x"), "not any_text"),
    "an end": ({**LIST, "tags": [tag("<t>", ANY, "")]}, "needs an end"),
    "ends": (tag("<x>", {**CALLS, "triggers": ["<"], "tags": [tag("<t>", ANY, [""])]}, "</x>"), "needs an end"),
    "an ordinary token": (tag(token(42), NUMBER, ""), "token: 42 is no token of its own"),
    "some end": (tag("<t>", NUMBER, ["</t>", ""]), 'must be "" or other texts, not both'),
    "product": (ENDINGS, "rules have more than"), "regexes": (MANY, "rules have more than"),
    "brackets": (tag("<t>", {"type": "regex", "pattern": "a)|(b"}, "x"), "unopened group"),
    "flag": (of("repeat", const("a"), min=True, max=2), "whole number"), "id": (token(10**9), "no token of its own"),
    "trigger": ({**CALLS, "triggers": ["x"]}, "no trigger begins '<f=a>'"), "lists": ({**CALLS, "tags": [5]}, "a list"),
    "no tags": ({**CALLS, "tags": [ANY]}, "of type tag"), "regex": ({"type": "regex", "pattern": "("}, "unclosed"),
    "nothing": ({"type": "json_schema", "json_schema": {"not": {}}}, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_formats_are_refused(tiny_llm, name):
    given, says = WRONG[name]
    with pytest.raises(ConfigError, match=r"structured_outputs: structural_tag cannot be used") as caught:
        read(StructuredOutputsParams(structural_tag={"format": given}), tiny_llm.tokenizer, 8192)
    assert says in str(caught.value)


def test_data_within_data_are_looked_at_once(monkeypatch):
    """A `const` in the data of another would else be read again for each that is around it."""
    seen, look = list[object](), grammar._writable
    monkeypatch.setattr(grammar, "_writable", lambda value, data: (data and seen.append(value)) or look(value, data))
    schema: dict[str, object] = {"enum": list(range(1000, 1100))}
    for _ in range(50):
        schema = {"const": schema}
    grammar._bounded(schema)
    assert sum(isinstance(value, int) for value in seen) == 100
