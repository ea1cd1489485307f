// Numbers in few bits (`Numbers` of panels.h) to float32: words of 16 outputs.

#pragma once

#include <cstdint>
#include <cstring>

#include "shared.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

inline Words LoadWords(const uint32_t* p) {
  Words y;
  std::memcpy(&y, p, sizeof y);
  return y;
}

// A signed integer of kBits bits in the uppermost bits of each lane.
template <int kBits>
inline Floats Integer(Words top) {
  return __builtin_convertvector((Ints)top >> (32 - kBits), Floats);
}

// A float in the uppermost bits of each lane: sign, exponent, mantissa. Infinities and NaN are numbers. One whose exponent
// is 0 has no leading 1; as a float32 it would be denormal, which a thread may flush to 0.
template <int kExponent, int kMantissa>
inline Floats Small(Words top) {
  constexpr uint32_t kUsed = ~uint32_t{0} << (31 - kExponent - kMantissa), kOne = 1u << 23;
  constexpr int kBias = 127 - ((1 << (kExponent - 1)) - 1);  // to a float32's exponent
  const Words magnitude = (top & (kUsed & 0x7fffffffu)) >> (8 - kExponent);
  const Floats normal = (Floats)(magnitude + uint32_t{kBias} * kOne);
  const Words first = Words{} + uint32_t{kBias + 1} * kOne;
  const Floats without_one = (Floats)(magnitude + first) - (Floats)first;
  return (Floats)((Words)Choose((Ints)(magnitude < kOne), without_one, normal) | (top & 0x80000000u));
}

// Each form: the numbers of a word of codes, in the order of inputs.

struct Int8 {
  static constexpr int kCodes = 4;
  static void Unpack(Words w, Floats* out) {
    for (int j = 0; j < kCodes; ++j) out[j] = Integer<8>(w << (24 - 8 * j));
  }
};

struct Fp8 {
  static constexpr int kCodes = 4;
#ifdef __AVX512BW__
  // As float16, which has the same sign and a wider exponent: the number / 256.
  static __m512i Halves(__m512i high) {
    return _mm512_and_si512(_mm512_srai_epi16(high, 1), _mm512_set1_epi16(static_cast<int16_t>(0xbf80)));
  }
  static void Two(__m512i halves, Floats& low, Floats& high) {
    const __m512i order = _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1,  //
                                           30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    halves = _mm512_permutexvar_epi16(order, halves);
    low = (Floats)_mm512_cvtph_ps(_mm512_castsi512_si256(halves)) * 256.0f;
    high = (Floats)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)) * 256.0f;
  }
  static void Unpack(Words w, Floats* out) {
    Two(Halves(_mm512_slli_epi16((__m512i)w, 8)), out[0], out[2]);
    Two(Halves((__m512i)w), out[1], out[3]);
  }
#else
  static void Unpack(Words w, Floats* out) {
    for (int j = 0; j < kCodes; ++j) out[j] = Small<4, 3>(w << (24 - 8 * j));
  }
#endif
};

struct Int4 {
  static constexpr int kCodes = 8;
  static void Unpack(Words w, Floats* out) {
#ifdef __AVX512F__
    // The instruction takes an index's lowest four bits.
    const __m512 numbers = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    for (int j = 0; j < kCodes; ++j) out[j] = (Floats)_mm512_permutexvar_ps((__m512i)(w >> (4 * j)), numbers);
#else
    w ^= 0x88888888u;  // to two's complement
    for (int j = 0; j < kCodes; ++j) out[j] = Integer<4>(w << (28 - 4 * j));
#endif
  }
};

struct E2m1 {
  static constexpr int kCodes = 8;
  static void Unpack(Words w, Floats* out) {
#ifdef __AVX512F__
    const __m512 numbers = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
    for (int j = 0; j < kCodes; ++j) out[j] = (Floats)_mm512_permutexvar_ps((__m512i)(w >> (4 * j)), numbers);
#else
    for (int j = 0; j < kCodes; ++j) out[j] = Small<2, 1>(w << (28 - 4 * j));
#endif
  }
};
