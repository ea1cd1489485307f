// x [T, K] times the transpose of a matrix [N, K] kept in panels, in float32, as a call of XLA's.
//
// A panel holds 16 outputs, so that sums lie in registers over all of K, with nothing to add up across lanes, and every
// weight is read once for all rows. A panel is float32 [K, 16], or [K / 2, 16] words of two bfloat16: a register of those
// is two of float32, one by a shift and one by a mask. Each sum goes through k in order, whatever the number of rows.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

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
// Weights that a second thread is not woken for.
constexpr int64_t kAlone = 16384;

// The weights of inputs k and k + 1.
inline void Two(const float* w, Floats& a, Floats& b) {
  a = Load(w);
  b = Load(w + kLanes);
}

inline void Two(const uint32_t* w, Floats& a, Floats& b) {
  const Words pairs = *reinterpret_cast<const Words*>(w);
  const Words low = pairs << 16, high = pairs & 0xffff0000u;
  std::memcpy(&a, &low, sizeof a);
  std::memcpy(&b, &high, sizeof b);
}

// P panels from `first` on, all of them inside the matrix but for the last one's last outputs.
template <class W, int M, int P>
void Tile(const float* x, int64_t k_size, const W* panels, int64_t first, float* out, int64_t outputs) {
  constexpr int kWords = std::is_same_v<W, float> ? kLanes : kLanes / 2;  // of a panel and one k
  const int64_t kept = k_size + k_size % 2;
  const W* w = panels + first * kept * kWords;
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
      const int64_t n = (first + p) * kLanes;
      std::memcpy(out + m * outputs + n, &sums[m][p], sizeof(float) * std::min<int64_t>(kLanes, outputs - n));
    }
  }
}

template <class W, int M>
void Rows(const float* x, int64_t k_size, const W* w, int64_t first, int64_t last, float* out, int64_t outputs) {
  constexpr int P = Panels(M);
  for (; first + P <= last; first += P) Tile<W, M, P>(x, k_size, w, first, out, outputs);
  for (; first < last; ++first) Tile<W, M, 1>(x, k_size, w, first, out, outputs);
}

template <class W, int M = kRows>
void Some(int rows, const float* x, int64_t k_size, const W* w, int64_t first, int64_t last, float* out,
          int64_t outputs) {
  if (rows == M) return Rows<W, M>(x, k_size, w, first, last, out, outputs);
  if constexpr (M > 1) Some<W, M - 1>(rows, x, k_size, w, first, last, out, outputs);
}

template <class W>
void Product(const float* x, int64_t rows, int64_t k_size, const W* w, int64_t panels, float* out,
             int64_t outputs) {
  const int64_t parts = (panels + kTaken - 1) / kTaken;
  const int64_t tiles = (rows + kRows - 1) / kRows;
  const auto part = [=](int64_t i) {
    const int64_t first = i * kTaken, last = std::min(first + kTaken, panels);
    // Rows in tiles of nearly one size, the panels read again from the cache.
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t begin = rows * t / tiles, end = rows * (t + 1) / tiles;
      Some<W>(end - begin, x + begin * k_size, k_size, w, first, last, out + begin * outputs, outputs);
    }
  };
  if (panels * kLanes * k_size <= kAlone) {
    for (int64_t i = 0; i < parts; ++i) part(i);
    return;
  }
  TheTeam().Run(parts, part);
}

ffi::Error Call(ffi::Buffer<ffi::F32> x, ffi::AnyBuffer w, ffi::ResultBuffer<ffi::F32> out) {
  const int64_t rows = x.dimensions()[0], k_size = x.dimensions()[1], outputs = out->dimensions()[1];
  const int64_t panels = w.dimensions()[0];
  if (w.element_type() == ffi::F32) {
    Product(x.typed_data(), rows, k_size, w.typed_data<float>(), panels, out->typed_data(), outputs);
  } else {
    Product(x.typed_data(), rows, k_size, w.typed_data<uint32_t>(), panels, out->typed_data(), outputs);
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(DflashProduct, Call,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
