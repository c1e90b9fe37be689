#include "kernels.h"

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

namespace OUTRIDER_ISA {

extern const Kernels table;
constexpr Kernels table = {TEXT(OUTRIDER_ISA), attention_kernels, linear_kernels, elementwise_kernels};

}  // namespace OUTRIDER_ISA
