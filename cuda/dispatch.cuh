// From what a call asks for to template arguments.
#pragma once

#include "element.h"
#include "number.cuh"

namespace jaxfuse::cuda {

// f(an object of the element's type)
template <class F>
void with_element(Element element, F f) {
  switch (element) {
    case Element::f32: return f(float{});
    case Element::bf16: return f(bf16{});
    case Element::f16: return f(f16{});
  }
}

}  // namespace jaxfuse::cuda
