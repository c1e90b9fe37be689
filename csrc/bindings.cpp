// The Python face: outrider.ops._kernels. Tensors come as addresses and sizes; outrider/ops/native.py checks them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <functional>

#include "blocks.h"
#include "choose.h"
#include "dispatch.h"
#include "experts.h"
#include "grow.h"
#include "lookups.h"
#include "pool.h"
#include "sampling.h"
#include "suffix.h"

namespace nb = nanobind;

void bind_attention(nb::module_ &m);
void bind_walk(nb::module_ &m);

constexpr size_t kFewLookUps = 6;

using Wish = std::tuple<uintptr_t, float, int, double, float, uint64_t>;

static const void *at(uintptr_t address) { return reinterpret_cast<const void *>(address); }
static void *to(uintptr_t address) { return reinterpret_cast<void *>(address); }

static void bind_linear(nb::module_ &m) {
  const auto release = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<Weights>(m, "Weights", "Packed weights: addresses of memory that its maker keeps alive.")
      .def("__init__", [](Weights *w, int format, int outputs, int inputs, int group, bool gated, bool rounded) {
        new (w) Weights{Format(format), outputs, inputs, group, gated, nullptr, {}, {}, nullptr, nullptr, rounded};
        if (rounded && !w->integers()) throw nb::value_error("weights of this format are no integers");
      })
      .def_prop_ro("group", [](const Weights &w) { return w.group; })
      .def_prop_ro("rounded", [](const Weights &w) { return w.rounded; })
      .def_prop_ro("format", [](const Weights &w) { return int(w.format); })
      .def_prop_ro("width", &Weights::width)
      .def_prop_ro("nbytes", [](const Weights &w) { return w.panels() * w.panel_bytes(); })
      .def("room", [](const Weights &w, int count) { return int64_t(w.panels()) * count * kPanel; },
           "How many numbers are packed ones of which each output has so many.")
      .def("pack", [](Weights &w, uintptr_t plain, uintptr_t data, int threads) {
        pack_weights(w, at(plain), to(data), threads);
        w.data = at(data);
      }, release)
      .def("pack_scales", [](Weights &w, bool offsets, int kind, uintptr_t plain, int count, int size, uintptr_t packed, int threads) {
        Factors &factors = offsets ? w.offsets : w.scales;
        pack_factors(w, at(plain), count, size, to(packed), threads);
        factors.kind = Factors::Kind(kind);
        factors.each = at(packed);
      })
      .def("pack_coarse", [](Weights &w, bool offsets, uintptr_t plain, int count, uintptr_t packed, int threads) {
        pack_factors(w, at(plain), count, 2, to(packed), threads);
        (offsets ? w.offsets : w.scales).coarse = static_cast<const f16 *>(at(packed));
      })
      .def("set_bias", [](Weights &w, uintptr_t bias) { w.bias = at(bias); })
      .def("set_place", [](Weights &w, uintptr_t place) { w.place = static_cast<const int32_t *>(at(place)); })
      .def("rows", [](const Weights &w, const std::vector<int64_t> &outputs, uintptr_t to_) {
        char *row = static_cast<char *>(to(to_));
        for (int64_t output : outputs) {
          if (output < 0 || output >= w.outputs) throw nb::index_error("there is no such row of weights");
          unpack_row(w, int(output), row);
          row += w.inputs * (w.format == kF32 ? 4 : 2);
        }
      })
      .def("multiply", [](const Weights &w, uintptr_t x, int rows, uintptr_t y, int stride, bool y_float,
                          uintptr_t residual, uintptr_t norm, float eps, int threads) {
        kernels().linear.linear(w, at(x), rows, to(y), stride, y_float, at(residual), at(norm), eps, threads);
      }, release);
}

static void bind_elementwise(nb::module_ &m) {
  const auto release = nb::call_guard<nb::gil_scoped_release>();
  m.def("rms_norm", [](uintptr_t x, int rows, int width, uintptr_t weight, float eps, uintptr_t y, int type, int threads) {
    kernels().elementwise.rms_norm(at(x), rows, width, at(weight), eps, to(y), Type(type), threads);
  }, release);
  m.def("rope", [](uintptr_t qkv, int rows, int stride, int heads, int queries, int dim, uintptr_t cos, uintptr_t sin,
                   uintptr_t q_norm, uintptr_t k_norm, float eps, int type, int threads) {
    kernels().elementwise.rope(to(qkv), rows, stride, heads, queries, dim, at(cos), at(sin), at(q_norm), at(k_norm), eps,
                               Type(type), threads);
  }, release);
  m.def("gate", [](uintptr_t x, int rows, int width, int kind, float alpha, float limit, uintptr_t y, int type, int threads) {
    kernels().elementwise.gate(at(x), rows, width, {Gate::Kind(kind), alpha, limit}, to(y), Type(type), threads);
  }, release);
  m.def("add", [](uintptr_t x, uintptr_t y, int64_t count, float factor, int type, int threads) {
    kernels().elementwise.add(to(x), at(y), count, factor, Type(type), threads);
  }, release);
  m.def("route", [](uintptr_t scores, int rows, int all, int chosen, bool normalised, bool shared, uintptr_t experts,
                    uintptr_t weights) {
    for (int r = 0; r < rows; r++)
      route(static_cast<const float *>(at(scores)) + size_t(r) * all, all, chosen, normalised, shared,
            static_cast<int *>(to(experts)) + size_t(r) * (chosen + shared),
            static_cast<float *>(to(weights)) + size_t(r) * (chosen + shared));
  }, "Which experts rows of scores take, and their weights.");
  m.def("combine", [](uintptr_t parts, uintptr_t places, uintptr_t weights, int rows, int each, int width, uintptr_t y,
                      int threads) {
    kernels().elementwise.combine(static_cast<const float *>(at(parts)), static_cast<const int *>(at(places)),
                                  static_cast<const float *>(at(weights)), rows, each, width, nullptr, to(y), Type::f32,
                                  threads);
  }, release, "What a row's experts give, weighed and summed.");
  m.def("argmax", [](uintptr_t x, int rows, int width, int threads) {
    std::vector<int> best(rows);
    {
      nb::gil_scoped_release released;
      kernels().elementwise.argmax(static_cast<const float *>(at(x)), rows, width, best.data(), threads);
    }
    return best;
  });
  m.def("draw", [](const std::vector<Wish> &wishes, int vocab, int threads) {
    std::vector<int> tokens(wishes.size());
    {
      nb::gil_scoped_release released;
      pool::parallel(int(wishes.size()), threads, [&](int i) {
        const auto &[logits, temperature, top_k, top_p, least, key] = wishes[i];
        tokens[i] = draw({static_cast<const float *>(at(logits)), temperature, top_k, top_p, least, key}, vocab);
      });
    }
    return tokens;
  }, "For each row (address, temperature, top_k, top_p, least, key) its token, -1 where that is left to the reference.");
  m.def("guess", [](const std::vector<Wish> &wishes, int vocab, uintptr_t ids_, int count) {
    const int64_t *ids = static_cast<const int64_t *>(at(ids_));
    std::vector<std::tuple<std::vector<int64_t>, std::vector<float>>> found(wishes.size());
    nb::gil_scoped_release released;
    for (size_t i = 0; i < wishes.size(); i++) {
      const auto &[logits, temperature, top_k, top_p, least, key] = wishes[i];
      for (const auto &[place, share] :
           guess({static_cast<const float *>(at(logits)), temperature, top_k, top_p, least, key}, vocab, ids, count)) {
        std::get<0>(found[i]).push_back(ids[place]);
        std::get<1>(found[i]).push_back(share);
      }
    }
    return found;
  }, "For each row, as `draw` has it, its likeliest tokens, and the logarithms of their shares.");
}

static void bind_grow(nb::module_ &m) {
  // State, token, a wish whose address is left out, and the noise's key of each level.
  using Root = std::tuple<uintptr_t, int64_t, Wish, std::vector<uint64_t>>;
  nb::class_<Recurrence>(m, "Recurrence", "A recurrent head: addresses of memory that its maker keeps alive.")
      .def("__init__", [](Recurrence *own, int hidden, int words, int vocab, float eps, int type, uintptr_t embedding, Weights *packed,
                          uintptr_t norm, Weights *gate_up, Weights *down, Weights *projection, uintptr_t ids) {
        const bool fits = gate_up->gated && gate_up->inputs == 2 * hidden && gate_up->width() == down->inputs && down->outputs == hidden &&
                          projection->inputs == hidden && projection->outputs == words && (packed ? packed->inputs == hidden : embedding != 0);
        if (!fits) throw nb::value_error("weights do not fit each other");
        new (own) Recurrence{hidden, words, vocab, eps, Type(type), at(embedding), packed, at(norm), gate_up, down, projection,
                             static_cast<const int64_t *>(at(ids))};
      }, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg(), nb::arg())
      .def("grow", [](const Recurrence &head, const std::vector<Root> &given, int k, int width, double least, int threads) {
        std::vector<GrowRoot> roots;
        for (const auto &[state, token, wish, keys] : given) {
          const auto &[none, temperature, top_k, top_p, lowest, key] = wish;
          roots.push_back({at(state), token, {nullptr, temperature, top_k, top_p, lowest, key}, keys});
        }
        std::vector<Grown> grown;
        {
          nb::gil_scoped_release released;
          grown = grow(head, roots, k, width, least, threads);
        }
        std::vector<std::tuple<std::vector<int64_t>, std::vector<int>, std::vector<double>>> found;
        for (Grown &own : grown) found.emplace_back(std::move(own.tokens), std::move(own.parents), std::move(own.trust));
        return found;
      });
}

// Tokens of a Python list, from one place to another.
static std::vector<int32_t> part(const nb::list &tokens, int64_t first, int64_t last) {
  std::vector<int32_t> found;
  for (int64_t i = first; i < last; i++) found.push_back(nb::cast<int32_t>(tokens[i]));
  return found;
}

// What is settled of a text that its index does not have yet, and the tokens beyond.
template <class Index>
static std::pair<std::vector<int32_t>, std::vector<int32_t>> split(const Index &own, const nb::list &tokens,
                                                                   int64_t settled) {
  const int64_t size = int64_t(tokens.size());
  if (settled < 0 || settled > size) throw nb::index_error("there are not so many tokens");
  return {part(tokens, own.size(), settled), part(tokens, settled, size)};
}

// Enter what is settled of a text in its index; the tokens beyond.
template <class Index>
static std::vector<int32_t> entered(Index &own, const nb::list &tokens, int64_t settled) {
  auto [first, beyond] = split(own, tokens, settled);
  own.enter(first);
  return beyond;
}

static void bind_suffix(nb::module_ &m) {
  nb::class_<SuffixIndex>(m, "SuffixIndex")
      .def(nb::init<>())
      .def("__len__", &SuffixIndex::size)
      .def("enter", &SuffixIndex::enter)
      .def("drop", [](SuffixIndex &index, int length) {
        if (length < 0 || length > index.size()) throw nb::index_error("there are not so many tokens");
        index.drop(length);
      })
      .def("guess", [](SuffixIndex &own, const SuffixIndex &past, const nb::list &tokens, int settled, int depth, int k,
                       double factor, double least, int width) {
        SuffixIndex::Guess guess = own.guess(past, entered(own, tokens, settled), depth, k, factor, least, width);
        return std::make_tuple(std::move(guess.tokens), std::move(guess.parents), std::move(guess.trust));
      })
      .def("chain", [](SuffixIndex &own, const SuffixIndex &past, const nb::list &tokens, int settled, int k) {
        SuffixIndex::Guess guess = own.chain(past, entered(own, tokens, settled), k);
        return std::make_tuple(std::move(guess.tokens), std::move(guess.trust));
      });
}

static void bind_lookups(nb::module_ &m) {
  nb::class_<NgramIndex>(m, "NgramIndex")
      .def(nb::init<int, int>())
      .def("guess", [](NgramIndex &own, const nb::list &tokens, int settled, int k) {
        NgramIndex::Copy copy = own.guess(entered(own, tokens, settled), k);
        return std::make_tuple(std::move(copy.tokens), std::move(copy.trust));
      });
  nb::class_<Shards>(m, "Shards", "Addresses of a datastore's shards, which its maker keeps in memory.")
      .def("__init__", [](Shards *own, const std::vector<std::tuple<uintptr_t, uintptr_t, int64_t>> &given,
                          bool read) {
        std::vector<Shards::Shard> shards;
        for (const auto &[ids, order, size] : given)
          shards.push_back({static_cast<const uint32_t *>(at(ids)), static_cast<const uint32_t *>(at(order)), size});
        new (own) Shards(std::move(shards), read);
      })
      .def("guess", [](const Shards &own, const std::vector<uint32_t> &context, int least, int length, int hits, int k,
                       bool tree) {
        Shards::Guess guess;
        {
          nb::gil_scoped_release released;  // it may wait for the disk
          guess = own.guess(context, least, length, hits, k, tree);
        }
        return std::make_tuple(std::move(guess.tokens), std::move(guess.parents), std::move(guess.trust));
      });
}

// A look-up (control.py's Look) without Python, to be done on any thread.
using LookUp = std::function<Beliefs::Guess()>;

// In a datastore, down to the first token that is none of the model's.
static LookUp in_shards(const nb::tuple &look, const nb::list &tokens, int k) {
  const int64_t size = int64_t(tokens.size()), first = std::max(int64_t(0), size - nb::cast<int>(look[2]));
  const std::vector<int32_t> tail = part(tokens, first, size);
  const std::vector<uint32_t> context(tail.begin(), tail.end());
  const Shards &shards = nb::cast<Shards &>(look[1]);
  const auto source = nb::cast<uint64_t>(look[0]);
  const int shortest = nb::cast<int>(look[3]), length = std::min(k, nb::cast<int>(look[4])), hits = nb::cast<int>(look[5]);
  const auto vocab = nb::cast<int64_t>(look[6]);
  const bool tree = nb::cast<bool>(look[7]);
  return [=, &shards]() -> Beliefs::Guess {
    Shards::Guess guess = shards.guess(context, shortest, length, hits, k, tree);
    const auto strange = [&](int32_t token) { return uint32_t(token) >= vocab; };
    guess.tokens.erase(std::find_if(guess.tokens.begin(), guess.tokens.end(), strange), guess.tokens.end());
    return {source, std::move(guess.tokens), std::move(guess.parents), std::move(guess.trust)};
  };
}

// Of a sequence's index, or of a datastore.
static LookUp look_up(const nb::tuple &look, int64_t seq, const nb::list &tokens, int64_t settled, int k) {
  if (nb::isinstance<Shards>(look[1])) return in_shards(look, tokens, k);
  nb::dict indexes = nb::cast<nb::dict>(look[1]);
  const nb::int_ key(seq);
  if (!indexes.contains(key)) indexes[key] = look[2]();
  SuffixIndex &own = nb::cast<SuffixIndex &>(indexes[key]);
  const SuffixIndex &past = nb::cast<SuffixIndex &>(look[3]);
  const auto source = nb::cast<uint64_t>(look[0]);
  const int depth = nb::cast<int>(look[4]), width = nb::cast<bool>(look[7]) ? k : 1;
  const double factor = nb::cast<double>(look[5]), least = nb::cast<double>(look[6]);
  return [=, &own, &past, text = split(own, tokens, settled)]() -> Beliefs::Guess {
    own.enter(text.first);
    SuffixIndex::Guess guess = own.guess(past, text.second, depth, k, factor, least, width);
    return {source, std::move(guess.tokens), std::move(guess.parents), std::move(guess.trust)};
  };
}

static void bind_beliefs(nb::module_ &m) {
  using Given = std::tuple<int64_t, nb::list, int64_t, int64_t>;
  using Model = std::tuple<uint64_t, int, int64_t, bool, double, double, bool, Beliefs::Reals>;
  nb::class_<Beliefs>(m, "Beliefs")
      .def(nb::init<uint64_t>())
      .def("__len__", &Beliefs::size)
      .def("price", &Beliefs::price)
      .def("ask", &Beliefs::ask)
      .def("choose", [](Beliefs &beliefs, const std::vector<Given> &given, const std::vector<nb::tuple> &looks,
                        const nb::dict &guesses, double drafted, int k, bool chains, bool again, int threads,
                        const std::vector<Model> &known) {
        k = std::min(k, beliefs.most());
        std::vector<Beliefs::Text> texts;
        std::vector<std::pair<size_t, LookUp>> lookups;
        for (const auto &[seq, tokens, settled, room] : given) {
          if (!again) beliefs.begin(seq, room);
          texts.push_back({seq, int64_t(tokens.size()), room, {}});
          if (k < 1) continue;
          if (guesses.size())
            if (const nb::int_ at(texts.size() - 1); guesses.contains(at))
              texts.back().guesses = nb::cast<std::vector<Beliefs::Guess>>(guesses[at]);
          if (again) {
            const auto &known = beliefs.looked(seq);
            texts.back().guesses.insert(texts.back().guesses.end(), known.begin(), known.end());
            continue;
          }
          beliefs.looked(seq).clear();
          if (beliefs.ask(seq, room))
            for (const nb::tuple &look : looks) lookups.emplace_back(texts.size() - 1, look_up(look, seq, tokens, settled, k));
        }
        // The lock stays held, lest somebody drop an index. Each waits for memory: few are done before others wake up.
        std::vector<Beliefs::Guess> found(lookups.size());
        pool::parallel(int(found.size()), found.size() < kFewLookUps ? 1 : threads, [&](int i) { found[i] = lookups[i].second(); });
        for (size_t i = 0; i < found.size(); i++) {
          Beliefs::Text &text = texts[lookups[i].first];
          text.guesses.push_back(found[i]);
          beliefs.looked(text.seq).push_back(std::move(found[i]));
        }
        std::vector<Beliefs::Picked> picked = beliefs.choose(texts, drafted, k, chains);
        std::vector<Beliefs::Model> models;
        for (const auto &[source, most, least, timed, reading, riders, tree, rounds] : known)
          models.push_back({source, most, least, timed, reading, riders, tree, rounds});
        return std::make_tuple(std::move(picked), beliefs.worth(texts, k, models));
      }, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg("again") = false,
         nb::arg("threads") = 1, nb::arg("models") = std::vector<Model>())
      .def("ran", &Beliefs::ran)
      .def("standing", &Beliefs::standing)
      .def("settle", [](Beliefs &beliefs, const std::vector<std::tuple<int64_t, nb::list, int>> &given, int rows,
                        double took, double drafted, int steps) {
        std::vector<Beliefs::Came> came;
        for (const auto &[seq, text, accepted] : given) {
          const int64_t size = int64_t(text.size()), waits = beliefs.waits(seq), first = waits < 0 ? size : waits;
          came.push_back({seq, first, part(text, first, size), accepted});
        }
        beliefs.settle(came, rows, took, drafted, steps);
      }, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg("steps") = 1)
      .def("hopes", &Beliefs::hopes)
      .def("forget", &Beliefs::forget);
}

NB_MODULE(_kernels, m) {
  nb::set_leak_warnings(false);  // a thread that Python ends in the middle of a call keeps its model
  const Kernels *found[kMaxIsas];
  runnable_kernels(found);
  use_kernels(found[0]);

  m.def("all_finite", [](uintptr_t numbers, int64_t count, int type, int threads) {
    nb::gil_scoped_release released;
    return all_finite(at(numbers), count, Type(type), threads);
  }, "Whether no number is NaN or infinite.");
  m.def("take_apart", [](int kind, uintptr_t blocks, int64_t count, uintptr_t values, uintptr_t scales, uintptr_t minima, int threads) {
    nb::gil_scoped_release released;
    const auto numbers = [](uintptr_t address) { return static_cast<int8_t *>(to(address)); };
    take_apart(Blocks(kind), static_cast<const uint8_t *>(at(blocks)), count, numbers(values), numbers(scales), numbers(minima), threads);
  }, "Of GGUF's blocks of so many bytes: numbers, scales, minima.");
  m.def("isas", [] {
    const Kernels *found[kMaxIsas];
    std::vector<std::string> names;
    for (int i = 0, n = runnable_kernels(found); i < n; i++) names.push_back(found[i]->name);
    return names;
  }, "All that run here, the best first.");
  m.def("use", [](const std::string &isa) {
    const Kernels *table = find_kernels(isa.c_str());
    if (!table) throw nb::value_error(("instruction set " + isa + " does not run here").c_str());
    use_kernels(table);
  }, "Use this instruction set from now on.");
  m.def("stream", [](uintptr_t memory, int64_t bytes, int threads) {
    return kernels().linear.stream(at(memory), bytes, threads);
  }, nb::call_guard<nb::gil_scoped_release>(), "Read memory (a multiple of 256 KiB) from one end to the other.");
  bind_linear(m);
  bind_elementwise(m);
  bind_attention(m);
  bind_walk(m);
  bind_grow(m);
  bind_suffix(m);
  bind_lookups(m);
  bind_beliefs(m);
}
