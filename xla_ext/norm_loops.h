// The table of norm_kernels.h for the ISA that the including file is compiled for.
#pragma once

#include "norm_columns_loops.h"

namespace jaxfuse::norm {
namespace {

constexpr Kernels kernels = {
    [](const Forward& f, Rows rows, Scratch scratch) {
      with_element(f.options.element, [&](auto t) { forward_rows<decltype(t)>(f, rows, scratch); });
    },
    [](const Forward& f, Columns columns, Scratch scratch) {
      with_element(f.options.element, [&](auto t) { forward_columns<decltype(t)>(f, columns, scratch); });
    },
    [](const Backward& b, Rows rows, float* dgamma, float* dbeta, Scratch scratch) {
      with_element(b.options.element, [&](auto t) { backward_rows<decltype(t)>(b, rows, dgamma, dbeta, scratch); });
    },
    [](const Backward& b, Columns columns, float* dgamma, float* dbeta, Scratch scratch) {
      with_element(b.options.element, [&](auto t) { backward_columns<decltype(t)>(b, columns, dgamma, dbeta, scratch); });
    },
};

}  // namespace
}  // namespace jaxfuse::norm
