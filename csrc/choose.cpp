#include "choose.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace {

constexpr double kTrusts[] = {0.05, 0.12, 0.25, 0.4, 0.55, 0.7, 0.8, 0.88, 0.94, 0.97};  // between levels of trust
constexpr int kDeep = 2, kAny = -1;  // the depth from which guesses are deep; of any trust
constexpr double kMemory = 0.995, kOwnMemory = 0.97;  // weight of the past, of all requests and of one
constexpr double kPriorWeight = 2, kOwnWeight = 8;    // guesses that the prior, and all requests against one, count for
constexpr double kHopes = 16, kLeastFaith = 0.75;     // tokens of drafts taken to have come true at first; see faith()
constexpr double kHope = 0.65;  // what a source that runs a model is believed to be right with, before it was asked
constexpr int kAgain = 24, kHorizon = 64;             // steps until it is asked again; tokens over which reading must pay
constexpr int kMostNodes = 256;
constexpr double kMargin = 1.2;                       // a row is worth it if it promises this much more than it costs

constexpr double kAllowance = 0.007, kStart = 1;            // plain steps: for each token that may come, at most
constexpr double kTopUp = 0.005, kCredit = 32, kDebt = 6;   // for each step; at most; owed at most
constexpr double kDoubt = 0.5;  // of a guess's worth, while the account is overdrawn by no more than it began with

int sure(double trust) { return int(std::upper_bound(std::begin(kTrusts), std::end(kTrusts), trust) - kTrusts); }

}  // namespace

Beliefs::Account::Account(int64_t room) : start(std::min(kStart, kAllowance * double(room))), credit(start) {}

double Beliefs::Account::covers() const { return credit >= 0 ? 1 : credit >= -start ? kDoubt : 0; }

void Beliefs::Account::enter(double brought, double cost) {
  credit = std::min(kCredit, std::max(-kDebt, credit + brought - cost));
}

void Beliefs::begin(int64_t seq, int64_t room) {
  Own &known = own.try_emplace(seq, room).first->second;
  known.steps++;
  known.ran = known.nodes = 0;
  known.worth = known.hoped = 0;
}

bool Beliefs::ask(int64_t seq, int64_t room) {
  return room > 1 && own.try_emplace(seq, room).first->second.rows.covers() > 0;
}

void Beliefs::enter(Bush &bush, const Guess &guess, int64_t deepest, std::vector<int> &at) const {
  const auto &[source, tokens, parents, trust] = guess;
  at.clear();
  for (size_t i = 0; i < std::min({tokens.size(), parents.size(), trust.size()}); i++) {
    if (parents[i] >= int(i)) throw std::out_of_range("a guess's parents come before it");
    const int above = parents[i] >= 0 ? at[parents[i]] : -1, size = int(bush.tokens.size());
    if (above < -1 || (above >= 0 ? bush.depths[above] : 0) >= deepest) {
      at.push_back(-2);
      continue;
    }
    int node = above + 1;
    while (node < size && (bush.parents[node] != above || bush.tokens[node] != tokens[i])) node++;
    const double sure = std::min(1.0, std::max(0.0, trust[i]));
    if (node == size) {
      bush.tokens.push_back(tokens[i]);
      bush.parents.push_back(above);
      bush.depths.push_back(above >= 0 ? 1 + bush.depths[above] : 1);
      bush.who.push_back(source);
      bush.trust.push_back(sure);
    } else {
      bush.who[node] |= source;
      bush.trust[node] = std::max(sure, bush.trust[node]);
    }
    auto says = bush.says.begin();
    while (says != bush.says.end() && (says->parent != above || says->source != source)) ++says;
    if (says == bush.says.end()) says = bush.says.insert(says, {above, source, sure});
    says->best = std::max(sure, says->best);
    at.push_back(node);
  }
}

std::vector<Beliefs::Picked> Beliefs::choose(std::vector<Text> &texts, double drafted, int k, bool chains) {
  const int n = int(texts.size());
  rate = 0;
  if (k < 1) return std::vector<Picked>(n);
  struct Way {
    double chance;
    int i, node;
  };
  std::vector<Way> ways;
  std::vector<Bush> bushes(n);
  std::vector<Reals> every(n);
  std::vector<int> at;
  Ints room;
  for (int i = 0; i < n; i++) {
    Text &text = texts[i];
    Own &known = own.at(text.seq);
    Bush &bush = bushes[i];
    bush.at = text.length;
    std::stable_sort(text.guesses.begin(), text.guesses.end(), [&](const Guess &a, const Guess &b) {
      const uint64_t one = std::get<0>(a), other = std::get<0>(b);
      return std::make_pair(one & apart, one) < std::make_pair(other & apart, other);
    });
    for (const Guess &guess : text.guesses) {
      enter(bush, guess, text.room - 1, at);
      if (const uint64_t source = std::get<0>(guess); source & apart) {
        std::vector<Bush> &probes = known.probes;
        auto probe = std::find_if(probes.begin(), probes.end(), [&](const Bush &p) { return p.source == source; });
        if (probe == probes.end()) probe = probes.emplace(probe);
        *probe = Bush();
        probe->tokens = std::get<1>(guess);
        probe->parents = std::get<2>(guess);
        probe->at = text.length;
        probe->source = source;
      }
    }
    const double covers = (known.ran ? known.asks : known.rows).covers() * faith();
    const double stake = seconds[0] + known.rows.stake() * (seconds[0] / n);  // what a token takes plainly
    const int may = int(std::upper_bound(seconds.begin(), seconds.end(), stake) - seconds.begin()) - 1;
    room.push_back(std::min(k, known.ran ? k : std::max(1, may)));
    const int size = int(bush.tokens.size());
    for (int node = 0; node < size; node++) {
      const int parent = bush.parents[node];
      const uint64_t who = bush.who[node];
      uint64_t otherwise = 0;
      double for_it = 0, all_of = 0;
      for (const Says &says : bush.says) {
        if (says.parent != parent) continue;
        all_of += says.best;
        if (says.source & who) for_it += says.best;
        else otherwise += says.source;
      }
      const double chance = bush.trust[node] * (all_of > 0 ? for_it / all_of : 1);
      const int kind = number({who, otherwise, sure(chance), bush.depths[node] >= kDeep});
      bush.kinds.push_back(kind);
      every[i].push_back(of(known, kind, chance) * (parent >= 0 ? every[i][parent] : covers));
      ways.push_back({every[i][node], i, node});
    }
  }

  std::sort(ways.begin(), ways.end(), [](const Way &a, const Way &b) {
    return a.chance != b.chance ? a.chance > b.chance : a.i != b.i ? a.i < b.i : a.node < b.node;
  });
  std::vector<std::vector<char>> taken(n), above(n);  // by node + 1: whether it is, and whether a child of it is
  for (int i = 0; i < n; i++) {
    taken[i].assign(every[i].size() + 1, 0);
    above[i].assign(every[i].size() + 1, 0);
    taken[i][0] = 1;
  }
  std::vector<Way> chosen;
  const double plain = seconds[0] + drafted;
  double expected = n, best = n / plain;
  rate = best;
  size_t many = 0;
  for (const Way &way : ways) {
    if (chosen.size() + 1 >= seconds.size()) break;
    const int above_it = bushes[way.i].parents[way.node] + 1;
    if (!room[way.i] || !taken[way.i][above_it] || (chains && above[way.i][above_it])) continue;
    room[way.i]--;
    above[way.i][above_it] = 1;
    taken[way.i][way.node + 1] = 1;
    chosen.push_back(way);
    expected += way.chance;
    const double more = std::max(0.0, seconds[chosen.size()] - seconds[0]);
    if (const double careful = expected / (plain + kMargin * more); careful > best) {
      best = careful;
      rate = expected / (plain + more);
      many = chosen.size();
    }
  }
  chosen.resize(many);

  // Children behind their parents, the likeliest first: an accepted first child lies as in plain decoding.
  std::vector<Picked> picked(n);
  std::vector<std::vector<std::vector<int>>> below(n);  // by node + 1: chosen children, the likeliest last
  for (int i = 0; i < n; i++) below[i].resize(many ? every[i].size() + 1 : 0);
  for (const Way &way : chosen) std::get<3>(picked[way.i]) += way.chance;
  for (auto way = chosen.rbegin(); way != chosen.rend(); ++way)
    below[way->i][bushes[way->i].parents[way->node] + 1].push_back(way->node);
  std::vector<std::pair<int, int>> stack;
  for (int i = 0; i < n && many; i++) {
    auto &[tokens, parents, who, worth] = picked[i];
    for (int node : below[i][0]) stack.emplace_back(node, -1);
    while (!stack.empty()) {
      const auto [node, parent] = stack.back();
      stack.pop_back();
      tokens.push_back(bushes[i].tokens[node]);
      parents.push_back(parent);
      who.push_back(__builtin_ctzll(bushes[i].who[node]));
      for (int child : below[i][node + 1]) stack.emplace_back(child, int(tokens.size()) - 1);
    }
  }
  for (int i = 0; i < n; i++) {
    Own &known = own.at(texts[i].seq);
    known.nodes = known.ran + int(std::get<0>(picked[i]).size());
    const double worth = known.worth = std::get<3>(picked[i]), covers = (known.ran ? known.asks : known.rows).covers() * faith();
    known.hoped = worth > 0 ? worth / covers : 0;
    known.bush = std::move(bushes[i]);
  }
  return picked;
}

std::optional<Beliefs::Asked> Beliefs::worth(const std::vector<Text> &texts, int k, const std::vector<Model> &models) {
  struct Found {
    double first, paid;
    Reals gains;
    int i;
  };
  k = std::min(k, most());
  if (k < 1) return {};
  const int n = int(texts.size());
  const double plain = seconds[0], trusted = faith();
  std::vector<const Own *> known;
  int drafted = 0;
  double had = 0, best = 0;
  for (const Text &text : texts) {
    known.push_back(&own.at(text.seq));
    drafted += known.back()->nodes, had += known.back()->worth;
  }
  had += n;
  std::optional<Asked> asked;
  for (size_t which = 0; which < models.size(); which++) {
    const Model &model = models[which];
    const int deep = model.most > 0 ? std::min(k, model.most) : k;
    const int kinds[] = {number({model.source, 0, kAny, false}), number({model.source, 0, kAny, true})};
    std::vector<Found> found;
    for (int i = 0; i < n; i++) {
      const Text &text = texts[i];
      if (known[i]->asks.credit < 0 || known[i]->steps <= 1 || text.room <= 1 || text.length < model.least) continue;
      const int64_t lag = text.length - known[i]->last(model.source).tokens;
      double gain = 0, share = 1;
      Reals gains;
      const double hopes[] = {of(*known[i], kinds[0], kHope), of(*known[i], kinds[1], kHope)};
      for (int depth = 1; depth <= deep; depth++) {
        share *= hopes[depth >= kDeep];
        gain += share;
        gains.push_back(std::max(0.0, gain * trusted - known[i]->worth));
      }
      double paid = lag > kMostNodes / 4 ? double(lag) * (model.reading > 0 ? model.reading : plain / 512) : 0;  // a guess, until it was measured
      paid /= double(std::min<int64_t>(kHorizon, text.room));
      found.push_back({paid - gains.back() * plain / n, paid, std::move(gains), i});
    }
    if (found.empty()) continue;
    std::stable_sort(found.begin(), found.end(), [](const Found &a, const Found &b) { return a.first < b.first; });
    // What it costs is not known at first: once, and little.
    const int longest = model.timed ? deep : std::min(2, deep), together = model.timed ? int(found.size()) : 1;
    for (int length = model.tree ? deep : 1; length <= (model.tree ? deep : longest); length++) {
      double more = 0, read = 0;
      for (int many = 1; many <= together; many++) {
        const Found &each = found[many - 1];
        more += each.gains[length - 1], read += each.paid;
        const int rows = std::min(most(), std::max(int(many * (length + model.riders)), drafted));
        const double spent = plain + kMargin * std::max(0.0, seconds[rows] - plain) +
                             (model.rounds.at(many - 1) * (model.tree ? 1 : length) + read);
        const double gained = (had + more) / spent;
        if (!(gained > 1.02 * rate) || (asked && gained <= best)) continue;
        std::vector<int> who;
        for (int j = 0; j < many; j++) who.push_back(found[j].i);
        best = gained, asked = {int(which), std::move(who), length};
      }
    }
    if (asked) continue;
    int late = -1, waits = kAgain * n;  // things may have changed; a try costs all of them time
    for (const Found &each : found)
      if (const int since = known[each.i]->steps - known[each.i]->last(model.source).step; since > waits)
        waits = since, late = each.i;
    const int length = model.tree ? deep : longest;
    const double cost = model.rounds.at(0) * (model.tree ? 1 : length);
    if (late >= 0 && known[late]->asks.credit > cost * n / plain) best = rate, asked = {int(which), {late}, length};
  }
  if (asked) std::sort(std::get<1>(*asked).begin(), std::get<1>(*asked).end());
  return asked;
}

int64_t Beliefs::ran(int64_t seq, uint64_t source, int riders, int64_t length) {
  Own &known = own.at(seq);
  known.ran = 1 + riders;
  auto read = std::find_if(known.read.begin(), known.read.end(), [&](const Read &r) { return r.source == source; });
  if (read == known.read.end()) read = known.read.insert(read, {source, 0, 0});
  const int64_t lag = length - read->tokens;
  *read = {source, known.steps, length};
  return lag;
}

int64_t Beliefs::waits(int64_t seq) const {
  const auto found = own.find(seq);
  if (found == own.end()) return -1;
  const Bush &bush = found->second.bush;
  int64_t first = bush.tokens.empty() ? -1 : bush.at;
  for (const Bush &probe : found->second.probes) first = first < 0 ? probe.at : std::min(first, probe.at);
  return first;
}

// How much of what drafts promised has come lately, in some bounds: what is chosen is what is thought too much of.
double Beliefs::faith() const {
  return std::clamp((drafts.right + kHopes) / (drafts.made + kHopes), kLeastFaith, 1.0);
}

void Beliefs::settle(const std::vector<Came> &came, int rows, double took, double drafted, int steps) {
  const int n = int(came.size());
  int nodes = 0, ran = 0;
  for (const Came &one : came)
    if (const auto found = own.find(one.seq); found != own.end())
      nodes += found->second.nodes, ran += found->second.ran > 0;
  double extra = 0;
  if (nodes) {
    extra = seconds.at(std::min(rows - n, most())) - seconds[0];
    // What was thought too little of is charged in full; a hiccup is not.
    if (std::isfinite(took)) extra = std::min(std::max(extra, took - seconds[0]), 2 * extra);
  }
  drafts = {kMemory * drafts.right, kMemory * drafts.made};
  const double row = nodes ? n / seconds[0] / nodes : 0;  // in plain steps of all: what its time costs, a second
  for (const Came &one : came) {
    const auto found = own.find(one.seq);
    if (found == own.end()) continue;
    Own &known = found->second;
    if (known.hoped > 0) drafts = {drafts.right + one.accepted, drafts.made + known.hoped};
    if (known.nodes) {
      const double model = known.ran ? drafted * n / seconds[0] / ran : 0;
      (known.ran ? known.asks : known.rows).enter(one.accepted, extra * row * known.nodes + model);
    }
    for (Account *account : {&known.rows, &known.asks}) account->credit += kTopUp * steps;
    judge(known, one);
  }
}

void Beliefs::judge(Own &known, const Came &came) {
  std::vector<Bush> &probes = known.probes;
  if (!known.bush.tokens.empty() && std::none_of(probes.begin(), probes.end(), [](Bush &p) { return !p.source; }))
    probes.push_back(std::move(known.bush));
  known.bush = Bush();
  const auto ends = [&](Bush &probe) { return !judge(known, probe, came.first, came.tokens); };
  probes.erase(std::remove_if(probes.begin(), probes.end(), ends), probes.end());
}

bool Beliefs::judge(Own &known, Bush &probe, int64_t first, const Ints &tokens) {
  for (; probe.at < first + int64_t(tokens.size()); probe.at++, probe.depth++) {
    const int32_t token = tokens[probe.at - first];
    const int last = probe.node;
    int right = -1;
    bool guessed = false;
    for (int node = last + 1; node < int(probe.parents.size()); node++)
      if (probe.parents[node] == last) {
        const bool hit = probe.tokens[node] == token;
        guessed = true;
        if (hit) right = node;
        if (!probe.source) learn(known, probe.kinds[node], hit);
      }
    if (guessed && probe.source) learn(known, number({probe.source, 0, kAny, probe.depth >= kDeep}), right >= 0);
    if (right < 0) return false;
    probe.node = right;
  }
  return true;
}

Beliefs::Reals Beliefs::hopes(int64_t seq, uint64_t source, int deep, double prior) {
  static const Own nobody;
  const auto found = own.find(seq);
  const Own &known = found == own.end() ? nobody : found->second;
  Reals chances;
  for (int depth = 1; depth <= deep; depth++)
    chances.push_back(of(known, number({source, 0, kAny, depth >= kDeep}), prior));
  return chances;
}

int Beliefs::number(const Kind &kind) {
  const auto [found, is_new] = numbers.try_emplace(kind, int(all.size()));
  if (is_new) all.emplace_back();
  return found->second;
}

// The probability that such a guess is right; `prior` while nothing is known.
double Beliefs::of(const Own &known, int kind, double prior) const {
  const Count mine = kind < int(known.counts.size()) ? known.counts[kind] : Count();
  const double general = (all[kind].right + kPriorWeight * prior) / (all[kind].made + kPriorWeight);
  return (mine.right + kOwnWeight * general) / (mine.made + kOwnWeight);
}

void Beliefs::learn(Own &known, int kind, bool right) {
  if (kind >= int(known.counts.size())) known.counts.resize(kind + 1);
  all[kind] = {kMemory * all[kind].right + right, kMemory * all[kind].made + 1};
  Count &mine = known.counts[kind];
  mine = {kOwnMemory * mine.right + right, kOwnMemory * mine.made + 1};
}
