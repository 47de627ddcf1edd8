// What this package asks of oneDNN, in types of its own. The library's types are known to this folder alone; absent.cc
// stands for all of it in builds without the library. All of it may be used from many threads at once; no lock is held
// while anything is computed or compiled.
#pragma once

#include <memory>
#include <string>

#include "conv.h"
#include "product.h"

namespace jaxfuse::onednn {

// Opens the library, unless that was done, and puts it on our threads. Returns "", or why it cannot be used: then nothing of
// it is called, and it is left as it was.
std::string load(const std::string& path);

// Whether it may be asked to compute.
bool is_loaded();

// Throws std::runtime_error, in words, where it may not.
void require();

// The instruction set that oneDNN uses here, which ONEDNN_MAX_CPU_ISA may lower; null where there is no oneDNN.
const char* isa();

// Two questions: Skylake, Cascade Lake and Ice Lake have AVX-512 without instructions for bf16, and what oneDNN does for bf16
// there is slower than ours. False where there is no oneDNN.
bool has_avx512();
bool has_bf16();

// ---- What follows needs the library.

// Whether oneDNN can apply it inside a convolution.
bool has_post_ops(Activation activation, const Parameters& parameters, DType dtype);

// All of f but z, into y, whose long sums are cut into slices. False, and nothing done, where oneDNN has no fast code.
bool convolve(const conv::Forward& f, void* y);

// The same for convolutions that differ in where their arrays lie: finds out once how.
class Primitive;
class Repeated {
 public:
  bool convolve(const conv::Forward& f, void* y);

 private:
  std::shared_ptr<const Primitive> whole_;
  [[maybe_unused]] int threads_ = 0;  // for which that is
};

// y = x (*) w and nothing else; y may be f32 where x and w are not.
void convolve(const conv::Geometry& geometry, const Tensor& x, const Tensor& w, const Tensor& y);

// dx and dw from g. None of the tensors may be empty.
void data_gradient(const conv::Geometry& geometry, const Tensor& dx, const Tensor& w, const Tensor& g);
void weights_gradient(const conv::Geometry& geometry, const Tensor& x, const Tensor& dw, const Tensor& g);

// Whether oneDNN has fast code for these, and not its reference code only, which it takes for large filters, widely dilated or padded.
// The tensors need no memory, and none may be empty.
bool is_fast(const conv::Geometry& geometry, const Tensor& x, const Tensor& w, const Tensor& y);
bool is_fast_data_gradient(const conv::Geometry& geometry, const Tensor& dx, const Tensor& w, const Tensor& g);
bool is_fast_weights_gradient(const conv::Geometry& geometry, const Tensor& x, const Tensor& dw, const Tensor& g);

// c = a·b for each of the batch, as dense::matmul, of dtypes that oneDNN has kernels of. Where n > 1 the columns of c lie
// side by side.
void matmul(const Shape& batch, int64_t m, int64_t k, int64_t n, const product::Matrix& a, const product::Matrix& b,
            const product::Matrix& c);

// ---- What follows answers without it too.

// Whether oneDNN has fast kernels of this dtype here. Of bf16 it has none before AVX-512, and its own casts to f32 take
// 100 ns an element there: see Wide in bf16.h.
inline bool has_kernels(DType dtype) { return dtype == DType::F32 || has_bf16(); }

// How many images of the batch one sum of oneDNN's of the filter's gradient, over their pixels of g, may take in: all, some
// where x and g have the batch outermost, or 0 where even those of one are too many, or where there is no oneDNN.
int64_t images_per_sum(const conv::Geometry& geometry, const Tensor& dw, const Tensor& g);

}  // namespace jaxfuse::onednn
