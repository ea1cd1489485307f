// Attention of a few new tokens over a cache and over one another, in float32, as a call of XLA's: dflash_jax.cache's
// `attend`, one KV head of one row at a time, 16 of its query rows (token by token, a group's heads of each) in lanes.
// The cache is read where it lies, as far as it is filled, once for all of them.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu_shared.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int kKeys = 64;       // folded into the running softmax at a time
constexpr int kMostSize = 256;  // of a head
constexpr float kMasked = -1e30f;

Floats Choose(Ints mask, Floats a, Floats b) {
  const Ints x = reinterpret_cast<const Ints&>(a), y = reinterpret_cast<const Ints&>(b), z = (mask & x) | (~mask & y);
  return reinterpret_cast<const Floats&>(z);
}

Floats Largest(Floats a, Floats b) { return Choose(a > b, a, b); }

// exp of x ≤ 0, to 2 units in the last place; 0 below -87. 2^n e^r, r within half of ln 2, by Taylor's terms.
Floats Exp(Floats x) {
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
  return Choose(x > -87.0f, p * reinterpret_cast<const Floats&>(power), Floats{});
}

// The running softmax of 16 query rows.
struct Softmax {
  int64_t size, rows;               // of a head; rows in use
  Floats q[kMostSize];              // scaled, by feature
  Floats best = Floats{} + kMasked, total = {};
  float sums[kLanes][kMostSize] = {};

  // n ≤ kKeys keys and values, `stride` floats apart; seen[j]: the lanes that see key j.
  void Fold(const float* k, const float* v, int64_t stride, int n, const Ints* seen) {
    Floats weights[kKeys];
    Floats most = best;
    for (int j = 0; j < n; j += 8) {
      Floats scores[8] = {};
      const float* key[8];
      for (int i = 0; i < 8; ++i) key[i] = k + std::min(j + i, n - 1) * stride;
      for (int64_t d = 0; d < size; ++d) {
        for (int i = 0; i < 8; ++i) scores[i] += q[d] * key[i][d];
      }
      for (int i = 0; i < 8 && j + i < n; ++i) {
        weights[j + i] = Choose(seen[j + i], scores[i], Floats{} + kMasked);
        most = Largest(most, weights[j + i]);
      }
    }
    const Floats kept = Exp(best - most);
    best = most;
    total *= kept;
    for (int64_t m = 0; m < rows; ++m) {
      for (int64_t d = 0; d < size; ++d) sums[m][d] *= kept[m];
    }
    for (int j = 0; j < n; ++j) {
      // Not by the difference alone: where a row has seen nothing yet, that is 0.
      weights[j] = Choose(seen[j], Exp(weights[j] - most), Floats{});
      total += weights[j];
    }
    for (int64_t m = 0; m < rows; m += 4) {
      int64_t d = 0;
      for (; d + 64 <= size; d += 64) Mix<4>(m, d, v + d, stride, n, weights);
      for (; d < size; d += 16) Mix<1>(m, d, v + d, stride, n, weights);
    }
  }

 private:
  // Four rows' sums of P * 16 features.
  template <int P>
  void Mix(int64_t m, int64_t d, const float* v, int64_t stride, int n, const Floats* weights) {
    Floats acc[4][P];
    for (int i = 0; i < 4; ++i) {
      for (int p = 0; p < P; ++p) acc[i][p] = Load(&sums[m + i][d + p * kLanes]);
    }
    for (int j = 0; j < n; ++j) {
      Floats value[P];
      for (int p = 0; p < P; ++p) value[p] = Load(v + j * stride + p * kLanes);
      const float* weight = reinterpret_cast<const float*>(weights + j) + m;
      for (int i = 0; i < 4; ++i) {
        for (int p = 0; p < P; ++p) acc[i][p] += value[p] * weight[i];
      }
    }
    for (int i = 0; i < 4; ++i) {
      for (int p = 0; p < P; ++p) std::memcpy(&sums[m + i][d + p * kLanes], &acc[i][p], sizeof(Floats));
    }
  }
};

using F32 = ffi::Buffer<ffi::F32>;
using I32 = ffi::Buffer<ffi::S32>;

// q [B, T, N, D]; k, v [B, T, K, D]; own [1 or B, T, T]; held [all rows, K, S, D]; rows, length, recent, sinks [B]; first
// [B, T]. ring_sinks: the first slots of a ring, which stay; -1: no ring, slots are positions.
ffi::Error Call(F32 q, F32 k, F32 v, ffi::Buffer<ffi::PRED> own, F32 k_held, F32 v_held, I32 rows, I32 length, I32 first,
                I32 recent, I32 sinks, ffi::ResultBuffer<ffi::F32> out, int64_t ring_sinks) {
  const int64_t tokens = q.dimensions()[1], heads = q.dimensions()[2], size = q.dimensions()[3];
  const int64_t kv_heads = k.dimensions()[2], group = heads / kv_heads;
  const int64_t all = k_held.dimensions()[0], capacity = k_held.dimensions()[2];
  const int64_t tiles = (tokens * group + kLanes - 1) / kLanes;
  const bool one_mask = own.dimensions()[0] == 1;

  const auto part = [&](int64_t i) {
    const int64_t tile = i % tiles, head = i / tiles % kv_heads, b = i / tiles / kv_heads;
    const int64_t begin = tile * kLanes, live = std::min<int64_t>(kLanes, tokens * group - begin);
    Softmax softmax = {size, live};
    int64_t token[kLanes], place[kLanes];
    Ints lowest;
    for (int m = 0; m < kLanes; ++m) {
      // Lanes past the last row do what it does.
      const int64_t row = begin + std::min<int64_t>(m, live - 1);
      token[m] = row / group;
      place[m] = ((b * tokens + token[m]) * heads + head * group + row % group) * size;
      lowest[m] = first.typed_data()[b * tokens + token[m]];
    }
    const float scale = 1.0f / __builtin_sqrtf(size);
    for (int64_t d = 0; d < size; ++d) {
      for (int m = 0; m < kLanes; ++m) softmax.q[d][m] = q.typed_data()[place[m] + d] * scale;
    }

    Ints seen[kKeys];
    const int32_t held = length.typed_data()[b];
    const int64_t used = std::min<int64_t>(held, capacity);
    const int64_t cache = (std::min<int64_t>(rows.typed_data()[b], all - 1) * kv_heads + head) * capacity * size;
    for (int64_t start = 0; start < used; start += kKeys) {
      const int n = std::min<int64_t>(kKeys, used - start);
      for (int j = 0; j < n; ++j) {
        int64_t position = start + j;
        if (position >= std::max<int64_t>(ring_sinks, 0) && ring_sinks >= 0) {
          const int64_t turn = (held - 1 - position) % (capacity - ring_sinks);
          position = held - 1 - turn;
        }
        const bool in = position >= recent.typed_data()[b] || position < sinks.typed_data()[b];
        seen[j] = in ? lowest <= static_cast<int32_t>(position) : Ints{};
      }
      softmax.Fold(k_held.typed_data() + cache + start * size, v_held.typed_data() + cache + start * size, size, n, seen);
    }
    const int64_t mine = (b * tokens * kv_heads + head) * size, stride = kv_heads * size;
    for (int64_t start = 0; start < tokens; start += kKeys) {
      const int n = std::min<int64_t>(kKeys, tokens - start);
      for (int j = 0; j < n; ++j) {
        for (int m = 0; m < kLanes; ++m) {
          const int64_t row = (one_mask ? 0 : b) * tokens + token[m];
          seen[j][m] = own.typed_data()[row * tokens + start + j] ? -1 : 0;
        }
      }
      const int64_t from = mine + start * stride;
      softmax.Fold(k.typed_data() + from, v.typed_data() + from, stride, n, seen);
    }
    for (int64_t m = 0; m < live; ++m) {
      float* y = out->typed_data() + place[m];
      for (int64_t d = 0; d < size; ++d) y[d] = softmax.sums[m][d] / softmax.total[m];
    }
  };
  TheTeam().Run(q.dimensions()[0] * kv_heads * tiles, part);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(DflashAttend, Call,
                              ffi::Ffi::Bind()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Ret<F32>()
                                  .Attr<int64_t>("ring_sinks"));
