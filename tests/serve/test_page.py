"""The chat page in Chromium, against a small server with our dialect. Slow, and skipped without a browser."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from fake_openai import CUT, Fake

from outrider.serve.page import page as served

HOSTILE = """Look: <img src=x onerror="window.hit = 1"> <script>window.hit = 2</script>

<details open ontoggle="window.hit = 3">raw</details>

[click me](javascript:window.hit=4) and [data](data:text/html,<script>1</script>) and [good](https://example.org/a?b=c)

![spy](https://evil.example/leak.png "t") <svg onload="window.hit=5"> <a href="javascript:window.hit=6">raw</a>

| a | b |
|---|---|
| <b onclick=window.hit=7>x</b> | `<i>` |

```html"><img src=x onerror=window.hit=8>
<img src=x onerror="window.hit = 9">
```
"""
ODD = (
    "&lt;b> &amp; [a](https://example.org/abc%20c?abc=abc&abc) abc &copy; ☑ 5 < 6 **so** ~~it~~ ends <here> `&lt;` now"
)
ENTITIES = "if a &lt; b then c is less <br> so it ends under &gt; <p> here"
COMPOSING = (
    "new KeyboardEvent('keydown', { key: 'Escape', isComposing: true, bubbles: true })"  # it is the input method's
)
COMPOSED = "new KeyboardEvent('keydown', { key: 'Enter', keyCode: 229, bubbles: true })"  # the same, from Safari
LISTS = "1. one\n\n```\ncode\n```\n\n2. two\n\n| what | price |\n| --- | ---: |\n| a pear | 12 |"
RAW = "Here:\n\n<config>\n  <name>a</name>\n  <!-- b -->\n</config>\n\nThe <b>end</b>."
CODE = "# Title\n\nSome **bold** text & `inline`.\n\n- one\n- two\n\n```python\nprint(1 < 2)\n```\n\nThe end."


def test_the_page_needs_nothing_from_elsewhere():
    """No address but the server's own, and a policy that lets nothing else run."""
    body, headers = served()
    html = body.decode()
    own = html.split("<script>")
    assert len(own) == 4 and "marked v" in own[2] and "DOMPurify 3" in own[3]
    assert not re.findall(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", html)
    assert not re.findall(r"""\bon(?:click|load|error)\s*=\s*["']""", own[0])
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    assert policy["script-src"].count("sha256-") == 3 and "unsafe" not in headers["Content-Security-Policy"]


def test_every_text_can_be_read():
    """WCAG's least contrast of small text, 4.5, for each colour of text on each ground, light and dark."""

    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    themes = re.findall(r":root(?:\[data-theme=dark\])? {(.*?)\n}", served()[0].decode(), re.DOTALL)
    assert len(themes) == 2
    for theme in themes:
        colours = {name: light(colour) for name, colour in re.findall(r"--([\w-]+): (#\w{6});", theme)}
        for text in ("ink", "soft", "faint", "accent", "bad", "good"):
            for ground in ("paper", "side", "card", "code"):
                low, high = sorted((colours[text], colours[ground]))
                assert (high + 0.05) / (low + 0.05) >= 4.5, (text, ground)


@pytest.mark.skipif(not shutil.which("node"), reason="needs node")
def test_a_key_of_any_letters_is_sent_as_the_server_reads_it():
    """A header that holds other than bytes is refused by the browser, as if no server were there."""
    script = served()[0].decode().split("<script>")[1].partition(f"// {64 * '-'} answers")[0]
    code = f"""
        globalThis.localStorage = {{ getItem: () => null }};
        globalThis.fetch = async (address, options) => {{
          console.log(Buffer.from(new Headers(options.headers).get("authorization"), "latin1").toString("utf8"));
          return {{ ok: true }};
        }};
        const key = "s\u00e9cond-\u043a\u043b\u044e\u0447";
        new Function("key", {json.dumps(script)} + "; settings.key = key; return call('v1/models');")(key)
          .catch((error) => console.log(error.message));
    """
    found = subprocess.run(["node", "-e", code], capture_output=True, text=True, encoding="utf-8", timeout=60)
    assert found.stdout == "Bearer s\u00e9cond-\u043a\u043b\u044e\u0447\n", found.stderr


@pytest.mark.skipif(not shutil.which("node"), reason="needs node")
def test_reasoning_is_taken_apart_from_the_answer():
    script = served()[0].decode().split("<script>")[1].partition(f"// {64 * '-'} answers")[0]
    frames = [
        {"delta": {"role": "assistant", "content": ""}},
        {"delta": {"reasoning": "Hm"}, "token_ids": [1], "token_texts": ["Hm"], "drafted_by": [None]},
        {"delta": {"reasoning": "."}, "token_ids": [2, 3], "token_texts": [".", "</think>"], "drafted_by": ["a", "a"]},
        {"delta": {"content": "Hello"}, "token_ids": [4], "token_texts": ["Hello"], "drafted_by": ["a"]},
    ]
    code = f"""
        globalThis.localStorage = {{ getItem: () => null }};
        const answer = {{ content: "", reasoning: "", runs: [], ids: [], by: {{}}, tokens: 0, own: 0 }};
        new Function("answer", "frames", {json.dumps(script)} + "; for (const each of frames) take(answer, each);")(
          answer, {json.dumps(frames)});
        console.log(JSON.stringify(answer));
    """
    found = subprocess.run(["node", "-e", code], capture_output=True, text=True, encoding="utf-8", timeout=60)
    answer = json.loads(found.stdout)
    assert (answer["reasoning"], answer["content"], answer["ids"]) == ("Hm.", "Hello", [1, 2, 3, 4]), found.stderr
    assert answer["runs"] == [[5, "a"]] and answer["tokens"] == 4


# ---------------------------------------------------------------- a server that answers by what it is asked


def words(body: dict[str, Any]) -> str:
    """The answer: a function of the request and the seed, never of speculation."""
    asked = body["messages"][-1]["content"]
    if asked == "hostile":
        return HOSTILE
    if asked in (others := {"code": CODE, "odd": ODD, "entities": ENTITIES, "raw": RAW, "lists": LISTS}):
        return others[asked]
    law = random.Random(f"{body['messages']}{body.get('seed')}")
    count = {"long": 400}.get(asked, 30)
    return " ".join([f"Answer to {asked}:", *(law.choice(["river", "stone", "lamp", "cloud"]) for _ in range(count))])


def script(body: dict[str, Any]) -> Iterator[Any]:
    asked = body["messages"][-1]["content"]
    if asked == "refuse":
        yield 400
        yield {"error": {"message": "max_tokens is 9999, and must be at most 4096", "type": "invalid_request_error"}}
        return
    if asked == "silence":
        for _ in range(100):
            yield b": keep-alive\n\n"
            yield 0.05
    if asked == "moved" and body["model"] == "fake":
        yield 404
        yield {"error": {"message": "the model 'fake' does not exist", "type": "invalid_request_error"}}
        return
    pieces = re.findall(r"\s*\S+|\s+", words(body))
    plain = (body.get("speculative_config") or {}).get("method") == "none"
    if plain and asked == "unfaithful":
        pieces[-3] = " ghost"
    yield b": keep-alive\n\n"
    yield {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    if asked in ("think", "rethink"):
        for piece in ("Let me see:\n", "gas." if plain and asked == "rethink" else "<b>water</b>."):
            choice = {"index": 0, "delta": {"reasoning": piece}, "token_ids": [1], "token_texts": [piece]}
            yield {"choices": [{**choice, "drafted_by": [None], "finish_reason": None}]}
    for at in range(0, len(pieces), step := 1 if plain else 3):
        texts = pieces[at : at + step]
        by = ["ngram" if at % 2 else "suffix"] * (len(texts) - 1) + [None]
        last = at + step >= len(pieces)
        ids = [hash(t) % 1000 + (plain and asked == "recut") for t in texts]
        choice = {
            "index": 0, "delta": {"content": "".join(texts)}, "token_ids": ids,
            "token_texts": texts, "drafted_by": by, "finish_reason": "stop" if last else None,
        }  # fmt: skip
        yield {"choices": [choice]}
        if asked == "break" and at > 10:
            yield 0.3  # a browser drops what it has not read when the connection breaks
            yield CUT
        if asked == "fail" and at > 10:
            yield {"error": {"message": "memory ran out", "type": "server_error"}}
            break
        if asked == "long":
            yield 0.02
    forwards = -(-len(pieces) // step)
    spec = {"mean_acceptance_length": len(pieces) / forwards, "num_draft_tokens": 0 if plain else 3 * forwards,
            "draft_acceptance_rate": 0.0 if plain else 0.6}  # fmt: skip
    usage = {"prompt_tokens": 5, "completion_tokens": len(pieces)}
    yield {"choices": [], "usage": usage, "metrics": {"speculative_decoding": spec}}
    yield "[DONE]"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="the page's tests need playwright: pip install playwright")
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("the page's tests need a browser: install chromium, or name one in CHROMIUM")
    with api.sync_playwright() as play:
        found = play.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()


@pytest.fixture
def server() -> Iterator[Fake]:
    with Fake(script, {"/": served()}) as fake:
        yield fake


@pytest.fixture
def tab(browser, server) -> Iterator[Any]:
    """The page, open; whatever it throws or logs as an error fails the test."""
    context = browser.new_context(viewport={"width": 1200, "height": 850}, color_scheme="light")
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    context.set_default_timeout(15_000)
    opened = context.new_page()
    thrown: list[str] = []
    opened.on("pageerror", lambda error: thrown.append(str(error)))
    opened.goto(server.url + "/")
    until(opened, "document.querySelector('#model').textContent.startsWith('fake')")
    yield opened
    assert not thrown
    context.close()


def until(tab: Any, condition: str) -> None:
    """Wait for it. (Playwright's own way evaluates a string within the page, which the policy forbids.)"""
    for _ in range(300):
        if tab.evaluate(condition):
            return
        tab.wait_for_timeout(50)
    raise AssertionError(f"in 15 s it never came true that {condition}")


def ask(tab: Any, text: str, wait: bool = True) -> None:
    tab.fill("#say", text)
    tab.keyboard.press("Enter")
    if wait:
        done(tab)


def done(tab: Any) -> None:
    tab.wait_for_selector("#send:not([hidden])")


def last(tab: Any) -> str:
    return tab.locator("article.assistant .text").last.inner_text()


def stats(tab: Any) -> str:
    return tab.locator("article.assistant .stats").last.inner_text()


def tints(tab: Any, colour: int) -> list[str]:
    """The texts that have it."""
    text = "r.startContainer.data.slice(r.startOffset, r.endOffset)"
    found: list[str] = tab.evaluate(f"[...CSS.highlights.get('d{colour}')].map(r => {text})")
    return found


@pytest.mark.slow
def test_an_answer_streams_and_is_tinted(tab, server):
    ask(tab, "long", wait=False)
    until(tab, "(document.querySelector('article.assistant .text')?.innerText.length ?? 0) > 60")
    assert tab.locator("#stop").is_visible() and not tab.locator("#send").is_visible()
    assert tab.get_by_role("article", name="Your message").count() == 1  # a screen reader says whose it is
    assert tab.get_by_role("article", name="Answer").get_attribute("aria-busy") == "true"
    assert tab.locator("#bar").is_visible() and "tokens per forward" in tab.locator("#bar").inner_text()
    early = last(tab)
    done(tab)
    assert last(tab).startswith(early[:60]) and last(tab) == words(server.bodies[-1])
    assert "2.99 per forward" in stats(tab) and "60 % of drafts kept" in stats(tab)
    legend = tab.locator("#legend").inner_text()
    assert "suffix" in legend and "ngram" in legend and "the model alone" in legend
    tinted = [tints(tab, i) for i in (0, 1)]
    pieces = re.findall(r"\s*\S+", words(server.bodies[-1]))
    assert tinted[0][0].split() == "".join(pieces[:2]).split()
    assert sum(len(t.split()) for kind in tinted for t in kind) == sum(1 for i in range(len(pieces) - 1) if i % 3 < 2)
    tab.uncheck("#legend input")
    assert tab.evaluate("CSS.highlights.get('d0').size + CSS.highlights.get('d1').size") == 0


@pytest.mark.slow
def test_tints_lie_right_over_markdown(tab):
    """A tint covers the very words that the drafter guessed, whatever the marks between them."""
    ask(tab, "code")
    covered = " ".join(tints(tab, 0) + tints(tab, 1))
    pieces = re.findall(r"\s*\S+", CODE)
    guessed = "".join(re.sub(r"[#*`\s-]|python", "", p) for i, p in enumerate(pieces) if i % 3 < 2)
    assert sorted(re.sub(r"\s", "", covered)) == sorted(guessed)
    assert "bold" in covered and "Some" not in covered
    tab.locator("#new").click()
    ask(tab, "odd")  # what is rendered is not always in the source
    covered = " ".join(tints(tab, 0) + tints(tab, 1)).split()
    assert {"&", "abc", "5", "<", "so", "it", "<here>"} <= set(covered) and not {"6", "ends", "now"} & set(covered)
    tab.locator("#new").click()
    ask(tab, "entities")
    assert sorted(" ".join(tints(tab, 0) + tints(tab, 1)).split()) == [
        ">",
        "a",
        "b",
        "if",
        "is",
        "it",
        "less",
        "so",
        "then",
        "under",
    ]


@pytest.mark.slow
def test_stop_keeps_what_came_and_tells_the_server(tab, server):
    ask(tab, "long", wait=False)
    until(tab, "(document.querySelector('article.assistant .text')?.innerText.length ?? 0) > 60")
    tab.evaluate(f"document.querySelector('#say').dispatchEvent({COMPOSING})")
    assert tab.locator("#stop").is_visible()
    tab.keyboard.press("Escape")
    done(tab)
    assert "stopped" in stats(tab) and len(last(tab)) < len(words(server.bodies[-1]))
    tab.uncheck("#speculate")
    assert tab.locator("#again").is_hidden()  # the whole answer would be another
    for _ in range(100):
        if server.gone:
            break
        tab.wait_for_timeout(50)
    assert server.gone == 1


@pytest.mark.slow
def test_what_is_composed_is_not_sent(tab, server):
    tab.fill("#say", "composed")
    tab.evaluate(f"document.querySelector('#say').dispatchEvent({COMPOSED})")
    assert tab.locator("article").count() == 0 and tab.locator("#say").input_value() == "composed"
    tab.keyboard.press("Enter")
    done(tab)
    tab.get_by_role("button", name="Edit").click()
    tab.evaluate(f"document.querySelector('#edit').dispatchEvent({COMPOSED})")
    assert tab.locator("#edit").is_visible() and len(server.bodies) == 1


@pytest.mark.slow
def test_who_scrolls_up_is_left_there(tab):
    ask(tab, "long", wait=False)
    until(tab, "$('scroll').scrollTop > 60")
    place = tab.evaluate("$('scroll').scrollTop -= 30")
    long = tab.evaluate("$('scroll').scrollHeight")
    until(tab, f"$('scroll').scrollHeight > {long}")
    assert tab.evaluate("$('scroll').scrollTop") == place and tab.locator("#down").is_visible()
    tab.click("#down")
    done(tab)
    assert tab.locator("#down").is_hidden() and tab.evaluate("$('scroll').scrollTop") > place


@pytest.mark.slow
def test_an_answer_that_is_stopped_before_it_comes_is_no_turn(tab, server):
    ask(tab, "silence", wait=False)
    tab.click("#stop")
    done(tab)
    assert "stopped" in stats(tab)
    ask(tab, "one")
    assert server.bodies[-1]["messages"] == [{"role": "user", "content": "one"}]


@pytest.mark.slow
def test_edit_and_regenerate_make_versions(tab, server):
    ask(tab, "one")
    first = last(tab)
    tab.get_by_role("button", name="Regenerate").click()
    done(tab)
    assert last(tab) != first and "2 / 2" in tab.locator("article.assistant").inner_text()
    assert server.bodies[0]["seed"] != server.bodies[1]["seed"]
    tab.get_by_role("button", name="the version before").focus()
    tab.keyboard.press("Enter")
    assert last(tab) == first
    tab.keyboard.press("Enter")  # the focus has stayed
    assert last(tab) != first
    tab.keyboard.press("Enter")
    assert last(tab) == first
    tab.evaluate("drawing = document.querySelector('article.assistant p')")
    ask(tab, "two")
    assert [m["content"] for m in server.bodies[-1]["messages"]] == ["one", first, "two"]
    assert tab.evaluate("drawing === document.querySelector('article.assistant p')")  # Markdown is not read again
    tab.get_by_role("button", name="Edit").first.click()
    tab.fill("#edit", "three")
    tab.keyboard.press("Enter")
    done(tab)
    assert [m["content"] for m in server.bodies[-1]["messages"]] == ["three"]
    assert tab.locator("article").count() == 2
    tab.get_by_role("button", name="the version before").first.click()
    assert tab.locator("article").count() == 4 and first in tab.locator("#talk").inner_text()
    tab.keyboard.press("/")
    tab.keyboard.press("ArrowUp")
    assert tab.locator("#edit").input_value() == "two"
    tab.evaluate(f"document.querySelector('#edit').dispatchEvent({COMPOSING})")
    assert tab.locator("#edit").count() == 1
    tab.keyboard.press("Escape")
    assert tab.locator("#edit").count() == 0


@pytest.mark.slow
def test_what_is_typed_in_a_message_stays_when_all_is_drawn_anew(tab, server):
    ask(tab, "one")
    tab.keyboard.press("Control+Shift+O")
    ask(tab, "two")
    tab.get_by_role("button", name="Edit").click()
    tab.fill("#edit", "two and more")
    tab.uncheck("#speculate")
    tab.locator("#bar input[type=checkbox]").click()
    tab.focus("#edit")
    other = tab.context.new_page()
    other.goto(server.url + "/")
    other.once("dialog", lambda dialog: dialog.accept())
    other.get_by_label("Delete “one”").or_(other.get_by_label("Delete one")).first.click()
    until(tab, "chats.length === 1")
    tab.keyboard.press("End")
    tab.keyboard.type("!")  # the focus has stayed as well
    assert tab.locator("#edit").input_value() == "two and more!"
    tab.get_by_role("button", name="Cancel").click()
    tab.get_by_role("button", name="Edit").click()
    assert tab.locator("#edit").input_value() == "two"


@pytest.mark.slow
def test_a_reload_loses_nothing(tab, server):
    ask(tab, "one")
    answer, line = last(tab), stats(tab)
    tab.locator("#new").click()
    ask(tab, "other")
    tab.fill("#say", "half a thou")
    tab.uncheck("#speculate")
    tab.reload()
    assert "other" in last(tab) and tab.locator("#say").input_value() == "half a thou"
    assert not tab.locator("#speculate").is_checked()
    tab.locator("#list .open", has_text="one").click()
    assert last(tab) == answer and stats(tab) == line
    assert tab.evaluate("CSS.highlights.get('d0').size") > 0
    tab.once("dialog", lambda dialog: dialog.accept())
    tab.locator("#list li.here .drop").click()
    tab.reload()
    assert tab.locator("#list li").count() == 1


@pytest.mark.slow
def test_old_chats_that_are_deleted_make_room(tab):
    ask(tab, "one")
    tab.evaluate("""() => {
        const { setItem, removeItem } = Storage.prototype;
        let full = true;
        Storage.prototype.setItem = function (name, text) {
            if (full && name.includes("chat.")) throw new Error("full");
            setItem.call(this, name, text);
        };
        Storage.prototype.removeItem = function (name) { full = false; removeItem.call(this, name); };
    }""")
    tab.locator("#new").click()
    ask(tab, "two")
    tab.wait_for_selector("#banner:not([hidden])")
    tab.route("**/v1/models", lambda route: route.abort())
    tab.evaluate("connect()")
    assert "does not answer" in tab.locator("#banner").inner_text()
    tab.evaluate("save()")
    assert "does not answer" in tab.locator("#banner").inner_text()
    tab.unroute("**/v1/models")
    tab.evaluate("connect()")
    assert "no room left" in tab.locator("#banner").inner_text()
    tab.once("dialog", lambda dialog: dialog.accept())
    tab.locator("#list li", has_text="one").locator(".drop").click()
    tab.wait_for_selector("#banner", state="hidden")
    tab.reload()
    assert last(tab).startswith("Answer to two") and tab.locator("#list li").count() == 1


@pytest.mark.slow
def test_reasoning_is_folded_above_the_answer(tab, server):
    ask(tab, "think")
    thought = tab.locator("article.assistant details.thought")
    assert thought.is_visible() and "water" not in thought.inner_text() and last(tab).startswith("Answer to think")
    thought.locator("summary").click()
    tab.reload()
    until(tab, "document.querySelector('article.assistant .thought div')")
    assert thought.locator("div").text_content() == "Let me see:\n<b>water</b>."
    ask(tab, "again")
    assert server.bodies[-1]["messages"][0]["content"] == "think"
    assert all("reasoning" not in message for message in server.bodies[-1]["messages"])
    assert tab.locator("article.assistant details.thought").last.is_hidden()


@pytest.mark.slow
def test_a_reload_amid_an_answer_keeps_what_had_come(tab):
    ask(tab, "long", wait=False)
    tab.wait_for_timeout(2500)
    had = last(tab)
    tab.reload()
    assert len(had) > 60 and last(tab).startswith(had) and "stopped" in stats(tab)
    assert tab.get_by_role("button", name="Regenerate").is_enabled()


@pytest.mark.slow
def test_nothing_in_an_answer_runs(tab, server):
    asked: list[str] = []
    tab.on("request", lambda request: asked.append(request.url))
    ask(tab, "hostile")
    tab.get_by_text("click me").click()
    tab.wait_for_timeout(300)
    assert tab.evaluate("window.hit") is None
    assert all(url.startswith(server.url) for url in asked)
    text = tab.locator("article.assistant .text")
    assert text.locator("img, script, details, svg, b, i, [onclick], [onerror], [style]").count() == 0
    assert '<img src=x onerror="window.hit = 1">' in text.inner_text()
    links = text.locator("a[href]").evaluate_all("all => all.map(a => [a.getAttribute('href'), a.rel, a.target])")
    safe = "noopener noreferrer nofollow", "_blank"
    assert links == [["https://example.org/a?b=c", *safe], ["https://evil.example/leak.png", *safe]]
    assert "<img src=x onerror" in text.locator("pre code").inner_text()
    tab.fill("#say", "<img src=x onerror=window.hit=10>")
    tab.keyboard.press("Enter")
    done(tab)
    assert tab.locator("#talk img, #list img").count() == 0 and tab.evaluate("window.hit") is None


@pytest.mark.slow
def test_markdown_and_copy(tab):
    ask(tab, "code")
    text = tab.locator("article.assistant .text")
    assert text.locator("h1").inner_text() == "Title" and text.locator("li").count() == 2
    assert text.locator("pre code").inner_text().strip() == "print(1 < 2)"
    tab.locator(".block .copy").click()
    assert tab.evaluate("navigator.clipboard.readText()") == "print(1 < 2)\n"
    until(tab, "document.querySelector('.block .copy').textContent === 'Copy'")
    tab.evaluate("for (const _ of [1, 2]) document.querySelector('.block .copy').click()")
    for said in ("Copied", "Copy"):
        until(tab, f"document.querySelector('.block .copy').textContent === '{said}'")
    tab.locator("article.assistant .row button", has_text="Copy").click()
    assert tab.evaluate("navigator.clipboard.readText()") == CODE
    tab.locator("#new").click()
    ask(tab, "raw")
    assert last(tab) == RAW  # with its lines
    tab.locator("#new").click()
    ask(tab, "lists")
    assert tab.evaluate("[...document.querySelectorAll('ol')].map(each => each.start)") == [1, 2]
    sides = "[...document.querySelectorAll('td')].map(each => getComputedStyle(each).textAlign.match(/start|right/)[0])"
    assert tab.evaluate(sides) == ["start", "right"]


@pytest.mark.slow
def test_settings_reach_the_server(tab, server):
    tab.click("#tune")
    given = {"temperature": "0.7", "top_p": "0.9", "top_k": "40", "min_p": "0.05", "max_tokens": "99", "seed": "7"}
    for name, value in given.items():
        tab.fill(f"#settings [name={name}]", value)
    tab.fill("#settings [name=system]", "Be brief.")
    tab.keyboard.press("Escape")
    ask(tab, "one")
    body = server.bodies[-1]
    assert {name: body[name] for name in given} == {name: json.loads(value) for name, value in given.items()}
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert body["stream_options"] == {"include_usage": True} and body["return_token_ids"] is True
    assert "speculative_config" not in body
    tab.reload()
    tab.click("#tune")
    assert tab.locator("#settings [name=top_k]").input_value() == "40"
    tab.fill("#settings [name=temperature]", "")
    tab.keyboard.press("Escape")
    tab.get_by_role("button", name="Regenerate").click()
    done(tab)
    assert "temperature" not in server.bodies[-1] and server.bodies[-1]["seed"] == 7
    tab.click("#tune")
    tab.fill("#settings [name=temperature]", "")
    tab.keyboard.type("15")  # the server says what it does not take, not an earlier value in its place
    tab.fill("#settings [name=top_k]", "-1")
    tab.get_by_role("button", name="Done").click()
    tab.get_by_role("button", name="Regenerate").click()
    done(tab)
    assert (server.bodies[-1]["temperature"], server.bodies[-1]["top_k"]) == (15, -1)


@pytest.mark.slow
def test_two_tabs_lose_nothing(tab, server):
    """Each writes whole chats, and all settings; so each takes in what the other has written."""
    ask(tab, "one")
    other = tab.context.new_page()
    other.goto(server.url + "/")
    for asking, text, articles in ((tab, "two", 4), (tab, "three", 6), (other, "four", 8)):
        ask(asking, text)
        for each in (tab, other):
            until(each, f"document.querySelectorAll('article').length === {articles}")
    ask(tab, "long", wait=False)
    tab.wait_for_selector("#stop:not([hidden])")
    ask(other, "five")
    done(tab)
    whole = "chat => JSON.stringify(chat).match(/Answer to \\w+/g).toSorted().join()"
    for each in (tab, other):
        each.reload()
        found = each.evaluate(f"({whole})(chats[0])")
        assert found == ",".join(f"Answer to {text}" for text in ("five", "four", "long", "one", "three", "two"))

    other.click("#tune")
    tab.click("#tune")
    tab.fill("#settings [name=key]", "new")
    tab.fill("#settings [name=max_tokens]", "40")
    tab.keyboard.press("Escape")
    until(other, "settings.key === 'new'")
    other.fill("#settings [name=temperature]", "0.5")  # beside fields that show what was
    other.keyboard.press("Escape")
    other.uncheck("#speculate")
    until(tab, "!document.querySelector('#speculate').checked")
    held = tab.evaluate("kept.get('settings')")
    assert [held[name] for name in ("max_tokens", "temperature", "key", "speculate")] == [40, 0.5, "new", False]


@pytest.mark.slow
def test_another_model_is_met(tab, server):
    """The server was started again with another."""
    server.pages["/v1/models"] = {"data": [{"id": "other"}]}
    ask(tab, "moved")
    assert "does not exist" in tab.locator(".error").inner_text()
    until(tab, "document.querySelector('#model').textContent === 'other'")
    tab.get_by_role("button", name="Try again").click()
    done(tab)
    assert server.bodies[-1]["model"] == "other" and last(tab).startswith("Answer to moved")


@pytest.mark.slow
def test_the_switch_and_a_replay_give_the_same_answer(tab, server):
    ask(tab, "one")
    tab.uncheck("#speculate")
    tab.click("#again")
    done(tab)
    before, after = server.bodies
    assert after.pop("speculative_config") == {"method": "none"} and before == after
    assert "the same text as version 1" in stats(tab) and "plain decoding" in stats(tab)
    assert "1.00 per forward" in stats(tab)
    for asked in ("rethink", "recut"):  # other reasoning, and other tokens of the same text
        tab.locator("#new").click()
        tab.check("#speculate")
        ask(tab, asked)
        tab.uncheck("#speculate")
        tab.click("#again")
        done(tab)
        assert "not the text of version 1" in stats(tab)


@pytest.mark.slow
def test_compare_says_whether_they_are_identical(tab, server):
    for asked, verdict in (("one", "Identical, token for token"), ("unfaithful", "They differ at token")):
        tab.locator("#new").click()
        ask(tab, asked)
        tab.get_by_role("button", name="Compare").click()
        tab.wait_for_selector(".verdict")
        first, second = server.bodies[-2:]
        assert second == first | {"speculative_config": {"method": "none"}}
        assert verdict in tab.locator(".verdict").inner_text()
        lanes = tab.locator(".compare .lane")
        assert (
            lanes.nth(0).locator(".stats").inner_text().count("3.") and "1.00 per forward" in lanes.nth(1).inner_text()
        )


@pytest.mark.slow
def test_errors_are_said(tab, server):
    ask(tab, "refuse")
    assert tab.locator(".error").inner_text() == "max_tokens is 9999, and must be at most 4096 (400)"
    ask(tab, "another")
    assert server.bodies[-1]["messages"] == [{"role": "user", "content": "another"}]
    ask(tab, "refuse")
    ask(tab, "third")
    assert [message["content"][:9] for message in server.bodies[-1]["messages"]] == ["another", "Answer to", "third"]
    for asked, said in (("fail", "memory ran out"), ("break", "The connection broke")):
        tab.locator("#new").click()
        ask(tab, asked)
        assert said in tab.locator(".error").inner_text() and last(tab).startswith(f"Answer to {asked}:")
    tab.locator("#new").click()
    tab.route("**/v1/**", lambda route: route.abort())
    ask(tab, "gone")
    assert "The server does not answer" in tab.locator("article .error").inner_text()
    tab.wait_for_selector("#banner:not([hidden])")
    tab.unroute("**/v1/**")
    tab.wait_for_selector("#banner", state="hidden")
    tab.get_by_role("button", name="Try again").click()
    done(tab)
    assert last(tab).startswith("Answer to gone:") and "1 / 2" not in tab.locator("#talk").inner_text()


@pytest.mark.slow
def test_an_api_key_is_asked_for(browser, server):
    server.key = "secret"
    context = browser.new_context()
    context.set_default_timeout(15_000)
    tab = context.new_page()
    tab.goto(server.url + "/")
    tab.wait_for_selector("#login[open]")
    tab.fill("#login input", "wrong")
    tab.keyboard.press("Enter")
    until(tab, "document.querySelector('#why').textContent.includes('does not take')")
    tab.fill("#login input", "secret")
    tab.keyboard.press("Enter")
    until(tab, "document.querySelector('#model').textContent.startsWith('fake')")
    ask(tab, "one")
    assert last(tab).startswith("Answer to one")
    tab.reload()
    until(tab, "document.querySelector('#model').textContent.startsWith('fake')")
    server.key = "other"
    tab.click("#tune")
    tab.fill("#settings [name=key]", "other")
    tab.keyboard.press("Escape")
    tab.get_by_role("button", name="Regenerate").click()
    done(tab)
    assert last(tab).startswith("Answer to one") and tab.locator("#login[open]").count() == 0
    context.close()


@pytest.mark.slow
def test_dark_and_light(browser, server):
    context = browser.new_context(color_scheme="dark")
    tab = context.new_page()
    tab.goto(server.url + "/")
    paper = "getComputedStyle(document.body).backgroundColor"
    dark = tab.evaluate(paper)
    assert sum(map(int, re.findall(r"\d+", dark)[:3])) < 150
    tab.click("#theme")
    light = tab.evaluate(paper)
    assert sum(map(int, re.findall(r"\d+", light)[:3])) > 600
    tab.reload()
    assert tab.evaluate(paper) == light
    context.close()


@pytest.mark.slow
def test_on_a_phone(browser, server):
    context = browser.new_context(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    context.set_default_timeout(15_000)
    tab = context.new_page()
    tab.goto(server.url + "/")
    wide = "document.documentElement.scrollWidth"
    ask(tab, "hostile")
    ask(tab, "code")
    tab.get_by_role("button", name="Compare").last.click()
    tab.wait_for_selector(".verdict")
    assert tab.evaluate(wide) <= 360
    box = tab.locator("#composer").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 360 and box["y"] + box["height"] <= 740
    assert not tab.locator("#new").is_visible()
    tab.tap("#menu")
    tab.tap("#new")
    assert tab.locator("#hello").is_visible()
    tab.tap("#tune")
    assert tab.locator("#settings").bounding_box()["width"] <= 360
    context.close()
