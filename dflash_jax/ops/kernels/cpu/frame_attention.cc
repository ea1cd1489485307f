// Attention of a vision tower's patches within their frames, as an XLA FFI call: `attend_frames` of calls.py.
//
// FlashAttention (arXiv 2205.14135). A part is one head of up to kPartQueries queries that see the same keys. Queries
// are in the lanes of vectors: neither the softmax nor a product adds across lanes, and a head may have any size. Each
// number of a key or value is read once for kVectors vectors of queries. Keys and values are copied tile by tile, since
// in the arrays each key of a head is in another page of memory; keys are rotated then.
//
// A query's result depends on its own keys only: parts have the queries of one frame, and tiles of keys begin at its
// first key.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "shared.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// Vectors of queries, and keys or features, whose sums fit the registers.
#ifdef __AVX512F__
constexpr int kVectors = 3, kBlock = 8;
#else
constexpr int kVectors = 1, kBlock = 6;
#endif
// Keys of a tile: a multiple of kBlock whose weights for kVectors vectors of queries fit the first cache.
constexpr int64_t kKeys = 96;
// Queries of a part: many enough for the copies of keys and values to cost little.
constexpr int64_t kPartQueries = 384;
constexpr float kMasked = -1e30f;

using BFloat16 = uint16_t;

inline float Wide(float x) { return x; }

inline float Wide(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}

inline void Round(float x, float& y) { y = x; }

inline void Round(float x, BFloat16& y) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  y = x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// Keys, values and scores of a tile, and the state of a part's queries.
struct Scratch {
  std::vector<float> k, v, weights, q, sums;
};

// The running softmax of up to kVectors vectors of queries.
struct Tile {
  const float* q;  // [size, lanes], scaled
  float* sums;     // [padded size, lanes]
  Floats max[kVectors], total[kVectors];

  // n ≤ kKeys keys [n, size] and values [n, padded]; weights [kKeys, lanes] is scratch.
  template <int P>
  void Fold(const float* k, const float* v, int64_t n, int64_t size, int64_t padded, float* weights) {
    constexpr int kWidth = P * kLanes;
    Floats largest[P], rescale[P], sum[P] = {};
    for (int p = 0; p < P; ++p) largest[p] = max[p];
    for (int64_t j = 0; j < n; j += kBlock) {
      // The last key is repeated, which changes no maximum.
      const float* key[kBlock];
      for (int i = 0; i < kBlock; ++i) key[i] = k + std::min(j + i, n - 1) * size;
      Floats scores[kBlock][P] = {};
      for (int64_t d = 0; d < size; ++d) {
        Floats query[P];
        for (int p = 0; p < P; ++p) query[p] = Load(q + d * kWidth + p * kLanes);
        for (int i = 0; i < kBlock; ++i) {
          for (int p = 0; p < P; ++p) scores[i][p] += query[p] * key[i][d];
        }
      }
      for (int i = 0; i < kBlock; ++i) {
        for (int p = 0; p < P; ++p) {
          largest[p] = Largest(largest[p], scores[i][p]);
          Store(weights + (j + i) * kWidth + p * kLanes, scores[i][p]);
        }
      }
    }
    for (int p = 0; p < P; ++p) {
      rescale[p] = Exp(max[p] - largest[p]);
      max[p] = largest[p];
    }
    for (int64_t j = 0; j < n; ++j) {
      for (int p = 0; p < P; ++p) {
        float* const here = weights + j * kWidth + p * kLanes;
        const Floats weight = Exp(Load(here) - largest[p]);
        sum[p] += weight;
        Store(here, weight);
      }
    }
    for (int p = 0; p < P; ++p) total[p] = total[p] * rescale[p] + sum[p];
    for (int64_t d = 0; d < padded; d += kBlock) {
      Floats mixed[kBlock][P] = {};
      for (int64_t j = 0; j < n; ++j) {
        Floats weight[P];
        for (int p = 0; p < P; ++p) weight[p] = Load(weights + j * kWidth + p * kLanes);
        for (int i = 0; i < kBlock; ++i) {
          for (int p = 0; p < P; ++p) mixed[i][p] += weight[p] * v[j * padded + d + i];
        }
      }
      for (int i = 0; i < kBlock; ++i) {
        for (int p = 0; p < P; ++p) {
          float* const here = sums + (d + i) * kWidth + p * kLanes;
          Store(here, Load(here) * rescale[p] + mixed[i][p]);
        }
      }
    }
  }
};

// `count` queries from `begin` on, which see the keys low … high - 1.
struct Part {
  int64_t begin, count, low, high;
};

std::vector<Part> Parts(const int32_t* low, const int32_t* high, int64_t rows) {
  std::vector<Part> parts;
  for (int64_t begin = 0, end; begin < rows; begin = end) {
    for (end = begin + 1; end < rows && low[end] == low[begin] && high[end] == high[begin];) ++end;
    const int64_t first = std::clamp<int64_t>(low[begin], 0, rows), last = std::clamp<int64_t>(high[begin], 0, rows);
    for (int64_t i = begin; i < end; i += kPartQueries) {
      parts.push_back({i, std::min(kPartQueries, end - i), first, last});
    }
  }
  return parts;
}

// The rotation (arXiv 2104.09864) of a row, times `scale`: into numbers `stride` apart.
template <class T>
void Rotate(const T* x, const float* cos, const float* sin, int64_t size, float scale, float* out, int64_t stride) {
  const int64_t half = size / 2;
  for (int64_t d = 0; d < half; ++d) {
    const float first = Wide(x[d]), second = Wide(x[d + half]);
    out[d * stride] = (first * cos[d] - second * sin[d]) * scale;
    out[(d + half) * stride] = (second * cos[d] + first * sin[d]) * scale;
  }
}

// One head of a part. q, k, v and out point at the head in row 0; rows are `stride` numbers apart, of out out_stride.
template <class T>
void Attend(const Part& part, const T* q, const T* k, const T* v, const float* cos, const float* sin, T* out,
            int64_t size, int64_t stride, int64_t out_stride) {
  if (part.low >= part.high) {
    for (int64_t m = part.begin; m < part.begin + part.count; ++m) {
      std::memset(out + m * out_stride, 0, size * sizeof(T));
    }
    return;
  }
  const int64_t half = size / 2;
  const float scale = 1.0f / __builtin_sqrtf(size);
  const int64_t padded = (size + kBlock - 1) / kBlock * kBlock, vectors = (part.count + kLanes - 1) / kLanes;
  const int64_t count = (vectors + kVectors - 1) / kVectors;
  thread_local Scratch scratch;
  scratch.k.resize(kKeys * size);
  scratch.v.assign(kKeys * padded, 0.0f);
  scratch.weights.resize(kKeys * kVectors * kLanes);
  scratch.q.resize(vectors * kLanes * size);
  scratch.sums.assign(vectors * kLanes * padded, 0.0f);
  float *const keys = scratch.k.data(), *const values = scratch.v.data();
  Tile tiles[(kPartQueries + kLanes * kVectors - 1) / (kLanes * kVectors)];
  const auto width = [&](int64_t t) { return std::min<int64_t>(kVectors, vectors - t * kVectors) * kLanes; };
  for (int64_t t = 0; t < count; ++t) {
    const int64_t first = t * kVectors * kLanes;
    float* const here = scratch.q.data() + first * size;
    tiles[t].q = here, tiles[t].sums = scratch.sums.data() + first * padded;
    for (int p = 0; p < kVectors; ++p) tiles[t].max[p] = Floats{} + kMasked, tiles[t].total[p] = Floats{};
    for (int64_t m = 0; m < width(t); ++m) {
      // Lanes past the last query repeat it.
      const int64_t row = part.begin + std::min(first + m, part.count - 1);
      Rotate(q + row * stride, cos + row * half, sin + row * half, size, scale, here + m, width(t));
    }
  }
  for (int64_t start = part.low; start < part.high; start += kKeys) {
    const int64_t n = std::min(kKeys, part.high - start);
    for (int64_t j = 0; j < n; ++j) {
      const int64_t row = start + j;
      Rotate(k + row * stride, cos + row * half, sin + row * half, size, 1.0f, keys + j * size, 1);
      for (int64_t d = 0; d < size; ++d) values[j * padded + d] = Wide(v[row * stride + d]);
    }
    for (int64_t t = 0; t < count; ++t) {
      const auto fold = [&]<int P>() {
        tiles[t].template Fold<P>(keys, values, n, size, padded, scratch.weights.data());
      };
      const int64_t p = width(t) / kLanes;
      if (p == kVectors) {
        fold.template operator()<kVectors>();
      } else if (p == 2) {
        fold.template operator()<std::min(2, kVectors)>();
      } else {
        fold.template operator()<1>();
      }
    }
  }
  for (int64_t m = 0; m < part.count; ++m) {
    const int64_t t = m / (kVectors * kLanes), lane = m % (kVectors * kLanes);
    const float total = tiles[t].total[lane / kLanes][lane % kLanes], whole = total > 0 ? total : 1;
    const float* const sum = tiles[t].sums + lane;
    T* const y = out + (part.begin + m) * out_stride;
    for (int64_t d = 0; d < size; ++d) Round(sum[d * width(t)] / whole, y[d]);
  }
}

using F32 = ffi::Buffer<ffi::F32>;
using I32 = ffi::Buffer<ffi::S32>;

// qkv [N, 3, heads, D] in float32 or bfloat16; cos, sin [N, D / 2]; low, high [N]; out [N, heads, D].
ffi::Error Call(ffi::AnyBuffer qkv, F32 cos, F32 sin, I32 low, I32 high, ffi::Result<ffi::AnyBuffer> out) {
  const int64_t rows = qkv.dimensions()[0], heads = qkv.dimensions()[2], size = qkv.dimensions()[3];
  if (size % 2 || cos.dimensions()[1] != size / 2) return ffi::Error::InvalidArgument("not an angle for two numbers");
  for (const int64_t n : {cos.dimensions()[0], sin.dimensions()[0], low.dimensions()[0], high.dimensions()[0]}) {
    if (n != rows) return ffi::Error::InvalidArgument("angles or bounds of another number of patches");
  }
  if (sin.dimensions() != cos.dimensions()) return ffi::Error::InvalidArgument("sines of another shape than cosines");
  const std::vector<Part> parts = Parts(low.typed_data(), high.typed_data(), rows);
  const auto run = [&]<class T>() {
    const T* const data = static_cast<const T*>(qkv.untyped_data());
    T* const result = static_cast<T*>(out->untyped_data());
    const int64_t line = heads * size;
    TheTeam().Run(heads * parts.size(), [&](int64_t i) {
      const int64_t at = i / parts.size() * size;
      Attend<T>(parts[i % parts.size()], data + at, data + line + at, data + 2 * line + at, cos.typed_data(),
                sin.typed_data(), result + at, size, 3 * line, line);
    });
    return ffi::Error::Success();
  };
  if (qkv.element_type() == ffi::F32) return run.template operator()<float>();
  if (qkv.element_type() == ffi::BF16) return run.template operator()<BFloat16>();
  return ffi::Error::InvalidArgument("neither float32 nor bfloat16");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(DflashAttendFrames, Call,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Ret<ffi::AnyBuffer>());
