// jaxfuse_conv_expanded: a depthwise convolution of a 1×1 convolution by a packed filter, each with its bias and activation: the first half
// of an inverted residual (Sandler et al., arXiv 1801.04381). The expanded image is nowhere whole: a task has a few channels of it, and of
// these the lines that the depthwise filter lies over, in the first-level cache.
#include <algorithm>
#include <limits>
#include <numeric>
#include <optional>

#include "activation_attr.h"
#include "bf16.h"
#include "contraction.h"
#include "conv_depthwise_problem.h"
#include "conv_limits.h"
#include "parallel.h"

namespace jaxfuse::conv {
namespace {

// What follows a convolution.
class After {
 public:
  // From the attributes that begin with `of`, and the operand number `next` if there is one.
  After(const Call& call, const std::string& of, size_t next, const Shape& features, DType dtype)
      : activation(activation_attr(call, of)), parameters(parameters_attr(call, of)), limits(limits_of(activation, parameters)), operand_(next) {
    if (!call.attr<bool>((of + "has_bias").c_str())) return;
    bias_ = call.operand(next, "bias");
    call.expect_dtype(*bias_, {DType::F32, dtype});
    call.expect_shape(*bias_, features);
  }

  void point_to(const Call& call) {
    if (!bias_) return;
    bias_->data = call.operand_data(operand_);
    if (bias_->dtype != DType::F32) wide_ = elements(bias_);
  }

  bool has_bias() const { return bias_.has_value(); }
  // Of the channels from this one on; or null.
  const float* bias(int64_t channel) const {
    if (!bias_) return nullptr;
    return (bias_->dtype == DType::F32 ? bias_->as<float>() : wide_.data()) + channel;
  }

  const Activation activation;
  const Parameters parameters;
  const std::optional<Limits> limits;  // the activation, if it is these

  void activate(float* z, int64_t count) const { epilogue::kernels().activate(activation, parameters, z, count); }

 private:
  size_t operand_;
  std::optional<Tensor> bias_;
  std::vector<float> wide_;  // of one that is not f32
};

// Channels [begin, begin + count) of the expanded image.
struct Channels {
  int64_t begin, count;
};

std::vector<Channels> groups_of(int64_t channels) {
  const int64_t together = contraction::kernels().pixel_columns;
  std::vector<Channels> groups;
  for (int64_t begin = 0; begin < channels; begin += together) groups.push_back({begin, std::min(together, channels - begin)});
  return groups;
}

// The last groups in halves, so that each thread has as many channels as the others.
std::vector<Channels> even_groups_of(int64_t channels) {
  const int64_t together = contraction::kernels().pixel_columns, half = together / 2, threads = max_threads();
  const int64_t rest = parts(channels, half) % (2 * threads), halves = rest <= threads ? rest : 2 * threads - rest;
  const int64_t in_whole = std::max<int64_t>(0, parts(channels, half) - halves) * half;
  std::vector<Channels> groups = groups_of(std::min(channels, in_whole));
  for (int64_t begin = in_whole; begin < channels; begin += half) groups.push_back({begin, std::min(half, channels - begin)});
  return groups;
}

// Groups of channels by strips of lines of the output.
struct Cut {
  std::vector<Channels> groups;
  int64_t strips = 1;

  explicit Cut(const depthwise::Problem& p) : groups(groups_of(p.channels)) {
    constexpr int64_t kTasksPerThread = 4, kLinesForTwice = 8;  // lines of a strip for each one that the strip before had made, too
    const int64_t threads = max_threads(), tasks = p.batch * int64_t(groups.size()), wanted = kTasksPerThread * threads;
    const depthwise::Dimension& lines = p.dimensions[1];
    if (tasks < wanted) {
      const int64_t twice = std::max<int64_t>(0, (lines.taps - 1) * lines.dilation + 1 - lines.stride);
      const int64_t most = twice ? lines.out * lines.stride / (kLinesForTwice * twice) : lines.out;
      strips = std::clamp<int64_t>(padded(parts(wanted, tasks), threads / std::gcd(threads, tasks)), 1, std::max<int64_t>(1, most));
    }
    if (strips == 1) groups = even_groups_of(p.channels);
  }
};

// All that shapes and attributes say, and where the tensors lie.
struct Description {
  const Geometry geometry;  // the depthwise convolution's
  Tensor x, y;
  After expansion;
  const size_t w_operand;
  Tensor w;
  After depthwise;
  const depthwise::Problem problem;
  const depthwise::Taps taps;
  const contraction::Panels panels;
  const char* packed = nullptr;

  const std::vector<int64_t> sources;          // lines of the image that each line of the output reads
  const std::vector<depthwise::Phase> phases;  // of outputs of a line

  explicit Description(const Call& call)
      : geometry(call), x(of_images(call, call.operand(0, "x"))), y(of_images(call, call.result(0, "y"))),
        expansion(call, "expansion_", 2, {y.shape.back()}, x.dtype), w_operand(2 + expansion.has_bias()),
        w(call.operand(w_operand, "w")), depthwise(call, "", w_operand + 1, {y.shape.back()}, x.dtype), problem(checked(call), x, w, y), taps(geometry, w),
        panels{x.shape[3], y.shape[3], 1, x.dtype}, sources(lines().sources()), phases(pixels().phases()) {
    call.expect_counts(w_operand + 1 + depthwise.has_bias(), 1);
    call.checked(call.operand(1, "packed"), DType::U8, {panels.all_bytes()});
  }

  const depthwise::Dimension& lines() const { return problem.dimensions[1]; }
  const depthwise::Dimension& pixels() const { return problem.dimensions[2]; }
  int64_t reach() const { return (lines().taps - 1) * lines().dilation + 1; }  // lines from the first to the last that one output reads
  int64_t kept() const { return std::max<int64_t>(1, std::min(reach(), lines().in)); }  // lines at once
  bool has_line_loops() const {
    const depthwise::Dimension& p = pixels();
    return (p.taps == 3 || p.taps == 5 || p.taps == 7) && p.stride <= 2 && p.dilation == 1;
  }

 private:
  static Tensor of_images(const Call& call, const Tensor& t) {
    if (t.shape.size() != 4) call.refuse(t.name, " has shape ", to_string(t.shape), ", expected 4 dimensions");
    return t;
  }

  const Geometry& checked(const Call& call) const {
    const Geometry& g = geometry;
    call.expect_dtype(x, {DType::F32, DType::BF16});
    call.expect_dtype(w, {DType::F32, x.dtype});
    call.expect_dtype(y, {x.dtype});
    Tensor expanded = x;
    expanded.shape[3] = y.shape[3];
    g.check(call, expanded, w, y);
    const bool is_depthwise = g.groups == y.shape[3] && w.shape[g.rhs_spec[0]] == g.groups;
    const bool is_empty = w.size() == 0 || x.shape[3] == 0;
    if (!is_depthwise || g.transposed() || !is_channels_last(g.lhs_spec) || !is_channels_last(g.out_spec) || is_empty) {
      call.refuse("the convolution is not depthwise, is transposed, has an empty filter or is not channels last");
    }
    return g;
  }
};

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Some channels of lines of an image.
class Strip {
 public:
  // Panels of the `next` channels are fetched meanwhile.
  Strip(const Description& description, int64_t image, Channels channels, Channels next)
      : d_(description), image_(image), channels_(channels), next_(next), by_lines_(d_.has_line_loops()), step_(step()), width_(width()),
        scratch_((d_.kept() * width_ + d_.taps.count()) * step_ * sizeof(float) + d_.pixels().out * channels.count * sizeof(float)),
        w_(scratch_.as<float>()), ring_(w_ + d_.taps.count() * step_), sums_(ring_ + d_.kept() * width_ * step_) {
    if (!load_filter() && by_lines_) {
      by_lines_ = false, step_ = step(), width_ = width();
      load_filter();
    }
    expansion_ = expansion();
    for (int64_t i = 0; i < d_.kept(); ++i) {
      float *const line = ring_ + i * width_ * step_, *const behind = line + (low() + d_.pixels().in) * step_;
      std::fill_n(line, low() * step_, 0.0f);
      std::fill(behind, line + width_ * step_, 0.0f);
    }
  }

  // Lines [begin, end) of the output.
  void run(int64_t begin, int64_t end) {
    const auto top = [&](int64_t line) { return line * d_.lines().stride - d_.lines().padding_low; };
    const auto bottom = [&](int64_t line) { return std::min(d_.lines().in, top(line) + d_.reach()); };
    first_ = std::max<int64_t>(0, top(begin)), end_ = bottom(end - 1);
    for (int64_t tap = 0; tap < d_.taps.count(); ++tap) {
      const char* const next = d_.w.as<char>() + (d_.taps.first[tap] + next_.begin * d_.taps.step) * int64_t(ffi::ByteWidth(d_.w.dtype));
      for (int64_t line = 0; line < 2; ++line) __builtin_prefetch(next + line * contraction::kLineBytes);
    }
    int64_t made = 0;
    for (int64_t line = begin; line < end; ++line) {
      for (made = std::max(made, top(line)); made < bottom(line); ++made) expand(made);
      convolve(line);
    }
  }

 private:
  // Whether it is finite, which is asked of one for lines.
  bool load_filter() {
    bool finite = true;
    for (int64_t tap = 0; tap < d_.taps.count(); ++tap) {
      const Elements own{d_.taps.first[tap] + channels_.begin * d_.taps.step, d_.taps.step, channels_.count};
      float* const to = w_ + tap * step_;
      const bool is_line = by_lines_ && own.step == 1 && d_.w.dtype == DType::F32;
      if (!is_line) load(d_.w, own, to);
      if (by_lines_) finite &= depthwise::kernels().copy_tap(is_line ? d_.w.as<float>() + own.first : to, own.n, to);
    }
    return finite;
  }

  // What every line of the expanded image is computed by.
  contraction::Pixels expansion() const {
    const contraction::Panels& p = d_.panels;
    const Limits limits = d_.expansion.limits.value_or(Limits{-kInfinity, kInfinity});
    return {d_.pixels().in, p.inner * int64_t(ffi::ByteWidth(p.dtype)), 1, 0, p.steps(), p.dtype == DType::BF16 && p.inner % 2 != 0,
            d_.packed, p.bytes(), channels_.begin, channels_.count, d_.expansion.bias(channels_.begin), limits.low, limits.high, Element::f32, step_};
  }

  int64_t step() const { return by_lines_ ? depthwise::kernels().line_step : channels_.count; }
  int64_t low() const { return by_lines_ ? d_.pixels().padding_low : 0; }
  int64_t width() const {
    const depthwise::Dimension& p = d_.pixels();
    return by_lines_ ? std::max(low() + p.in, (padded(p.out, depthwise::kTogether) - 1) * p.stride + p.taps) : p.in;
  }

  float* at(int64_t line) const { return ring_ + line % d_.kept() * width_ * step_; }

  void expand(int64_t line) const {
    const contraction::Panels& p = d_.panels;
    const char* const x = d_.x.as<char>() + (image_ * d_.lines().in + line) * expansion_.count * expansion_.pixel;
    float* const to = at(line) + low() * step_;
    // Of the next channels' panels this line's share, if they are others.
    const int64_t panels = next_.begin == channels_.begin ? 0 : parts(next_.count, contraction::kPanel), lines = end_ - first_;
    const int64_t wanted = panels * p.bytes() / contraction::kLineBytes, before = (line - first_) * wanted / lines;
    const int64_t fetched = (line - first_ + 1) * wanted / lines - before;
    const char* const fetch = d_.packed + next_.begin / contraction::kPanel * p.bytes() + before * contraction::kLineBytes;
    const auto multiply = p.dtype == DType::F32 ? contraction::kernels().pixels_f32 : contraction::kernels().pixels_bf16;
    multiply(expansion_, x, reinterpret_cast<char*>(to), nullptr, {fetch, fetched});
    if (!d_.expansion.limits) d_.expansion.activate(to, (expansion_.count - 1) * step_ + channels_.count);
  }

  void convolve(int64_t line) {
    rows_.clear();
    for (int64_t tap = 0; tap < d_.lines().taps; ++tap) {
      const int64_t source = d_.sources[line * d_.lines().taps + tap];
      if (source >= 0) rows_.push_back({at(source), tap * d_.pixels().taps});
    }
    const int64_t pixels = d_.pixels().out, features = d_.problem.channels;
    const int64_t place = (image_ * d_.lines().out + line) * pixels * features + channels_.begin;
    char* const y = d_.y.as<char>() + place * d_.problem.element_bytes();
    const std::optional<Limits> limits = d_.problem.bf16 ? std::nullopt : d_.depthwise.limits;
    if (limits) return convolve(reinterpret_cast<float*>(y), features, *limits);
    convolve(sums_, channels_.count, {-kInfinity, kInfinity});
    d_.depthwise.activate(sums_, pixels * channels_.count);
    epilogue::kernels().apply({element_of(d_.y.dtype), channels_.count, features, 0, Activation::none, {}, sums_, channels_.count, true,
                               nullptr, nullptr, nullptr, false, nullptr, y}, 0, pixels);
  }

  void convolve(float* to, int64_t step, Limits limits) const {
    const depthwise::Dimension& p = d_.pixels();
    const float* const bias = d_.depthwise.bias(channels_.begin);
    const int64_t n_rows = rows_.size();
    if (by_lines_) {
      return depthwise::kernels().convolve_line(
          {rows_.data(), n_rows, p.taps, p.stride, p.out, channels_.count, w_, bias, limits.low, limits.high, to, step});
    }
    const depthwise::Args args{false, channels_.count, p.in, p.taps, d_.phases.data(), int64_t(d_.phases.size()), step};
    const float low = limits.low, high = limits.high;
    depthwise::kernels().convolve(args, {0, p.out, rows_.data(), n_rows, nullptr}, w_, {bias, nullptr, to, {{low, high}, {low, high}}});
  }

  const Description& d_;
  const int64_t image_;
  const Channels channels_, next_;
  bool by_lines_;        // a tap over padding multiplies zeros, which lie beside the image: wrong of infinities
  int64_t step_, width_;  // from pixel to pixel, and from tap to tap; pixels of a line
  const Scratch scratch_;
  float *const w_, *const ring_, *const sums_;
  contraction::Pixels expansion_;
  std::vector<depthwise::Row> rows_;
  int64_t first_ = 0, end_ = 0;  // lines of the image that are read
};

class Expanded : public Kept::Object {
 public:
  explicit Expanded(const Call& call) : d_(call) {}

  void run(const Call& call) {
    if (d_.y.size() == 0) return;
    d_.x.data = call.operand_data(0), d_.w.data = call.operand_data(d_.w_operand), d_.y.data = call.result_data(0);
    d_.packed = static_cast<const char*>(call.operand_data(1));
    d_.expansion.point_to(call), d_.depthwise.point_to(call);
    if (!cut_ || threads_ != max_threads()) threads_ = max_threads(), cut_.emplace(d_.problem);
    const Cut& cut = *cut_;
    const int64_t groups = cut.groups.size(), lines = d_.lines().out, strips = d_.problem.batch * cut.strips;
    // What is larger, the panels or an image, is read once.
    const bool by_groups = d_.panels.all_bytes() > int64_t(d_.x.bytes()) / d_.problem.batch;
    const auto group = [&](int64_t i) { return cut.groups[by_groups ? i / strips : i % groups]; };
    parallel_for(strips * groups, [&](int64_t i) {
      const int64_t at = by_groups ? i % strips : i / groups, strip = at % cut.strips;
      Strip part(d_, at / cut.strips, group(i), group((i + 1) % (strips * groups)));
      part.run(strip * lines / cut.strips, (strip + 1) * lines / cut.strips);
    });
  }

 private:
  Description d_;
  std::optional<Cut> cut_;
  int threads_ = 0;  // among which it is cut
};

JAXFUSE_KEEPING_HANDLER(jaxfuse_conv_expanded, Expanded);

}  // namespace
}  // namespace jaxfuse::conv
