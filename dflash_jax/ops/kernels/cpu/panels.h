// Products of rows by a weight in panels.
//
// A panel has 16 outputs, so that sums stay in registers over all of K without additions across lanes, and every weight
// is read once for all rows. A panel is float32 [K, 16], or [K / 2, 16] words of two bfloat16: a register of words
// becomes two of float32, one by a shift and one by a mask. Each sum goes through k in order, for any number of rows.

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

// x [rows, k_size] by panels first … last - 1, into out [rows, stride], whose first column is that of panel `first`.
void Multiply(const float* x, int64_t rows, int64_t k_size, const xla::ffi::AnyBuffer& panels, int64_t first,
              int64_t last, float* out, int64_t columns, int64_t stride);

// silu(gate) · up of one row into out; gate and up are multiples of a vector.
inline void Gate(const float* gate, const float* up, int64_t columns, float* out) {
  for (int64_t c = 0; c < columns; c += kLanes) {
    const Floats y = Silu(Load(gate + c)) * Load(up + c);
    std::memcpy(out + c, &y, sizeof(float) * std::min<int64_t>(kLanes, columns - c));
  }
}
