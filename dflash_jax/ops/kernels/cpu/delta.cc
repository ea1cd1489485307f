// A Gated DeltaNet layer in float32, as two XLA FFI calls of calls.py: `mix` reads the state, and `replay` writes it.
// A part computes 16 value features of a head token by token; its part of the state, [Dk, 16], stays in the
// first-level cache. No sum depends on the number of tokens.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "shared.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int kMaxKeySize = 256;  // features of a key
// The fewest products that are worth a second thread.
constexpr int64_t kAlone = 8192;

// Σ x[i] y[i]; size is a multiple of a vector.
inline float Product(const float* x, const float* y, int64_t size) {
  Floats sums = {};
  for (int64_t i = 0; i < size; i += kLanes) sums += Load(x + i) * Load(y + i);
  float sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += sums[i];
  return sum;
}

// S ← decay S + k ⊗ δ, 16 values of one feature of the key.
inline Floats Stepped(Floats state, float decay, float k, Floats delta) { return state * decay + delta * k; }

template <class F>
void ForAll(int64_t parts, int64_t products, const F& part) {
  if (products > kAlone) return TheTeam().Run(parts, part);
  for (int64_t i = 0; i < parts; ++i) part(i);
}

// The inputs of T tokens for one head: k and q [T, size], their products kq [T], beta and decay [T].
struct Tokens {
  int64_t count, size;
  const float *k, *q, *kq, *beta, *decay;
};

// The delta rule for 16 values of a head. Row t of v, delta and out is at t times its stride; the state's values of
// feature i are at i * width.
void Recurrence(const Tokens& x, const float* state, int64_t width, const float* v, int64_t v_stride, float* delta,
                int64_t delta_stride, float* out, int64_t out_stride) {
  Floats s[kMaxKeySize];
  Floats recalled[2] = {}, seen[2] = {};  // Sᵀk and Sᵀq
  const auto read = [&](int64_t i, int64_t t) {
    recalled[i & 1] += s[i] * x.k[t * x.size + i];
    seen[i & 1] += s[i] * x.q[t * x.size + i];
  };
  for (int64_t i = 0; i < x.size; i += 2) {
    s[i] = Load(state + i * width), s[i + 1] = Load(state + (i + 1) * width);
    read(i, 0), read(i + 1, 0);
  }
  for (int64_t t = 0;; ++t) {
    const float decay = x.decay[t];
    const Floats d = (Load(v + t * v_stride) - (recalled[0] + recalled[1]) * decay) * x.beta[t];
    Store(delta + t * delta_stride, d);
    Store(out + t * out_stride, (seen[0] + seen[1]) * decay + d * x.kq[t]);
    if (t + 1 == x.count) break;
    recalled[0] = recalled[1] = seen[0] = seen[1] = Floats{};
    const float* const k = x.k + t * x.size;
    for (int64_t i = 0; i < x.size; i += 2) {
      s[i] = Stepped(s[i], decay, k[i], d), s[i + 1] = Stepped(s[i + 1], decay, k[i + 1], d);
      read(i, t + 1), read(i + 1, t + 1);
    }
  }
}

using F32 = ffi::Buffer<ffi::F32>;
using F32Out = ffi::ResultBuffer<ffi::F32>;
using I32 = ffi::Buffer<ffi::S32>;

// qkvz [B, T, G, C + R Dv], gates [B, T, 2, G, R], state [all rows, G, R, Dk, Dv], conv [all rows, J - 1, G, C],
// state_rows [B], taps [G, C, J], a_log and dt_bias [G, R], norm [Dv] → y and delta [B, T, G, R, Dv], k [B, T, G, Dk],
// log_decay [B, T, G, R], inputs [B, T, G, C]. Rows past the end are padding, with meaningless results.
ffi::Error Mix(F32 qkvz, F32 gates, F32 state, F32 conv, I32 state_rows, F32 taps, F32 a_log, F32 dt_bias, F32 norm,
               F32Out y, F32Out k_out, F32Out delta, F32Out log_decay, F32Out inputs, float eps) {
  const int64_t rows = qkvz.dimensions()[0], tokens = qkvz.dimensions()[1], wide = qkvz.dimensions()[3];
  const int64_t groups = taps.dimensions()[0], channels = taps.dimensions()[1], kernel = taps.dimensions()[2];
  const int64_t repeat = state.dimensions()[2], size = state.dimensions()[3], values = state.dimensions()[4];
  if (size > kMaxKeySize || size % kLanes || values % kLanes) {
    return ffi::Error::InvalidArgument("heads of an unsupported size");
  }

  // A part is a group: a key head of one batch entry, and its value heads.
  const auto part = [&](int64_t index) {
    const int64_t b = index / groups, g = index % groups;
    const int64_t line = std::clamp<int64_t>(state_rows.typed_data()[b], 0, state.dimensions()[0] - 1);
    thread_local std::vector<float> buffer;
    buffer.resize(kernel * channels + tokens * (channels + 2 * size + repeat * values + 1 + 2 * repeat));
    float* const weights = buffer.data();                // [J, C]
    float* const mixed = weights + kernel * channels;  // [T, C]: q, k, v
    float* const q = mixed + tokens * channels;        // [T, Dk]
    float* const k = q + tokens * size;                // [T, Dk]
    float* const out = k + tokens * size;              // [T, R, Dv]
    float* const kq = out + tokens * repeat * values;  // [T]
    float* const beta = kq + tokens;                   // [R, T]
    float* const decay = beta + repeat * tokens;       // [R, T]
    for (int64_t c = 0; c < channels; ++c) {
      for (int64_t j = 0; j < kernel; ++j) {
        weights[j * channels + c] = taps.typed_data()[(g * channels + c) * kernel + j];
      }
    }
    // The convolution's input at token t; before the first token, that of the state.
    const auto input = [&](int64_t t) {
      return t < 0 ? conv.typed_data() + ((line * (kernel - 1) + kernel - 1 + t) * groups + g) * channels
                   : qkvz.typed_data() + ((b * tokens + t) * groups + g) * wide;
    };
    for (int64_t t = 0; t < tokens; ++t) {
      float* const here = mixed + t * channels;
      for (int64_t c = 0; c < channels; c += kLanes) {
        Floats sum = {};
        for (int64_t j = 0; j < kernel; ++j) {
          sum += Load(input(t + j - kernel + 1) + c) * Load(weights + j * channels + c);
        }
        Store(here + c, Silu(sum));
      }
      const int64_t row = (b * tokens + t) * groups + g;
      std::memcpy(inputs->typed_data() + row * channels, input(t), channels * sizeof(float));
      const float q_scale = 1.0f / std::sqrt((Product(here, here, size) + 1e-6f) * size);
      const float k_scale = 1.0f / std::sqrt(Product(here + size, here + size, size) + 1e-6f);
      for (int64_t i = 0; i < size; i += kLanes) {
        Store(q + t * size + i, Load(here + i) * q_scale);
        Store(k + t * size + i, Load(here + size + i) * k_scale);
      }
      std::memcpy(k_out->typed_data() + row * size, k + t * size, size * sizeof(float));
      kq[t] = Product(k + t * size, q + t * size, size);
      for (int64_t r = 0; r < repeat; ++r) {
        const float* const gate = gates.typed_data() + ((b * tokens + t) * 2 * groups + g) * repeat + r;
        const float alpha = gate[groups * repeat] + dt_bias.typed_data()[g * repeat + r];
        const float dt = std::max(alpha, 0.0f) + std::log1p(std::exp(-std::abs(alpha)));
        const float log = -std::exp(a_log.typed_data()[g * repeat + r]) * dt;
        log_decay->typed_data()[row * repeat + r] = log;
        decay[r * tokens + t] = std::exp(log);
        beta[r * tokens + t] = 1.0f / (1.0f + std::exp(-gate[0]));
      }
    }
    for (int64_t r = 0; r < repeat; ++r) {
      const Tokens head_inputs = {tokens, size, k, q, kq, beta + r * tokens, decay + r * tokens};
      const float* const from = state.typed_data() + ((line * groups + g) * repeat + r) * size * values;
      const int64_t first = (b * tokens * groups + g) * repeat + r, step = groups * repeat * values;
      for (int64_t v = 0; v < values; v += kLanes) {
        Recurrence(head_inputs, from + v, values, mixed + 2 * size + r * values + v, channels,
                   delta->typed_data() + first * values + v, step, out + r * values + v, repeat * values);
      }
      for (int64_t t = 0; t < tokens; ++t) {
        const float* const head = out + (t * repeat + r) * values;
        const float scale = 1.0f / std::sqrt(Product(head, head, values) / values + eps);
        const float* const z = input(t) + channels + r * values;
        float* const to = y->typed_data() + first * values + t * step;
        for (int64_t v = 0; v < values; v += kLanes) {
          Store(to + v, Load(head + v) * scale * Load(norm.typed_data() + v) * Silu(Load(z + v)));
        }
      }
    }
  };
  ForAll(rows * groups, rows * groups * repeat * tokens * size * values, part);
  return ffi::Error::Success();
}

// state [all rows, G, R, Dk, Dv] and conv [all rows, J - 1, G, C], whose state_rows [B] advance by the first n [B] of
// T tokens: k [B, T, G, Dk], delta [B, T, G, R, Dv], log_decay [B, T, G, R], inputs [B, T, G, C]. Written in place.
ffi::Error Replay(F32 state, F32 conv, I32 state_rows, F32 k, F32 delta, F32 log_decay, F32 inputs, I32 n,
                  F32Out state_out, F32Out conv_out) {
  const int64_t rows = k.dimensions()[0], tokens = k.dimensions()[1], groups = k.dimensions()[2];
  const int64_t repeat = state.dimensions()[2], size = state.dimensions()[3], values = state.dimensions()[4];
  const int64_t past = conv.dimensions()[1], line = groups * conv.dimensions()[3];
  if (size > kMaxKeySize || values % kLanes) {
    return ffi::Error::InvalidArgument("heads of an unsupported size");
  }
  // XLA copies an argument that is not donated.
  if (state.typed_data() != state_out->typed_data() || conv.typed_data() != conv_out->typed_data()) {
    return ffi::Error::Internal("the state was not written where it lies");
  }

  const auto part = [&](int64_t index) {
    const int64_t b = index / groups, g = index % groups, row = state_rows.typed_data()[b];
    const int64_t count = std::clamp<int64_t>(n.typed_data()[b], 0, tokens);
    if (count == 0 || row < 0 || row >= state.dimensions()[0]) return;
    if (g == 0) {
      float* const last_inputs = conv_out->typed_data() + row * past * line;
      const float* const fresh = inputs.typed_data() + b * tokens * line;
      for (int64_t j = 0; j < past; ++j) {
        const int64_t from = j + count;
        std::memmove(last_inputs + j * line, from < past ? last_inputs + from * line : fresh + (from - past) * line,
                     line * sizeof(float));
      }
    }
    thread_local std::vector<float> decay;
    decay.resize(tokens);
    for (int64_t r = 0; r < repeat; ++r) {
      float* const state_part = state_out->typed_data() + ((row * groups + g) * repeat + r) * size * values;
      const int64_t first = (b * tokens * groups + g) * repeat + r;
      for (int64_t t = 0; t < count; ++t) {
        decay[t] = std::exp(log_decay.typed_data()[first + t * groups * repeat]);
      }
      for (int64_t v = 0; v < values; v += kLanes) {
        Floats s[kMaxKeySize];
        for (int64_t i = 0; i < size; ++i) s[i] = Load(state_part + i * values + v);
        for (int64_t t = 0; t < count; ++t) {
          const Floats d = Load(delta.typed_data() + (first + t * groups * repeat) * values + v);
          const float* const key = k.typed_data() + ((b * tokens + t) * groups + g) * size;
          for (int64_t i = 0; i < size; ++i) s[i] = Stepped(s[i], decay[t], key[i], d);
        }
        for (int64_t i = 0; i < size; ++i) Store(state_part + i * values + v, s[i]);
      }
    }
  };
  ForAll(rows * groups, rows * groups * repeat * tokens * size * values, part);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(DflashMix, Mix,
                              ffi::Ffi::Bind()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<I32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Ret<F32>()
                                  .Ret<F32>()
                                  .Ret<F32>()
                                  .Ret<F32>()
                                  .Ret<F32>()
                                  .Attr<float>("eps"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(DflashReplay, Replay,
                              ffi::Ffi::Bind()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<I32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<I32>()
                                  .Ret<F32>()
                                  .Ret<F32>());
