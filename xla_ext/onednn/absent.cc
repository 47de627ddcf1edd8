// In place of this folder's other files, in a build without the library.
#include <stdexcept>

#include "onednn.h"

namespace jaxfuse::onednn {

std::string load(const std::string&) { return JAXFUSE_NO_ONEDNN; }
bool is_loaded() { return false; }
void require() { throw std::runtime_error("oneDNN would compute this: " JAXFUSE_NO_ONEDNN); }
const char* isa() { return nullptr; }
bool has_avx512() { return false; }
bool has_bf16() { return false; }
int64_t images_per_sum(const conv::Geometry&, const Tensor&, const Tensor&) { return 0; }

bool has_post_ops(Activation, const Parameters&, DType) { return false; }
bool convolve(const conv::Forward&, void*) { return require(), false; }
bool Repeated::convolve(const conv::Forward&, void*) { return require(), false; }
void convolve(const conv::Geometry&, const Tensor&, const Tensor&, const Tensor&) { require(); }
void data_gradient(const conv::Geometry&, const Tensor&, const Tensor&, const Tensor&) { require(); }
void weights_gradient(const conv::Geometry&, const Tensor&, const Tensor&, const Tensor&) { require(); }
bool is_fast(const conv::Geometry&, const Tensor&, const Tensor&, const Tensor&) { return false; }
bool is_fast_data_gradient(const conv::Geometry&, const Tensor&, const Tensor&, const Tensor&) { return false; }
bool is_fast_weights_gradient(const conv::Geometry&, const Tensor&, const Tensor&, const Tensor&) { return false; }
void matmul(const Shape&, int64_t, int64_t, int64_t, const product::Matrix&, const product::Matrix&, const product::Matrix&) {
  require();
}

}  // namespace jaxfuse::onednn
