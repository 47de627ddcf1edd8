// jaxfuse_global_average_pool: x -> y, the mean of each channel over an image in f32, x being (batch..., places..., channels) and
// y (batch..., channels). In f32 are sums of kLongestSum numbers at most, the rest is in double.
#include <algorithm>

#include "cut.h"
#include "epilogue.h"
#include "parallel.h"
#include "partial_sums.h"
#include "scratch.h"

namespace jaxfuse {
namespace {

constexpr int64_t kPartElements = 1 << 14, kLongestSum = 1024;

void check(const Call& call, const Tensor& x, const Tensor& y) {
  call.expect_dtype(x, {DType::F32, DType::BF16, DType::F16});
  call.expect_dtype(y, {DType::F32});
  const size_t kept = y.shape.size();
  const bool fits = kept >= 2 && x.shape.size() > kept && x.shape.back() == y.shape.back() &&
                    std::equal(y.shape.begin(), y.shape.end() - 1, x.shape.begin());
  if (!fits) call.refuse("y has shape ", to_string(y.shape), ", expected the first dimensions and the last of x, ", to_string(x.shape));
}

void global_average_pool(const Call& call) {
  call.expect_counts(1, 1);
  const Tensor x = call.operand(0, "x"), y = call.result(0, "y");
  check(call, x, y);
  if (x.size() == 0) call.refuse("x has shape ", to_string(x.shape), ", expected no empty dimension");
  const int64_t channels = y.shape.back(), images = y.size() / channels, places = x.size() / y.size();
  const int64_t step = even(places, std::clamp<int64_t>(kPartElements / channels, 1, kLongestSum)), count = parts(places, step);
  const epilogue::GradientTile tile{element_of(x.dtype), channels, 0, Activation::none, {}, false, x.data, nullptr, nullptr};
  const Scratch memory(images * count * channels * sizeof(float));
  float* const sums = memory.as<float>();
  parallel_for(images * count, [&](int64_t i) {
    const int64_t image = i / count, begin = i % count * step, end = std::min(begin + step, places);
    epilogue::kernels().gradient(tile, image * places + begin, image * places + end, sums + i * channels);
  });
  parallel_for(images, [&](int64_t image) {
    float* const mean = y.as<float>() + image * channels;
    add_parts(sums + image * count * channels, count, channels, mean);
    for (int64_t c = 0; c < channels; ++c) mean[c] /= float(places);
  });
}

JAXFUSE_HANDLER(jaxfuse_global_average_pool, global_average_pool);

}  // namespace
}  // namespace jaxfuse
