// Products of rows by a weight in panels: see panels.h.

#include "panels.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace {

// Panels whose sums fit the registers for each number of rows of x.
#ifdef __AVX512F__
constexpr int Panels(int rows) { return rows <= 4 ? 4 : 2; }
#else
constexpr int Panels(int rows) { return rows <= 2 ? 2 : 1; }
#endif
// Bytes of each panel that are prefetched: the CPU's own prefetching is not enough for two cores to use the memory's
// full bandwidth.
constexpr int64_t kAhead = 2048;
// Inputs of a partial sum: the rounding error of one sum over all K grows with the square root of K, that of partial
// sums with the square root of kRun + K / kRun.
constexpr int64_t kRun = 64;

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

// x [M, K] by P panels, into out [M, stride]; the last panel has as many outputs as there are columns.
template <int M, int P, class W>
void Tile(const float* x, int64_t k_size, const W* w, float* out, int64_t columns, int64_t stride) {
  constexpr int kWords = std::is_same_v<W, float> ? kLanes : kLanes / 2;  // words of a panel for one k
  const int64_t stored_inputs = k_size + k_size % 2;
  Floats totals[M][P] = {};
  for (int64_t begin = 0; begin < k_size; begin += kRun) {
    const int64_t end = std::min(begin + kRun, k_size);
    Floats sums[M][P] = {};
    for (int64_t k = begin; k < end; k += 2) {
      Floats a[P], b[P];
      for (int p = 0; p < P; ++p) {
        const W* const here = w + (p * stored_inputs + k) * kWords;
        __builtin_prefetch(reinterpret_cast<const char*>(here) + kAhead);
        Two(here, a[p], b[p]);
      }
      for (int m = 0; m < M; ++m) {
        for (int p = 0; p < P; ++p) sums[m][p] += a[p] * x[m * k_size + k];
      }
      if (k + 1 == end) break;
      for (int m = 0; m < M; ++m) {
        for (int p = 0; p < P; ++p) sums[m][p] += b[p] * x[m * k_size + k + 1];
      }
    }
    for (int m = 0; m < M; ++m) {
      for (int p = 0; p < P; ++p) totals[m][p] += sums[m][p];
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int p = 0; p < P; ++p) {
      const int64_t n = p * kLanes;
      std::memcpy(out + m * stride + n, &totals[m][p], sizeof(float) * std::min<int64_t>(kLanes, columns - n));
    }
  }
}

// The same for any number of panels.
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

// The same for a number of rows up to kRows that is known at run time.
template <int M = kRows, class W>
void Some(int rows, const float* x, int64_t k_size, const W* w, int64_t panels, float* out, int64_t columns,
          int64_t stride) {
  if (rows == M) return Rows<M>(x, k_size, w, panels, out, columns, stride);
  if constexpr (M > 1) Some<M - 1>(rows, x, k_size, w, panels, out, columns, stride);
}

}  // namespace

void Multiply(const float* x, int64_t rows, int64_t k_size, const xla::ffi::AnyBuffer& panels, int64_t first,
              int64_t last, float* out, int64_t columns, int64_t stride) {
  const bool is_float = panels.element_type() == xla::ffi::F32;
  const int64_t words = (k_size + k_size % 2) * (is_float ? kLanes : kLanes / 2), tiles = (rows + kRows - 1) / kRows;
  // Rows in tiles of nearly equal size; each tile reads the panels again, from the cache.
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t begin = rows * t / tiles, n = rows * (t + 1) / tiles - begin;
    const float* from = x + begin * k_size;
    float* const here = out + begin * stride;
    if (is_float) {
      Some(n, from, k_size, panels.typed_data<float>() + first * words, last - first, here, columns, stride);
    } else {
      Some(n, from, k_size, panels.typed_data<uint32_t>() + first * words, last - first, here, columns, stride);
    }
  }
}
