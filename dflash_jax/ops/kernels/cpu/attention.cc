// Attention of new tokens over a cache and over one another, the rotation before it, and the writing of a cache, as XLA
// FFI calls: `attend`, `rotate` and `write` of calls.py.
//
// Attention is in float32. A part is one KV head of one batch entry; 16 of its query rows (ordered by token, then head)
// are in the lanes of a vector: a tile. The valid part of the cache is read in place, once for each tile; FP8 is decoded
// into float32, once for several tiles.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "shared.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int kKeys = 64;       // keys of one update of the running softmax
constexpr int kMaxHeadSize = 256;  // largest head size
// Tiles that share decoded keys and values at most, and the fewest parts that a call is divided into for it.
constexpr int64_t kTogether = 8, kFewestParts = 16;
constexpr float kMasked = -1e30f;

// The running softmax of 16 query rows.
struct Softmax {
  int64_t size, rows;  // head size; rows in use
  Floats q[kMaxHeadSize];  // scaled, by feature
  Floats best, total;
  float sums[kLanes][kMaxHeadSize];

  // Of `live` rows of heads of `head_size`, which have seen no key.
  void Begin(int64_t head_size, int64_t live) {
    size = head_size, rows = live;
    best = Floats{} + kMasked, total = Floats{};
    std::memset(sums, 0, sizeof sums);
  }

  // n ≤ kKeys keys and values, `stride` floats apart; seen[j]: the lanes that see key j.
  void Fold(const float* k, const float* v, int64_t stride, int n, const Ints* seen) {
    Floats weights[kKeys];
    Floats new_max = best;
    for (int j = 0; j < n; j += 8) {
      Floats scores[8] = {};
      const float* key[8];
      for (int i = 0; i < 8; ++i) key[i] = k + std::min(j + i, n - 1) * stride;
      // Summed in runs, so that rounding errors do not add up over all features; likewise over keys below.
      for (int64_t run = 0; run < size; run += kLanes) {
        Floats part[8] = {};
        for (int64_t d = run; d < run + kLanes; ++d) {
          for (int i = 0; i < 8; ++i) part[i] += q[d] * key[i][d];
        }
        for (int i = 0; i < 8; ++i) scores[i] += part[i];
      }
      for (int i = 0; i < 8 && j + i < n; ++i) {
        weights[j + i] = Choose(seen[j + i], scores[i], Floats{} + kMasked);
        new_max = Largest(new_max, weights[j + i]);
      }
    }
    const Floats rescale = Exp(best - new_max);
    best = new_max;
    Floats sum = {};
    for (int64_t m = 0; m < rows; ++m) {
      for (int64_t d = 0; d < size; ++d) sums[m][d] *= rescale[m];
    }
    for (int j = 0; j < n; ++j) {
      // Masked explicitly: for a row that has seen no key yet, the difference is 0.
      weights[j] = Choose(seen[j], Exp(weights[j] - new_max), Floats{});
      sum += weights[j];
    }
    total = total * rescale + sum;
    for (int64_t m = 0; m < rows; m += 4) {
      int64_t d = 0;
      for (; d + 64 <= size; d += 64) Mix<4>(m, d, v + d, stride, n, weights);
      for (; d < size; d += 16) Mix<1>(m, d, v + d, stride, n, weights);
    }
  }

 private:
  // The sums of four rows and P * 16 features.
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
using Bytes = uint8_t __attribute__((vector_size(16)));

// float8_e4m3fn: a sign, four bits of exponent with a bias of 7, three of mantissa. NaN is decoded to 480: it is in no
// cache but where nothing was written.
inline void Decode(const uint8_t* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; i += kLanes) {
    Bytes bytes;
    std::memcpy(&bytes, from + i, sizeof bytes);
    const Ints bits = __builtin_convertvector(bytes, Ints), size = bits & 127;
    const Floats normal = (Floats)((size << 20) + (120 << 23));
    // Below the least normal number the mantissa counts in units of 2^-9.
    const Floats small = __builtin_convertvector(size, Floats) * 0.001953125f;
    const Floats y = Choose(size < 8, small, normal);
    Store(to + i, (Floats)((Ints)y | (bits & 128) << 24));
  }
}

// Keys or values: `Rows` gives n ≤ kKeys of them, one each `stride` numbers from `at` on, and their stride in floats.
struct Numbers {
  const void* data;
  bool is_fp8;

  const float* Rows(int64_t at, int64_t& stride, int n, int64_t size, float* room) const {
    if (!is_fp8) return static_cast<const float*>(data) + at;
    const uint8_t* const from = static_cast<const uint8_t*>(data) + at;
    for (int j = 0; j < n; ++j) Decode(from + j * stride, size, room + j * size);
    stride = size;
    return room;
  }
};

// A tile: its rows' tokens, the first position that each sees, and where each is in q and in the result.
struct Tile {
  Softmax softmax;
  Ints token, lowest;
  int64_t place[kLanes], live, first_seen;
};

// q [B, T, N, D]; k, v [B, T, K, D], in float32 or float8_e4m3fn, as the caches are; block_mask [1 or B, T, T], unless `causal`: a token sees itself and earlier ones;
// k_cache, v_cache [pages, K, P, D]; table [all rows, n], the pages of each row; rows, length, recent, sinks
// [B]; first [B, T].
ffi::Error Call(F32 q, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::Buffer<ffi::PRED> block_mask, ffi::AnyBuffer k_cache,
                ffi::AnyBuffer v_cache, I32 table, I32 rows, I32 length, I32 first, I32 recent, I32 sinks,
                ffi::ResultBuffer<ffi::F32> out, bool causal) {
  const int64_t tokens = q.dimensions()[1], heads = q.dimensions()[2], size = q.dimensions()[3];
  const int64_t kv_heads = k.dimensions()[2], group = heads / kv_heads;
  const int64_t pages = k_cache.dimensions()[0], page_size = k_cache.dimensions()[2];
  const int64_t all = table.dimensions()[0], most = table.dimensions()[1];
  if (size > kMaxHeadSize || size % kLanes) return ffi::Error::InvalidArgument("heads of an unsupported size");
  const bool is_fp8 = k_cache.element_type() == ffi::F8E4M3FN;
  for (const ffi::AnyBuffer& each : {k, v, k_cache, v_cache}) {
    if (each.element_type() != (is_fp8 ? ffi::F8E4M3FN : ffi::F32)) {
      return ffi::Error::InvalidArgument("keys and values of different or unsupported dtypes");
    }
  }
  const Numbers new_k{k.untyped_data(), is_fp8}, new_v{v.untyped_data(), is_fp8};
  const Numbers cached_k{k_cache.untyped_data(), is_fp8}, cached_v{v_cache.untyped_data(), is_fp8};
  const int64_t tiles = (tokens * group + kLanes - 1) / kLanes, all_tiles = q.dimensions()[0] * kv_heads * tiles;
  const int64_t together = is_fp8 ? std::clamp<int64_t>(std::min(tiles, all_tiles / kFewestParts), 1, kTogether) : 1;
  const int64_t parts = (tiles + together - 1) / together;
  const bool one_mask = block_mask.dimensions()[0] == 1;

  const auto part = [&](int64_t i) {
    const int64_t head = i / parts % kv_heads, b = i / parts / kv_heads, first_tile = i % parts * together;
    const int64_t count = std::min(together, tiles - first_tile);
    thread_local std::vector<Tile> room(kTogether);
    thread_local std::vector<float> key_room(kKeys * kMaxHeadSize), value_room(kKeys * kMaxHeadSize);
    const float scale = 1.0f / __builtin_sqrtf(size);
    for (int64_t number = 0; number < count; ++number) {
      Tile& tile = room[number];
      const int64_t begin = (first_tile + number) * kLanes;
      tile.live = std::min<int64_t>(kLanes, tokens * group - begin);
      tile.softmax.Begin(size, tile.live);
      for (int m = 0; m < kLanes; ++m) {
        // Lanes past the last row repeat it.
        const int64_t row = begin + std::min<int64_t>(m, tile.live - 1), token = row / group;
        tile.token[m] = token;
        tile.place[m] = ((b * tokens + token) * heads + head * group + row % group) * size;
        tile.lowest[m] = first.typed_data()[b * tokens + token];
      }
      for (int64_t d = 0; d < size; ++d) {
        for (int m = 0; m < kLanes; ++m) tile.softmax.q[d][m] = q.typed_data()[tile.place[m] + d] * scale;
      }
      tile.first_seen = tile.lowest[0];
      for (int m = 1; m < kLanes; ++m) tile.first_seen = std::min<int64_t>(tile.first_seen, tile.lowest[m]);
      tile.first_seen = std::max<int64_t>(tile.first_seen, 0);
    }

    Ints seen[kKeys];
    const int64_t used = std::min<int64_t>(length.typed_data()[b], most * page_size);
    const int64_t row = std::clamp<int64_t>(rows.typed_data()[b], 0, all - 1);
    int64_t first_seen = room[0].first_seen;
    for (int64_t number = 1; number < count; ++number) first_seen = std::min(first_seen, room[number].first_seen);
    const int64_t sink_end = sinks.typed_data()[b], recent_start = recent.typed_data()[b];
    // What no token sees is not read: it may never have been written.
    const int64_t ranges[2][2] = {{0, std::min(sink_end, used)}, {std::max(recent_start, sink_end), used}};
    for (const auto& [from, limit] : ranges) {
      for (int64_t start = std::max(from, first_seen), end; start < limit; start = end) {
        // Keys of one page: page sizes are multiples of kKeys, or smaller.
        end = std::min({(start / kKeys + 1) * kKeys, (start / page_size + 1) * page_size, limit});
        const int64_t page = std::clamp<int64_t>(table.typed_data()[row * most + start / page_size], 0, pages - 1);
        const int64_t at = ((page * kv_heads + head) * page_size + start % page_size) * size;
        int64_t stride = size, of_values = size;
        const float* const keys = cached_k.Rows(at, stride, end - start, size, key_room.data());
        const float* const values = cached_v.Rows(at, of_values, end - start, size, value_room.data());
        for (int64_t number = 0; number < count; ++number) {
          Tile& tile = room[number];
          const int64_t begin = std::max(start, tile.first_seen);
          if (begin >= end) continue;
          for (int64_t p = begin; p < end; ++p) seen[p - begin] = tile.lowest <= static_cast<int32_t>(p);
          const int64_t skipped = (begin - start) * stride;
          tile.softmax.Fold(keys + skipped, values + skipped, stride, end - begin, seen);
        }
      }
    }
    const int64_t first_new = (b * tokens * kv_heads + head) * size;
    const int64_t visible = causal ? room[count - 1].token[kLanes - 1] + 1 : tokens;
    for (int64_t start = 0; start < visible; start += kKeys) {
      int64_t stride = kv_heads * size, of_values = stride;
      const int64_t n = std::min<int64_t>(kKeys, visible - start), at = first_new + start * stride;
      const float* const keys = new_k.Rows(at, stride, n, size, key_room.data());
      const float* const values = new_v.Rows(at, of_values, n, size, value_room.data());
      for (int64_t number = 0; number < count; ++number) {
        Tile& tile = room[number];
        const int64_t own = causal ? std::min<int64_t>(n, tile.token[kLanes - 1] + 1 - start) : n;
        for (int64_t j = 0; j < own; ++j) {
          const int32_t other = start + j;
          seen[j] = tile.token >= other;
          for (int m = 0; !causal && m < kLanes; ++m) {
            const int64_t row = (one_mask ? 0 : b) * tokens + tile.token[m];
            seen[j][m] = block_mask.typed_data()[row * tokens + other] ? -1 : 0;
          }
        }
        if (own > 0) tile.softmax.Fold(keys, values, stride, own, seen);
      }
    }
    for (int64_t number = 0; number < count; ++number) {
      const Tile& tile = room[number];
      for (int64_t m = 0; m < tile.live; ++m) {
        float* y = out->typed_data() + tile.place[m];
        for (int64_t d = 0; d < size; ++d) y[d] = tile.softmax.sums[m][d] / tile.softmax.total[m];
      }
    }
  };
  TheTeam().Run(q.dimensions()[0] * kv_heads * parts, part);
  return ffi::Error::Success();
}

// The fewest numbers whose rotation is worth a second thread.
constexpr int64_t kAlone = 16384;

// Heads of one projection of the tokens: RMSNorm, unless `norm` is null, and rotation (arXiv 2104.09864) of the first
// 2 · half of their numbers.
struct Projection {
  const float *x, *norm;
  float* out;
  int64_t heads, size, stride;  // `stride`: from a head of x to the next

  void Rotate(int64_t token, const float* cos, const float* sin, int64_t half, float eps, float offset) const {
    for (int64_t n = token * heads; n < (token + 1) * heads; ++n) {
      const float* from = x + n * stride;
      float* const y = out + n * size;
      if (norm) Norm(from, norm, size, eps, offset, y), from = y;
      for (int64_t d = 0; d < half; ++d) {
        const float first = from[d], second = from[d + half];
        y[d] = first * cos[d] - second * sin[d];
        y[d + half] = second * cos[d] + first * sin[d];
      }
      if (!norm) std::memcpy(y + 2 * half, from + 2 * half, (size - 2 * half) * sizeof(float));
    }
  }
};

// cos, sin [B or 1, T, half]; of each projection x [B, T, heads, parts, D], of whose parts the first counts, and the
// weight of its norm [D], or an empty one; the results are [B, T, heads, D].
ffi::Error Rotate(F32 cos, F32 sin, ffi::RemainingArgs args, ffi::RemainingRets out, float eps, float offset) {
  const int64_t half = cos.dimensions()[2], angles = cos.dimensions()[0] * cos.dimensions()[1];
  if (sin.dimensions() != cos.dimensions()) return ffi::Error::InvalidArgument("sines of another shape than cosines");
  int64_t tokens = 0, numbers = 0;
  std::vector<Projection> all;
  for (size_t i = 0; i < out.size(); ++i) {
    const F32 x = args.get<F32>(2 * i).value(), norm = args.get<F32>(2 * i + 1).value();
    auto result = out.get<F32>(i).value();
    const int64_t heads = x.dimensions()[2], size = x.dimensions()[4];
    tokens = x.dimensions()[0] * x.dimensions()[1], numbers += result->element_count();
    if (cos.dimensions()[1] != x.dimensions()[1] || (cos.dimensions()[0] != 1 && angles != tokens)) {
      return ffi::Error::InvalidArgument("angles of another number of tokens");
    }
    if (2 * half > size) return ffi::Error::InvalidArgument("more angles than numbers of a head");
    if (norm.element_count() > 0 && static_cast<int64_t>(norm.element_count()) != size) {
      return ffi::Error::InvalidArgument("a norm of another size than a head");
    }
    const float* const weight = norm.element_count() > 0 ? norm.typed_data() : nullptr;
    all.push_back({x.typed_data(), weight, result->typed_data(), heads, size, x.dimensions()[3] * size});
  }
  const auto part = [&](int64_t token) {
    const int64_t at = token % angles * half;
    for (const Projection& each : all) {
      each.Rotate(token, cos.typed_data() + at, sin.typed_data() + at, half, eps, offset);
    }
  };
  if (numbers <= kAlone) {
    for (int64_t i = 0; i < tokens; ++i) part(i);
  } else {
    TheTeam().Run(tokens, part);
  }
  return ffi::Error::Success();
}

// k_cache, v_cache [pages, K, P, D] in any dtype; table [all rows, n]; k, v [B, T, K, D] in that dtype; rows [B];
// positions [B, T]. What falls on no page is dropped.
ffi::Error Write(ffi::AnyBuffer k_cache, ffi::AnyBuffer v_cache, I32 table, ffi::AnyBuffer k, ffi::AnyBuffer v,
                 I32 rows, I32 positions, ffi::Result<ffi::AnyBuffer> k_out, ffi::Result<ffi::AnyBuffer> v_out) {
  // XLA copies an argument that is not donated.
  if (k_cache.untyped_data() != k_out->untyped_data() || v_cache.untyped_data() != v_out->untyped_data()) {
    return ffi::Error::Internal("the cache was not written in place");
  }
  if (v.dimensions() != k.dimensions() || v_cache.dimensions() != k_cache.dimensions()) {
    return ffi::Error::InvalidArgument("values of another shape than keys");
  }
  const int64_t batch = k.dimensions()[0], tokens = k.dimensions()[1], kv_heads = k.dimensions()[2];
  if (kv_heads != k_cache.dimensions()[1] || k.dimensions()[3] != k_cache.dimensions()[3]) {
    return ffi::Error::InvalidArgument("heads of another number or size than the cache's");
  }
  if (rows.dimensions()[0] != batch || positions.dimensions()[0] != batch || positions.dimensions()[1] != tokens) {
    return ffi::Error::InvalidArgument("rows or positions of another number of tokens");
  }
  const int64_t pages = k_cache.dimensions()[0], page_size = k_cache.dimensions()[2];
  const int64_t all = table.dimensions()[0], most = table.dimensions()[1];
  const int64_t bytes = k.dimensions()[3] * ffi::ByteWidth(k.element_type());
  const auto copy = [&](const ffi::AnyBuffer& from, ffi::AnyBuffer& to, int64_t token, int64_t page, int64_t place) {
    const char* source = static_cast<const char*>(from.untyped_data()) + token * kv_heads * bytes;
    char* target = static_cast<char*>(to.untyped_data()) + (page * kv_heads * page_size + place) * bytes;
    for (int64_t head = 0; head < kv_heads; ++head, source += bytes, target += page_size * bytes) {
      std::memcpy(target, source, bytes);
    }
  };
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t row = rows.typed_data()[b];
    if (row < 0 || row >= all) continue;
    for (int64_t token = b * tokens; token < (b + 1) * tokens; ++token) {
      const int64_t position = positions.typed_data()[token];
      if (position < 0 || position >= most * page_size) continue;
      const int64_t page = table.typed_data()[row * most + position / page_size];
      if (page < 0 || page >= pages) continue;
      copy(k, *k_out, token, page, position % page_size);
      copy(v, *v_out, token, page, position % page_size);
    }
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(DflashAttend, Call,
                              ffi::Ffi::Bind()
                                  .Arg<F32>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Ret<F32>()
                                  .Attr<bool>("causal"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(DflashRotate, Rotate,
                              ffi::Ffi::Bind()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<float>("eps")
                                  .Attr<float>("offset"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(DflashWrite, Write,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<I32>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());
