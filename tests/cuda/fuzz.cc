// The kernels' host and device headers against float64 and against counting, with a plain C++ compiler. Prints what is wrong.
#include <cstdio>
#include <random>
#include <vector>

#include "deal.cuh"
#include "number.cuh"

using namespace jaxfuse::cuda;

static int failures = 0;
#define CHECK(condition, ...) \
  if (!(condition) && ++failures < 20) std::printf(__VA_ARGS__), std::printf("\n")

// The nearest T, ties to even, found in float64 among all of them.
template <class T>
void all_roundings(const char* name, std::mt19937& random) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const T value{uint16_t(bits)};
    const float wide = to_float(value);
    if (std::isnan(wide)) continue;
    CHECK(from_float<T>(wide).bits == bits, "%s %04x does not come back", name, bits);
    const T next{uint16_t(bits + 1)};
    const double a = wide, b = to_float(next);
    if (!std::isfinite(a) || !std::isfinite(b) || (bits & 0x7fff) == 0x7fff) continue;
    const float between = float(a + (b - a) * std::uniform_real_distribution<double>(0, 1)(random)), middle = float((a + b) / 2);
    const double from_a = std::fabs(double(between) - a), from_b = std::fabs(b - double(between));
    const uint32_t want = from_a == from_b ? bits + (bits & 1) : from_a < from_b ? bits : bits + 1;
    CHECK(from_float<T>(between).bits == want, "%s: %a becomes %04x, not %04x", name, between, from_float<T>(between).bits, want);
    if (double(middle) * 2 == a + b) CHECK(from_float<T>(middle).bits == bits + (bits & 1), "%s: tie %a", name, middle);
  }
  CHECK(std::isnan(to_float(from_float<T>(NAN))), "%s: NaN", name);
  CHECK(std::isinf(to_float(from_float<T>(3e38f * 10))), "%s: Inf", name);
}

// Every row is dealt to one lane of one part; counted where there are few, added up where there are more than 2³¹.
void deals(std::mt19937_64& random) {
  for (int trial = 0; trial < 3000; ++trial) {
    const int chunk = 8 << random() % 6, lanes = 1 << random() % 4, parts = 1 + random() % 40;
    const bool many = trial % 2;
    const int64_t rows = many ? (int64_t(1) << 31) + random() % (int64_t(1) << 33) : 1 + random() % 3000;
    const Deal deal{rows, parts, chunk};
    std::vector<int64_t> counted(parts * lanes);
    for (int64_t row = 0; !many && row < rows; ++row) ++counted[row / chunk % parts * lanes + row % chunk % lanes];
    int64_t sum = 0;
    for (int part = 0; part < parts; ++part) {
      for (int lane = 0; lane < lanes; ++lane) {
        const int64_t count = deal.count(part, lane, lanes);
        sum += count;
        CHECK(many || count == counted[part * lanes + lane], "rows %ld chunk %d parts %d part %d lane %d/%d: %ld, not %ld", long(rows),
              chunk, parts, part, lane, lanes, long(count), long(counted[part * lanes + lane]));
      }
    }
    CHECK(sum == rows, "%ld of %ld rows dealt", long(sum), long(rows));
  }
}

// Moments of sets put together, beside float64.
void moments(std::mt19937& random) {
  for (int trial = 0; trial < 500; ++trial) {
    const float offset = trial % 3 ? 100.0f : 0.0f;
    std::normal_distribution<float> normal(offset, 1);
    Moments all{0, 0};
    double sum = 0, squares = 0;
    std::vector<float> values;
    for (int set = 0; set < 20; ++set) {
      const int n = random() % 5;
      double own_sum = 0, own_m2 = 0;
      std::vector<float> own;
      for (int i = 0; i < n; ++i) own.push_back(normal(random)), own_sum += own.back();
      for (float v : own) own_m2 += (v - own_sum / n) * (v - own_sum / n);
      all.add(float(values.size()), n ? Moments{float(own_sum / n), float(own_m2)} : Moments{0, 0}, float(n));
      values.insert(values.end(), own.begin(), own.end());
    }
    if (values.empty()) continue;
    for (float v : values) sum += v;
    for (float v : values) squares += (v - sum / values.size()) * (v - sum / values.size());
    CHECK(std::fabs(all.mean - sum / values.size()) < 1e-6 * (1 + offset), "mean %g, not %g", all.mean, sum / values.size());
    CHECK(std::fabs(all.m2 - squares) < 1e-4 * (1 + squares), "m2 %g, not %g", all.m2, squares);
  }
  Moments infinite{INFINITY, NAN};
  infinite.add(3, {1, 1}, 2);
  CHECK(infinite.mean == INFINITY, "an Inf becomes %g", infinite.mean);
}

int main() {
  std::mt19937 random(1);
  std::mt19937_64 wide(2);
  all_roundings<bf16>("bf16", random);
  all_roundings<f16>("f16", random);
  deals(wide);
  moments(random);
  std::printf("%d failures\n", failures);
  return failures != 0;
}
