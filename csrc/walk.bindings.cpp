#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "walk.h"

namespace nb = nanobind;

using Parts = std::vector<Weights *>;
// Row, n, start, capacity, parents, the store of each layer, and a table or 0 with its length; ops/walk.py says more.
using Run = std::tuple<int64_t, int64_t, int64_t, int64_t, std::optional<std::vector<int32_t>>, std::vector<uintptr_t>,
                       uintptr_t, int64_t>;

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

static void forward(const Walk &w, std::vector<int64_t> tokens, uintptr_t embedded, std::vector<uintptr_t> turns,
                    int64_t sines, std::vector<Run> runs, uintptr_t slabs, int64_t slab_count, std::vector<int> wanted,
                    std::vector<std::pair<int, uintptr_t>> states, uintptr_t queries, uintptr_t out, uintptr_t logits,
                    int threads) {
  const int rows = int(turns.size());
  WalkPlan plan{rows, std::move(tokens), at(embedded), std::move(turns), sines, {},
                reinterpret_cast<void *const *>(slabs), slab_count, std::move(wanted), std::move(states),
                reinterpret_cast<void *>(queries), reinterpret_cast<void *>(out), reinterpret_cast<float *>(logits), threads};
  if (!embedded && (int(plan.tokens.size()) != rows || (!w.embedding && !w.packed)))
    throw nb::value_error("there must be a token for each row, or the rows embedded");
  for (int row : plan.wanted)
    if (row < 0 || row >= rows) throw nb::value_error("a row that is wanted is not there");
  for (Run &run : runs) plan.runs.push_back(checked(w, rows, slab_count, std::move(run)));
  nb::gil_scoped_release release;
  walk(w, plan);
}

void bind_walk(nb::module_ &m) {
  nb::class_<Walk>(m, "Walk", "A decoder: addresses of memory that its maker keeps alive.")
      .def("__init__", [](Walk *w, int heads, int kv_heads, int dim, int hidden, int vocab, float eps, float scale, int type) {
        new (w) Walk{heads, kv_heads, dim, hidden, vocab, eps, scale, Type(type), nullptr, nullptr, {}, nullptr, {}};
      })
      .def("add", [](Walk &w, uintptr_t input_norm, const Parts &qkv, uintptr_t q_norm, uintptr_t k_norm, const Parts &o,
                     uintptr_t post_norm, const Parts &gate_up, const Parts &down, int64_t window) {
        w.layers.push_back({at(input_norm), at(post_norm), at(q_norm), at(k_norm), product(qkv), product(o),
                            product(gate_up), product(down), window});
      }, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), "The next layer.")
      .def("end", [](Walk &w, uintptr_t norm, const Parts &head) { w.norm = at(norm), w.head = product(head); })
      .def("embedding", [](Walk &w, uintptr_t table, Weights *packed) { w.embedding = at(table), w.packed = packed; },
           nb::arg(), nb::arg().none())
      .def("forward", forward);
}
