// Depthwise convolution's FFI targets on CUDA: images (n, height, width, channels), filter (height, width, 1, channels).
//   jaxfuse_depthwise_fwd   x, w, [scale], [bias] -> y, [z]
//   jaxfuse_depthwise_bwd   x, w, dy, [saved activation] -> dx, dw, db, [dz], memory for partial sums: f32 (parts, taps + 1, channels)
// Gradients of the filter and the bias are f32. The saved activation, y if by_value, else z, and dz are there if there is an activation.
#include "depthwise.h"

#include <string_view>

#include "activation_attr.h"
#include "reader.h"

namespace jaxfuse::cuda::depthwise {
namespace {

constexpr int64_t kLongest = 1 << 28;  // of what is counted along a dimension, so that sums of them have 32 bits

class Reader : public cuda::Reader<Args> {
 public:
  explicit Reader(const Call& call) : cuda::Reader<Args>(call, call.operand(0, "x")) {
    const Tensor w = call.operand(1, "w");
    if (x_.shape.size() != 4 || x_.size() == 0) {
      call.refuse("x has shape ", to_string(x_.shape), ", expected (n, height, width, channels) with elements");
    }
    const int64_t channels = x_.shape[3];
    if (w.shape.size() != 4 || w.size() == 0 || w.shape[2] != 1 || w.shape[3] != channels) {
      call.refuse("w has shape ", to_string(w.shape), ", expected (height, width, 1, ", channels, ") with elements");
    }
    args.images = x_.shape[0];
    args.channels = channels;
    args.aligned = channels % 8 == 0;
    args.height = axis(w, 0);
    args.width = axis(w, 1);
    taps_ = w.shape[0] * w.shape[1];
    if (taps_ > kLongest) call.refuse("w has shape ", to_string(w.shape), ": too large");
    args.activation = activation_attr(call);
    args.parameters = parameters_attr(call);
    args.x = full(x_);
    args.w = shaped(w, w.shape);
  }

  void* of_y(const Tensor& t) { return shaped(t, {args.images, args.height.out, args.width.out, args.channels}); }
  float* vector(const Tensor& t) { return numbers(t, {args.channels}); }
  float* filter(const Tensor& t) { return numbers(t, {args.height.window, args.width.window, 1, args.channels}); }
  void workspace(const Tensor& t) { partial_sums(t, args.channels, taps_ + 1); }

 private:
  Axis axis(const Tensor& w, size_t d) const {
    const auto attribute = [&](const char* name, int64_t least) {
      const Shape values = call_.int_array(name);
      if (values.size() != 2 || values[d] < least || values[d] > kLongest) {
        call_.refuse("attribute ", name, " is ", to_string(values), ", expected two numbers from ", least, " to ", kLongest);
      }
      return values[d];
    };
    const int64_t stride = attribute("window_strides", 1), dilation = attribute("rhs_dilation", 1);
    const int64_t low = attribute("padding_low", -kLongest), high = attribute("padding_high", -kLongest);
    const int64_t in = x_.shape[1 + d], window = w.shape[d], room = in + low + high - (window - 1) * dilation;
    if (room < 1 || in > kLongest || room > kLongest || (window - 1) * dilation > kLongest) {
      call_.refuse("x has shape ", to_string(x_.shape), ", w ", to_string(w.shape), ": with padding (", low, ", ", high,
                   ") and dilation ", dilation, " the window has ", room, " positions along dimension ", 1 + d,
                   ", expected 1 to ", kLongest);
    }
    return {int32_t(in), int32_t((room - 1) / stride + 1), int32_t(window), int32_t(stride), int32_t(-low), int32_t(dilation), 1};
  }

  int64_t taps_;
};

void forward_handler(const Call& call, cudaStream_t stream) {
  const bool has_scale = call.attr<bool>("has_scale"), has_bias = call.attr<bool>("has_bias"), save_z = call.attr<bool>("save_z");
  call.expect_counts(2 + has_scale + has_bias, 1 + save_z);
  Reader reader(call);
  Args& args = reader.args;
  if (has_scale) args.scale = reader.vector(call.operand(2, "scale"));
  if (has_bias) args.bias = reader.vector(call.operand(2 + has_scale, "bias"));
  args.y = reader.of_y(call.result(0, "y"));
  if (save_z) args.z = reader.of_y(call.result(1, "z"));
  forward(args, stream);
}

void backward_handler(const Call& call, cudaStream_t stream) {
  const bool activated = call.attr<std::string_view>("activation") != "none";
  call.expect_counts(3 + activated, 4 + activated);
  Reader reader(call);
  Args& args = reader.args;
  args.derivative_from_y = derivative_from_y_attr(call, args.activation, args.parameters);
  args.dy = reader.of_y(call.operand(2, "dy"));
  args.dx = reader.full(call.result(0, "dx"));
  args.dw = reader.filter(call.result(1, "dw"));
  args.db = reader.vector(call.result(2, "db"));
  if (activated) {
    args.saved_activation = reader.of_y(call.operand(3, args.derivative_from_y ? "y" : "z"));
    args.dz = reader.of_y(call.result(3, "dz"));
  }
  reader.workspace(call.result(3 + activated, "workspace"));
  backward(args, stream);
}

JAXFUSE_CUDA_HANDLER(jaxfuse_depthwise_fwd, forward_handler);
JAXFUSE_CUDA_HANDLER(jaxfuse_depthwise_bwd, backward_handler);

}  // namespace
}  // namespace jaxfuse::cuda::depthwise
