"""What a guess is worth, as experience has it: rows are given to the guesses that pay for them.

A step over n sequences emits n tokens and those of its drafts that are accepted, in the time to draft and the time T of
a forward over so many rows and so long texts (costs.py). A node of a draft adds a row to the forward, and to the tokens
the probability that it and all before it are accepted. `pick` takes the likeliest nodes of all sequences, as many as
make tokens per second the most. (Goodput as in TurboSpec, 2406.14066, greedily over survival probabilities as in
DSpark; Law 1 lets the choice look at everything.)

`Beliefs` are how often guesses come true, by who guessed, how sure and how deep, of all requests and of each one.
Whatever they say, drafting may lose little: every sequence has an `Account` of what drafts brought and cost it, in
plain steps, and while it is overdrawn it is not drafted for; sources that run a model have another one.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from outrider.config import MOST_NODES

MARGIN = 1.2  # a row is worth it if it promises this much more than it costs
ALLOWANCE, START = 0.007, 1.0  # plain steps: for each token that may come, at most
TOP_UP, CREDIT, DEBT = 0.005, 32.0, 6.0  # for each step; at most; owed at most
DOUBT = 0.5  # of a guess's worth, while the account is overdrawn by no more than it began with
TRUSTS = (0.05, 0.12, 0.25, 0.4, 0.55, 0.7, 0.8, 0.88, 0.94, 0.97)  # between the levels of trust
DEPTHS = (2,)
MEMORY, OWN_MEMORY = 0.995, 0.97  # weight of the past, of all requests and of one, per guess of a kind
HOPES, LEAST_FAITH = 16.0, 0.75  # tokens of drafts taken to have come true at first; of what drafts promise
HOPE = 0.65  # what a source that runs a model is believed to be right with, before it was asked
AGAIN = 24  # steps, for each sequence, after which such a source may be asked again, if the account covers it
HORIZON = 64  # tokens over which reading a text must pay
PRIOR_WEIGHT, OWN_WEIGHT = 2.0, 8.0  # guesses that the prior, and all requests against one, count for


@dataclass
class Account:
    """What drafts brought a sequence less what they cost it, in plain steps, with a small allowance."""

    room: int  # tokens that the sequence may yet have
    credit: float = 0.0

    def __post_init__(self) -> None:
        self.credit = self.start = min(START, ALLOWANCE * self.room)

    @property
    def covers(self) -> float:
        """What share of a guess's worth may be spent on it: all, or less if it is overdrawn, or nothing."""
        return 1.0 if self.credit >= 0 else DOUBT if self.credit >= -self.start else 0.0

    @property
    def stake(self) -> float:
        """What one step may lose: what there is, and as much debt as there was allowance."""
        return self.credit + 0.5 * self.start

    def enter(self, brought: float, cost: float) -> None:
        """One step. What is owed beyond DEBT is let off: it was bad luck, or the machine did something else."""
        self.credit = min(CREDIT, max(-DEBT, self.credit + brought - cost))


Kind = tuple[int, int, int, int]  # who guessed it (bits), who guessed otherwise, how sure, how deep
Guess = tuple[int, list[int], list[int], list[float]]  # whose it is (a bit), tokens, parents, trust
Picked = tuple[list[int], list[int], list[int], float]  # tokens, parents, whose each is (number), expected tokens
Text = tuple[int, list[int], int, int]  # a sequence's id, its tokens, how many are settled, how many may yet come
# A look-up: whose (a bit), each sequence's index, what makes one, and what else an index is asked with, last if a tree.
# Or in a datastore: whose, its shards, the longest and shortest match, length, hits, tokens of the model, if a tree.
Look = tuple[Any, ...]
# A source that runs a model: whose (a bit); most tokens of a draft (0: any); how long the texts are that it is for;
# whether it was timed; seconds to read a token of a text; riders; whether its drafts are trees, whose size is its own
# affair; and seconds of a round for one sequence, for two and so on, for each token of a chain or a whole tree.
Model = tuple[int, int, int, bool, float, float, bool, list[float]]
Asked = tuple[int, list[int], int]  # a model, by its number, for which sequences, by their places, and how many tokens


def kind(who: int, otherwise: int, trust: float | None, depth: int) -> Kind:
    """What a guess is counted as. `trust` None: whatever they guessed at this depth."""
    return who, otherwise, -1 if trust is None else bisect(TRUSTS, trust), bisect(DEPTHS, depth)


@dataclass
class Bush:
    """All guesses for one sequence in one trie; parents come before their children."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)  # 1 = directly behind the sequence
    who: list[int] = field(default_factory=list)  # the sources that guess it: bits
    trust: list[float] = field(default_factory=list)  # of who trusts it most
    best: dict[tuple[int, int], float] = field(default_factory=dict)  # by parent and source: its trust in one there
    index: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, source: int, tokens: list[int], parents: list[int], trust: list[float], deepest: int = 2**62) -> None:
        """Enter the guesses of a source (a bit), down to a depth."""
        at: list[int] = []
        for token, parent, own in zip(tokens, parents, trust, strict=False):
            above = at[parent] if parent >= 0 else -1
            if above < -1 or (self.depths[above] if above >= 0 else 0) >= deepest:
                at.append(-2)
                continue
            node, own = self.index.setdefault((above, token), len(self.tokens)), min(1.0, max(0.0, own))
            if node == len(self.tokens):
                self.tokens.append(token)
                self.parents.append(above)
                self.depths.append(1 + self.depths[above] if above >= 0 else 1)
                self.who.append(source)
                self.trust.append(own)
            else:
                self.who[node] |= source
                self.trust[node] = max(own, self.trust[node])
            self.best[above, source] = max(own, self.best.get((above, source), 0.0))
            at.append(node)

    def judged(self) -> list[tuple[Kind, float]]:
        """What each node is counted as, and its chance while of that nothing is known.

        Sources that guess behind the same node have a say each by how sure they are of their best guess there: a guess
        that others contradict has the share of those who make it.
        """
        found = list[tuple[Kind, float]]()
        for parent, who, trust, depth in zip(self.parents, self.who, self.trust, self.depths, strict=True):
            says = [(source, best) for (node, source), best in self.best.items() if node == parent]
            for_it, all_of = sum(best for source, best in says if source & who), sum(best for _, best in says)
            chance = trust * (for_it / all_of if all_of else 1.0)
            otherwise = sum(source for source, _ in says if not source & who)
            found.append((kind(who, otherwise, chance, depth), chance))
        return found

    def drafted(self, nodes: list[int]) -> tuple[list[int], list[int], list[int]]:
        """Of chosen nodes tokens, parents and first sources, in an order in which the first child follows its parent.

        `nodes` has the likeliest first, so that an accepted first child lies as in plain decoding.
        """
        below: dict[int, list[int]] = {}
        for node in reversed(nodes):
            below.setdefault(self.parents[node], []).append(node)
        tokens, parents, who, stack = list[int](), list[int](), list[int](), [(node, -1) for node in below.get(-1, ())]
        while stack:
            node, above = stack.pop()
            tokens.append(self.tokens[node])
            parents.append(above)
            who.append((self.who[node] & -self.who[node]).bit_length() - 1)
            stack += [(child, len(tokens) - 1) for child in below.get(node, ())]
        return tokens, parents, who


@dataclass
class Probe:
    """Guesses that are compared with the text as it comes, whether they were drafted or not."""

    tokens: list[int]
    parents: list[int]
    kinds: list[Kind]  # per node: what it is counted as; of a single source's guess none
    at: int  # the place in the text where the next token is compared
    source: int = 0  # whose guess it is, if all that counts is whether any was right at each depth; else 0
    node: int = -1  # reached so far
    depth: int = 1


@dataclass
class Own:
    """What is known of one sequence."""

    rows: Account  # of steps in which no model was run to draft
    asks: Account  # of the others
    read: dict[int, tuple[int, int]] = field(default_factory=dict)  # by model (bit): the step it was run in, its tokens
    steps: int = 0
    looked: list[Guess] = field(default_factory=list)  # in the step under way: what look-ups found; ...
    ran: int = 0  # ... a model's run and riders, if one was run for it; ...
    nodes: int = 0  # ... these, and its rows: for what it pays; ...
    worth: float = 0.0  # ... tokens that its draft is expected to bring; ...
    hoped: float = 0.0  # ... and the same by what is believed of their kinds alone
    counts: dict[Kind, tuple[float, float]] = field(default_factory=dict)
    probes: dict[int, Probe] = field(default_factory=dict)  # of sources apart; 0: of all together
    bush: Probe | None = None  # of the step under way

    @property
    def account(self) -> Account:
        """Who pays for the step under way."""
        return self.asks if self.ran else self.rows


class Beliefs:
    """How often guesses of a kind come true once those before them have: of all requests, and of each sequence.

    So `choose` knows which of a step's guesses get rows, and `settle` learns what came of all of them, and who pays.
    `apart` are the sources (bits) that are judged by themselves, too. Sequences go by their ids. The reference of
    csrc/choose.cpp.
    """

    def __init__(self, apart: int) -> None:
        self.apart = apart
        self.all: dict[Kind, tuple[float, float]] = {}  # right, made
        self.own: dict[int, Own] = {}
        self.drafts = 0.0, 0.0  # tokens of what was drafted: right, and hoped for
        self.seconds: list[float] = []
        self.rate = 0.0  # tokens a second that are expected of what was chosen

    def __len__(self) -> int:
        """How many sequences something is kept of."""
        return len(self.own)

    def price(self, seconds: list[float]) -> None:
        """From now on a forward with no node, with one, and so on takes so long (`Costs.ladder`)."""
        self.seconds = seconds

    def ask(self, seq: int, room: int) -> bool:
        """Whether cheap sources are to be asked for a sequence: if something may come, and drafts have not lost it."""
        return room > 1 and self._known(seq, room).rows.covers > 0

    def _known(self, seq: int, room: int) -> Own:
        return self.own.get(seq) or self.own.setdefault(seq, Own(Account(room), Account(room)))

    def choose(
        self, texts: list[Text], looks: list[Look], guesses: dict[int, list[Guess]], drafted: float, k: int,
        chains: bool, again: bool = False, threads: int = 1, models: Seq[Model] = (),
    ) -> tuple[list[Picked], Asked | None]:  # fmt: skip
        """Per sequence which guesses to verify, at most k, and what `worth` says.

        Guesses are those of `looks`, where they are to be asked, and those given, by the sequence's place; cheap ones
        come first, each kind in the order of the bits. Fewer are taken where the account is overdrawn that pays, or
        would be if all were wrong. drafted: seconds spent.  chains: see `pick`.  again: in the same step, once a model
        was run; what look-ups have found is known then.  threads: that may look up.
        """
        n, k, self.rate = len(texts), min(k, len(self.seconds) - 1), 0.0
        for seq, _, _, room in () if again else texts:
            known = self._known(seq, room)
            known.steps, known.nodes, known.ran, known.worth, known.hoped = known.steps + 1, 0, 0, 0.0, 0.0
        if k < 1:
            return [([], [], [], 0.0) for _ in texts], None
        bushes, every, most = list[Bush](), list[list[float]](), list[int]()
        for i, (seq, text, settled, room) in enumerate(texts):
            bush, known, given = Bush(), self.own[seq], [*guesses.get(i, ())]
            if not again:
                asked = looks if self.ask(seq, room) else ()
                known.looked = [(look[0], *_look_up(look, seq, text, settled, k)) for look in asked]
            given += known.looked
            for source, tokens, parents, trust in sorted(given, key=lambda guess: (guess[0] & self.apart, guess[0])):
                bush.add(source, tokens, parents, trust, room - 1)
                if source & self.apart:
                    known.probes[source] = Probe(tokens, parents, [], len(text), source)
            judged, chances, covers = bush.judged(), list[float](), known.account.covers * self.faith()
            for (what, own), parent in zip(judged, bush.parents, strict=True):
                chances.append(self._of(known.counts, what, own) * (chances[parent] if parent >= 0 else covers))
            known.bush = Probe(bush.tokens, bush.parents, [what for what, _ in judged], len(text))
            bushes.append(bush)
            every.append(chances)
            stake = self.seconds[0] + known.rows.stake * (self.seconds[0] / n)  # what a token takes plainly
            most.append(k if known.ran else min(k, max(1, bisect(self.seconds, stake) - 1)))
        chosen, self.rate = pick(every, bushes, self.seconds, drafted, most, chains)
        picked: list[Picked] = []
        for (seq, *_), bush, chances, nodes in zip(texts, bushes, every, chosen, strict=True):
            known = self.own[seq]
            known.nodes = known.ran + len(nodes)
            worth = known.worth = sum(chances[node] for node in nodes)
            known.hoped = worth / (known.account.covers * self.faith()) if worth else 0.0
            picked.append((*bush.drafted(nodes), worth))
        return picked, self.worth(texts, k, models)

    def worth(self, texts: list[Text], k: int, models: Seq[Model]) -> Asked | None:
        """Which model to run beside what was just chosen; None if none pays."""
        n, k = len(texts), min(k, len(self.seconds) - 1)
        if k < 1:
            return None
        plain = self.seconds[0]
        own = [self.own[seq] for seq, *_ in texts]
        may = [i for i, each in enumerate(own) if each.asks.credit >= 0 and each.steps > 1 and texts[i][3] > 1]
        drafted, had, faith = sum(each.nodes for each in own), n + sum(each.worth for each in own), self.faith()
        best: tuple[float, int, list[int], int] | None = None
        for number, (source, most, least, timed, reading, riders, tree, rounds) in enumerate(models):
            deep, found = min(k, most) if most > 0 else k, list[tuple[float, float, list[float], int]]()
            for i in may:
                seq, text, _, room = texts[i]
                if len(text) < least:
                    continue
                lag, gain, share, gains = self._lag(own[i], source, len(text)), 0.0, 1.0, list[float]()
                for hope in self.hopes(seq, source, deep, HOPE):
                    share *= hope
                    gain += share
                    gains.append(max(0.0, gain * faith - own[i].worth))
                unread = reading or plain / 512  # seconds a token: a guess, until it was measured
                paid = lag * unread / min(HORIZON, room) if lag > MOST_NODES // 4 else 0.0
                found.append((paid - gains[-1] * plain / n, paid, gains, i))
            if not found:
                continue
            found.sort(key=itemgetter(0))
            # what it costs is not known at first: once, and little
            many_at_most, longest = (len(found), deep) if timed else (1, min(2, deep))
            for length in [deep] if tree else range(1, longest + 1):
                more = read = 0.0
                for many, (_, paid, gains, _) in enumerate(found[:many_at_most], 1):
                    more, read = more + gains[length - 1], read + paid
                    rows = min(len(self.seconds) - 1, max(int(many * (length + riders)), drafted))
                    spent = plain + MARGIN * max(0.0, self.seconds[rows] - plain)
                    spent += rounds[many - 1] * (1 if tree else length) + read
                    if (gained := (had + more) / spent) > 1.02 * self.rate and (best is None or gained > best[0]):
                        best = gained, number, [i for *_, i in found[:many]], length
            if best is None:  # things may have changed; a try costs all of them time
                waits = {i: own[i].steps - own[i].read.get(source, (0, 0))[0] for *_, i in found}
                late, length = max(waits, key=lambda i: waits[i]), deep if tree else longest
                cost = rounds[0] * (1 if tree else length)
                if waits[late] > AGAIN * n and own[late].asks.credit > cost * n / plain:
                    best = self.rate, number, [late], length
        return None if best is None else (best[1], sorted(best[2]), best[3])

    @staticmethod
    def _lag(known: Own, source: int, length: int) -> int:
        """Tokens of a text that a model has not read."""
        return length - known.read.get(source, (0, 0))[1]

    def ran(self, seq: int, source: int, riders: int, length: int) -> int:
        """A model was run for a sequence in the step under way, and its draft has riders. What it had not read."""
        known = self.own[seq]
        lag, known.ran, known.read[source] = self._lag(known, source, length), 1 + riders, (known.steps, length)
        return lag

    def standing(self, seq: int) -> tuple[int, float]:
        """A sequence's steps, and what is left to run models for it, in plain steps."""
        known = self.own[seq]
        return known.steps, known.asks.credit

    def settle(
        self, came: list[tuple[int, list[int], int]], rows: int, took: float, drafted: float, steps: int = 1
    ) -> None:
        """A step is over: who was drafted for pays, and guesses are compared with what came, as far as they reach.

        came: ids, texts and how many tokens were accepted.  rows: of the forward.  took: seconds; infinite if it did
        something else, too.  drafted: seconds of a model, which those pay whom it was run for.  steps: since the last
        one of which this was told.
        """
        known = [(self.own[seq], text, accepted) for seq, text, accepted in came if seq in self.own]
        nodes, plain = sum(each.nodes for each, *_ in known), self.seconds[0] if self.seconds else 0.0
        extra = self.seconds[min(rows - len(came), len(self.seconds) - 1)] - plain if nodes else 0.0
        if nodes and took < math.inf:  # what was thought too little of is charged in full; a hiccup is not
            extra = min(max(extra, took - plain), 2 * extra)
        ran = sum(each.ran > 0 for each, *_ in known)
        self.drafts = MEMORY * self.drafts[0], MEMORY * self.drafts[1]
        row = len(came) / plain / nodes if nodes else 0.0  # in plain steps of all: what its time costs, a second
        for each, text, accepted in known:
            if each.hoped:
                self.drafts = self.drafts[0] + accepted, self.drafts[1] + each.hoped
            if each.nodes:
                model = drafted * len(came) / plain / ran if each.ran else 0.0
                each.account.enter(accepted, extra * row * each.nodes + model)
            for account in (each.rows, each.asks):
                account.credit += TOP_UP * steps
            if each.bush and each.bush.tokens:
                each.probes.setdefault(0, each.bush)
            each.bush = None
            each.probes = {source: probe for source, probe in each.probes.items() if self._judge(each, probe, text)}

    def hopes(self, seq: int, source: int, deep: int, prior: float) -> list[float]:
        """The chance of a source apart to be right at each depth, if it is asked."""
        counts = self.own[seq].counts if seq in self.own else {}
        return [self._of(counts, kind(source, 0, None, depth), prior) for depth in range(1, deep + 1)]

    def faith(self) -> float:
        """How much of what drafts promised has come lately: what is chosen is what is thought too much of.

        In some bounds, for how sure guesses are is for their kinds to learn, which they do without being drafted, too.
        """
        right, hoped = self.drafts
        return max(LEAST_FAITH, min(1.0, (right + HOPES) / (hoped + HOPES)))

    def forget(self, seq: int) -> None:
        """Drop what is known of this sequence alone."""
        self.own.pop(seq, None)

    def _of(self, counts: dict[Kind, tuple[float, float]], what: Kind, prior: float) -> float:
        """The probability that such a guess is right; `prior` while nothing is known."""
        hits, made = self.all.get(what, (0.0, 0.0))
        general = (hits + PRIOR_WEIGHT * prior) / (made + PRIOR_WEIGHT)
        hits, made = counts.get(what, (0.0, 0.0))
        return (hits + OWN_WEIGHT * general) / (made + OWN_WEIGHT)

    def _learn(self, known: Own, what: Kind, right: bool) -> None:
        """One guess was judged."""
        for counts, memory in ((self.all, MEMORY), (known.counts, OWN_MEMORY)):
            hits, made = counts.get(what, (0.0, 0.0))
            counts[what] = memory * hits + right, memory * made + 1

    def _judge(self, known: Own, probe: Probe, text: list[int]) -> bool:
        """Compare one guess; whether it goes on."""
        while probe.at < len(text):
            token, right, last, guessed = text[probe.at], -1, probe.node, False
            for node in range(last + 1, len(probe.parents)):
                if probe.parents[node] == last:
                    guessed = True
                    if hit := probe.tokens[node] == token:
                        right = node
                    if not probe.source:
                        self._learn(known, probe.kinds[node], hit)
            if guessed and probe.source:
                self._learn(known, kind(probe.source, 0, None, probe.depth), right >= 0)
            if right < 0:
                return False
            probe.at, probe.node, probe.depth = probe.at + 1, right, probe.depth + 1
        return True


def _look_up(look: Look, seq: int, text: list[int], settled: int, k: int) -> tuple[list[int], list[int], list[float]]:
    """Tokens, parents, trust."""
    if isinstance(look[1], dict):
        _, indexes, make, past, depth, factor, least, tree = look
        index = indexes[seq] if seq in indexes else indexes.setdefault(seq, make())
        tokens, parents, trust = index.guess(past, text, settled, depth, k, factor, least, k if tree else 1)
    else:
        _, shards, longest, shortest, length, hits, vocab, tree = look
        tokens, parents, trust = shards.guess(text[-longest:], shortest, min(k, length), hits, k, tree)
        tokens = tokens[: next((i for i, token in enumerate(tokens) if token >= vocab), k)]
    return tokens, parents, trust


def pick(
    chances: list[list[float]],
    bushes: list[Bush],
    seconds: Seq[float],
    drafted: float,
    most: list[int],
    chains: bool = False,
) -> tuple[list[list[int]], float]:
    """Per sequence the nodes to verify, the likeliest first; and tokens per second expected with them.

    chances: per sequence and node, of surviving.  seconds: of the forward with no node, one, and so on.  drafted:
    seconds spent.  most: nodes of each sequence.  chains: one child behind each node at most.
    """
    n, room, chosen = len(bushes), [*most], list[tuple[int, int]]()
    taken: list[set[int]] = [{-1} for _ in bushes]
    parents: list[set[int]] = [set() for _ in bushes]
    expected, plain, many = float(n), seconds[0] + drafted, 0
    best = rate = n / plain
    for negative, i, node in sorted([(-p, i, node) for i, own in enumerate(chances) for node, p in enumerate(own)]):
        if len(chosen) + 1 >= len(seconds):
            break
        parent = bushes[i].parents[node]
        if not room[i] or parent not in taken[i] or (chains and parent in parents[i]):
            continue
        room[i] -= 1
        parents[i].add(parent)
        taken[i].add(node)
        chosen.append((i, node))
        expected -= negative
        more = max(0.0, seconds[len(chosen)] - seconds[0])
        if (careful := expected / (plain + MARGIN * more)) > best:
            best, rate, many = careful, expected / (plain + more), len(chosen)
    nodes: list[list[int]] = [[] for _ in bushes]
    for i, node in chosen[:many]:
        nodes[i].append(node)
    return nodes, rate
