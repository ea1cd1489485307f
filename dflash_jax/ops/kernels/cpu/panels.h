// Products of rows by a weight in panels.
//
// A panel has 16 outputs, so that sums stay in registers over all of K without additions across lanes, and every weight
// is read once for all rows. A panel is float32 [K, 16], or [K / 2, 16] words of two bfloat16: a register of words
// becomes two of float32, one by a shift and one by a mask. Or it has numbers in few bits and their scales, [words, 16]
// (`Form`). Each sum goes through k in order, for any number of rows.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "shared.h"
#include "xla/ffi/api/ffi.h"

// Rows of one product at most.
#ifdef __AVX512F__
constexpr int kRows = 12;
#else
constexpr int kRows = 6;
#endif
// Panels of a part.
constexpr int64_t kPartPanels = 4;
// Vectors of each panel that are prefetched: the CPU's own prefetching is not enough for two cores to use the memory's
// full bandwidth.
constexpr int64_t kAhead = 32;
// Inputs of a partial sum: the rounding error of one sum over all K grows with the square root of K, that of partial
// sums with the square root of kRun + K / kRun.
constexpr int64_t kRun = 64;

enum class Numbers : int64_t { kFloat, kInt8, kFp8, kInt4, kE2m1 };
enum class Scales : int64_t { kFloat32, kBfloat16, kFloat16, kFp8 };

// How a panel keeps a `QuantizedWeight` of ops/weights.py. A lane has the bytes of its output, one array after another,
// each in whole words: numbers, then for each of `runs` equal runs of inputs a scale and, if any, a zero point, then
// `factors`. The lead of an attribute `forms`: see `forms_of` in calls.py.
struct Form {
  Numbers numbers;
  int64_t runs;
  Scales scales;
  int64_t has_zero;
  int64_t factors;
};

// A weight of k_size inputs in panels.
struct Panels {
  const uint32_t* data = nullptr;
  int64_t count = 0, words = 0;  // panels, and words of a lane
  int64_t k_size = 0;
  bool is_float = false;  // float32 numbers without scales
  Form form{};

  const uint32_t* of(int64_t panel) const { return data + panel * words * kLanes; }
  bool has_scales() const { return form.numbers != Numbers::kFloat; }
  int64_t run() const { return k_size / form.runs; }
  // Each word of codes has one scale, and no zero point.
  bool has_scales_of_words() const { return has_scales() && !form.has_zero && run() % codes() == 0; }
  int64_t codes() const { return form.numbers == Numbers::kInt4 || form.numbers == Numbers::kE2m1 ? 8 : 4; }  // a word
};

// The panels of the call's weight number `i`; an error where `panels` do not have the size of its form.
xla::ffi::ErrorOr<Panels> PanelsOf(const xla::ffi::AnyBuffer& panels, int64_t k_size,
                                   xla::ffi::Span<const int64_t> forms, size_t i);

// The numbers less their zero points of inputs begin … end - 1, [end - begin, 16], of a panel with scales, and up to 7
// more vectors. `begin` is a multiple of 8.
void Unpack(const Panels& panels, int64_t panel, int64_t begin, int64_t end, float* out);

// The scales of runs first … last - 1 of a panel, [last - first, 16].
void UnpackScales(const Panels& panels, int64_t panel, int64_t first, int64_t last, float* out);

// x [rows, k_size] by panels first … last - 1, into out [rows, stride], whose first column is that of panel `first`.
void Multiply(const float* x, int64_t rows, const Panels& panels, int64_t first, int64_t last, float* out,
              int64_t columns, int64_t stride);

// silu(gate) · up of one row into out; gate and up are multiples of a vector.
inline void Gate(const float* gate, const float* up, int64_t columns, float* out) {
  for (int64_t c = 0; c < columns; c += kLanes) {
    const Floats y = Silu(Load(gate + c)) * Load(up + c);
    std::memcpy(out + c, &y, sizeof(float) * std::min<int64_t>(kLanes, columns - c));
  }
}
