// Products for contraction_loops.h by AMX: 32 rows by two panels at a time, of which the registers hold the sums, with 16 steps together.
#pragma once

#include "amx.h"
#include "contraction_fetch.h"
#include "contraction_kernels.h"
#include "simd.h"

namespace jaxfuse::contraction {
namespace {

static_assert(kPanel == amx::kLines && kLineSteps == amx::kLines);  // so 16 lines of a panel are what a register holds

struct MatricesOfPairs {
  static constexpr int64_t kElementBytes = 2;
  template <int sums, int a, int b>
  static void multiply() {
    amx::multiply_pairs<sums, a, b>();
  }
};
struct MatricesOfBytes {
  static constexpr int64_t kElementBytes = 4;  // what is behind a row's last one meets zeros
  template <int sums, int a, int b>
  static void multiply() {
    amx::multiply_bytes<sums, a, b>();
  }
};

// ---- rows

// Fewer bytes than a line has, filled up with zeros.
inline void copy_rest(const char* from, int64_t bytes, char* to) {
#ifdef __AVX512BW__
  _mm512_storeu_si512(to, _mm512_maskz_loadu_epi8((uint64_t(1) << bytes) - 1, from));
#else
  __builtin_memset(to, 0, amx::kLineBytes);
  __builtin_memcpy(to, from, bytes);
#endif
}

template <class Step>
void copy_rows(const Tile& tile, int64_t count, char* to, int64_t stride) {
  const int64_t bytes = tile.steps * kStepBytes - (tile.odd ? Step::kElementBytes % kStepBytes : 0);
  for (int64_t i = 0; i < count; ++i, to += stride) {
    char* at = to;
    for (int64_t tap = 0; tap < tile.taps; ++tap, at += tile.steps * kStepBytes) {
      const char* const from = tile.rows[tap * tile.row_step + i] + tile.offset;
      int64_t done = 0;
      for (; done + amx::kLineBytes <= bytes; done += amx::kLineBytes) store_bits(at + done, load_bits<Floats>(from + done));
      if (done < bytes) copy_rest(from + done, bytes - done, at + done);
    }
    store_bits(at, Floats{});
  }
}

// ---- products

// The lines of panels behind the last 16, filled up with zeros.
class LastLines {
 public:
  static constexpr Layout kLayout = {amx::kLineBytes, amx::kBytes};

  explicit LastLines(const Tile& tile) {
    const int64_t rest = tile.steps % kLineSteps;
    if (rest == 0) return;
    const char* from = tile.panels + (tile.steps - rest) * tile.layout.line;
    for (int64_t n = 0; n < tile.columns; n += kPanel, from += tile.layout.panel) {
      char* const to = lines_ + n / kPanel * kLayout.panel;
      for (int64_t i = 0; i < kLineSteps; ++i) {
        store_bits(to + i * kLayout.line, i < rest ? load_bits<Floats>(from + i * tile.layout.line) : Floats{});
      }
    }
  }
  const char* panel(int64_t number) const { return lines_ + number * kLayout.panel; }

 private:
  alignas(64) char lines_[kColumns / kPanel * amx::kBytes];
};

// How a tile's rows lie. The second register's end with the last of them, be they some of the first's: both then have the same sums.
struct Rows {
  int64_t stride, second;  // second: number of a row

  Rows(const Tile& tile, int64_t count)
      : stride(tile.rows[1] - tile.rows[0]), second(count > amx::kLines ? count - amx::kLines : 0) {}
};

template <class Step, bool both_rows, bool both_panels>
[[gnu::always_inline]] inline void add_block(const char* at, const Rows& rows, const char* panels, Layout layout) {
  amx::load<4>(at, rows.stride);
  amx::load<6>(panels, layout.line);
  Step::template multiply<0, 4, 6>();
  if constexpr (both_panels) {
    amx::load<7>(panels + layout.panel, layout.line);
    Step::template multiply<1, 4, 7>();
  }
  if constexpr (both_rows) {
    amx::load<5>(at + rows.second * rows.stride, rows.stride);
    Step::template multiply<2, 5, 6>();
    if constexpr (both_panels) Step::template multiply<3, 5, 7>();
  }
}

template <int n>
struct Number {
  static constexpr int value = n;
};

// A tile's sums, `stride` from row to row.
struct Sums {
  float* data;
  int64_t stride;
  bool are_first;  // else they are added to what is there
};

// f for each register of sums, by its number, and where its sums lie.
template <bool both_rows, bool both_panels, class F>
[[gnu::always_inline]] inline void for_sums(float* first, float* second, F f) {
  f(Number<0>{}, first);
  if constexpr (both_panels) f(Number<1>{}, first + kPanel);
  if constexpr (both_rows) f(Number<2>{}, second);
  if constexpr (both_rows && both_panels) f(Number<3>{}, second + kPanel);
}

// Rows by panels number `panel` and the one behind it.
template <class Step, bool both_rows, bool both_panels>
void multiply_panels(const Tile& tile, const Rows& rows, const LastLines& last, int64_t panel, Fetch& fetch, const Sums& sums) {
  float* const first = sums.data + panel * kPanel;
  const auto with_sums = [&](auto f) { for_sums<both_rows, both_panels>(first, first + rows.second * sums.stride, f); };
  const int64_t stride = sums.stride * int64_t(sizeof(float)), whole = tile.steps / kLineSteps;  // blocks
  with_sums([&](auto n, float* at) { sums.are_first ? amx::zero<n.value>() : amx::load<n.value>(at, stride); });
  const char* lines = tile.panels + panel * tile.layout.panel;
  for (int64_t tap = 0; tap < tile.taps; ++tap) {
    const char* at = tile.rows[tap * tile.row_step] + tile.offset;
    for (int64_t block = 0; block < whole; ++block, at += amx::kLineBytes, lines += kLineSteps * tile.layout.line) {
      fetch.some();
      add_block<Step, both_rows, both_panels>(at, rows, lines, tile.layout);
    }
    if (tile.steps % kLineSteps != 0) add_block<Step, both_rows, both_panels>(at, rows, last.panel(panel), LastLines::kLayout);
  }
  with_sums([&](auto n, float* at) { amx::store<n.value>(at, stride); });
}

template <class Step>
void multiply_matrices(const Tile& tile, int64_t count, const Sums& sums) {
  const Rows rows(tile, count);
  const LastLines last(tile);
  Fetch fetch(tile, (tile.columns + 2 * kPanel - 1) / (2 * kPanel));
  for (int64_t panel = 0; panel * kPanel < tile.columns; panel += 2) {
    const bool both_rows = count > amx::kLines, both_panels = tile.columns > (panel + 1) * kPanel;
    const auto multiply = both_rows ? (both_panels ? multiply_panels<Step, true, true> : multiply_panels<Step, true, false>)
                                    : (both_panels ? multiply_panels<Step, false, true> : multiply_panels<Step, false, false>);
    multiply(tile, rows, last, panel, fetch, sums);
  }
}

template <class Step>
void multiply_for_tile(const Tile& tile, int64_t count, float* sums, bool first) {
  multiply_matrices<Step>(tile, count, {sums, kColumns, first});
}

inline void multiply_pairs(const Tile& tile, int64_t count, float* sums, int64_t stride, bool first) {
  multiply_matrices<MatricesOfPairs>(tile, count, {sums, stride, first});
}

template <class Step>
constexpr Products matrix_products = {
    2 * amx::kLines, amx::kLines, 256, 1 << 20, multiply_for_tile<Step>, copy_rows<Step>, amx::begin, amx::end,
};

}  // namespace
}  // namespace jaxfuse::contraction
