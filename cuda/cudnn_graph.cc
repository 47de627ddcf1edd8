// Runs an execution plan that jaxfuse/runtime/cudnn made while the program was lowered. It knows no operation: which buffer is which
// tensor of the plan's graph is said by `uids`, operands first, then results; the last result is the plan's workspace.
//
// A plan is read once for each device: that allocates and loads kernels, in the first call. Calls after that only enqueue. So XLA
// may record them: cuDNN has no note of engines that a stream could not capture (its note on CUDA graphs is of another way to
// make them), and other frameworks record its plans as well.
#include "capture.h"
#include "cudnn_api.h"
#include "handler.h"

#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

namespace jaxfuse::cudnn {
namespace {

// What one device has: a handle, which serves one thread at a time, and the plans read with it. Neither is ever given back:
// the driver may be gone before this process's last destructors run.
struct Device {
  std::mutex busy;
  Handle handle = nullptr;
  std::map<std::string, std::unique_ptr<Descriptor>, std::less<>> plans;

  const Descriptor& plan(std::string_view digest, std::string_view text) {
    auto found = plans.find(digest);
    if (found != plans.end()) return *found->second;
    const Api& api = Api::get();
    if (!handle) api.expect_success(api.create(&handle), "cudnnCreate");
    auto plan = std::make_unique<Descriptor>(Kind::execution_plan);
    plan->set(Attribute::plan_handle, Type::handle, 1, &handle);
    plan->set(Attribute::plan_text, Type::text, int64_t(text.size()), text.data());
    plan->finalize();
    return *plans.emplace(digest, std::move(plan)).first->second;
  }
};

Device& current_device() {
  int ordinal = 0;
  cuda::expect_success(cudaGetDevice(&ordinal), "cudaGetDevice");
  static std::mutex mutex;
  static auto& devices = *new std::map<int, Device>;
  const std::lock_guard<std::mutex> lock(mutex);
  return devices[ordinal];
}

void run(const Call& call, cudaStream_t stream) {
  const Shape uids = call.int_array("uids");
  const size_t operands = size_t(call.attr<int64_t>("operands"));
  if (operands > uids.size()) call.refuse("attribute operands is ", operands, ", expected at most ", uids.size(), ", as there are uids");
  call.expect_counts(operands, uids.size() - operands + 1);
  std::vector<void*> pointers;
  for (size_t i = 0; i < uids.size(); ++i) {
    pointers.push_back(i < operands ? call.operand(i, "of the graph").data : call.result(i - operands, "of the graph").data);
  }
  const Tensor workspace = call.result(uids.size() - operands, "workspace");

  Device& device = current_device();
  const std::lock_guard<std::mutex> lock(device.busy);
  const cuda::OutsideCapture outside;  // reading a plan allocates, and running it may load a kernel
  try {
    const Descriptor& plan = device.plan(call.attr<std::string_view>("digest"), call.attr<std::string_view>("plan"));
    const int64_t needed = plan.get_int64(Attribute::plan_workspace);
    if (needed > int64_t(workspace.bytes())) call.refuse("workspace has ", workspace.bytes(), " bytes, the plan needs ", needed);
    Descriptor pack(Kind::variant_pack);
    pack.set(Attribute::pack_uids, Type::int64, int64_t(uids.size()), uids.data());
    pack.set(Attribute::pack_pointers, Type::pointer, int64_t(pointers.size()), pointers.data());
    pack.set(Attribute::pack_workspace, Type::pointer, 1, &workspace.data);
    pack.finalize();
    const Api& api = Api::get();
    api.expect_success(api.set_stream(device.handle, stream), "cudnnSetStream");
    api.expect_success(api.execute(device.handle, plan.pointer(), pack.pointer()), "cudnnBackendExecute");
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(std::string(call.attr<std::string_view>("what")) + ": " + error.what());
  }
}

JAXFUSE_CUDA_HANDLER(jaxfuse_cudnn_graph, run);

}  // namespace
}  // namespace jaxfuse::cudnn
