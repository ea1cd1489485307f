// Linear maps in float32 with what is around them, as a call of XLA's: x [T, K], normed or not, times the transposes of
// matrices [N, K] kept in panels, then SwiGLU or a residual.
//
// A panel holds 16 outputs, so that sums lie in registers over all of K, with nothing to add up across lanes, and every
// weight is read once for all rows. A panel is float32 [K, 16], or [K / 2, 16] words of two bfloat16: a register of
// those is two of float32, one by a shift and one by a mask. Each sum goes through k in order, whatever the number of
// rows.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "cpu_shared.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// Sums that the registers hold: rows of x by panels.
#ifdef __AVX512F__
constexpr int kRows = 12;
constexpr int Panels(int rows) { return rows <= 4 ? 4 : 2; }
#else
constexpr int kRows = 6;
constexpr int Panels(int rows) { return rows <= 2 ? 2 : 1; }
#endif
// What a thread takes at a time.
constexpr int64_t kTaken = 4;
// Products that a second thread is not woken for.
constexpr int64_t kAlone = 32768;

// The weights of inputs k and k + 1.
inline void Two(const float* w, Floats& a, Floats& b) {
  a = Load(w);
  b = Load(w + kLanes);
}

inline void Two(const uint32_t* w, Floats& a, Floats& b) {
  Words pairs;
  std::memcpy(&pairs, w, sizeof pairs);
  a = (Floats)(pairs << 16);
  b = (Floats)(pairs & 0xffff0000u);
}

// x [M, K] by P panels, into out [M, stride]; of the last panel as many outputs as there are columns.
template <int M, int P, class W>
void Tile(const float* x, int64_t k_size, const W* w, float* out, int64_t columns, int64_t stride) {
  constexpr int kWords = std::is_same_v<W, float> ? kLanes : kLanes / 2;  // of a panel and one k
  const int64_t kept = k_size + k_size % 2;
  Floats sums[M][P] = {};
  for (int64_t k = 0; k < k_size; k += 2) {
    Floats a[P], b[P];
    for (int p = 0; p < P; ++p) Two(w + (p * kept + k) * kWords, a[p], b[p]);
    for (int m = 0; m < M; ++m) {
      for (int p = 0; p < P; ++p) sums[m][p] += a[p] * x[m * k_size + k];
    }
    if (k + 1 == k_size) break;
    for (int m = 0; m < M; ++m) {
      for (int p = 0; p < P; ++p) sums[m][p] += b[p] * x[m * k_size + k + 1];
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int p = 0; p < P; ++p) {
      const int64_t n = p * kLanes;
      std::memcpy(out + m * stride + n, &sums[m][p], sizeof(float) * std::min<int64_t>(kLanes, columns - n));
    }
  }
}

// The same of any number of panels.
template <int M, class W>
void Rows(const float* x, int64_t k_size, const W* w, int64_t panels, float* out, int64_t columns, int64_t stride) {
  constexpr int P = Panels(M), kWords = std::is_same_v<W, float> ? kLanes : kLanes / 2;
  const int64_t words = (k_size + k_size % 2) * kWords;
  int64_t p = 0;
  for (; p + P <= panels; p += P) {
    Tile<M, P>(x, k_size, w + p * words, out + p * kLanes, columns - p * kLanes, stride);
  }
  for (; p < panels; ++p) Tile<M, 1>(x, k_size, w + p * words, out + p * kLanes, columns - p * kLanes, stride);
}

// The same of a number of rows up to kRows that is known only now.
template <int M = kRows, class W>
void Some(int rows, const float* x, int64_t k_size, const W* w, int64_t panels, float* out, int64_t columns,
          int64_t stride) {
  if (rows == M) return Rows<M>(x, k_size, w, panels, out, columns, stride);
  if constexpr (M > 1) Some<M - 1>(rows, x, k_size, w, panels, out, columns, stride);
}

// How a weight is kept, and what comes of it.
struct Weight {
  ffi::AnyBuffer panels;
  int64_t outputs;
  float* out;
  bool gated;

  // Panels that give `outputs`: half of all, where the others gate them.
  int64_t steps() const { return panels.dimensions()[0] / (gated ? 2 : 1); }
  int64_t parts() const { return (steps() + kTaken - 1) / kTaken; }

  // All rows by panels first … last - 1, into out [rows, stride], whose first column is that of panel `first`.
  void Multiply(const float* x, int64_t rows, int64_t k_size, int64_t first, int64_t last, float* to, int64_t columns,
                int64_t stride) const {
    const bool is_float = panels.element_type() == ffi::F32;
    const int64_t words = (k_size + k_size % 2) * (is_float ? kLanes : kLanes / 2), tiles = (rows + kRows - 1) / kRows;
    // Rows in tiles of nearly one size; the panels are read again from the cache.
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t begin = rows * t / tiles, n = rows * (t + 1) / tiles - begin;
      const float* from = x + begin * k_size;
      float* const here = to + begin * stride;
      if (is_float) {
        Some(n, from, k_size, panels.typed_data<float>() + first * words, last - first, here, columns, stride);
      } else {
        Some(n, from, k_size, panels.typed_data<uint32_t>() + first * words, last - first, here, columns, stride);
      }
    }
  }
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

// silu(gate) · up of one row into out; gate and up are whole vectors.
void Gate(const float* gate, const float* up, int64_t columns, float* out) {
  for (int64_t c = 0; c < columns; c += kLanes) {
    const Floats y = Silu(Load(gate + c)) * Load(up + c);
    std::memcpy(out + c, &y, sizeof(float) * std::min<int64_t>(kLanes, columns - c));
  }
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
      weight.Multiply(input, rows, k_size, first, last, gates.data(), kStride, kStride);
      weight.Multiply(input, rows, k_size, weight.steps() + first, weight.steps() + last, ups, kStride, kStride);
      for (int64_t t = 0; t < rows; ++t) {
        Gate(gates.data() + t * kStride, ups + t * kStride, columns, here + t * outputs);
      }
    } else {
      weight.Multiply(input, rows, k_size, first, last, here, columns, outputs);
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
