// Products of rows by a weight in panels: see panels.h.

#include "panels.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "codes.h"

namespace {

// Panels whose sums fit the registers for each number of rows of x.
#ifdef __AVX512F__
constexpr int Width(int rows) { return rows <= 4 ? 4 : 2; }
#else
constexpr int Width(int rows) { return rows <= 2 ? 2 : 1; }
#endif
// Rows up to which numbers with scales stay in registers: more rows use each number often enough.
constexpr int kDirectRows = kRows / 3;

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

// The weights before panel p of those of a weight.
inline const float* Skip(const float* w, int64_t p, int64_t k_size) { return w + p * (k_size + k_size % 2) * kLanes; }
inline const uint32_t* Skip(const uint32_t* w, int64_t p, int64_t k_size) {
  return w + p * (k_size + k_size % 2) * (kLanes / 2);
}

// Panels with scales, from panel `first` on, whose numbers pass through memory.
struct Scaled {
  const Panels* panels;
  int64_t first;
  const float* numbers;  // unpacked weights, [K rounded up to 8, 16] a panel; or null
};

inline int64_t Unpacked(int64_t k_size) { return (k_size + 7) / 8 * 8 * kLanes; }

inline Scaled Skip(const Scaled& w, int64_t p, int64_t k_size) {
  return {w.panels, w.first + p, w.numbers ? w.numbers + p * Unpacked(k_size) : nullptr};
}

// Panels with one scale for each word of codes, whose numbers stay in registers.
template <class Codes>
struct Direct {
  const Panels* panels;
  int64_t first;
};

template <class Codes>
inline Direct<Codes> Skip(const Direct<Codes>& w, int64_t p, int64_t k_size) {
  return {w.panels, w.first + p};
}

template <int M, int P>
inline void StoreTile(const Floats (&totals)[M][P], float* out, int64_t columns, int64_t stride) {
  for (int m = 0; m < M; ++m) {
    for (int p = 0; p < P; ++p) {
      const int64_t n = p * kLanes;
      std::memcpy(out + m * stride + n, &totals[m][p], sizeof(float) * std::min<int64_t>(kLanes, columns - n));
    }
  }
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
        __builtin_prefetch(here + kAhead * kLanes);
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
  StoreTile(totals, out, columns, stride);
}

// The same for panels with scales: partial sums of numbers, each times its scale. Numbers pass through a buffer in the
// fastest cache, so that one loop serves all forms; a row's sums are the same where all are unpacked before.
template <int M, int P>
void Tile(const float* x, int64_t k_size, const Scaled& w, float* out, int64_t columns, int64_t stride) {
  alignas(64) float numbers[P][kRun * kLanes], scales[P][kRun * kLanes];
  const int64_t run = w.panels->run();
  Floats totals[M][P] = {};
  for (int64_t begin = 0; begin < k_size; begin += kRun) {
    const int64_t end = std::min(begin + kRun, k_size), first = begin / run, last = (end - 1) / run;
    const float* from[P];
    for (int p = 0; p < P; ++p) {
      from[p] = numbers[p];
      if (w.numbers) {
        from[p] = w.numbers + p * Unpacked(k_size) + begin * kLanes;
      } else {
        Unpack(*w.panels, w.first + p, begin, end, numbers[p]);
      }
      UnpackScales(*w.panels, w.first + p, first, last + 1, scales[p]);
    }
    for (int64_t r = first; r <= last; ++r) {
      const int64_t from_k = std::max(begin, r * run), to_k = std::min(end, (r + 1) * run);
      Floats sums[M][P] = {};
      for (int64_t k = from_k; k < to_k; ++k) {
        Floats a[P];
        for (int p = 0; p < P; ++p) a[p] = Load(from[p] + (k - begin) * kLanes);
        for (int m = 0; m < M; ++m) {
          for (int p = 0; p < P; ++p) sums[m][p] += a[p] * x[m * k_size + k];
        }
      }
      for (int p = 0; p < P; ++p) {
        const Floats scale = Load(scales[p] + (r - first) * kLanes);
        for (int m = 0; m < M; ++m) totals[m][p] += sums[m][p] * scale;
      }
    }
  }
  StoreTile(totals, out, columns, stride);
}

// The same sums for a few rows.
template <int M, int P, class Codes>
void Tile(const float* x, int64_t k_size, const Direct<Codes>& w, float* out, int64_t columns, int64_t stride) {
  constexpr int kCodes = Codes::kCodes;
  alignas(64) float scales[P][kRun / kCodes * kLanes];
  const int64_t run = w.panels->run(), words = w.panels->words;
  const uint32_t* from[P];
  for (int p = 0; p < P; ++p) from[p] = w.panels->of(w.first + p);
  // What follows prefetches the vectors after these.
  for (int64_t i = 0; i < std::min(words, kAhead); ++i) {
    for (int p = 0; p < P; ++p) __builtin_prefetch(from[p] + i * kLanes);
  }
  Floats totals[M][P] = {};
  for (int64_t begin = 0; begin < k_size; begin += kRun) {
    const int64_t end = std::min(begin + kRun, k_size), first = begin / run, last = (end - 1) / run;
    for (int p = 0; p < P; ++p) UnpackScales(*w.panels, w.first + p, first, last + 1, scales[p]);
    for (int64_t r = first; r <= last; ++r) {
      const int64_t from_k = std::max(begin, r * run), to_k = std::min(end, (r + 1) * run);
      Floats sums[M][P] = {};
      for (int64_t i = from_k / kCodes; i < to_k / kCodes; ++i) {
        const bool is_more = i + kAhead < words;
        Floats numbers[P][kCodes];
        for (int p = 0; p < P; ++p) {
          if (is_more) __builtin_prefetch(from[p] + (i + kAhead) * kLanes);
          Codes::Unpack(LoadWords(from[p] + i * kLanes), numbers[p]);
        }
        for (int j = 0; j < kCodes; ++j) {
          for (int m = 0; m < M; ++m) {
            for (int p = 0; p < P; ++p) sums[m][p] += numbers[p][j] * x[m * k_size + i * kCodes + j];
          }
        }
      }
      for (int p = 0; p < P; ++p) {
        const Floats scale = Load(scales[p] + (r - first) * kLanes);
        for (int m = 0; m < M; ++m) totals[m][p] += sums[m][p] * scale;
      }
    }
  }
  StoreTile(totals, out, columns, stride);
}

// The same for any number of panels.
template <int M, class W>
void Rows(const float* x, int64_t k_size, W w, int64_t panels, float* out, int64_t columns, int64_t stride) {
  constexpr int P = Width(M);
  int64_t p = 0;
  for (; p + P <= panels; p += P) {
    Tile<M, P>(x, k_size, Skip(w, p, k_size), out + p * kLanes, columns - p * kLanes, stride);
  }
  for (; p < panels; ++p) {
    Tile<M, 1>(x, k_size, Skip(w, p, k_size), out + p * kLanes, columns - p * kLanes, stride);
  }
}

// The same for a number of rows up to kRows that is known at run time.
template <int M = kRows, class W>
void Some(int rows, const float* x, int64_t k_size, W w, int64_t panels, float* out, int64_t columns, int64_t stride) {
  if (rows == M) return Rows<M>(x, k_size, w, panels, out, columns, stride);
  if constexpr (M > 1) Some<M - 1>(rows, x, k_size, w, panels, out, columns, stride);
}

// The numbers of panels first … last - 1, unpacked once for many rows.
const float* AllNumbers(const Panels& panels, int64_t first, int64_t last) {
  thread_local std::vector<Floats> buffer;  // aligned to its vectors
  const int64_t size = Unpacked(panels.k_size);
  buffer.resize((last - first) * size / kLanes);
  float* const numbers = reinterpret_cast<float*>(buffer.data());
  for (int64_t p = first; p < last; ++p) Unpack(panels, p, 0, panels.k_size, numbers + (p - first) * size);
  return numbers;
}

template <class Codes>
void Few(int rows, const float* x, const Panels& panels, int64_t first, int64_t last, float* out, int64_t columns,
         int64_t stride) {
  Some<kDirectRows>(rows, x, panels.k_size, Direct<Codes>{&panels, first}, last - first, out, columns, stride);
}

}  // namespace

void Multiply(const float* x, int64_t rows, const Panels& panels, int64_t first, int64_t last, float* out,
              int64_t columns, int64_t stride) {
  if (rows <= kDirectRows && panels.has_scales_of_words()) {
    switch (panels.form.numbers) {
      case Numbers::kInt8: return Few<Int8>(rows, x, panels, first, last, out, columns, stride);
      case Numbers::kFp8: return Few<Fp8>(rows, x, panels, first, last, out, columns, stride);
      case Numbers::kInt4: return Few<Int4>(rows, x, panels, first, last, out, columns, stride);
      case Numbers::kE2m1: return Few<E2m1>(rows, x, panels, first, last, out, columns, stride);
      case Numbers::kFloat: break;
    }
  }
  const int64_t k_size = panels.k_size, tiles = (rows + kRows - 1) / kRows;
  const float* const numbers = panels.has_scales() && tiles > 1 ? AllNumbers(panels, first, last) : nullptr;
  // Rows in tiles of nearly equal size; each tile reads the panels again, from the cache.
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t begin = rows * t / tiles, n = rows * (t + 1) / tiles - begin;
    const float* from = x + begin * k_size;
    float* const here = out + begin * stride;
    if (panels.has_scales()) {
      Some(n, from, k_size, Scaled{&panels, first, numbers}, last - first, here, columns, stride);
    } else if (panels.is_float) {
      const float* const w = reinterpret_cast<const float*>(panels.of(first));
      Some(n, from, k_size, w, last - first, here, columns, stride);
    } else {
      Some(n, from, k_size, panels.of(first), last - first, here, columns, stride);
    }
  }
}
