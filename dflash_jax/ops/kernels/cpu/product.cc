// Linear maps in float32, as an XLA FFI call: `linear` of calls.py. x [T, K], normed or not, times the transposes of
// matrices [N, K] in panels, then SwiGLU, or biases and GELU, and a residual.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "panels.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// The fewest products that are worth a second thread.
constexpr int64_t kAlone = 32768;
// Rows of a part at most: with many rows, small parts keep all threads busy to the end, and each reads its panels once.
constexpr int64_t kPartRows = 20 * kRows;
// Rows of a part of a norm.
constexpr int64_t kNormRows = 16;

// A weight's panels and its result.
struct Weight {
  Panels panels;
  int64_t outputs;
  float* out;
  int64_t first;  // panel
  bool gated;
  int64_t column;  // of its first output among those of all weights

  // Panels of `outputs`: half of the weight's, where the first half is SwiGLU's gate.
  int64_t steps() const { return (outputs + kLanes - 1) / kLanes; }
  int64_t all() const { return steps() * (gated ? 2 : 1); }
  int64_t parts() const { return (steps() + kPartPanels - 1) / kPartPanels; }
};

// LayerNorm (arXiv 1607.06450) of one row.
void LayerNorm(const float* x, const float* weight, const float* bias, int64_t size, float eps, float* out) {
  Floats sums = {}, squares = {};
  float sum = 0, square = 0;
  int64_t k = 0;
  for (; k + kLanes <= size; k += kLanes) sums += Load(x + k);
  for (; k < size; ++k) sum += x[k];
  for (int i = 0; i < kLanes; ++i) sum += sums[i];
  const float mean = sum / size;
  for (k = 0; k + kLanes <= size; k += kLanes) squares += (Load(x + k) - mean) * (Load(x + k) - mean);
  for (; k < size; ++k) square += (x[k] - mean) * (x[k] - mean);
  for (int i = 0; i < kLanes; ++i) square += squares[i];
  const float scale = 1.0f / __builtin_sqrtf(square / size + eps);
  for (int64_t i = 0; i < size; ++i) out[i] = (x[i] - mean) * scale * weight[i] + bias[i];
}

// GELU (arXiv 1606.08415) by tanh: x / 2 · (1 + tanh z) = x / (1 + exp(-2 z)).
inline Floats Gelu(Floats x) {
  const Floats z = x * (x * x * 0.0713548163f + 1.59576912f);  // 2 z = 2 √(2 / π) (x + 0.044715 x³)
  const Floats small = Exp(Choose(z > 0, -z, z)), one = Floats{} + 1.0f;
  return x * Choose(z > 0, one, small) / (one + small);
}

inline Floats LoadSome(const float* p, int64_t n) {
  if (n >= kLanes) return Load(p);
  Floats y = {};
  std::memcpy(&y, p, n * sizeof(float));
  return y;
}

// Adds a bias to a row, applies GELU, and adds a residual; each pointer may be null.
void Finish(float* y, int64_t columns, const float* bias, bool gelu, const float* residual) {
  for (int64_t c = 0; c < columns; c += kLanes) {
    const int64_t n = std::min<int64_t>(kLanes, columns - c);
    Floats sum = LoadSome(y + c, n);
    if (bias) sum += LoadSome(bias + c, n);
    if (gelu) sum = Gelu(sum);
    if (residual) sum += LoadSome(residual + c, n);
    if (n == kLanes) {
      Store(y + c, sum);
    } else {
      std::memcpy(y + c, &sum, n * sizeof(float));
    }
  }
}

using F32 = ffi::Buffer<ffi::F32>;
using I32 = ffi::Buffer<ffi::S32>;

// x [T, K], normed first where `norm` [K] is not empty: by LayerNorm where `norm_bias` [K] is not. The results are each
// weight's product, then the normed x if there is one more result. gated: SwiGLU of the one weight [2 F, K]. bias: those
// of all weights [sum of N], or empty; gelu: GELU after them. residual [T, N], or empty: added to each. live: the first
// rows that are computed, or empty: all. index: which weight of its stack each one is, or empty.
ffi::Error Call(F32 x, F32 norm, F32 norm_bias, F32 bias, F32 residual, I32 live, I32 index,
                ffi::RemainingArgs weights, ffi::RemainingRets out, ffi::Span<const int64_t> forms,
                float eps, float offset, bool gated, bool gelu) {
  const int64_t all_rows = x.dimensions()[0], k_size = x.dimensions()[1];
  const int64_t rows = live.element_count() > 0 ? std::clamp<int64_t>(live.typed_data()[0], 0, all_rows) : all_rows;
  const float* input = x.typed_data();
  for (const F32& each : {norm, norm_bias}) {
    if (each.element_count() > 0 && static_cast<int64_t>(each.element_count()) != k_size) {
      return ffi::Error::InvalidArgument("a norm of another size than the inputs");
    }
  }
  thread_local std::vector<float> normed_rows;
  if (norm.element_count() > 0) {
    float* normed;
    if (out.size() > weights.size()) {
      normed = out.get<F32>(weights.size()).value()->typed_data();
    } else {
      normed_rows.resize(rows * k_size);
      normed = normed_rows.data();
    }
    const float* const centred = norm_bias.element_count() > 0 ? norm_bias.typed_data() : nullptr;
    const auto norms = [&](int64_t i) {
      for (int64_t t = i * kNormRows; t < std::min((i + 1) * kNormRows, rows); ++t) {
        const float* const from = input + t * k_size;
        float* const to = normed + t * k_size;
        if (centred) {
          LayerNorm(from, norm.typed_data(), centred, k_size, eps, to);
        } else {
          Norm(from, norm.typed_data(), k_size, eps, offset, to);
        }
      }
    };
    const int64_t norm_parts = (rows + kNormRows - 1) / kNormRows;
    if (rows * k_size <= kAlone) {
      for (int64_t i = 0; i < norm_parts; ++i) norms(i);
    } else {
      TheTeam().Run(norm_parts, norms);
    }
    input = normed;
  }
  std::vector<Weight> all;
  int64_t parts = 0, read = 0, all_outputs = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    auto result = out.get<F32>(i).value();
    const int64_t outputs = result->dimensions()[1];
    const auto panels = PanelsOf(weights.get<ffi::AnyBuffer>(i).value(), k_size, forms, i);
    if (!panels) return panels.error();
    all.push_back({*panels, outputs, result->typed_data(), 0, gated, all_outputs});
    if (index.element_count() > 0) all[i].first = index.typed_data()[i] * all[i].all();
    if (all[i].first < 0 || all[i].first + all[i].all() > all[i].panels.count) {
      return ffi::Error::InvalidArgument("more outputs than panels hold");
    }
    parts += all[i].parts(), read += outputs * k_size, all_outputs += outputs;
  }
  if (bias.element_count() > 0 && static_cast<int64_t>(bias.element_count()) != all_outputs) {
    return ffi::Error::InvalidArgument("a bias of another size than the outputs");
  }
  if (residual.element_count() > 0 && static_cast<int64_t>(residual.element_count()) != all_rows * all[0].outputs) {
    return ffi::Error::InvalidArgument("a residual of another size than the result");
  }
  const float* const residuals = residual.element_count() > 0 ? residual.typed_data() : nullptr;
  const float* const biases = bias.element_count() > 0 ? bias.typed_data() : nullptr;

  // Parts that follow one another share their panels. Their rows are multiples of a tile.
  const int64_t chunks = (rows + kPartRows - 1) / kPartRows;
  const int64_t even = chunks > 0 ? (rows + chunks - 1) / chunks : 0, chunk_rows = (even + kRows - 1) / kRows * kRows;
  const auto part = [&](int64_t i) {
    const int64_t begin = i % chunks * chunk_rows, count = std::min(chunk_rows, rows - begin);
    const Weight* entry = all.data();
    for (i /= chunks; i >= entry->parts(); ++entry) i -= entry->parts();
    const Weight& weight = *entry;
    const int64_t first = i * kPartPanels, last = std::min(first + kPartPanels, weight.steps());
    const int64_t outputs = weight.outputs;
    const int64_t columns = std::min((last - first) * kLanes, outputs - first * kLanes);
    const float* const from = input + begin * k_size;
    float* const here = weight.out + begin * outputs + first * kLanes;
    if (gated) {
      constexpr int64_t kStride = kPartPanels * kLanes;
      thread_local std::vector<float> gates;
      gates.resize(2 * count * kStride);
      float* const ups = gates.data() + count * kStride;
      const int64_t gate = weight.first, up = gate + weight.steps();
      Multiply(from, count, weight.panels, gate + first, gate + last, gates.data(), kStride, kStride);
      Multiply(from, count, weight.panels, up + first, up + last, ups, kStride, kStride);
      for (int64_t t = 0; t < count; ++t) {
        Gate(gates.data() + t * kStride, ups + t * kStride, columns, here + t * outputs);
      }
    } else {
      const int64_t panel = weight.first + first;
      Multiply(from, count, weight.panels, panel, panel + last - first, here, columns, outputs);
    }
    if (!biases && !gelu && !residuals) return;
    const int64_t column = first * kLanes;
    const float* const added = residuals ? residuals + begin * outputs + column : nullptr;
    for (int64_t t = 0; t < count; ++t) {
      Finish(here + t * outputs, columns, biases ? biases + weight.column + column : nullptr, gelu,
             added ? added + t * outputs : nullptr);
    }
  };
  if (read * rows <= kAlone) {
    for (int64_t i = 0; i < parts * chunks; ++i) part(i);
  } else {
    TheTeam().Run(parts * chunks, part);
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(DflashLinear, Call,
                              ffi::Ffi::Bind()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<ffi::Span<const int64_t>>("forms")
                                  .Attr<float>("eps")
                                  .Attr<float>("offset")
                                  .Attr<bool>("gated")
                                  .Attr<bool>("gelu"));
