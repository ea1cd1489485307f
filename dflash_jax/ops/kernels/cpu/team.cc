#include <chrono>
#include <system_error>
#include <thread>

#include "shared.h"

namespace {

constexpr auto kAwake = std::chrono::microseconds(200);

int64_t threads = 1;

// Yields now and then: there may be more threads than cores.
void Pause(int64_t spins) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
  if (spins % 64 == 0) std::this_thread::yield();
}

}  // namespace

// Sets the number of threads; called before the first kernel.
extern "C" void DflashThreads(int64_t n) { threads = n; }

Team& TheTeam() {
  // Never destroyed: the threads outlive main.
  static Team* const team = new Team(threads - 1);
  return *team;
}

Team::Team(int64_t helpers) {
  try {
    for (int64_t i = 0; i < helpers; ++i) std::thread([this] { Help(); }).detach();
  } catch (const std::system_error&) {
    // The process can have no more threads: the existing ones are enough.
  }
}

void Team::Run(int64_t parts, const std::function<void(int64_t)>& part) {
  std::unique_lock<std::mutex> lock(busy_, std::defer_lock);
  if (parts == 1 || !lock.try_lock()) {
    for (int64_t i = 0; i < parts; ++i) part(i);
    return;
  }
  part_ = &part, parts_ = parts, next_ = 0;
  open_ = true;
  calls_.fetch_add(1);
  calls_.notify_all();
  Take();
  open_ = false;
  for (int64_t spins = 1; inside_.load() > 0; ++spins) Pause(spins);
}

void Team::Take() {
  for (int64_t i; (i = next_.fetch_add(1)) < parts_;) (*part_)(i);
}

void Team::Help() {
  for (uint32_t seen = 0;; seen = calls_.load()) {
    const auto until = std::chrono::steady_clock::now() + kAwake;
    for (int64_t spins = 1; calls_.load() == seen; ++spins) {
      Pause(spins);
      if (spins % 64 == 0 && std::chrono::steady_clock::now() > until) calls_.wait(seen);
    }
    // The fields that Run has set stay until every thread has left.
    inside_.fetch_add(1);
    if (open_.load()) Take();
    inside_.fetch_sub(1);
  }
}
