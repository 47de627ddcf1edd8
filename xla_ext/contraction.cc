#include "contraction.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <string>

#include "contraction_packing.h"
#include "contraction_task_rows.h"
#include "cut.h"
#include "parallel.h"
#include "scratch.h"
#include "simd_level.h"

namespace jaxfuse::contraction {
namespace {

// A chunk of the panels that a tile meets, as long as its products' `steps`, stays in the cache while rows meet it: in that of the first
// level, or with AVX-512 on AMD's CPUs, and with AMX, of the second. Its sums are then added to the total: that keeps them short. The rows
// of a task, and their sums, stay in the second-level cache.
constexpr int64_t kFewestRows = 28, kMostRows = 336, kFewestOfThread = 12;
constexpr int64_t kManyRows = 126;        // are worth the panels' way from the third-level cache: rows that are too long for that are met in parts
constexpr int64_t kMostSums = 384 << 10;  // bytes of them that wait for the next part
constexpr int64_t kRowsTogether = 26;     // whose sums are finished together, at least: they are in the first-level cache
constexpr int64_t kRowsAhead = 6;         // behind a tile, whose outputs are expected with its own

}  // namespace

// How a problem is cut into tasks, and its panels.
class Plan {
 public:
  Plan(const Problem& problem, size_t number)
      : p_(problem), number_(number), columns_(kernels().columns), products_(products_of(problem.dtype, problem.filter.narrow)),
        panels_{p_.inner, p_.columns, int64_t(p_.filter.taps.size()), p_.dtype},
        packing_(p_.filter, panels_, p_.filter.panels ? panels_.layout() : side_by_side()),
        groups_(parts(p_.columns, columns_)) {
    const int64_t taps_apart = products_.copy ? std::max<int64_t>(1, panels_.taps) : 1;  // else they meet the same inputs
    const int64_t row_bytes = std::max<int64_t>(1, p_.inner * int64_t(ffi::ByteWidth(p_.dtype))) * taps_apart;
    const int64_t most_parts = panels_.taps == 1 ? std::max<int64_t>(1, packing_.chunks().size()) : 1;  // taps meet the same inputs
    row_parts_ = std::clamp<int64_t>(row_bytes * std::min(p_.rows, kManyRows) / products_.task_bytes, 1, most_parts);
    const int64_t rows = std::clamp(products_.task_bytes * row_parts_ / row_bytes, kFewestRows, kMostRows);
    const int64_t most_rows = std::max(rows / products_.rows * products_.rows, products_.rows);
    const int64_t wanted = wanted_tasks(p_.rows * p_.columns * p_.inner * panels_.taps);
    row_blocks_ = parts(p_.rows, most_rows);
    task_groups_ = parts(groups_, std::min(groups_, parts(wanted, row_blocks_)));
    if (row_parts_ > 1) task_groups_ = std::clamp<int64_t>(kMostSums / (most_rows * columns_ * int64_t(sizeof(float))), 1, task_groups_);
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
    const int64_t first = task % column_parts_ * task_groups_, end = std::min(groups_, first + task_groups_);
    const int64_t pointers = panels_.taps * rows * sizeof(char*), group_sums = std::max(rows, products_.fewest) * columns_;
    const int64_t kept_groups = row_parts_ > 1 ? end - first : 1;  // whose sums wait for the next part
    const int64_t own_panels = whole() ? 0 : chunk_bytes(), sums_bytes = kept_groups * group_sums * sizeof(float);
    const Scratch scratch(own_panels + sums_bytes + pointers);
    float* const all_sums = reinterpret_cast<float*>(scratch.data() + own_panels);
    const char** const at = reinterpret_cast<const char**>(scratch.data() + own_panels + sums_bytes);
    p_.point(row, rows, at, rows);
    bool finite = true;
    const Multiplying multiplying(products_);
    const TaskRows task_rows(products_, packing_, at, rows, end - first);
    for (int64_t part = 0; part < row_parts_; ++part) {
      for (int64_t group = first; group < end; ++group) {
        const int64_t column = group * columns_, columns = std::min(columns_, p_.columns - column);
        float* const sums = all_sums + (group - first) % kept_groups * group_sums;
        const auto block = [&](int64_t begin, int64_t end) {
          return Block{number_, row + begin, end - begin, column, columns, sums + begin * columns_, columns_};
        };
        for (const Chunk& chunk : packing_.part(part, row_parts_)) {
          Tile tile = tile_of(chunk, columns);
          if (whole()) {
            tile.panels = panels_of(group, chunk), tile.fetch = next_panels(part, group, first, end, chunk);
            if (tile.fetch) tile.fetched = packing_.lines(packing_.chunks()[0]);
          } else {
            finite &= packing_.pack(group, chunk, scratch.data());
            tile.panels = scratch.data();
          }
          tile.rows = task_rows.at(chunk), tile.row_step = rows;
          const bool last = &chunk == &packing_.chunks().back();
          multiply(tile, chunk, task_rows, rows, sums, group == first,
                   [&](int64_t begin, int64_t end) { if (last) expect(block(begin, end)); },
                   [&](int64_t begin, int64_t end) { if (last) finish(block(begin, end)); });
        }
        if (packing_.chunks().empty()) std::fill_n(sums, rows * columns_, 0.0f), finish(block(0, rows));
      }
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

  const char* panels_of(int64_t group, const Chunk& chunk) const { return whole() + packing_.place(group) + packing_.place(chunk); }

  // The panels that a task's rows meet after these, where all are packed: what follows them of this part of the rows, the same part of the
  // next group, the first group's next part, or what another task may begin with.
  const char* next_panels(int64_t part, int64_t group, int64_t first, int64_t end, const Chunk& chunk) const {
    const Chunks own = packing_.part(part, row_parts_);
    if (&chunk + 1 != own.end()) return panels_of(group, *(&chunk + 1));
    if (group + 1 < end) return panels_of(group + 1, *own.begin());
    if (part + 1 < row_parts_) return panels_of(first, *own.end());
    return end < groups_ ? panels_of(end, packing_.chunks()[0]) : nullptr;
  }

  // Rows by the chunk, tile by tile. `expect` and `finish` are told which rows are next, and which are done.
  template <class Expect, class Finish>
  void multiply(const Tile& tile, const Chunk& chunk, const TaskRows& task_rows, int64_t rows, float* sums, bool first_group, Expect expect,
                Finish finish) const {
    const bool first = chunk.tap == 0 && chunk.first == 0;
    int64_t expected = 0, finished = 0;
    for_tiles(products_, tile, rows, [&](Tile& own, int64_t begin, int64_t end) {
      own.next = first_group && end < rows ? tile.rows + std::min(end, rows - products_.rows) : nullptr;
      if (end > expected) {
        const int64_t next = std::min(rows, end + kRowsAhead);
        expect(expected, next), expected = next;
      }
      const auto multiply = [&](const Tile& even) { products_.multiply(even, end - begin, sums + begin * columns_, first); };
      task_rows.are_copied() ? multiply(task_rows.copied(own, chunk, begin, end - begin, first_group)) : multiply(own);
      if (end - finished >= kRowsTogether || end == rows) finish(finished, end), finished = end;
    });
  }

  const Problem& p_;
  const size_t number_;
  const int64_t columns_;  // of a tile
  const Products& products_;
  const Panels panels_;
  const Packing packing_;
  const int64_t groups_;  // of panels that a tile meets
  int64_t row_parts_;     // each is met by all of a task's panels before the next
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

namespace {

// Loops of AVX-512's vectors, as this CPU runs them best.
void adapt(Products& products) {
  // Of seven rows the registers hold sums and panels alone, and each product loads its factor: 32 loads for 28 products. A CPU that
  // multiplies as often as it loads is faster by six.
  if (!halves_vectors()) products.rows = 6;
  // Intel's bring hardly more from the second-level cache than a tile reads: panels that fit into the first.
  if (is_intel()) products.steps = 128;
}

Kernels found_kernels() {
  Kernels all = choose(portable_kernels, avx2_kernels, avx512_kernels);
  if (has_vnni()) {
    const Kernels& better = choose(portable_kernels, avx2_vnni_kernels, avx512_vnni_kernels);
    all.bytes = better.bytes, all.narrow_bytes = better.narrow_bytes;
  }
  if (has_bf16()) {
    const Kernels& better = avx512_bf16_kernels;
    all.bf16 = better.bf16, all.pack_bf16 = better.pack_bf16;
    all.transpose_bf16 = better.transpose_bf16, all.pixels_bf16 = better.pixels_bf16;
  }
  if (simd_level() == SimdLevel::avx512) {
    for (Products* products : {&all.f32, &all.bf16, &all.bytes, &all.narrow_bytes}) adapt(*products);
  }
  if (has_amx()) {
    const Kernels& better = avx512_amx_kernels;
    all.bf16 = better.bf16, all.bytes = better.bytes, all.narrow_bytes = better.narrow_bytes, all.multiply_pairs = better.multiply_pairs;
  }
  return all;
}

}  // namespace

const Kernels& kernels() {
  static const Kernels found = found_kernels();
  return found;
}

const Products& products_of(DType dtype, bool narrow) {
  if (dtype == DType::U8) return narrow ? kernels().narrow_bytes : kernels().bytes;
  return dtype == DType::F32 ? kernels().f32 : kernels().bf16;
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
