#include "contraction.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <string>

#include "cut.h"
#include "parallel.h"
#include "scratch.h"
#include "simd_level.h"

namespace jaxfuse::contraction {
namespace {

// A chunk of a panel, kMostSteps long, stays in the first-level cache while rows meet it. Its sums are then added to the
// total: that keeps them short. The rows of a task, and their sums, stay in the second-level cache.
constexpr int64_t kMostSteps = 256, kRowBytes = 384 << 10, kMostTiles = 24, kTasksPerThread = 4;

// Lines of a panel that a tile meets at once: some taps whole, or a part of one.
struct Chunk {
  int64_t tap, taps, first, inner;  // elements [first, first + inner) of each of the taps
};

std::vector<Chunk> chunks_of(const Problem& p, int64_t per) {
  std::vector<Chunk> chunks;
  const int64_t steps = parts(p.inner, per), taps = int64_t(p.filter.taps.size());
  const int64_t together = taps ? even(taps, std::max<int64_t>(1, kMostSteps / steps)) : 1;
  const int64_t inner = together > 1 ? p.inner : even(steps, kMostSteps) * per;
  for (int64_t tap = 0; tap < taps; tap += together) {
    for (int64_t first = 0; first < p.inner; first += inner) {
      chunks.push_back({tap, std::min(together, taps - tap), first, std::min(inner, p.inner - first)});
    }
  }
  return chunks;
}

// How a problem is cut into tasks, and its panels.
class Plan {
 public:
  Plan(const Problem& problem, size_t number)
      : p_(problem), number_(number), loops_(kernels()), element_(element_of(problem.dtype)), per_(per_step(element_)),
        steps_(parts(p_.inner, per_)), taps_(int64_t(p_.filter.taps.size())), chunks_(chunks_of(p_, per_)),
        panels_(parts(p_.columns, loops_.columns)) {
    const int64_t row_bytes = std::max<int64_t>(1, p_.inner * int64_t(ffi::ByteWidth(p_.dtype)));
    const int64_t tiles = std::clamp<int64_t>(kRowBytes / (loops_.rows * row_bytes), 2, kMostTiles);
    block_rows_ = even(p_.rows, tiles * loops_.rows);
    block_rows_ = std::min(p_.rows, parts(block_rows_, loops_.rows) * loops_.rows);
    row_blocks_ = parts(p_.rows, block_rows_);
    const int64_t wanted = std::min(panels_, parts(kTasksPerThread * max_threads(), row_blocks_));
    task_panels_ = parts(panels_, wanted);
    column_parts_ = parts(panels_, task_panels_);
    if (row_blocks_ > 1) packed_ = std::make_unique<Scratch>(panels_ * panel_bytes());
  }

  // Panels that are packed beforehand, because several tasks meet them.
  int64_t packings() const { return packed_ ? panels_ * int64_t(chunks_.size()) : 0; }
  int64_t tasks() const { return row_blocks_ * column_parts_; }

  bool pack(int64_t i) const {
    const int64_t panel = i / int64_t(chunks_.size());
    const Chunk& chunk = chunks_[i % chunks_.size()];
    return pack(panel, chunk, packed_at(panel, chunk));
  }

  bool run(int64_t task, const std::function<void(const Block&)>& finish) const {
    const int64_t row = task / column_parts_ * block_rows_, rows = std::min(block_rows_, p_.rows - row);
    const int64_t pointers = taps_ * rows * sizeof(char*), sums_bytes = rows * loops_.columns * sizeof(float);
    const int64_t own_panel = packed_ ? 0 : chunk_bytes();
    const Scratch scratch(own_panel + sums_bytes + pointers);
    char* const panel_memory = scratch.data();
    float* const sums = reinterpret_cast<float*>(panel_memory + own_panel);
    const char** const at = reinterpret_cast<const char**>(panel_memory + own_panel + sums_bytes);
    p_.point(row, rows, at, rows);
    bool finite = true;
    const int64_t first_panel = task % column_parts_ * task_panels_;
    for (int64_t panel = first_panel; panel < std::min(panels_, first_panel + task_panels_); ++panel) {
      const int64_t column = panel * loops_.columns, columns = std::min(loops_.columns, p_.columns - column);
      if (chunks_.empty()) std::fill_n(sums, rows * loops_.columns, 0.0f);
      for (const Chunk& chunk : chunks_) {
        if (!packed_) finite &= pack(panel, chunk, panel_memory);
        multiply(chunk, packed_ ? packed_at(panel, chunk) : panel_memory, columns, at, rows, sums, panel == first_panel);
      }
      finish({number_, row, rows, column, columns, sums, loops_.columns});
    }
    return finite;
  }

 private:
  int64_t line_bytes() const { return loops_.columns * kStepBytes; }
  int64_t panel_bytes() const { return taps_ * steps_ * line_bytes(); }
  int64_t chunk_bytes() const {
    return chunks_.empty() ? 0 : chunks_[0].taps * parts(chunks_[0].inner, per_) * line_bytes();
  }

  char* packed_at(int64_t panel, const Chunk& chunk) const {
    return packed_->data() + panel * panel_bytes() + (chunk.tap * steps_ + chunk.first / per_) * line_bytes();
  }

  bool pack(int64_t panel, const Chunk& chunk, char* to) const {
    const Filter& f = p_.filter;
    const int64_t column = panel * loops_.columns, columns = std::min(loops_.columns, p_.columns - column);
    bool finite = true;
    for (int64_t tap = chunk.tap; tap < chunk.tap + chunk.taps; ++tap, to += parts(chunk.inner, per_) * line_bytes()) {
      const int64_t offset = f.taps[tap] + chunk.first * f.inner_step + column * f.column_step;
      const void* from = static_cast<const char*>(f.data) + offset * int64_t(ffi::ByteWidth(f.dtype));
      const auto pack = element_ == Element::f32 ? loops_.pack_f32 : loops_.pack_bf16;
      finite &= pack({element_of(f.dtype), from, f.inner_step, f.column_step}, columns, chunk.inner, to);
    }
    return finite;
  }

  void multiply(const Chunk& chunk, const void* panel, int64_t columns, const char* const* at, int64_t rows, float* sums, bool fetch) const {
    Tile tile{nullptr, nullptr, rows, chunk.first * int64_t(ffi::ByteWidth(p_.dtype)), chunk.taps, parts(chunk.inner, per_),
              chunk.inner % per_ != 0, 2 * columns <= loops_.columns, panel};
    const bool first = chunk.tap == 0 && chunk.first == 0;
    const auto multiply = element_ == Element::f32 ? loops_.multiply_f32 : loops_.multiply_bf16;
    const int64_t tiles = parts(rows, loops_.rows);
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t begin = i * rows / tiles, end = (i + 1) * rows / tiles;
      tile.rows = at + chunk.tap * rows + begin;
      tile.next = fetch && i + 1 < tiles ? at + chunk.tap * rows + std::min(end, rows - loops_.rows) : nullptr;
      multiply(tile, end - begin, sums + begin * loops_.columns, first);
    }
  }

  const Problem& p_;
  const size_t number_;
  const Kernels& loops_;
  const Element element_;
  const int64_t per_, steps_, taps_;
  const std::vector<Chunk> chunks_;
  const int64_t panels_;
  int64_t block_rows_, row_blocks_, task_panels_, column_parts_;
  std::unique_ptr<Scratch> packed_;
};

// f(plan, i) for i < count(plan), of all plans in one parallel loop; whether all were true.
template <class Count, class F>
bool all_of(const std::vector<Plan>& plans, Count count, F f) {
  std::vector<int64_t> ends;
  for (const Plan& plan : plans) ends.push_back((ends.empty() ? 0 : ends.back()) + count(plan));
  std::atomic<bool> all{true};
  if (ends.back() > 0) {
    parallel_for(ends.back(), [&](int64_t i) {
      const size_t k = std::upper_bound(ends.begin(), ends.end(), i) - ends.begin();
      if (!f(plans[k], k ? i - ends[k - 1] : i)) all = false;
    });
  }
  return all;
}

}  // namespace

#if defined(__x86_64__) && !defined(JAXFUSE_EMULATE_AVX512)
bool has_bf16() { return simd_level() == SimdLevel::avx512 && __builtin_cpu_supports("avx512bf16"); }
#else
bool has_bf16() { return false; }
#endif

bool always() {
  static const char* const wanted = std::getenv("JAXFUSE_CONTRACTION");
  return wanted && std::string(wanted) == "always";
}

const Kernels& kernels() { return has_bf16() ? avx512_bf16_kernels : choose(portable_kernels, avx2_kernels, avx512_kernels); }

bool multiply(const std::vector<Problem>& problems, const std::function<void(const Block&)>& finish) {
  std::vector<Plan> plans;
  for (const Problem& p : problems) {
    if (p.rows > 0 && p.columns > 0) plans.emplace_back(p, &p - problems.data());
  }
  if (plans.empty()) return true;
  const bool packed = all_of(plans, [](const Plan& plan) { return plan.packings(); }, [](const Plan& plan, int64_t i) { return plan.pack(i); });
  const bool run = all_of(plans, [](const Plan& plan) { return plan.tasks(); },
                          [&](const Plan& plan, int64_t i) { return plan.run(i, finish); });
  return packed && run;
}

}  // namespace jaxfuse::contraction
