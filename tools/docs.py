"""The tables of README.md and docs/ that follow from measurements or from the code, written between marks:

    <!-- table: speedups bench/results/cpu-tiny only="plain|ngram*" -->
    ... made by `make docs` ...
    <!-- end of table -->

`speedups FOLDER ...` has a row for each method and a column for each suite, or context, of the folders' results.jsonl.
`lines FOLDER ... columns="method|tokens/s"` has a row for each line, as the folder's table.md has it, in these columns;
`model`, `weights` and `suite` are columns, too. In both, `only="a|b*"` names the methods wanted, in their order, and
`suites="a|b"` the columns or suites. `options KIND ...` lists what drafters, or views, can be told. `families` has a
row for each family of models, `missing` one for each that is known and not supported.
`changes FOLDER` counts, by engine, the answers that `bench exact` saw change. `servers FOLDER ...` has a row for each
number of streams that `bench server` asked with. `prompts FOLDER ... method="auto*"` has a row for each folder: the
speed-ups of a method's single prompts. `curve FOLDER` is what a training run's log.jsonl says. `gpu FOLDER
PART ...` has the lines of a part of `bench gpu`, in the `columns` asked for, where other columns have these values:
rows="1|8".
"""

from __future__ import annotations

import inspect
import json
import re
import shlex
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import quantiles
from typing import Any

from outrider import drafters
from outrider.bench import exact, long, report, server
from outrider.bench import gpu as machine
from outrider.bench.report import markdown_table
from outrider.errors import ConfigError
from outrider.families import FAMILIES, UNSUPPORTED
from outrider.files import write_text
from outrider.kv.views import POLICIES

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARKED = re.compile(r"(<!-- table: ([^\n]*?) -->\n).*?(<!-- end of table -->)", re.DOTALL)
Row = report.Result | long.Row


def write(page: Path) -> None:
    """Make a page's tables again. Raises ConfigError, as `render` does."""
    write_text(page, render(page))


def render(page: Path) -> str:
    """The page with its tables made again. Raises ConfigError for a mark that asks for what is not there."""
    text = page.read_text("utf-8")
    if text.count("<!-- table: ") != text.count("<!-- end of table -->"):
        raise ConfigError(f"{page}: each mark `<!-- table: ... -->` needs its `<!-- end of table -->`")
    up = "../" * len(page.relative_to(ROOT).parent.parts) if page.is_relative_to(ROOT) else ""

    def made(found: re.Match[str]) -> str:
        return f"{found[1]}\n{table(found[2], up)}\n\n{found[3]}"

    try:
        return MARKED.sub(made, text)
    except ConfigError as error:
        raise ConfigError(f"{page}: {error}") from None


def table(asked: str, up: str = "") -> str:
    """What a mark asks for, as Markdown; `up` leads from the page to the root. Raises ConfigError."""
    kind, *words = shlex.split(asked)
    given = dict(word.split("=", 1) for word in words if "=" in word)
    names = [word for word in words if "=" not in word]
    if kind not in KINDS:
        raise ConfigError(f"table {kind!r} is unknown; valid: {', '.join(KINDS)}")
    if kind == "changes":
        return changes(names, up)
    if kind == "servers":
        return servers(names, up)
    if kind == "prompts":
        return prompts(names, up, given["method"])
    if kind == "curve":
        return curve(" ".join(names), up)
    if kind == "gpu":
        return gpu(names, up, given)
    if kind in FROM_CODE:
        return FROM_CODE[kind](names)
    rows = [row for name in names for row in read(ROOT / name)]
    wanted = given.pop("only", "*").split("|")
    rows = [row for pattern in wanted for row in rows if fnmatchcase(row.method, pattern)]
    if suites := given.pop("suites", ""):
        rows = [row for suite in suites.split("|") for row in rows if place(row) == suite]
    if not rows:
        raise ConfigError(f"`{asked}` leaves no row")
    made = speedups(rows, **given) if kind == "speedups" else lines(rows, **given)
    sources = ", ".join(f"[{Path(name).name}]({up}{name}/results.jsonl)" for name in names)
    return "\n".join([made, "", *about(rows), f"Lines: {sources}."])


def changes(names: list[str], up: str) -> str:
    """A row for each engine and way to draft; a column for each temperature, alone and together. Raises ConfigError."""
    rows, said = [], dict[str, None]()
    for name in names:
        rows += (own := exact.read(there(name)))
        said |= dict.fromkeys(exact.remarks(own)[:2])
    columns = sorted({(row.together, row.temperature) for row in rows})

    def title(together: int, temperature: float) -> str:
        law = "greedy" if temperature == 0 else f"T = {temperature:g}"
        return law if together == 1 else f"{law}, {together} together"

    def cell(row: exact.Row | None) -> str:
        if row is None or row.changed is None:
            return "" if row is None else "failed"
        return f"**{len(row.changed)}** of {row.prompts}" if row.changed else f"0 of {row.prompts}"

    found = {(row.engine, row.drafts, row.together, row.temperature): row for row in rows}
    out = []
    for engine, drafts in dict.fromkeys((row.engine, row.drafts) for row in rows):
        kind = drafts.removeprefix(f"{engine} ")
        out.append([engine, kind, *(cell(found.get((engine, drafts, *column))) for column in columns)])
    table = markdown_table(["engine", "drafts", *(title(*column) for column in columns)], out)
    sources = ", ".join(f"[{Path(name).name}]({up}{name}/results.jsonl)" for name in names)
    return "\n".join([table, "", *said, f"Lines: {sources}."])


def servers(names: list[str], up: str) -> str:
    """A row for each folder and number of streams: our server's tokens/s in times the others'. Raises ConfigError."""
    rows, said, others = [], [], dict[str, None]()
    for name in names:
        *own, gap, first = (server.Row(**json.loads(line)) for line in there(name).read_text("utf-8").splitlines())
        for what in dict.fromkeys(row.what for row in own):
            at = {row.against: f"{row.ratio:.2f}" for row in own if row.what == what}
            speed = next(f"{row.server:,.0f}" for row in own if row.what == what)
            rows.append(([f"`{Path(name).name}`", what.replace(" streams", ""), speed], at))
            others |= dict.fromkeys(at)
        s, h = gap.settings, gap.hardware
        law = "greedy" if s["temperature"] == 0 else f"T = {s['temperature']:g}"
        where = f"{h['gpu'] or h['cpu']}, {h['threads']} threads"
        rounded = "".join(f", {name} {s[name]}" for name in ("quantization", "activations") if s.get(name))
        asked = f"{s['model']}{rounded}, {s['suite']}, {law}, {s['max_tokens']} tokens, rounds: {s['repeats']}"
        said.append(
            f"- [{Path(name).name}]({up}{name}/results.jsonl): {asked}; {where}; "
            f"outrider {gap.versions['outrider']} ({gap.commit}), {gap.date[:10]}. "
            f"While a prompt of {s['long']:,} tokens is read, the 99th of 100 gaps is {gap.ratio:.2f} times as long; "
            f"behind {s['shared']:,} tokens that were read before, the first token takes {first.server:,.0f} ms, "
            f"not {first.other:,.0f}."
        )
    titles = ["run", "streams", "tokens/s", *(f"times {other}" for other in others)]
    table = markdown_table(titles, ([*row, *(at.get(other, "") for other in others)] for row, at in rows))
    return "\n".join([table, "", *said])


def prompts(names: list[str], up: str, method: str) -> str:
    """A row for each folder, a column for each suite: least, quartiles and most over its prompts."""
    suites, out = dict[str, None](), []
    for name in names:
        rows = [row for row in report.read(there(name)) if fnmatchcase(row.method, method)]
        suites |= dict.fromkeys(row.suite for row in rows)
        each = [(min(speeds), *quantiles(speeds, n=4), max(speeds)) for row in rows if (speeds := row.by_batch)]
        spreads = ["{:.2f}; {:.2f}, {:.2f}, {:.2f}; {:.2f}".format(*spread) for spread in each]
        out.append([f"[{Path(name).name}]({up}{name}/results.jsonl)", *spreads])
    return markdown_table(["run", *suites], out)


def curve(name: str, up: str) -> str:
    """A row for each report of a run of `outrider train eagle3` that had learnt a tenth more. Raises ConfigError."""
    path = there(name, "log.jsonl")
    reports, rows, last = [json.loads(line) for line in path.read_text("utf-8").splitlines()], list[list[str]](), 0
    reports = [own for own in reports if own["loss"] is not None]  # others were given up
    for own in reports:
        if own["tokens"] >= 1.1 * last or own is reports[-1]:
            last, right = own["tokens"], ", ".join(f"{share:.0%}" for share in own["right"])
            loss, kept = f"{own['loss']:.2f}", f"{own['tokens_a_forward']:.2f}"
            rows.append([f"{last:,}", f"{own['read']:,}", loss, right, kept])
    table = markdown_table(["tokens", "new", "loss", "right, by depth", "tokens a forward"], rows)
    return f"{table}\n\nLines: [{path.parent.name}]({up}{name}/log.jsonl)."


def gpu(names: list[str], up: str, given: dict[str, str]) -> str:
    """A row for each line of a part. Raises ConfigError."""
    folder, part = names
    found = json.loads(there(folder, "gpu.json").read_text("utf-8"))
    if part not in found["parts"]:
        raise ConfigError(f"part {part!r} is not there; there are: {', '.join(found['parts'])}")
    columns = given.pop("columns").split("|")
    wanted = {column: value.split("|") for column, value in given.items()}
    lines = [
        line
        for line in found["parts"][part]["lines"]
        if all(machine.cell(line.get(column, "")) in values for column, values in wanted.items())
    ]
    if not lines:
        raise ConfigError(f"part {part!r} has no line of {given}")
    table = markdown_table(columns, ([machine.cell(line.get(column, "")) for column in columns] for line in lines))
    about = found | found["parts"][part]  # results from before each part had its own say it once
    versions = ", ".join(
        f"{name} {about['versions'][name]}" for name in ("torch", "triton") if name in about["versions"]
    )
    made = f"{about['hardware']['gpu']}; outrider {about['commit']}, {versions}, {about['date'][:10]}."
    return f"{table}\n\n{made} All lines: [{Path(folder).name}]({up}{folder}/gpu.md)."


def there(folder: str | Path, name: str = "results.jsonl") -> Path:
    """A file of a folder of results. Raises ConfigError if it is not there."""
    if not (path := ROOT / folder / name).is_file():
        raise ConfigError(f"{path} is not there")
    return path


def read(folder: Path) -> list[Any]:
    """The rows of a folder's results.jsonl, of `bench` or of `bench long`. Raises ConfigError."""
    path = there(folder)
    return long.read(path) if '"context"' in path.read_text("utf-8").split("\n", 1)[0] else report.read(path)


def place(row: Row) -> str:
    """The suite, or the context."""
    return f"{row.context:,} tokens" if isinstance(row, long.Row) else row.suite


def weights(row: Row) -> str:
    """What a forward reads."""
    return row.quantization or row.dtype


def speedups(rows: list[Any]) -> str:
    """A row for each method of each model, a column for each place: speedup (tokens a forward); plain: tokens/s."""
    places = list(dict.fromkeys(map(place, rows)))
    models = list(dict.fromkeys((row.model, weights(row)) for row in rows))
    out = []
    for model in models:
        own = [row for row in rows if (row.model, weights(row)) == model]
        best = {p: max(row.speedup for row in own if place(row) == p) for p in {place(row) for row in own}}
        for method in dict.fromkeys(row.method for row in own):
            at = {place(row): row for row in own if row.method == method}
            found = [_speedup(at[p], best[p]) if p in at else "" for p in places]
            named = [", ".join(model)] if len(models) > 1 else []
            out.append([*named, f"`{method}`", *found, same(list(at.values()))])
    return markdown_table([*["model"][: len(models) > 1], "method", *places, "identical"], out)


def _speedup(row: Any, best: float) -> str:
    if row.method == "plain":
        return f"1.00 = {row.tokens_per_second:,.{1 if row.tokens_per_second < 100 else 0}f} tokens/s"
    number = f"**{row.speedup:.2f}**" if row.speedup == best else f"{row.speedup:.2f}"
    return f"{number} ({row.acceptance_length:.2f})"


def same(rows: list[Any]) -> str:
    """Whether a method gave plain decoding's tokens, wherever it ran."""
    if all(row.identical for row in rows):
        return "yes"
    promised = {report.may_differ(row) for row in rows if isinstance(row, report.Result)} - {""}
    return f"no: {promised.pop()}" if promised else "no"


def lines(rows: list[Any], columns: str = "method|tokens/s|speedup|identical") -> str:
    """A row for each line, in the columns asked for."""
    return markdown_table(columns.split("|"), ([_cell(row, name) for name in columns.split("|")] for row in rows))


def _cell(row: Any, column: str) -> str:
    module: Any = long if isinstance(row, long.Row) else report
    known = dict(zip((title.replace("\n", " ") for title in module.HEADER), module.cells(row), strict=True))
    known |= {"model": row.model, "weights": weights(row), "suite": place(row), "speedup": f"{row.speedup:.2f}"}
    if column not in known:
        raise ConfigError(f"column {column!r} is unknown; valid: {', '.join(known)}")
    return f"`{known[column]}`" if column == "method" else known[column]


def about(rows: list[Any]) -> list[str]:
    """Below a table: how its lines came to be, each way once."""
    said = []
    for row in rows:
        law = "greedy" if row.temperature == 0 else f"T = {row.temperature:g}, top-p {row.top_p:g}"
        prompts = f", prompts a suite: {row.prompts}" if isinstance(row, report.Result) else ""
        batch = f", batch {row.batch}" if row.batch > 1 else ""
        ends = isinstance(row, report.Result) and row.new_tokens is not None
        length = f"answers of at most {row.max_tokens} tokens" if ends else f"{row.max_tokens} new tokens"
        size = f"{length}{prompts}{batch}, rounds: {len(row.repeats)}"
        where = f"{row.hardware['gpu'] or row.hardware['cpu']}, {row.hardware['threads']} threads"
        versions = f"outrider {row.versions['outrider']} ({row.commit}), torch {row.versions['torch'].split('+')[0]}"
        numbers = row.numbers if isinstance(row, report.Result) else weights(row)
        said.append(f"{row.model}, {numbers}, {law}, {size}; {where}; {versions}, {row.date[:10]}.")
    return list(dict.fromkeys(said))


def options(kinds: list[str]) -> str:
    """A row for each option of these methods or views (none named: of all built-in methods)."""
    out = []
    for kind in kinds or [name for name in drafters.methods() if (DRAFTERS / f"{name}.py").is_file()]:
        about = POLICIES[kind] if kind in POLICIES else drafters.find(kind)
        options = [[f"`{item.name}`", _default(item), meaning(about, item)] for item in fields(about) if item.init]
        out += [[f"`{kind}`" * (i == 0), *option] for i, option in enumerate(options)]
    return markdown_table(["", "option", "default", "meaning"], out)


def families(_: list[str]) -> str:
    """A row for each family of models that can be read."""
    rows = ([f"`{name}`", found.title, found.differs] for name, found in FAMILIES.items())
    return markdown_table(["architecture", "models", "beside a Llama"], rows)


def missing(_: list[str]) -> str:
    """A row for each architecture that an error can say something about."""
    return markdown_table(["architecture", "needs"], ([f"`{name}`", needs] for name, needs in UNSUPPORTED.items()))


def _default(item: Field[Any]) -> str:
    value = item.default_factory() if item.default_factory is not MISSING else item.default
    return "" if value is MISSING or value in (None, "", []) else f"`{value}`".replace("|", "\\|")


def meaning(kind: type, item: Field[Any]) -> str:
    """What a field is for: its `help`, or the comment behind it where it, or a base's of that name, is defined."""
    found: str = item.metadata.get("help", "")
    for owner in () if found else kind.__mro__:
        if item.name in vars(owner).get("__annotations__", ()) and (
            match := re.search(rf"^    {item.name}: .*?  # (.*)$", inspect.getsource(owner), re.MULTILINE)
        ):
            found = match[1]
            break
    return found.replace("|", "\\|")


DRAFTERS = Path(inspect.getfile(drafters)).parent
FROM_CODE: dict[str, Callable[[list[str]], str]] = {"options": options, "families": families, "missing": missing}
KINDS: Iterable[str] = ("speedups", "lines", "changes", "servers", "prompts", "curve", "gpu", *FROM_CODE)
