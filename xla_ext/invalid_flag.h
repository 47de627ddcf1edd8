// Did a NaN meet a comparison while oneDNN ran?
//
// oneDNN clamps with MAXPS and MINPS (relu, relu6, the argument of every exp), which return their second operand when
// one is NaN: a NaN goes in and a finite value comes out. But MAXPS, MINPS and the ordered comparisons also raise the sticky
// Invalid flag in the MXCSR of the thread that executes them, for quiet NaNs too, as does every operation that makes a
// new NaN (Inf - Inf, 0·Inf). ThreadPool looks at the flag after every share of a region, so after the run it is known
// for all threads. Down: no NaN reached the activation. Raised: the caller runs the convolution again without the
// activation, to see where it is not finite, and puts there what the activation makes of that. No pass over memory is
// spent on it; other arithmetic may raise the flag too, which costs time only.
#pragma once

#include "thread_pool.h"

namespace jaxfuse {

class InvalidFlagGuard {
 public:
  InvalidFlagGuard() { ThreadPool::forget_invalid(); }
  bool invalid_flag_raised() const { return ThreadPool::saw_invalid(); }
};

}  // namespace jaxfuse
