// C[m, n] = Σ over taps t and elements k of A[row(m, t)][k]·B[t][k][n]: rows of A by pointers, as Dukhan has it ("The indirect
// convolution algorithm", 2019). What a convolution, its gradient of x, a transposed one and a dense layer have in common.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "contraction_kernels.h"
#include "cut.h"
#include "handler.h"

namespace jaxfuse::contraction {

// The loops for this machine.
const Kernels& kernels();
// Of rows of this dtype; of u8 by a narrow filter or any.
const Products& products_of(DType dtype, bool narrow = false);

// While it lives the thread may multiply.
class Multiplying {
 public:
  explicit Multiplying(const Products& products) : products_(products) {
    if (products_.begin) products_.begin();
  }
  ~Multiplying() {
    if (products_.end) products_.end();
  }
  Multiplying(const Multiplying&) = delete;

 private:
  const Products& products_;
};

// Whether they multiply bf16 by an instruction of its own.
bool has_bf16();

// Whether JAXFUSE_CONTRACTION=always asks for it wherever it can compute what is wanted, and not only where that was measured to
// be faster: for tests. Read once.
bool always();

// Element (k, n) of tap t is taps[t] + k·inner_step + n·column_step elements behind `data`. One of the steps is 1.
struct Filter {
  const void* data;
  DType dtype;
  std::vector<int64_t> taps;
  int64_t inner_step, column_step;
  const char* panels = nullptr;  // or all of it packed, for the dtype of the rows; then the others but for the number of taps are not read
  bool narrow = false;           // of s8, as contraction_kernels.h has it
};

// A packed filter: one panel of kPanel columns after the other, each with its taps, each with its steps. The same on every ISA.
struct Panels {
  int64_t inner, columns, taps;
  DType dtype;  // of the rows

  int64_t steps() const;      // of a tap
  int64_t bytes() const;      // of a panel
  int64_t all_bytes() const;  // of all of them
  Layout layout() const;
};

// How they lie while they are used in one call only: those that a tile meets side by side, so that they are written line by line,
// which is a quarter faster. For as many panels as there are tiles of columns.
Layout side_by_side();
int64_t side_by_side_bytes(const Panels& panels);

// Packs all of it, on threads; whether it is finite.
bool pack(const Filter& filter, const Panels& panels, char* to);

// Writes where rows [first, first + count) begin: row i under tap t to at[t·step + i - first].
using Point = std::function<void(int64_t first, int64_t count, const char** at, int64_t step)>;

struct Problem {
  int64_t rows, inner, columns;  // inner: elements of a row that a tap meets
  DType dtype;                   // of the rows; an f32 filter that meets bf16 is rounded to it; u8 meets s8 in panels
  Filter filter;
  Point point;
};

// Part of a problem's result: `rows` × `columns` sums, row i at sums + i·stride; of u8 they are s32. Nobody reads them afterwards.
struct Block {
  size_t problem;
  int64_t row, rows, column, columns;
  float* sums;
  int64_t stride;
};

// A tile whose rows were copied as its products read them: they begin `offset` bytes behind `rows`.
inline Tile of_copies(Tile tile, const char* const* rows, int64_t offset) {
  tile.rows = rows, tile.offset = offset, tile.steps *= tile.taps, tile.taps = 1, tile.odd = false;
  return tile;
}

// x as u8, round(x/step) + zero within 0 to 255, on threads.
void quantise(const Tensor& x, float step, int32_t zero, uint8_t* to);

using OfBlock = std::function<void(const Block&)>;  // must not throw

// f(tile, begin, end) for tiles of rows [0, rows) one after the other, each of which fetches its share of the lines.
template <class F>
void for_tiles(const Products& products, Tile tile, int64_t rows, F f) {
  const int64_t tiles = parts(rows, products.rows);
  Shares counts(rows, tiles), fetched(tile.fetched, tiles);
  tile.together = parts(fetched.most(), tile.taps * parts(tile.steps, kLineSteps));
  for (int64_t begin = 0, end; begin < rows; begin = end) {
    end = begin + counts.next(), tile.fetched = fetched.next();
    f(tile, begin, end);
    tile.rows += end - begin, tile.fetch += tile.fetched * tile.layout.line;
  }
}

// Tasks that so many products are cut into, at least: a few for each thread, of a large problem more. Who is done first takes those of the
// others, and waits for the last one.
int64_t wanted_tasks(int64_t products);

class Plan;

// Problems cut into tasks, to be multiplied as often as wanted: they may meet other rows and panels, of the same sizes.
class Plans {
 public:
  explicit Plans(const std::vector<Problem>& problems);  // which stay where they are
  ~Plans();

  // Calls `finish` once for every block of every problem, on any thread. `expect` is called with rows of it before they are computed: it
  // may fetch what `finish` will want. Returns whether the filters were finite.
  bool multiply(const OfBlock& finish, const OfBlock& expect) const;

 private:
  std::vector<Plan> plans_;
};

}  // namespace jaxfuse::contraction
