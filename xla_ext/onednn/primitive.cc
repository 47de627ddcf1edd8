#include "primitive.h"

#include <pthread.h>

#include <cstdlib>
#include <list>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <string>

#include "scratch.h"
#include "thread_pool.h"

namespace jaxfuse::onednn {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kCachedPrimitives = 1024;

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

struct PrimitiveCache {
  using Entry = std::pair<Key, SharedPrimitive>;
  std::mutex mutex;
  std::list<Entry> entries;  // most recently used first
  std::map<Key, std::list<Entry>::iterator> index;
};

// It lives until the process ends: XLA's threads may still run handlers while static objects are destroyed. A fork waits
// until nobody changes it, so that the child can use it.
PrimitiveCache& primitive_cache() {
  static PrimitiveCache& instance = *new PrimitiveCache;
  return instance;
}

[[maybe_unused]] const int whole_in_children = pthread_atfork(
    [] { primitive_cache().mutex.lock(); }, [] { primitive_cache().mutex.unlock(); }, [] { primitive_cache().mutex.unlock(); });

std::optional<SharedPrimitive> find(const Key& key) {
  PrimitiveCache& cache = primitive_cache();
  std::lock_guard<std::mutex> lock(cache.mutex);
  auto found = cache.index.find(key);
  if (found == cache.index.end()) return std::nullopt;
  cache.entries.splice(cache.entries.begin(), cache.entries, found->second);
  return found->second->second;
}

}  // namespace

const dnnl::engine& engine() {
  static const dnnl::engine& instance = *new dnnl::engine(dnnl::engine::kind::cpu, 0);
  return instance;
}

Primitive::Primitive(const dnnl::primitive_desc_base& descriptor, dnnl::primitive primitive, const Layouts& inputs,
                     const Layouts& outputs)
    : primitive_(std::move(primitive)), scratchpad_(descriptor.scratchpad_desc()) {
  for (const auto& [number, user] : inputs) add(descriptor, number, user, false);
  for (const auto& [number, user] : outputs) add(descriptor, number, user, true);
  scratchpad_offset_ = reserve(scratchpad_.get_size());
}

size_t Primitive::reserve(size_t bytes) {
  size_t offset = scratch_bytes_;
  scratch_bytes_ += aligned(bytes);
  return offset;
}

void Primitive::add(const dnnl::primitive_desc_base& descriptor, int number, const dnnl::memory::desc& user,
                    bool output) {
  Argument argument{number, output, user, descriptor.query_md(dnnl::query::exec_arg_md, number), {}, 0, 0, {}};
  if (argument.inner != user) {
    dnnl::primitive_attr attr;
    attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    const auto& from = output ? argument.inner : user;
    const auto& to = output ? user : argument.inner;
    dnnl::reorder::primitive_desc reorder(engine(), from, engine(), to, attr);
    argument.reorder = dnnl::reorder(reorder);
    argument.inner_offset = reserve(argument.inner.get_size());
    argument.reorder_scratch = reorder.scratchpad_desc();
    argument.reorder_scratch_offset = reserve(argument.reorder_scratch.get_size());
  }
  arguments_.push_back(std::move(argument));
}

struct Primitive::Objects {
  using Arguments = std::unordered_map<int, dnnl::memory>;

  dnnl::stream stream{engine()};
  Arguments arguments;
  std::vector<Arguments> reorders;  // in the order of arguments_, empty where there is none
};

Primitive::~Primitive() { delete spare_.load(); }

std::unique_ptr<Primitive::Objects> Primitive::objects() const {
  if (Objects* spare = spare_.exchange(nullptr)) return std::unique_ptr<Objects>(spare);
  const auto memory = [](const dnnl::memory::desc& layout) { return dnnl::memory(layout, engine(), DNNL_MEMORY_NONE); };
  auto made = std::make_unique<Objects>();
  for (const Argument& a : arguments_) {
    const dnnl::memory& inner = made->arguments[a.number] = memory(a.inner);
    Objects::Arguments& reorder = made->reorders.emplace_back();
    if (!a.reorder) continue;
    const dnnl::memory user = memory(a.user);
    reorder = {{DNNL_ARG_FROM, a.output ? inner : user}, {DNNL_ARG_TO, a.output ? user : inner}, {DNNL_ARG_SCRATCHPAD, memory(a.reorder_scratch)}};
  }
  made->arguments[DNNL_ARG_SCRATCHPAD] = memory(scratchpad_);
  return made;
}

void Primitive::run(const std::vector<std::pair<int, const void*>>& buffers) const {
  const Scratch scratch(scratch_bytes_);
  auto buffer_of = [&](int number) {
    for (const auto& [given, data] : buffers) {
      if (given == number) return const_cast<void*>(data);
    }
    throw std::logic_error("no buffer for oneDNN argument " + std::to_string(number));
  };
  std::unique_ptr<Objects> o = objects();
  const auto reorder = [&](size_t i) {
    const Argument& a = arguments_[i];
    o->reorders[i].at(a.output ? DNNL_ARG_TO : DNNL_ARG_FROM).set_data_handle(buffer_of(a.number));
    o->reorders[i].at(DNNL_ARG_SCRATCHPAD).set_data_handle(scratch.data() + a.reorder_scratch_offset);
    a.reorder.execute(o->stream, o->reorders[i]);
  };
  for (size_t i = 0; i < arguments_.size(); ++i) {
    const Argument& a = arguments_[i];
    o->arguments.at(a.number).set_data_handle(a.reorder ? scratch.data() + a.inner_offset : buffer_of(a.number));
    if (a.reorder && !a.output) reorder(i);
  }
  o->arguments.at(DNNL_ARG_SCRATCHPAD).set_data_handle(scratch.data() + scratchpad_offset_);
  primitive_.execute(o->stream, o->arguments);
  for (size_t i = 0; i < arguments_.size(); ++i) {
    if (arguments_[i].reorder && arguments_[i].output) reorder(i);
  }
  o->stream.wait();
  delete spare_.exchange(o.release());
}

SharedPrimitive cached(const Key& problem, const std::function<SharedPrimitive()>& make) {
  Key key = problem;
  key.push_back(ThreadPool::instance().size());  // oneDNN divides the work among so many when it makes the primitive
  if (auto found = find(key)) return *found;
  SharedPrimitive made = make();  // outside the lock: compiling takes milliseconds
  PrimitiveCache& cache = primitive_cache();
  std::lock_guard<std::mutex> lock(cache.mutex);
  if (auto other = cache.index.find(key); other != cache.index.end()) return other->second->second;
  cache.entries.emplace_front(key, made);
  cache.index.emplace(key, cache.entries.begin());
  if (cache.entries.size() > kCachedPrimitives) {
    cache.index.erase(cache.entries.back().first);
    cache.entries.pop_back();
  }
  return made;
}

}  // namespace jaxfuse::onednn
