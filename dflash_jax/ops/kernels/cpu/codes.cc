// Numbers in few bits and their scales, as panels keep them (`Form` of panels.h), to float32.

#include "codes.h"

#include <cstdint>

#include "panels.h"

namespace {

template <class Codes>
void UnpackAll(const uint32_t* words, int64_t count, float* out, int64_t ahead) {
  for (int64_t i = 0; i < count; ++i) {
    if (i < ahead) __builtin_prefetch(words + (i + kAhead) * kLanes);
    Floats numbers[Codes::kCodes];
    Codes::Unpack(LoadWords(words + i * kLanes), numbers);
    for (int j = 0; j < Codes::kCodes; ++j) Store(out + (i * Codes::kCodes + j) * kLanes, numbers[j]);
  }
}

// A scale, as `Small`; NaN where its bits without the sign are kNan or more.
template <int kExponent, int kMantissa, uint32_t kNan>
inline Floats Scale(Words top) {
  const Ints is_nan = (Ints)((top & 0x7fffffffu) >> (31 - kExponent - kMantissa) >= kNan);
  return Choose(is_nan, Floats{} + __builtin_nanf(""), Small<kExponent, kMantissa>(top));
}

int64_t WordsOf(int64_t bytes) { return (bytes + 3) / 4; }

int64_t ScaleBytes(Scales scales) { return scales == Scales::kFloat32 ? 4 : scales == Scales::kFp8 ? 1 : 2; }

// Words of a lane before its scales, zero points and factors.
int64_t NumberWords(const Panels& panels) { return (panels.k_size + panels.codes() - 1) / panels.codes(); }
int64_t ZeroBegin(const Panels& panels) {
  return NumberWords(panels) + WordsOf(panels.form.runs * ScaleBytes(panels.form.scales));
}
int64_t FactorBegin(const Panels& panels) {
  return ZeroBegin(panels) + (panels.form.has_zero ? WordsOf(panels.form.runs) : 0);
}

}  // namespace

void Unpack(const Panels& panels, int64_t panel, int64_t begin, int64_t end, float* out) {
  const int64_t codes = panels.codes(), count = (end - begin + codes - 1) / codes;
  const uint32_t* const words = panels.of(panel) + begin / codes * kLanes;
  const int64_t ahead = panels.words - begin / codes - kAhead;  // words whose prefetched ones are of this panel
  switch (panels.form.numbers) {
    case Numbers::kInt8: UnpackAll<Int8>(words, count, out, ahead); break;
    case Numbers::kFp8: UnpackAll<Fp8>(words, count, out, ahead); break;
    case Numbers::kInt4: UnpackAll<Int4>(words, count, out, ahead); break;
    case Numbers::kE2m1: UnpackAll<E2m1>(words, count, out, ahead); break;
    case Numbers::kFloat: break;
  }
  if (!panels.form.has_zero) return;
  const uint32_t* const zeros = panels.of(panel) + ZeroBegin(panels) * kLanes;
  for (int64_t k = begin, run = panels.run(); k < end;) {
    const int64_t r = k / run, last = std::min((r + 1) * run, end);
    const Floats zero = Integer<8>(LoadWords(zeros + r / 4 * kLanes) << (24 - 8 * (r % 4)));
    for (; k < last; ++k) Store(out + (k - begin) * kLanes, Load(out + (k - begin) * kLanes) - zero);
  }
}

void UnpackScales(const Panels& panels, int64_t panel, int64_t first, int64_t last, float* out) {
  const uint32_t* const scales = panels.of(panel) + NumberWords(panels) * kLanes;
  const uint32_t* const factors = panels.of(panel) + FactorBegin(panels) * kLanes;
  const Form& form = panels.form;
  for (int64_t r = first; r < last; ++r, out += kLanes) {
    const auto word = [=](int64_t in_word) { return LoadWords(scales + r / in_word * kLanes); };
    const int half = 16 - 16 * (r % 2), byte = 24 - 8 * (r % 4);
    Floats scale{};
    switch (form.scales) {
      case Scales::kFloat32: scale = (Floats)word(1); break;
      case Scales::kBfloat16: scale = (Floats)(word(2) << half & 0xffff0000u); break;
      case Scales::kFloat16: scale = Scale<5, 10, 0x7c00>(word(2) << half); break;
      case Scales::kFp8: scale = Scale<4, 3, 0x7f>(word(4) << byte); break;
    }
    if (form.factors) scale *= (Floats)LoadWords(factors + r * form.factors / form.runs * kLanes);
    Store(out, scale);
  }
}

xla::ffi::ErrorOr<Panels> PanelsOf(const xla::ffi::AnyBuffer& buffer, int64_t k_size,
                                   xla::ffi::Span<const int64_t> forms, size_t i) {
  const auto wrong = [](const char* what) { return xla::ffi::Unexpected(xla::ffi::Error::InvalidArgument(what)); };
  constexpr size_t kFields = 5;
  if (forms.size() < (i + 1) * kFields) return wrong("fewer forms than weights");
  const int64_t* const fields = forms.begin() + i * kFields;
  Panels panels;
  panels.data = static_cast<const uint32_t*>(buffer.untyped_data());
  panels.count = buffer.dimensions()[0], panels.words = buffer.dimensions()[1], panels.k_size = k_size;
  panels.is_float = buffer.element_type() == xla::ffi::F32;
  panels.form = {static_cast<Numbers>(fields[0]), fields[1], static_cast<Scales>(fields[2]), fields[3], fields[4]};
  if (panels.has_scales() && (panels.form.runs < 1 || k_size % panels.form.runs)) return wrong("runs of other sizes");
  const int64_t inputs = k_size + k_size % 2;
  const int64_t words = panels.has_scales() ? FactorBegin(panels) + panels.form.factors
                                            : (panels.is_float ? inputs : inputs / 2);
  if (panels.words != words) return wrong("panels of another number of inputs");
  return panels;
}
