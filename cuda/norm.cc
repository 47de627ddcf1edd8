// Layer and RMS norm's FFI targets on CUDA, with the operands, results and attributes of xla_ext/norm.cc, for tensors (outer, 1, groups,
// length) without an activation. With dgamma and dbeta, bwd has one more result, memory for partial sums: f32 (parts, 2, groups·length).
#include "norm.h"

#include <string_view>

#include "reader.h"

namespace jaxfuse::cuda::norm {
namespace {

constexpr int32_t kBlocks = 264;  // two for each multiprocessor of an H100

class Reader : public cuda::Reader<Args> {
 public:
  Reader(const Call& call, size_t i, const char* name, size_t gamma) : cuda::Reader<Args>(call, call.operand(i, name)) {
    if (x_.shape.size() != 4 || x_.shape[1] != 1 || x_.size() == 0 || x_.shape[3] > kLongestRow) {
      call.refuse(name, " has shape ", to_string(x_.shape), ", expected (outer, 1, groups, length) with elements and at most ",
                  kLongestRow, " of them in a row");
    }
    const auto activation = call.attr<std::string_view>("activation");
    if (activation != "none") call.refuse("attribute activation is \"", activation, "\", expected none");
    if (x_.shape[2] > 65535) call.refuse(name, " has ", x_.shape[2], " groups, expected at most 65535");
    args.groups = x_.shape[2];
    args.length = x_.shape[3];
    args.inverse_length = 1.0f / float(args.length);
    args.rows = x_.shape[0];
    args.aligned = args.length % 8 == 0;
    args.centered = call.attr<bool>("centered");
    args.epsilon_outside = call.attr<bool>("epsilon_outside");
    args.epsilon = call.attr<float>("epsilon");
    if (!(args.epsilon >= 0)) call.refuse("attribute epsilon is ", args.epsilon, ", expected 0 or more");
    args.gamma = parameter(call.operand(gamma, "gamma"));
    args.beta = parameter(call.operand(gamma + 1, "beta"));
    full(x_);
  }

  void* x() const { return x_.data; }
  float* parameter(const Tensor& t) { return numbers(t, {args.groups, args.length}); }
  float* statistic(const Tensor& t) { return call_.checked(t, DType::F32, {x_.shape[0], args.groups}).as<float>(); }
  void workspace(const Tensor& t) { partial_sums(t, args.groups * args.length); }
};

void forward_handler(const Call& call, cudaStream_t stream) {
  const bool has_residual = call.attr<bool>("has_residual"), wants_sum = call.attr<bool>("wants_sum");
  const bool saving = call.attr<bool>("saving");
  if (wants_sum && !has_residual) call.refuse("attribute wants_sum is true but there is no residual");
  call.expect_counts(3 + has_residual, 1 + wants_sum + 2 * saving);
  Reader reader(call, 0, "x", 1);
  Args& args = reader.args;
  args.x = reader.x();
  if (has_residual) args.residual = reader.full(call.operand(3, "residual"));
  args.y = reader.full(call.result(0, "y"));
  if (wants_sum) args.sum = reader.full(call.result(1, "sum"));
  if (saving) {
    args.mean = reader.statistic(call.result(1 + wants_sum, "mean"));
    args.rstd = reader.statistic(call.result(2 + wants_sum, "rstd"));
  }
  forward(args, stream);
}

void backward_handler(const Call& call, cudaStream_t stream) {
  const bool has_ds = call.attr<bool>("has_ds"), wants_parameters = call.attr<bool>("wants_parameters");
  call.expect_counts(6 + has_ds, 1 + 3 * wants_parameters);
  Reader reader(call, 1, "s", 2);
  Args& args = reader.args;
  args.s = reader.x();
  args.dy = reader.full(call.operand(0, "dy"));
  args.mean = reader.statistic(call.operand(4, "mean"));
  args.rstd = reader.statistic(call.operand(5, "rstd"));
  if (has_ds) args.ds = reader.full(call.operand(6, "ds"));
  args.dx = reader.full(call.result(0, "dx"));
  args.parts = kBlocks;  // without sums to be made in parts: as many blocks
  if (wants_parameters) {
    args.dgamma = reader.parameter(call.result(1, "dgamma"));
    args.dbeta = reader.parameter(call.result(2, "dbeta"));
    reader.workspace(call.result(3, "workspace"));
  }
  backward(args, stream);
}

JAXFUSE_CUDA_HANDLER(jaxfuse_norm_fwd, forward_handler);
JAXFUSE_CUDA_HANDLER(jaxfuse_norm_bwd, backward_handler);

}  // namespace
}  // namespace jaxfuse::cuda::norm
