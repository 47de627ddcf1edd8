#include "contraction.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <string>

#include "cut.h"
#include "parallel.h"
#include "scratch.h"
#include "simd_level.h"

namespace jaxfuse::contraction {
namespace {

// A chunk of the panels that a tile meets, kernels().steps long, stays in the cache while rows meet it: in that of the first level, or with
// AVX-512 on AMD's CPUs of the second. Its sums are then added to the total: that keeps them short. The rows of a task, and their sums, stay in
// the second-level cache.
constexpr int64_t kRowBytes = 384 << 10, kFewestRows = 28, kMostRows = 336, kFewestOfThread = 12;
constexpr int64_t kRowsTogether = 26;  // whose sums are finished together, at least: they are in the first-level cache
constexpr int64_t kRowsAhead = 6;      // behind a tile, whose outputs are expected with its own

// Numbers of a step.
int64_t per_step(DType dtype) { return kStepBytes / int64_t(ffi::ByteWidth(dtype)); }

// Lines of a panel that a tile meets at once: some taps whole, or a part of one.
struct Chunk {
  int64_t tap, taps, first, inner;  // elements [first, first + inner) of each of the taps
};

std::vector<Chunk> chunks_of(const Panels& p, int64_t per) {
  std::vector<Chunk> chunks;
  const int64_t steps = p.steps(), together = p.taps ? even(p.taps, std::max<int64_t>(1, kernels().steps / steps)) : 1;
  const int64_t inner = together > 1 ? p.inner : even(steps, kernels().steps) * per;
  for (int64_t tap = 0; tap < p.taps; tap += together) {
    for (int64_t first = 0; first < p.inner; first += inner) {
      chunks.push_back({tap, std::min(together, p.taps - tap), first, std::min(inner, p.inner - first)});
    }
  }
  return chunks;
}

// A filter that is packed, chunk by chunk of a panel.
class Packing {
 public:
  Packing(const Filter& filter, const Panels& panels, Layout layout)
      : f_(filter), panels_(panels), layout_(layout), per_(per_step(panels.dtype)), chunks_(chunks_of(panels, per_)) {}

  const std::vector<Chunk>& chunks() const { return chunks_; }
  int64_t lines(const Chunk& chunk) const { return chunk.taps * parts(chunk.inner, per_); }
  const Layout& layout() const { return layout_; }
  // Bytes from the beginning of the panels that a tile meets; and from the beginning of all.
  int64_t place(const Chunk& chunk) const { return (chunk.tap * panels_.steps() + chunk.first / per_) * layout_.line; }
  int64_t place(int64_t group) const { return group * (kernels().columns / kPanel) * panels_.bytes(); }
  int64_t count() const { return parts(panels_.columns, kernels().columns) * int64_t(chunks_.size()); }

  // One of `count` parts of all panels.
  bool pack(int64_t i, char* to) const {
    const int64_t group = i / int64_t(chunks_.size());
    const Chunk& chunk = chunks_[i % chunks_.size()];
    return pack(group, chunk, to + place(group) + place(chunk));
  }

  // The panels that a tile meets.
  bool pack(int64_t group, const Chunk& chunk, char* to) const {
    const int64_t column = group * kernels().columns, columns = std::min(kernels().columns, panels_.columns - column);
    const auto pack = panels_.dtype == DType::F32 ? kernels().pack_f32 : kernels().pack_bf16;
    bool finite = true;
    for (int64_t tap = chunk.tap; tap < chunk.tap + chunk.taps; ++tap, to += parts(chunk.inner, per_) * layout_.line) {
      const int64_t offset = f_.taps[tap] + chunk.first * f_.inner_step + column * f_.column_step;
      const void* from = static_cast<const char*>(f_.data) + offset * int64_t(ffi::ByteWidth(f_.dtype));
      finite &= pack({element_of(f_.dtype), from, f_.inner_step, f_.column_step}, columns, chunk.inner, to, layout_);
    }
    return finite;
  }

 private:
  const Filter& f_;
  const Panels panels_;
  const Layout layout_;
  const int64_t per_;
  const std::vector<Chunk> chunks_;
};

using Multiply = void (*)(const Tile&, int64_t, float*, bool);

Multiply multiply_of(const Problem& p) {
  if (p.dtype == DType::U8) return p.filter.narrow ? kernels().multiply_narrow_bytes : kernels().multiply_bytes;
  return p.dtype == DType::F32 ? kernels().multiply_f32 : kernels().multiply_bf16;
}

}  // namespace

// How a problem is cut into tasks, and its panels.
class Plan {
 public:
  Plan(const Problem& problem, size_t number)
      : p_(problem), number_(number), loops_(kernels()), multiply_(multiply_of(problem)),
        panels_{p_.inner, p_.columns, int64_t(p_.filter.taps.size()), p_.dtype}, packing_(p_.filter, panels_, p_.filter.panels ? panels_.layout() : side_by_side()),
        groups_(parts(p_.columns, loops_.columns)) {
    const int64_t row_bytes = std::max<int64_t>(1, p_.inner * int64_t(ffi::ByteWidth(p_.dtype)));
    const int64_t most_rows = std::clamp(kRowBytes / row_bytes, kFewestRows, kMostRows) / loops_.rows * loops_.rows;
    const int64_t wanted = wanted_tasks(p_.rows * p_.columns * p_.inner * panels_.taps);
    row_blocks_ = parts(p_.rows, most_rows);
    task_groups_ = parts(groups_, std::min(groups_, parts(wanted, row_blocks_)));
    column_parts_ = parts(groups_, task_groups_);
    // Panels that are packed already cost other tasks only that they read them.
    if (p_.filter.panels && tasks() < wanted) {
      row_blocks_ = std::max(row_blocks_, std::min(parts(wanted, column_parts_), parts(p_.rows, kFewestRows)));
    }
    if (p_.filter.panels || row_blocks_ > 1) row_blocks_ = as_many_for_each_thread(row_blocks_);
    if (!p_.filter.panels && row_blocks_ > 1) packed_ = std::make_unique<Scratch>(side_by_side_bytes(panels_));
  }

  // Parts of the panels that are packed beforehand, because several tasks meet them.
  int64_t packings() const { return packed_ ? packing_.count() : 0; }
  int64_t tasks() const { return row_blocks_ * column_parts_; }

  bool pack(int64_t i) const { return packing_.pack(i, packed_->data()); }

  bool run(int64_t task, const OfBlock& finish, const OfBlock& expect) const {
    const int64_t row_block = task / column_parts_, row = row_block * p_.rows / row_blocks_;
    const int64_t rows = (row_block + 1) * p_.rows / row_blocks_ - row;
    const int64_t pointers = panels_.taps * rows * sizeof(char*), sums_bytes = rows * loops_.columns * sizeof(float);
    const int64_t own_panels = whole() ? 0 : chunk_bytes();
    const Scratch scratch(own_panels + sums_bytes + pointers);
    float* const sums = reinterpret_cast<float*>(scratch.data() + own_panels);
    const char** const at = reinterpret_cast<const char**>(scratch.data() + own_panels + sums_bytes);
    p_.point(row, rows, at, rows);
    bool finite = true;
    const int64_t first = task % column_parts_ * task_groups_;
    for (int64_t group = first; group < std::min(groups_, first + task_groups_); ++group) {
      const int64_t column = group * loops_.columns, columns = std::min(loops_.columns, p_.columns - column);
      const auto block = [&](int64_t begin, int64_t end) {
        return Block{number_, row + begin, end - begin, column, columns, sums + begin * loops_.columns, loops_.columns};
      };
      for (const Chunk& chunk : packing_.chunks()) {
        Tile tile = tile_of(chunk, columns);
        if (whole()) {
          point_to(tile, group, chunk);
        } else {
          finite &= packing_.pack(group, chunk, scratch.data());
          tile.panels = scratch.data();
        }
        const bool last = &chunk == &packing_.chunks().back();
        multiply(tile, chunk, at, rows, sums, group == first,
                 [&](int64_t begin, int64_t end) { if (last) expect(block(begin, end)); },
                 [&](int64_t begin, int64_t end) { if (last) finish(block(begin, end)); });
      }
      if (packing_.chunks().empty()) std::fill_n(sums, rows * loops_.columns, 0.0f), finish(block(0, rows));
    }
    return finite;
  }

 private:
  // Blocks of rows, some more than these, of which each thread has as many tasks as the others; unless they had hardly any rows.
  int64_t as_many_for_each_thread(int64_t blocks) const {
    const int64_t threads = max_threads(), wanted = padded(blocks, threads / std::gcd(threads, column_parts_));
    return p_.rows >= wanted * kFewestOfThread ? wanted : blocks;
  }

  // All panels, where they are packed before the tasks.
  const char* whole() const { return packed_ ? packed_->data() : p_.filter.panels; }
  int64_t chunk_bytes() const { return packing_.chunks().empty() ? 0 : packing_.lines(packing_.chunks()[0]) * packing_.layout().line; }

  Tile tile_of(const Chunk& chunk, int64_t columns) const {
    const int64_t per = per_step(p_.dtype);
    return {nullptr, nullptr, 0, chunk.first * int64_t(ffi::ByteWidth(p_.dtype)), chunk.taps, parts(chunk.inner, per),
            chunk.inner % per != 0, columns, nullptr, packing_.layout(), nullptr, 0, 0};
  }

  // The chunk's panels, and those that come next, where all are packed.
  void point_to(Tile& tile, int64_t group, const Chunk& chunk) const {
    tile.panels = whole() + packing_.place(group) + packing_.place(chunk);
    const bool last = &chunk == &packing_.chunks().back();
    if (last && group + 1 == groups_) return;
    tile.fetch = last ? whole() + packing_.place(group + 1) : tile.panels + packing_.lines(chunk) * packing_.layout().line;
    tile.fetched = packing_.lines(packing_.chunks()[0]);
  }

  // Rows by the chunk, tile by tile. `expect` and `finish` are told which rows are next, and which are done.
  template <class Expect, class Finish>
  void multiply(Tile& tile, const Chunk& chunk, const char* const* at, int64_t rows, float* sums, bool fetch_rows, Expect expect,
                Finish finish) const {
    const bool first = chunk.tap == 0 && chunk.first == 0;
    tile.rows = at + chunk.tap * rows, tile.row_step = rows;
    int64_t expected = 0, finished = 0;
    for_tiles(tile, rows, [&](Tile& own, int64_t begin, int64_t end) {
      own.next = fetch_rows && end < rows ? tile.rows + std::min(end, rows - loops_.rows) : nullptr;
      if (end > expected) {
        const int64_t next = std::min(rows, end + kRowsAhead);
        expect(expected, next), expected = next;
      }
      multiply_(own, end - begin, sums + begin * loops_.columns, first);
      if (end - finished >= kRowsTogether || end == rows) finish(finished, end), finished = end;
    });
  }

  const Problem& p_;
  const size_t number_;
  const Kernels& loops_;
  const Multiply multiply_;
  const Panels panels_;
  const Packing packing_;
  const int64_t groups_;  // of panels that a tile meets
  int64_t row_blocks_, task_groups_, column_parts_;
  std::unique_ptr<Scratch> packed_;
};

namespace {

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
bool has_bf16() { return simd_level() == SimdLevel::avx512 && has_vnni() && __builtin_cpu_supports("avx512bf16"); }
#else
bool has_bf16() { return false; }
#endif

bool always() {
  static const char* const wanted = std::getenv("JAXFUSE_CONTRACTION");
  return wanted && std::string(wanted) == "always";
}

const Kernels& kernels() {
  static const Kernels found = [] {
    Kernels all = choose(portable_kernels, avx2_kernels, avx512_kernels);
    // Of seven rows the registers hold sums and panels alone, and each product loads its factor: 32 loads for 28 products. A CPU that
    // multiplies as often as it loads is faster by six.
    if (simd_level() == SimdLevel::avx512 && !halves_vectors()) all.rows = 6;
    // Intel's bring hardly more from the second-level cache than a tile reads: panels that fit into the first.
    if (simd_level() == SimdLevel::avx512 && is_intel()) all.steps = 128;
    if (has_vnni()) {
      const Kernels& better = choose(portable_kernels, avx2_vnni_kernels, avx512_vnni_kernels);
      all.multiply_bytes = better.multiply_bytes, all.multiply_narrow_bytes = better.multiply_narrow_bytes;
    }
    if (has_bf16()) {
      const Kernels& better = avx512_bf16_kernels;
      all.pack_bf16 = better.pack_bf16, all.transpose_bf16 = better.transpose_bf16, all.multiply_bf16 = better.multiply_bf16, all.pixels_bf16 = better.pixels_bf16;
    }
    return all;
  }();
  return found;
}

int64_t Panels::steps() const { return parts(inner, per_step(dtype)); }
int64_t Panels::bytes() const { return taps * steps() * kLineBytes; }
int64_t Panels::all_bytes() const { return parts(columns, kPanel) * bytes(); }
Layout Panels::layout() const { return {kLineBytes, bytes()}; }

Layout side_by_side() { return {kernels().columns * kStepBytes, kLineBytes}; }
int64_t side_by_side_bytes(const Panels& p) { return padded(p.columns, kernels().columns) / kPanel * p.bytes(); }

bool pack(const Filter& filter, const Panels& panels, char* to) {
  const Packing packing(filter, panels, panels.layout());
  std::atomic<bool> finite{true};
  parallel_for(packing.count(), [&](int64_t i) {
    if (!packing.pack(i, to)) finite = false;
  });
  return finite;
}

void quantise(const Tensor& x, float step, int32_t zero, uint8_t* to) {
  constexpr int64_t kTogether = 1 << 14;
  const auto quantise = x.dtype == DType::F32 ? kernels().quantise_f32 : kernels().quantise_bf16;
  parallel_for(parts(x.size(), kTogether), [&](int64_t i) {
    const int64_t begin = i * kTogether, count = std::min(kTogether, x.size() - begin);
    quantise(x.as<char>() + begin * int64_t(ffi::ByteWidth(x.dtype)), count, step, zero, to + begin);
  });
}

int64_t wanted_tasks(int64_t products) {
  constexpr int64_t kFewest = 4, kMost = 8, kProducts = 2 << 20;
  const int64_t threads = max_threads();
  return threads * std::clamp(products / kProducts / threads, kFewest, kMost);
}

Plans::Plans(const std::vector<Problem>& problems) {
  for (const Problem& p : problems) {
    if (p.rows > 0 && p.columns > 0) plans_.emplace_back(p, &p - problems.data());
  }
}

Plans::~Plans() = default;

bool Plans::multiply(const OfBlock& finish, const OfBlock& expect) const {
  if (plans_.empty()) return true;
  const bool packed = all_of(plans_, [](const Plan& plan) { return plan.packings(); }, [](const Plan& plan, int64_t i) { return plan.pack(i); });
  const bool run = all_of(plans_, [](const Plan& plan) { return plan.tasks(); },
                          [&](const Plan& plan, int64_t i) { return plan.run(i, finish, expect); });
  return packed && run;
}

}  // namespace jaxfuse::contraction
