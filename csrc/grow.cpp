#include "grow.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "dispatch.h"
#include "pool.h"
#include "scratch.h"

namespace {

constexpr int kSlot = 9;  // of scratch memory

size_t room(size_t bytes) { return (bytes + 63) / 64 * 64; }

struct Node {
  int64_t token;
  int parent;
  double score;           // logarithm of its path's likelihood
  std::vector<int> path;  // nodes down to it
};

struct Tree {
  std::vector<Node> nodes;
  std::vector<int> border{-1};
  std::vector<std::vector<char>> states{1};  // behind the root, and then behind each node that was gone on from

  // The k likeliest nodes; of equals the earlier.
  std::vector<int> best(int k) const {
    std::vector<int> found(nodes.size());
    std::iota(found.begin(), found.end(), 0);
    std::stable_sort(found.begin(), found.end(), [&](int a, int b) { return nodes[a].score > nodes[b].score; });
    if (int(found.size()) > k) found.resize(k);
    return found;
  }

  Grown grown(int k) const {
    std::vector<int> order = best(k), rank(nodes.size());
    for (size_t i = 0; i < order.size(); i++) rank[order[i]] = int(i);
    std::sort(order.begin(), order.end(), [&](int a, int b) {
      const std::vector<int> &x = nodes[a].path, &y = nodes[b].path;
      return std::lexicographical_compare(x.begin(), x.end(), y.begin(), y.end(), [&](int p, int q) { return rank[p] < rank[q]; });
    });
    std::vector<int> at(nodes.size(), -1);
    Grown out;
    for (int i : order) {
      const Node &node = nodes[i];
      at[i] = int(out.tokens.size());
      out.tokens.push_back(node.token);
      out.parents.push_back(node.parent < 0 ? -1 : at[node.parent]);
      const double above = node.parent < 0 ? 0.0 : nodes[node.parent].score;
      out.trust.push_back(std::min(1.0, std::exp(node.score - above)));
    }
    return out;
  }
};

}  // namespace

std::vector<Grown> grow(const Recurrence &head, const std::vector<GrowRoot> &roots, int k, int width, double least, int threads) {
  const size_t size = size_of(head.type), row = size * head.hidden;
  const Kernels &run = kernels();
  std::vector<Tree> trees(roots.size());
  std::vector<std::pair<int, int>> places;  // tree and node, -1 the root
  for (size_t level = 0;; level++) {
    places.clear();
    for (size_t t = 0; t < trees.size(); t++)
      if (level < roots[t].keys.size())
        for (int node : trees[t].border) places.emplace_back(int(t), node);
    const int rows = int(places.size());
    if (!rows) break;
    const size_t wide = head.down->inputs;
    const size_t sizes[] = {2 * row, row, row, wide * size, size_t(head.words) * 4};  // of a row each
    size_t total = 0;
    for (size_t bytes : sizes) total += room(rows * bytes);
    char *x = static_cast<char *>(scratch(kSlot, total)), *before = x + room(rows * sizes[0]), *after = before + room(rows * row);
    char *gated = after + room(rows * row);
    float *scores = reinterpret_cast<float *>(gated + room(rows * sizes[3]));
    for (int r = 0; r < rows; r++) {
      const auto [t, node] = places[r];
      const Tree &tree = trees[t];
      const int64_t token = node < 0 ? roots[t].token : tree.nodes[node].token;
      if (token < 0 || token >= head.vocab) throw std::out_of_range("a token is beyond the vocabulary");
      char *to = x + r * 2 * row;
      if (head.packed)
        unpack_row(*head.packed, int(token), to);
      else
        memcpy(to, static_cast<const char *>(head.embedding) + token * row, row);
      run.elementwise.rms_norm(to, 1, head.hidden, head.norm, head.eps, to, head.type, 1);
      const void *from = node < 0 ? roots[t].state : tree.states[1 + tree.nodes[node].parent].data();
      memcpy(to + row, from, row);
      memcpy(before + r * row, from, row);
    }
    run.linear.linear(*head.gate_up, x, rows, gated, int(wide), head.type == Type::f32, nullptr, nullptr, head.eps, threads);
    run.linear.linear(*head.down, gated, rows, after, head.hidden, head.type == Type::f32, before, nullptr, head.eps, threads);
    run.linear.linear(*head.projection, after, rows, scores, head.words, true, nullptr, nullptr, head.eps, threads);
    std::vector<size_t> fresh;
    for (const Tree &tree : trees) fresh.push_back(tree.nodes.size());
    std::vector<std::vector<std::pair<int, float>>> guesses(rows);
    pool::parallel(rows, threads, [&](int r) {
      Draw shape = roots[places[r].first].shape;
      shape.logits = scores + size_t(r) * head.words, shape.key = roots[places[r].first].keys[level];
      guesses[r] = guess(shape, head.words, head.ids, width);
    });
    for (int r = 0; r < rows; r++) {
      const auto [t, at] = places[r];
      Tree &tree = trees[t];
      if (tree.states.size() < tree.nodes.size() + 1) tree.states.resize(tree.nodes.size() + 1);
      tree.states[1 + at].assign(after + r * row, after + (r + 1) * row);
      for (const auto &[place, share] : guesses[r]) {
        const double score = share + (at < 0 ? 0.0 : tree.nodes[at].score);
        if (!(score > least) || !std::isfinite(score)) continue;
        std::vector<int> path = at < 0 ? std::vector<int>() : tree.nodes[at].path;
        path.push_back(int(tree.nodes.size()));
        tree.nodes.push_back({head.ids[place], at, score, std::move(path)});
      }
    }
    for (size_t t = 0; t < trees.size(); t++) {
      trees[t].border.clear();
      for (int node : trees[t].best(k))
        if (size_t(node) >= fresh[t]) trees[t].border.push_back(node);
    }
  }
  std::vector<Grown> out;
  for (const Tree &tree : trees) out.push_back(tree.grown(k));
  return out;
}
