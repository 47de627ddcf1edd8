// Did a NaN meet a comparison while oneDNN ran?
//
// oneDNN clamps with MAXPS and MINPS (relu, relu6, the argument of every exp), which return their second operand when
// one is NaN: a NaN goes in and a number comes out. But MAXPS, MINPS and the ordered comparisons also raise the sticky
// Invalid flag in the MXCSR of the thread that executes them, for quiet NaNs too, as does every operation that makes a
// new NaN (Inf - Inf, 0·Inf). So after the run the flag is looked at on every thread of the team. Down on all: no NaN
// reached the activation. Raised: the caller runs the convolution again without the activation, to see where it is not
// finite, and puts there what the activation makes of that. The look costs one empty parallel region instead of a pass
// over memory, and lowers the flags for the next time; other arithmetic may raise one in between, which costs time only.
//
// An OpenMP runtime may end threads of a team, and their flags with them (gomp does when a smaller team starts), so each
// thread remembers that it was looked at before; one that was not may stand in for one that is gone.
#pragma once

#include <xmmintrin.h>

#include <atomic>

#include "parallel.h"

namespace jaxfuse {

class NanWatch {
 public:
  enum class Outcome { no_nan, perhaps_nan, thread_lost };

  NanWatch() {
    if (!seen_before) look();
    lower_flag();  // this thread also runs XLA's code, where the flag means nothing
  }

  Outcome look() const {
    std::atomic<bool> raised{false}, lost{false};
    on_each_thread([&](int) {
      if (_mm_getcsr() & _MM_EXCEPT_INVALID) raised = true;
      if (!seen_before) lost = true;
      seen_before = true;
      lower_flag();
    });
    return raised ? Outcome::perhaps_nan : lost ? Outcome::thread_lost : Outcome::no_nan;
  }

 private:
  static void lower_flag() { _mm_setcsr(_mm_getcsr() & ~_MM_EXCEPT_INVALID); }

  static inline thread_local bool seen_before = false;
};

}  // namespace jaxfuse
