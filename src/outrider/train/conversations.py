"""What a target says: conversations that it writes itself, for heads and drafts that learn from it.

An instruct model that is given only the header of a user's turn writes one, as it has read many (Magpie, 2406.08464);
to this, and to prompts from files, it answers at several temperatures, and now and then the conversation goes on. The
engine is kept full: when a few have ended as many begin, together, as a forward that reads no prompts is a graph on a
GPU. A conversation is a JSON line: `p`, the ids of the prompt in the chat template, `o`, those of the answer, `t`, its
temperature, and `by`, which tells the tokenizer. A file that is there goes on.
"""

from __future__ import annotations

import json
import logging
import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outrider.config import SamplingParams
from outrider.corpus import SAID, mended, speller
from outrider.engine import Request
from outrider.errors import ConfigError, message_of
from outrider.files import append, locked, make_folder
from outrider.llm import LLM
from outrider.train.settings import ConversationSettings as Settings

log = logging.getLogger(__name__)
Report = Callable[[int, int], None]
FIELDS = ("prompt", "question", "instruction", "turns", "text")  # of a file's JSON lines, by turns
HINTS = (
    "", "", "", "Write a", "How do I", "What is", "Explain", "Can you", "Give me", "I need help with", "Create a",
    "Tell me about", "Why", "Compare", "Solve", "Translate", "Calculate", "Imagine",
)  # fmt: skip  # how some users' turns begin, or they would be alike
PATIENCE = 200  # prompts in a row that lead to no answer
FREE = 8  # one in so many places of the engine is empty before they are filled
QUESTION, LONGEST = 192, 600  # tokens that the target may give a user's turn, and a question with what was before it


class Template:
    """A chat template, taken apart: what stands before a user's words, between them and the answer, and after that.

    Raises ConfigError for a tokenizer without one, or whose template refuses this or says otherwise each time.
    """

    def __init__(self, tokenizer: Any) -> None:
        if tokenizer is None or not getattr(tokenizer, "chat_template", None):
            raise ConfigError("this model has no chat template, by which conversations are told apart")
        self.tokenizer = tokenizer
        user, assistant, again = ({"role": role, "content": f"@{role}{i}@"} for role, i in
                                  (("user", 1), ("assistant", 1), ("user", 2)))  # fmt: skip
        try:
            one = tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True)
            two = tokenizer.apply_chat_template([user, assistant, again], tokenize=False)
        except Exception as error:  # templates raise what they like
            raise ConfigError(
                f"this model's chat template refuses users' texts and answers: {message_of(error)}"
            ) from None
        try:
            self.before, self.answer = one.split("@user1@")
            self.next = two.split("@assistant1@")[1].split("@user2@")[0]
        except (ValueError, IndexError):
            raise ConfigError(
                "this model's chat template changes what is said; conversations cannot be written"
            ) from None

    def ids(self, text: str) -> list[int]:
        """Token ids of a part."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def read_prompts(paths: list[Path]) -> list[str]:
    """The prompts in files of JSON lines. Raises ConfigError for what cannot be read."""
    found = []
    for path in paths:
        try:
            lines = path.read_text("utf-8-sig").split("\n")  # others of Unicode's line ends may stand in a JSON string
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
                given = next(entry[name] for name in FIELDS if name in entry)
                given = given[0] if isinstance(given, list) else given
                if not isinstance(given, str):
                    raise TypeError
            except (ValueError, TypeError, StopIteration, IndexError, RecursionError):
                raise ConfigError(
                    f"{path}:{number} is no JSON object with text in one of {', '.join(FIELDS)}"
                ) from None
            found.append(mended(given))
    if paths and not found:
        raise ConfigError(f"there is no prompt in {', '.join(map(str, paths))}")
    return found


def write(
    output: Path,
    tokens: int,
    settings: Settings,
    prompts: list[str] | None = None,
    report: Report | None = None,
    llm: LLM | None = None,
) -> int:
    """Append conversations to a file until their answers have so many tokens; `report(tokens, conversations)`.

    Returns the conversations in the file. A last line that was cut short is taken away first. Raises ConfigError for a
    file that holds something else, cannot be written, or is being written by another run.
    """
    if output.exists() and not output.is_file():
        raise ConfigError(f"{output} is there and is no file; give another name")
    if not output.exists():  # else it may well lie where no other can be made
        make_folder(output.parent, "the folder of conversations,")
    append(output, "")  # where it cannot be written, that is told now
    with locked(output):
        return _write(
            output, tokens, settings, prompts, report, llm or LLM(settings.model, max_num_seqs=settings.batch)
        )


def _write(output: Path, tokens: int, s: Settings, prompts: list[str] | None, report: Report | None, llm: LLM) -> int:
    engine, template = llm.engine, Template(llm.tokenizer)
    by = speller(llm.tokenizer)
    done, count = _resume(output, by)
    dice = random.Random(f"{s.seed}/{count}")
    live: list[tuple[Request, str, float]] = []
    due = deque[tuple[Callable[[list[int]], None], list[int]]]()  # what goes on when there is room
    refused = 0  # since the last answer was begun
    failed = 0  # since the last one was done

    def ask(ids: list[int]) -> None:
        add("question", ids, 1.0, QUESTION)

    def answer(ids: list[int]) -> None:
        add("answer", ids, dice.choice(s.temperatures), dice.choice([s.max_tokens, -(-s.max_tokens // 2)]))

    def in_vain() -> None:
        nonlocal refused
        if (refused := refused + 1) == PATIENCE:  # it would go on for ever
            raise ConfigError(
                f"{refused} prompts in a row are too long, or questions of the target's own that it did not end: "
                f"{s.longest} tokens are read, and {engine.max_len} with the answer's {s.max_tokens}; give shorter "
                "ones, or a lower max_tokens"
            )

    def add(kind: str, ids: list[int], temperature: float, most: int) -> None:
        nonlocal refused
        if len(ids) <= s.longest and len(ids) + most <= engine.max_len:
            params = SamplingParams(temperature=temperature, max_tokens=most, seed=dice.getrandbits(62))
            (request,) = engine.add(ids, params)
            live.append((request, kind, temperature))
            refused = 0 if kind == "answer" else refused
        else:
            in_vain()

    try:
        while done < tokens:
            refill = len(live) <= s.batch - s.batch // FREE
            while refill and len(live) < s.batch:
                if due:
                    begin, ids = due.popleft()
                    begin(ids)
                elif prompts and dice.random() >= s.own:
                    answer(template.ids(template.before + dice.choice(prompts) + template.answer))
                else:
                    ask(template.ids(template.before + dice.choice(HINTS)))
            engine.step()
            over, live = [own for own in live if own[0].finished], [own for own in live if not own[0].finished]
            for request, kind, temperature in over:
                if request.error:
                    log.warning("a request failed, and is left out: %s", request.error)
                    if (failed := failed + 1) > s.batch:
                        raise request.error
                    continue
                seq = request.seq
                ended = seq.finish_reason == "stop"
                if kind == "question":
                    if ended and len(seq.tokens) < LONGEST:
                        due.append((answer, seq.tokens[:-1] + template.ids(template.answer)))
                    else:
                        in_vain()
                    continue
                line = {"p": seq.tokens[: seq.prompt_len], "o": seq.output, "t": temperature, "by": by}
                append(output, json.dumps(line) + "\n")
                done, count, failed = done + len(seq.output), count + 1, 0
                if report:
                    report(done, count)
                if ended and dice.random() < s.turns:
                    due.append((ask, seq.tokens[:-1] + template.ids(template.next)))
    finally:
        for request in [*engine.running, *engine.waiting]:
            engine.abort(request)
    return count


def _resume(output: Path, by: str) -> tuple[int, int]:
    """Tokens of answers and conversations in the file, which must be of the same tokenizer."""
    whole = output.read_bytes()
    lines = whole[: whole.rfind(b"\n") + 1]
    try:
        entries = [json.loads(line) for line in lines.splitlines()]
        answers = [len(entry["o"]) for entry in entries]
        others = any(entry.get("by", by) != by for entry in entries)
        if not SAID.startswith(whole[len(lines) :][: len(SAID)]):
            raise ValueError
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ConfigError(f"{output} holds something else than conversations; give another name") from None
    if others:
        raise ConfigError(f"{output} holds what a model with another tokenizer said; give another name")
    if len(lines) < len(whole):
        with open(output, "r+b") as file:
            file.truncate(len(lines))
    return sum(answers), len(answers)
