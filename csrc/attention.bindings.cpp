#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include <vector>

#include "kernels.h"

namespace nb = nanobind;

using Strides = std::tuple<int64_t, int64_t, int64_t>;

// A job is (q, new keys or 0, new values or 0, out, store or 0, capacity, start, n, parents or None, table or 0), tensors as addresses; `slabs` is that of the slabs' addresses. ops/attention.py checks them.
static void attend(const nb::list &list, uintptr_t slabs, int heads, int kv_heads, int dim, Strides strides, int64_t window, float scale,
                   float softcap, uintptr_t sinks, int type, int threads) {
  std::vector<AttentionJob> jobs;
  std::vector<std::vector<int32_t>> trees(nb::len(list));
  for (nb::handle item : list) {
    const nb::tuple job = nb::cast<nb::tuple>(item);
    const auto address = [&](int i) { return reinterpret_cast<void *>(nb::cast<uintptr_t>(job[i])); };
    const auto number = [&](int i) { return nb::cast<int64_t>(job[i]); };
    std::vector<int32_t> &parents = trees[jobs.size()];
    if (!job[8].is_none()) {
      for (nb::handle parent : nb::cast<nb::list>(job[8])) {
        const int32_t row = int32_t(parents.size());
        parents.push_back(nb::cast<int32_t>(parent));
        if (parents.back() < -1 || parents.back() >= row) throw nb::value_error("parents must come before their rows");
      }
      if (int64_t(parents.size()) != number(7)) throw nb::value_error("parents must be one for each row");
    }
    jobs.push_back({address(0), address(1), address(2), address(3), address(4), number(5), number(6), number(7),
                    parents.empty() ? nullptr : parents.data(),
                    reinterpret_cast<void *const *>(slabs), static_cast<const int32_t *>(address(9))});
  }
  const auto [q_stride, k_stride, v_stride] = strides;
  const AttentionShape shape{heads,  kv_heads, dim,   q_stride,           k_stride,           v_stride,
                             window, scale,    softcap, reinterpret_cast<const float *>(sinks), Type(type), threads};
  nb::gil_scoped_release release;
  kernels().attention.attend(shape, jobs.data(), int(jobs.size()));
}

void bind_attention(nb::module_ &m) {
  m.def("attend", attend, "Attention of new rows of several sequences.");
  m.attr("PAGE") = kPage;
}
