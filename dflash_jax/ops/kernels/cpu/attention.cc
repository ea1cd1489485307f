// Attention of new tokens over a cache and over one another, in float32, as a call of XLA's: dflash_jax.cache's
// `attend`, one KV head of one row at a time, 16 of its query rows (token by token, a group's heads of each) in lanes.
// The cache is read where it lies, as far as it is filled, once for each such 16.

#include <algorithm>
#include <cstdint>

#include "shared.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int kKeys = 64;       // folded into the running softmax at a time
constexpr int kMostSize = 256;  // of a head
constexpr float kMasked = -1e30f;

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
      // In runs, whose rounding errors do not add up over all features; so it is with keys below.
      for (int64_t run = 0; run < size; run += kLanes) {
        Floats part[8] = {};
        for (int64_t d = run; d < run + kLanes; ++d) {
          for (int i = 0; i < 8; ++i) part[i] += q[d] * key[i][d];
        }
        for (int i = 0; i < 8; ++i) scores[i] += part[i];
      }
      for (int i = 0; i < 8 && j + i < n; ++i) {
        weights[j + i] = Choose(seen[j + i], scores[i], Floats{} + kMasked);
        most = Largest(most, weights[j + i]);
      }
    }
    const Floats kept = Exp(best - most);
    best = most;
    Floats sum = {};
    for (int64_t m = 0; m < rows; ++m) {
      for (int64_t d = 0; d < size; ++d) sums[m][d] *= kept[m];
    }
    for (int j = 0; j < n; ++j) {
      // Not by the difference alone: where a row has seen nothing yet, that is 0.
      weights[j] = Choose(seen[j], Exp(weights[j] - most), Floats{});
      sum += weights[j];
    }
    total = total * kept + sum;
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
    Floats acc[4][P] = {};
    for (int j = 0; j < n; ++j) {
      Floats value[P];
      for (int p = 0; p < P; ++p) value[p] = Load(v + j * stride + p * kLanes);
      for (int i = 0; i < 4; ++i) {
        for (int p = 0; p < P; ++p) acc[i][p] += value[p] * weights[j][m + i];
      }
    }
    for (int i = 0; i < 4; ++i) {
      for (int p = 0; p < P; ++p) {
        float* const sum = &sums[m + i][d + p * kLanes];
        Store(sum, Load(sum) + acc[i][p]);
      }
    }
  }
};

using F32 = ffi::Buffer<ffi::F32>;
using I32 = ffi::Buffer<ffi::S32>;

// q [B, T, N, D]; k, v [B, T, K, D]; own [1 or B, T, T], unless `causal`: each token sees itself and those before it;
// held [all rows, K, S, D]; rows, length, recent, sinks [B]; first [B, T]. ring_sinks: the first slots of a ring, which
// stay; -1: no ring, slots are positions.
ffi::Error Call(F32 q, F32 k, F32 v, ffi::Buffer<ffi::PRED> own, F32 k_held, F32 v_held, I32 rows, I32 length,
                I32 first, I32 recent, I32 sinks, ffi::ResultBuffer<ffi::F32> out, int64_t ring_sinks, bool causal) {
  const int64_t tokens = q.dimensions()[1], heads = q.dimensions()[2], size = q.dimensions()[3];
  const int64_t kv_heads = k.dimensions()[2], group = heads / kv_heads;
  const int64_t all = k_held.dimensions()[0], capacity = k_held.dimensions()[2];
  if (size > kMostSize || size % kLanes) return ffi::Error::InvalidArgument("heads of a size that is not made for");
  const int64_t tiles = (tokens * group + kLanes - 1) / kLanes;
  const bool one_mask = own.dimensions()[0] == 1;

  const auto part = [&](int64_t i) {
    const int64_t tile = i % tiles, head = i / tiles % kv_heads, b = i / tiles / kv_heads;
    const int64_t begin = tile * kLanes, live = std::min<int64_t>(kLanes, tokens * group - begin);
    Softmax softmax;
    softmax.size = size, softmax.rows = live;
    int64_t place[kLanes];
    Ints token, lowest;
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
    const int64_t row = std::clamp<int64_t>(rows.typed_data()[b], 0, all - 1);
    const int64_t cache = (row * kv_heads + head) * capacity * size;
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
      const int64_t from = cache + start * size;
      softmax.Fold(k_held.typed_data() + from, v_held.typed_data() + from, size, n, seen);
    }
    const int64_t mine = (b * tokens * kv_heads + head) * size, stride = kv_heads * size;
    const int64_t visible = causal ? token[kLanes - 1] + 1 : tokens;
    for (int64_t start = 0; start < visible; start += kKeys) {
      const int n = std::min<int64_t>(kKeys, visible - start);
      for (int j = 0; j < n; ++j) {
        const int32_t other = start + j;
        seen[j] = token >= other;
        for (int m = 0; !causal && m < kLanes; ++m) {
          const int64_t row = (one_mask ? 0 : b) * tokens + token[m];
          seen[j][m] = own.typed_data()[row * tokens + other] ? -1 : 0;
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
                                  .Attr<int64_t>("ring_sinks")
                                  .Attr<bool>("causal"));
