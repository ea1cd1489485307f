// A mixture of experts in float32, as an XLA FFI call: `mixture` of calls.py. Routing, then for each expert the SwiGLU
// of the tokens that chose it. Experts that no token chose are not read. A token's result does not depend on other
// tokens: its sum is in the order of the experts.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "panels.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int64_t kStride = kPartPanels * kLanes;
// Tokens of an expert that are multiplied at once.
constexpr int64_t kTokens = 4 * kRows;

// The tokens that chose each expert, in order, and their weights.
struct Routes {
  std::vector<int64_t> begin, token;  // expert e has the choices begin[e] … begin[e + 1] - 1
  std::vector<float> weight;
  std::vector<int64_t> used;  // experts with at least one choice
};

// logits [T, E]; the `top` most probable experts of each live token, of equal ones the first. Weights: those of the
// softmax over all experts, or over the chosen ones.
Routes Route(const float* logits, const bool* live, int64_t tokens, int64_t experts, int64_t top, bool normalise) {
  std::vector<int64_t> order(experts), chosen(tokens * top, -1);
  std::vector<float> weight(tokens * top);
  Routes routes;
  routes.begin.assign(experts + 1, 0);
  for (int64_t t = 0; t < tokens; ++t) {
    if (!live[t]) continue;
    const float* const row = logits + t * experts;
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + top, order.end(), [row](int64_t a, int64_t b) {
      return row[a] > row[b] || (row[a] == row[b] && a < b);
    });
    const float maximum = row[order[0]];
    float total = 0;
    for (int64_t e = 0; e < (normalise ? top : experts); ++e)
      total += std::exp(row[normalise ? order[e] : e] - maximum);
    for (int64_t i = 0; i < top; ++i) {
      chosen[t * top + i] = order[i];
      weight[t * top + i] = std::exp(row[order[i]] - maximum) / total;
      ++routes.begin[order[i] + 1];
    }
  }
  for (int64_t e = 0; e < experts; ++e) {
    if (routes.begin[e + 1] > 0) routes.used.push_back(e);
    routes.begin[e + 1] += routes.begin[e];
  }
  std::vector<int64_t> next(routes.begin);
  routes.token.resize(routes.begin[experts]), routes.weight.resize(routes.begin[experts]);
  for (int64_t i = 0; i < tokens * top; ++i) {
    if (chosen[i] < 0) continue;
    const int64_t place = next[chosen[i]]++;
    routes.token[place] = i / top, routes.weight[place] = weight[i];
  }
  return routes;
}

using F32 = ffi::Buffer<ffi::F32>;

// x [T, H], logits [T, E], live [T], gate_up in panels of [E, 2, F, H] and down of [E, H, F] → [T, H]. H and F are
// multiples of a panel.
ffi::Error Call(F32 x, F32 logits, ffi::Buffer<ffi::PRED> live, ffi::AnyBuffer gate_up, ffi::AnyBuffer down,
                ffi::ResultBuffer<ffi::F32> out, ffi::Span<const int64_t> forms, int64_t features, int64_t top,
                bool normalise) {
  const int64_t tokens = x.dimensions()[0], hidden = x.dimensions()[1], experts = logits.dimensions()[1];
  if (hidden % kLanes || features % kLanes || top > experts) {
    return ffi::Error::InvalidArgument("experts of a size that is not activations for");
  }
  const auto in = PanelsOf(gate_up, hidden, forms, 0), back = PanelsOf(down, features, forms, 1);
  if (!in) return in.error();
  if (!back) return back.error();
  if (in->count < experts * 2 * features / kLanes || back->count < experts * hidden / kLanes) {
    return ffi::Error::InvalidArgument("more experts than panels hold");
  }
  const Routes routes = Route(logits.typed_data(), live.typed_data(), tokens, experts, top, normalise);
  thread_local std::vector<float> activations;
  activations.resize(routes.token.size() * features);
  float* const inner = activations.data();  // [choices, F]

  const int64_t runs = (features / kLanes + kPartPanels - 1) / kPartPanels;
  const auto first = [&](int64_t i) {
    const int64_t e = routes.used[i / runs], panel = i % runs * kPartPanels;
    const int64_t last = std::min(panel + kPartPanels, features / kLanes), columns = (last - panel) * kLanes;
    thread_local std::vector<float> buffer;
    buffer.resize(kTokens * (hidden + 2 * kStride));
    float* const rows = buffer.data();
    float* const gates = rows + kTokens * hidden;
    float* const ups = gates + kTokens * kStride;
    for (int64_t c = routes.begin[e]; c < routes.begin[e + 1]; c += kTokens) {
      const int64_t n = std::min<int64_t>(kTokens, routes.begin[e + 1] - c), up = features / kLanes;
      for (int64_t j = 0; j < n; ++j) {
        std::memcpy(rows + j * hidden, x.typed_data() + routes.token[c + j] * hidden, hidden * sizeof(float));
      }
      const int64_t first_panel = e * 2 * up;
      Multiply(rows, n, *in, first_panel + panel, first_panel + last, gates, kStride, kStride);
      Multiply(rows, n, *in, first_panel + up + panel, first_panel + up + last, ups, kStride, kStride);
      for (int64_t j = 0; j < n; ++j) {
        Gate(gates + j * kStride, ups + j * kStride, columns, inner + (c + j) * features + panel * kLanes);
      }
    }
  };
  const auto second = [&](int64_t i) {
    const int64_t panel = i * kPartPanels, last = std::min(panel + kPartPanels, hidden / kLanes);
    const int64_t columns = (last - panel) * kLanes;
    float* const here = out->typed_data() + panel * kLanes;
    for (int64_t t = 0; t < tokens; ++t) std::memset(here + t * hidden, 0, columns * sizeof(float));
    float rows[kTokens * kStride];
    for (const int64_t e : routes.used) {
      const int64_t first_panel = e * hidden / kLanes;
      for (int64_t c = routes.begin[e]; c < routes.begin[e + 1]; c += kTokens) {
        const int64_t n = std::min<int64_t>(kTokens, routes.begin[e + 1] - c);
        Multiply(inner + c * features, n, *back, first_panel + panel, first_panel + last, rows, kStride, kStride);
        for (int64_t j = 0; j < n; ++j) {
          float* const to = here + routes.token[c + j] * hidden;
          const float weight = routes.weight[c + j];
          for (int64_t k = 0; k < columns; k += kLanes) {
            Store(to + k, Load(to + k) + Load(rows + j * kStride + k) * weight);
          }
        }
      }
    }
  };
  TheTeam().Run(routes.used.size() * runs, first);
  TheTeam().Run((hidden / kLanes + kPartPanels - 1) / kPartPanels, second);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(DflashExperts, Call,
                              ffi::Ffi::Bind()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<F32>()
                                  .Attr<ffi::Span<const int64_t>>("forms")
                                  .Attr<int64_t>("features")
                                  .Attr<int64_t>("top")
                                  .Attr<bool>("normalise"));
