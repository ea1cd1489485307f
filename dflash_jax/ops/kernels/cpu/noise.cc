// Standard Gumbel noise by counter, as an XLA FFI call: `noise` of calls.py, 16 tokens in the lanes of a vector.

#include <algorithm>
#include <cstdint>

#include "shared.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// Token ids of a part.
constexpr int64_t kPartIds = 4096;

// The first word of Threefry-2x32 with 20 rounds (Salmon et al., SC 2011).
inline Words Threefry(uint32_t key_hi, uint32_t key_lo, Words hi) {
  constexpr int kTurns[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  const uint32_t keys[3] = {key_hi, key_lo, key_hi ^ key_lo ^ 0x1BD11BDA};
  Words lo = Words{} + key_lo;
  hi += key_hi;
  for (uint32_t group = 0; group < 5; ++group) {
    for (const int turn : kTurns[group % 2]) {
      hi += lo;
      lo = hi ^ (lo << turn | lo >> (32 - turn));
    }
    hi += keys[(group + 1) % 3], lo += keys[(group + 2) % 3] + group + 1;
  }
  return hi;
}

// log of normal x > 0, to 2 units in the last place: m 2^n, m in [√½, √2), by 2 artanh((m - 1) / (m + 1)).
inline Floats Log(Floats x) {
  const Ints bits = (Ints)x - 0x3f3504f3;
  const Floats n = __builtin_convertvector(bits >> 23, Floats);
  const Floats m = (Floats)((bits & 0x007fffff) + 0x3f3504f3);
  const Floats f = m - 1.0f, s = f / (m + 1.0f), z = s * s;
  Floats p = z * (1.0f / 9) + 1.0f / 7;
  p = p * z + 1.0f / 5;
  p = p * z + 1.0f / 3;
  // 2 s = f - s f: the correction of f is small, and so are its roundings.
  return n * 0.693359375f + (f - (s * f - 2.0f * s * z * p) + n * -2.12194440e-4f);
}

// seed [B], positions [B, T], ids [V] → [B, T, V].
ffi::Error Call(ffi::Buffer<ffi::U32> seed, ffi::Buffer<ffi::S32> positions, ffi::Buffer<ffi::U32> ids,
                ffi::ResultBuffer<ffi::F32> out) {
  const int64_t tokens = positions.dimensions()[1], size = ids.dimensions()[0];
  const int64_t runs = (size + kPartIds - 1) / kPartIds;
  TheTeam().Run(positions.element_count() * runs, [&](int64_t part) {
    const int64_t row = part / runs, end = std::min(size, (part % runs + 1) * kPartIds);
    const uint32_t key = seed.typed_data()[row / tokens], position = positions.typed_data()[row];
    for (int64_t i = part % runs * kPartIds; i < end; i += kLanes) {
      const int64_t n = std::min<int64_t>(kLanes, end - i);
      Words id = {};
      std::memcpy(&id, ids.typed_data() + i, n * sizeof(uint32_t));
      const Floats whole = __builtin_convertvector(Threefry(key, position, id), Floats);
      // u in (0, 1). The exponential -log(1 - u) needs its precision near 0, where 1 - u would lose it.
      Floats u = (whole + 0.5f) * 0x1p-32f;
      u = Choose(u < 1.0f - 0x1p-24f, u, Floats{} + (1.0f - 0x1p-24f));
      const Floats complement = 1.0f - u, lost = complement - 1.0f;
      const Floats divisor = Choose(lost == 0.0f, Floats{} + 1.0f, lost);
      const Floats exponential = Choose(lost == 0.0f, u, u * Log(complement) / divisor);
      const Floats noise = -Log(exponential);
      std::memcpy(out->typed_data() + row * size + i, &noise, n * sizeof(float));
    }
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(DflashNoise, Call,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::U32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::U32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
