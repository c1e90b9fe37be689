// Types of numbers in memory.
#pragma once

#include <cstddef>
#include <cstdint>

enum class Type : int { f32, bf16, f16 };

static inline size_t size_of(Type type) { return type == Type::f32 ? 4 : 2; }

using bf16 = uint16_t;
struct f16 {
  uint16_t bits;
};

// Calls f with a null pointer to activations' type.
template <class F>
auto with_type(Type type, F f) {
  switch (type) {
    case Type::f32: return f(static_cast<float *>(nullptr));
    case Type::f16: return f(static_cast<f16 *>(nullptr));
    case Type::bf16: return f(static_cast<bf16 *>(nullptr));
  }
  __builtin_trap();
}
