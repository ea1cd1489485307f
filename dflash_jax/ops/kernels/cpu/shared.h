// Shared parts of the CPU's kernels: vectors of float32, and threads.

#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>

constexpr int kLanes = 16;
using Floats = float __attribute__((vector_size(64)));
using Words = uint32_t __attribute__((vector_size(64)));
using Ints = int32_t __attribute__((vector_size(64)));

// Unaligned loads and stores: arrays are not aligned to a vector.
inline Floats Load(const float* p) {
  Floats y;
  std::memcpy(&y, p, sizeof y);
  return y;
}

inline void Store(float* p, Floats x) { std::memcpy(p, &x, sizeof x); }

inline Floats Choose(Ints mask, Floats a, Floats b) { return (Floats)((mask & (Ints)a) | (~mask & (Ints)b)); }

inline Floats Largest(Floats a, Floats b) { return Choose(a > b, a, b); }

// exp of x ≤ 0, to 2 units in the last place; 0 below -87, NaN for NaN. 2^n e^r, |r| ≤ ln 2 / 2, by a Taylor series.
inline Floats Exp(Floats x) {
  const Ints none = x < -87.0f;
  x = Choose(none, Floats{}, x);
  constexpr float kRound = 12582912.0f;  // 1.5 · 2^23: adding it rounds to an integer
  const Floats n = (x * 1.44269504f + kRound) - kRound;
  const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats p = r * (1.0f / 5040) + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
  return Choose(none, Floats{}, p * (Floats)power);
}

inline Floats Silu(Floats x) {
  const Floats small = Exp(Choose(x > 0, -x, x)), one = Floats{} + 1.0f;
  return x * Choose(x > 0, one, small) / (one + small);
}

// RMSNorm (arXiv 1910.07467) of one row.
inline void Norm(const float* x, const float* weight, int64_t size, float eps, float offset, float* out) {
  Floats squares = {};
  float sum = 0;
  int64_t k = 0;
  for (; k + kLanes <= size; k += kLanes) squares += Load(x + k) * Load(x + k);
  for (; k < size; ++k) sum += x[k] * x[k];
  for (int i = 0; i < kLanes; ++i) sum += squares[i];
  const float scale = 1.0f / __builtin_sqrtf(sum / size + eps);
  for (int64_t i = 0; i < size; ++i) out[i] = x[i] * scale * (offset + weight[i]);
}

// Threads that compute the parts of one call at a time. They spin for the next call before they sleep, since in a model
// it comes at once and waking takes as long as a product; the caller waits only for threads that have begun a part.
class Team {
 public:
  explicit Team(int64_t helpers);

  // Calls part(i) for i below `parts` on free threads; of concurrent callers, all but the first use their thread only.
  void Run(int64_t parts, const std::function<void(int64_t)>& part);

 private:
  void Take();
  void Help();

  std::mutex busy_;
  std::atomic<uint32_t> calls_{0};
  std::atomic<bool> open_{false};
  std::atomic<int64_t> inside_{0}, next_{0};
  int64_t parts_ = 0;
  const std::function<void(int64_t)>* part_ = nullptr;
};

// The team of the process.
Team& TheTeam();
