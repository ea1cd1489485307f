// What the CPU's kernels share: vectors of float32 and the threads.

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>

constexpr int kLanes = 16;
using Floats = float __attribute__((vector_size(64), aligned(4), may_alias));
using Words = uint32_t __attribute__((vector_size(64), aligned(4), may_alias));
using Ints = int32_t __attribute__((vector_size(64), aligned(4), may_alias));

inline Floats Load(const float* p) { return *reinterpret_cast<const Floats*>(p); }

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

// One for the process, of as many threads as it may use.
Team& TheTeam();
