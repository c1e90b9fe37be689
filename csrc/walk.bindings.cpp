#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "walk.h"

namespace nb = nanobind;

using Parts = std::vector<Weights *>;
// Row, n, start, capacity, parents, the store of each layer, and a table or 0 with its length; ops/walk.py says more.
using Run = std::tuple<int64_t, int64_t, int64_t, int64_t, std::optional<std::vector<int32_t>>, std::vector<uintptr_t>,
                       uintptr_t, int64_t>;

// Temperature, top-k, top-p, the smallest shaped logit, and the key of the noise: see Draw.
using Drawn = std::tuple<float, int, double, float, uint64_t>;

static const void *at(uintptr_t address) { return reinterpret_cast<const void *>(address); }

static Product product(const Parts &parts) { return {parts.begin(), parts.end()}; }

static WalkRun checked(const Walk &w, int rows, int64_t slabs, Run run) {
  auto &[row, n, start, capacity, parents, stores, table_, pages] = run;
  const int32_t *table = static_cast<const int32_t *>(at(table_));
  const int64_t room = table ? pages * kPage : capacity, needed = (start + n + kPage - 1) / kPage;
  bool fits = row >= 0 && n >= 0 && row <= rows - n && start >= 0 && start <= room - n;
  fits &= table ? capacity > 0 && capacity % kPage == 0 : stores.size() == w.layers.size();
  for (int64_t i = 0; fits && table && i < needed; i++) fits = table[i] >= 0 && table[i] < slabs * (capacity / kPage);
  if (!fits) throw nb::value_error("a run of rows does not fit the forward, or its stores");
  if (parents) {
    if (int64_t(parents->size()) != n) throw nb::value_error("parents must be one for each row");
    for (int64_t i = 0; i < n; i++)
      if ((*parents)[i] < -1 || (*parents)[i] >= i) throw nb::value_error("parents must come before their rows");
  }
  WalkRun out{row, n, start, capacity, parents.has_value(), {}, std::move(stores), table};
  if (parents) out.parents = std::move(*parents);
  return out;
}

static std::vector<int> forward(const Walk &w, std::vector<int64_t> tokens, uintptr_t embedded, uintptr_t beside,
                    std::vector<uintptr_t> turns, int64_t sines, std::vector<Run> runs, uintptr_t slabs, int64_t slab_count, std::vector<int> wanted,
                    std::vector<std::pair<int, uintptr_t>> states, uintptr_t queries, uintptr_t out, uintptr_t logits,
                    const std::vector<Drawn> &draws, int threads) {
  int most = 0;
  for (const WalkLayer &layer : w.layers) most = std::max(most, layer.turn);
  const int rows = int(turns.size()) / (most + 1);
  if (int(turns.size()) != rows * (most + 1)) throw nb::value_error("there must be a turn for each row and rotation");
  WalkPlan plan{rows, std::move(tokens), at(embedded), at(beside), std::move(turns), sines, {},
                reinterpret_cast<void *const *>(slabs), slab_count, std::move(wanted), std::move(states),
                reinterpret_cast<void *>(queries), reinterpret_cast<void *>(out), reinterpret_cast<float *>(logits), {}, nullptr,
                threads};
  if (!embedded && (int(plan.tokens.size()) != rows || (!w.embedding && !w.packed)))
    throw nb::value_error("there must be a token for each row, or the rows embedded");
  if (w.beside_norm && (!embedded || !beside)) throw nb::value_error("rows must come embedded, with what stands beside them");
  for (int row : plan.wanted)
    if (row < 0 || row >= rows) throw nb::value_error("a row that is wanted is not there");
  if (!draws.empty() && draws.size() != plan.wanted.size()) throw nb::value_error("there must be a draw for each row that is wanted");
  for (const auto &[temperature, top_k, top_p, least, key] : draws) plan.draws.push_back({nullptr, temperature, top_k, top_p, least, key});
  for (Run &run : runs) plan.runs.push_back(checked(w, rows, slab_count, std::move(run)));
  std::vector<int> best(logits ? plan.wanted.size() : 0);
  plan.best = best.data();
  {
    nb::gil_scoped_release release;
    walk(w, plan);
  }
  return best;
}

void bind_walk(nb::module_ &m) {
  nb::class_<Mixture>(m, "Experts", "Experts of a layer: addresses of memory that its maker keeps alive.")
      .def("__init__", [](Mixture *m, int hidden, int width, int type, const Parts &router, int chosen, bool normalised,
                          bool shared, int gate, float alpha, float limit) {
        new (m) Mixture{hidden, width, Type(type), product(router), {}, chosen, normalised, shared,
                        {Gate::Kind(gate), alpha, limit}};
      })
      .def("add", [](Mixture &m, const Parts &gate_up, const Parts &down, int64_t bytes) {
        m.experts.push_back({product(gate_up), product(down), bytes});
      }, "The next expert.")
      .def_prop_ro("read", [](const Mixture &m) { return m.read.load(); }, "Bytes of experts read so far.")
      .def("mix", [](const Mixture &m, uintptr_t x, int rows, uintptr_t norm, float eps, uintptr_t residual, uintptr_t y,
                     int threads) {
        mix(m, at(x), rows, at(norm), eps, at(residual), reinterpret_cast<void *>(y), threads);
      }, nb::call_guard<nb::gil_scoped_release>());
  nb::class_<Walk>(m, "Walk", "A decoder: addresses of memory that its maker keeps alive.")
      .def("__init__", [](Walk *w, int heads, int kv_heads, int dim, int hidden, int vocab, float eps, float scale,
                          float softcap, bool full_norms, int gate, float alpha, float limit, float residual, int type) {
        new (w) Walk{heads,   kv_heads,   dim, hidden, vocab, eps, scale, softcap, full_norms, {Gate::Kind(gate), alpha, limit},
                     residual, Type(type), nullptr, nullptr, nullptr, false, {}, nullptr, {}};
      })
      .def("add", [](Walk &w, const std::vector<uintptr_t> &norms, const Parts &qkv, const Parts &o, const Parts &gate_up,
                     const Parts &down, const Mixture *experts, int64_t window, uintptr_t sinks, int turn) {
        w.layers.push_back({at(norms.at(0)), at(norms.at(1)), at(norms.at(2)), at(norms.at(3)), at(norms.at(4)), at(norms.at(5)),
                            product(qkv), product(o), product(gate_up), product(down), experts, window,
                            static_cast<const float *>(at(sinks)), turn});
      }, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg(),
           "The next layer; its norms: input, post, q, k, attention, MLP.")
      .def("end", [](Walk &w, uintptr_t norm, const Parts &head) { w.norm = at(norm), w.head = product(head); })
      .def("embedding", [](Walk &w, uintptr_t table, Weights *packed) { w.embedding = at(table), w.packed = packed; },
           nb::arg(), nb::arg().none())
      .def("beside", [](Walk &w, uintptr_t norm, bool normed) { w.beside_norm = at(norm), w.normed = normed; })
      .def("forward", forward);
}
