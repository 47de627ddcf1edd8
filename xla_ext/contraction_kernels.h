// The inner loops of contraction.cc as a table of functions for each ISA; contraction_loops.h is the loops.
#pragma once

#include <cstdint>

#include "element.h"

namespace jaxfuse::contraction {

// Products are of steps: one number of f32, a pair of neighbouring ones of bf16, or four of u8 and s8.
constexpr int64_t kStepBytes = 4, kLineSteps = 64 / kStepBytes;  // of a row, in a line of the cache

constexpr int64_t kPositions = 32;  // that are transposed together

// A matrix is packed as panels of kPanel columns, on every ISA alike: line s of a panel has step s of each of its columns.
constexpr int64_t kPanel = 16;
constexpr int64_t kLineBytes = kPanel * kStepBytes;

// Where panels lie: bytes from a line to the next of the same panel, and from a panel to the next.
struct Layout {
  int64_t line, panel;
};

// A matrix that becomes panels: element k of column n is at data + k·inner_step + n·column_step.
struct Columns {
  Element element;
  const void* data;
  int64_t inner_step, column_step;
};

// Rows by pointers, and the panel that they meet. Row i of tap t begins `offset` bytes behind rows[t·row_step + i]; it meets
// line t·steps of the panels, and with each further step the next.
struct Tile {
  const char* const* rows;
  const char* const* next;  // or null: those of the next tile, to be fetched into the cache
  int64_t row_step, offset, taps, steps;
  bool odd;         // the last step of a row is not full; of bf16 nothing behind it is read
  int64_t columns;  // the first ones of the panels, at most a tile's, are wanted
  const char* panels;
  Layout layout;
  const char* fetch;  // lines of panels that are wanted soon, to be fetched into the second-level cache
  int64_t fetched;    // how many of each panel
  int64_t together;   // of them, with as many steps as a line of the cache has
};

constexpr int64_t kMostPixelSteps = 256;  // of a sum that is not added in parts

// Lines of the cache that are wanted soon, to be fetched into the second level.
struct Lines {
  const char* first;
  int64_t count;
};

// Neighbouring pixels, `pixel` bytes apart, each a row of `steps` for every tap, `tap` bytes apart: they meet columns
// [column, column + columns) of the panels. `columns` is at most the table's `pixel_columns`, and `column` a multiple of half of them: of
// all, if `columns` is more than half.
struct Pixels {
  int64_t count, pixel, taps, tap, steps;
  bool odd;  // as of a tile
  const char* panels;
  int64_t panel;  // bytes from a panel to the next
  int64_t column, columns;
  const float* bias;  // of these columns, or null
  float low, high;    // limits of what a sum becomes; NaN stays NaN
  Element element;    // of what the sums become, and of the residual; of longer sums than kMostPixelSteps, which have one tap, f32
  int64_t stride;     // from a pixel's elements of both to the next's
  const int32_t* offsets = nullptr;  // of u8, of these columns: (Σ + offset)·scale + bias + residual
  const float* scale = nullptr;      // or null; of sums that are not added in parts
};

// How a tile's products of one kind of step are computed.
struct Products {
  int64_t rows;        // of a tile
  int64_t fewest;      // rows that are read, and sums that are written, of a tile that has fewer
  int64_t steps;       // at most, of the panels that stay in the cache while rows meet them
  int64_t task_bytes;  // of the rows that stay in the second-level cache while they meet panels

  // sums[i·columns + n] = Σ over taps and steps for i < count, added to what is there unless `first`.
  void (*multiply)(const Tile&, int64_t count, float* sums, bool first);
  // If it is not null, `multiply` takes rows that lie equally far apart, of several taps only in whole lines, and with zeros behind others.
  // This copies any rows so, their taps one after the other, `stride` bytes from row to row, and writes up to a line behind.
  void (*copy)(const Tile&, int64_t count, char* to, int64_t stride) = nullptr;
  // What a thread calls before the first of these, and after the last; or null.
  void (*begin)() = nullptr;
  void (*end)() = nullptr;
};

// The first pixel is at x, its columns of what the sums become at `to`, and those of the residual at `residual`, or null. What differs from
// line to line comes in registers: of numbers that were just written to memory a copy by whole vectors waits for every store before it.
using MultiplyPixels = void(const Pixels&, const char* x, char* to, const char* residual, Lines fetched);

struct Kernels {
  int64_t columns;  // of a tile, whose sums fill the registers
  Products f32, bf16;
  // Of u8 by s8, whose sums are s32. Narrow: what is multiplied into the same half of a lane in two neighbouring steps, four of s8, has
  // positive ones of 128 at most in all, and negative ones of -128: products of u8 by them may be added in s16.
  Products bytes, narrow_bytes;

  // `inner` elements of each of `count` columns, at most a tile's, as lines of panels; zeros behind the last column of a panel, and
  // behind the last element of a step. Whether all elements are finite.
  bool (*pack_f32)(const Columns&, int64_t count, int64_t inner, char* to, Layout layout) = nullptr;
  bool (*pack_bf16)(const Columns&, int64_t count, int64_t inner, char* to, Layout layout) = nullptr;
  // Element c of each position's line becomes element p of row c, rows `stride` bytes apart; `count` is a multiple of kPositions.
  void (*transpose_f32)(const char* const* positions, int64_t count, int64_t channels, char* to, int64_t stride) = nullptr;
  void (*transpose_bf16)(const char* const* positions, int64_t count, int64_t channels, char* to, int64_t stride) = nullptr;
  // `count` numbers as round(x/step) + zero in u8; and sums of s32, with an offset for each column, as f32 in their place.
  void (*quantise_f32)(const void* x, int64_t count, float step, int32_t zero, uint8_t* to) = nullptr;
  void (*quantise_bf16)(const void* x, int64_t count, float step, int32_t zero, uint8_t* to) = nullptr;
  void (*to_floats)(float* sums, int64_t rows, int64_t stride, int64_t columns, const int32_t* offsets) = nullptr;

  // to[i·stride + n] = scale·Σ + bias + residual, within the limits.
  MultiplyPixels* pixels_f32 = nullptr;
  MultiplyPixels* pixels_bf16 = nullptr;
  MultiplyPixels* pixels_narrow_bytes = nullptr;
  int64_t pixel_columns = 0;  // that are multiplied together

  // As bf16.multiply, with sums `stride` from row to row; null where that does not multiply matrices.
  void (*multiply_pairs)(const Tile&, int64_t count, float* sums, int64_t stride, bool first) = nullptr;
};

extern const Kernels portable_kernels, avx2_kernels, avx512_kernels;
// Of these only the functions that more instructions make better; the others are null.
extern const Kernels avx2_vnni_kernels, avx512_vnni_kernels, avx512_bf16_kernels, avx512_amx_kernels;

}  // namespace jaxfuse::contraction
