// What the CPU's kernels share: vectors of float32 and the threads.

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

// From and to anywhere: arrays are not aligned to a vector.
inline Floats Load(const float* p) {
  Floats y;
  std::memcpy(&y, p, sizeof y);
  return y;
}

inline void Store(float* p, Floats x) { std::memcpy(p, &x, sizeof x); }

inline Floats Choose(Ints mask, Floats a, Floats b) { return (Floats)((mask & (Ints)a) | (~mask & (Ints)b)); }

inline Floats Largest(Floats a, Floats b) { return Choose(a > b, a, b); }

// exp of x ≤ 0, to 2 units in the last place; 0 below -87, NaN of NaN. 2^n e^r, |r| within ln 2 / 2, by Taylor's terms.
inline Floats Exp(Floats x) {
  const Ints none = x < -87.0f;
  x = Choose(none, Floats{}, x);
  constexpr float kRound = 12582912.0f;  // 1.5 · 2^23: what is added to it loses its fraction
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

// Threads that take the parts of one call at a time in turn. They look out for the next one before they sleep, since in
// a model it comes at once and waking takes as long as a product; the caller waits for none that has not begun.
class Team {
 public:
  explicit Team(int64_t helpers);

  // part(i) for i below `parts`, on whoever is free; of callers at one time all but the first go alone.
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

// One for the process.
Team& TheTeam();
