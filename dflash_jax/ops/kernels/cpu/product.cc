// Linear maps in float32 with what is around them, as a call of XLA's: x [T, K], normed or not, times the transposes of
// matrices [N, K] kept in panels, then SwiGLU or a residual.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "panels.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// Products that a second thread is not woken for.
constexpr int64_t kAlone = 32768;

// How a weight is kept, and what comes of it.
struct Weight {
  ffi::AnyBuffer panels;
  int64_t outputs;
  float* out;
  bool gated;

  // Panels that give `outputs`: half of all, where the others gate them.
  int64_t steps() const { return panels.dimensions()[0] / (gated ? 2 : 1); }
  int64_t parts() const { return (steps() + kTaken - 1) / kTaken; }
};

void Norm(const float* x, const float* weight, int64_t size, float eps, float offset, float* out) {
  Floats squares = {};
  float rest = 0;
  int64_t k = 0;
  for (; k + kLanes <= size; k += kLanes) squares += Load(x + k) * Load(x + k);
  for (; k < size; ++k) rest += x[k] * x[k];
  for (int i = 0; i < kLanes; ++i) rest += squares[i];
  const float scale = 1.0f / __builtin_sqrtf(rest / size + eps);
  for (int64_t i = 0; i < size; ++i) out[i] = x[i] * scale * (offset + weight[i]);
}

using F32 = ffi::Buffer<ffi::F32>;

// x [T, K], normed first where `norm` [K] is not empty; each of the weights' products comes out, then the normed x if
// there is one output more. gated: of the one weight [2 F, K]. residual [T, N], or empty: added to each.
ffi::Error Call(F32 x, F32 norm, F32 residual, ffi::RemainingArgs weights, ffi::RemainingRets out, float eps,
                float offset, bool gated) {
  const int64_t rows = x.dimensions()[0], k_size = x.dimensions()[1];
  const float* input = x.typed_data();
  thread_local std::vector<float> made;
  if (norm.element_count() > 0) {
    float* normed;
    if (out.size() > weights.size()) {
      normed = out.get<F32>(weights.size()).value()->typed_data();
    } else {
      made.resize(rows * k_size);
      normed = made.data();
    }
    for (int64_t t = 0; t < rows; ++t) {
      Norm(input + t * k_size, norm.typed_data(), k_size, eps, offset, normed + t * k_size);
    }
    input = normed;
  }
  std::vector<Weight> all;
  int64_t parts = 0, read = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    auto result = out.get<F32>(i).value();
    all.push_back({weights.get<ffi::AnyBuffer>(i).value(), result->dimensions()[1], result->typed_data(), gated});
    if (all[i].steps() * kLanes < all[i].outputs) return ffi::Error::InvalidArgument("more outputs than panels hold");
    parts += all[i].parts(), read += all[i].outputs * k_size;
  }
  const float* const rest = residual.element_count() > 0 ? residual.typed_data() : nullptr;

  const auto part = [&](int64_t i) {
    const Weight* found = all.data();
    for (; i >= found->parts(); ++found) i -= found->parts();
    const Weight& weight = *found;
    const int64_t first = i * kTaken, last = std::min(first + kTaken, weight.steps()), outputs = weight.outputs;
    const int64_t columns = std::min((last - first) * kLanes, outputs - first * kLanes);
    float* const here = weight.out + first * kLanes;
    if (gated) {
      constexpr int64_t kStride = kTaken * kLanes;
      thread_local std::vector<float> gates;
      gates.resize(2 * rows * kStride);
      float* const ups = gates.data() + rows * kStride;
      Multiply(input, rows, k_size, weight.panels, first, last, gates.data(), kStride, kStride);
      const int64_t half = weight.steps();
      Multiply(input, rows, k_size, weight.panels, half + first, half + last, ups, kStride, kStride);
      for (int64_t t = 0; t < rows; ++t) {
        Gate(gates.data() + t * kStride, ups + t * kStride, columns, here + t * outputs);
      }
    } else {
      Multiply(input, rows, k_size, weight.panels, first, last, here, columns, outputs);
    }
    for (int64_t t = 0; rest && t < rows; ++t) {
      for (int64_t c = 0; c < columns; ++c) here[t * outputs + c] += rest[t * outputs + first * kLanes + c];
    }
  };
  if (read * rows <= kAlone) {
    for (int64_t i = 0; i < parts; ++i) part(i);
  } else {
    TheTeam().Run(parts, part);
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(DflashLinear, Call,
                              ffi::Ffi::Bind()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<float>("eps")
                                  .Attr<float>("offset")
                                  .Attr<bool>("gated"));
