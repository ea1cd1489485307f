// Zeros whose pages the system provides when they are first written, as an XLA FFI call: `zeros` of calls.py.

#include <cstdint>
#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

ffi::Error Call(ffi::Result<ffi::AnyBuffer> out) {
  char* const begin = static_cast<char*>(out->untyped_data());
  char* const end = begin + out->size_bytes();
#if defined(__linux__)
  const uintptr_t page = sysconf(_SC_PAGESIZE);
  char* const first = begin + (page - reinterpret_cast<uintptr_t>(begin) % page) % page;
  char* const last = end - reinterpret_cast<uintptr_t>(end) % page;
  // The memory is private and anonymous: pages that are given back read as zeros.
  if (first < last && madvise(first, last - first, MADV_DONTNEED) == 0) {
    std::memset(begin, 0, first - begin);
    std::memset(last, 0, end - last);
    return ffi::Error::Success();
  }
#endif
  std::memset(begin, 0, end - begin);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(DflashZeros, Call, ffi::Ffi::Bind().Ret<ffi::AnyBuffer>());
