// Launches compiled Triton kernels on XLA's stream: all kernels of a call, one after another.
//
// The call's attributes hold everything, so that a program that XLA has kept on disk needs nothing else:
//   plan    int64 numbers: how many images and launches, the size of each image, then the launches (see `Launch`)
//   names   the name of each image's kernel, each followed by a newline
//   images  the images (cubins), one after another, in base64
//
// libcuda is loaded when it is first needed, by `DflashDriver`, so that the library is built and tested without it.
#include <cuda.h>
#include <dlfcn.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// More shared memory than this must be asked for.
constexpr int64_t kSharedWithoutAsking = 48 * 1024;

struct Driver {
  decltype(&cuCtxGetCurrent) ctx_get_current;
  decltype(&cuModuleLoadData) module_load_data;
  decltype(&cuModuleGetFunction) module_get_function;
  decltype(&cuFuncSetAttribute) func_set_attribute;
  decltype(&cuLaunchKernelEx) launch_kernel_ex;
  decltype(&cuGetErrorString) get_error_string;
  std::string error = "DflashDriver was not called";
};

Driver& TheDriver() {
  // Never destroyed: kernels may be launched while the process ends.
  static Driver* const driver = new Driver();
  return *driver;
}

ffi::Error Failed(CUresult code, std::string_view what, std::string_view kernel) {
  const char* why = nullptr;
  TheDriver().get_error_string(code, &why);
  std::string text = std::string(what) + " of kernel " + std::string(kernel) + " failed: ";
  return ffi::Error::Internal(text + (why ? why : "unknown error") + " (CUDA error " + std::to_string(code) + ")");
}

struct Image {
  std::string name;
  std::string cubin;
  int64_t shared = 0;

  // Loads the image into a context, once in a process: calls have images in common.
  ffi::Error Load(CUcontext context, CUfunction* function) const;
};

struct Launch {
  int64_t image, grid[3], threads, shared, cluster;
  // Whether it may begin before the launch before it has ended: its kernel waits for that one by itself.
  bool is_dependent;
  // Arguments and results of the call, counted together; the last one is memory for the kernel itself, -1 for none.
  std::vector<int64_t> buffers;
};

class Chain {
 public:
  static ffi::ErrorOr<std::unique_ptr<Chain>> Parse(ffi::Span<const int64_t> plan, std::string_view names,
                                                    std::string_view images);
  // Loads the images into the current context; not during the recording of a graph, which does not allow it.
  ffi::Error Load(std::vector<CUfunction>* functions) const;
  ffi::Error Run(CUstream stream, const std::vector<void*>& buffers) const;

 private:
  std::vector<Image> images_;
  std::vector<Launch> launches_;
};

int Sextet(char c) {
  if (c >= 'A' && c <= 'Z') return c - 'A';
  if (c >= 'a' && c <= 'z') return c - 'a' + 26;
  if (c >= '0' && c <= '9') return c - '0' + 52;
  return c == '+' ? 62 : c == '/' ? 63 : -1;
}

std::string FromBase64(std::string_view text) {
  std::string bytes;
  bytes.reserve(text.size() / 4 * 3);
  uint32_t bits = 0;
  int count = 0;
  for (char c : text) {
    int value = Sextet(c);
    if (value < 0) break;
    bits = bits << 6 | static_cast<uint32_t>(value);
    if ((count += 6) >= 8) bytes.push_back(static_cast<char>(bits >> (count -= 8) & 0xff));
  }
  return bytes;
}

ffi::ErrorOr<std::unique_ptr<Chain>> Chain::Parse(ffi::Span<const int64_t> plan, std::string_view names,
                                                  std::string_view images) {
  size_t at = 0;
  bool is_short = false;
  auto next = [&]() -> int64_t {
    if (at < plan.size()) return plan[at++];
    is_short = true;
    return 0;
  };
  auto chain = std::make_unique<Chain>();
  const std::string cubins = FromBase64(images);
  const int64_t image_count = next(), launch_count = next();
  size_t begin = 0;
  for (int64_t i = 0; i < image_count && !is_short; ++i) {
    const size_t size = static_cast<size_t>(next()), end_of_name = names.find('\n');
    if (end_of_name == names.npos || size > cubins.size() - begin) {
      return ffi::Unexpected(ffi::Error::InvalidArgument("images or names are shorter than the plan says"));
    }
    chain->images_.push_back({std::string(names.substr(0, end_of_name)), cubins.substr(begin, size)});
    names.remove_prefix(end_of_name + 1);
    begin += size;
  }
  for (int64_t i = 0; i < launch_count && !is_short; ++i) {
    Launch launch{};
    launch.image = next();
    for (int64_t& programs : launch.grid) programs = next();
    launch.threads = next(), launch.shared = next(), launch.cluster = next(), launch.is_dependent = next() != 0;
    for (int64_t left = next(); left > 0 && !is_short; --left) launch.buffers.push_back(next());
    if (launch.image < 0 || launch.image >= image_count) {
      return ffi::Unexpected(ffi::Error::InvalidArgument("the plan has no image " + std::to_string(launch.image)));
    }
    Image& image = chain->images_[static_cast<size_t>(launch.image)];
    if (launch.shared > image.shared) image.shared = launch.shared;
    chain->launches_.push_back(std::move(launch));
  }
  if (is_short) return ffi::Unexpected(ffi::Error::InvalidArgument("the plan is too short"));
  return chain;
}

ffi::Error Image::Load(CUcontext context, CUfunction* function) const {
  using Key = std::tuple<CUcontext, int64_t, std::string>;
  static auto* const mutex = new std::mutex();
  static auto* const loaded = new std::map<Key, CUfunction>();
  const Driver& driver = TheDriver();
  std::lock_guard<std::mutex> lock(*mutex);
  auto [found, is_new] = loaded->try_emplace(Key(context, shared, cubin));
  if (is_new) {
    CUmodule module;
    const char* what = "loading";
    CUresult code = driver.module_load_data(&module, std::get<2>(found->first).data());
    if (!code) {
      what = "finding the function";
      code = driver.module_get_function(&found->second, module, name.c_str());
    }
    const std::string memory = "shared memory (" + std::to_string(shared) + " bytes)";
    if (!code && shared > kSharedWithoutAsking) {
      what = memory.c_str();
      const auto attribute = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
      code = driver.func_set_attribute(found->second, attribute, static_cast<int>(shared));
    }
    if (code) {
      loaded->erase(found);
      return Failed(code, what, name);
    }
  }
  *function = found->second;
  return ffi::Error::Success();
}

ffi::Error Chain::Load(std::vector<CUfunction>* functions) const {
  const Driver& driver = TheDriver();
  if (!driver.error.empty()) return ffi::Error::Internal(driver.error);
  CUcontext context = nullptr;
  if (CUresult code = driver.ctx_get_current(&context)) {
    return Failed(code, "the context", images_.empty() ? "" : images_.front().name);
  }
  for (const Image& image : images_) {
    functions->emplace_back();
    if (ffi::Error error = image.Load(context, &functions->back()); error.failure()) return error;
  }
  return ffi::Error::Success();
}

ffi::Error Chain::Run(CUstream stream, const std::vector<void*>& buffers) const {
  std::vector<CUfunction> functions;
  if (ffi::Error error = Load(&functions); error.failure()) return error;
  for (const Launch& launch : launches_) {
    const auto image = static_cast<size_t>(launch.image);
    std::vector<void*> addresses, parameters;
    for (int64_t i : launch.buffers) {
      if (i < -1 || i >= static_cast<int64_t>(buffers.size())) {
        return ffi::Error::InvalidArgument("kernel " + images_[image].name + ": no buffer " + std::to_string(i));
      }
      addresses.push_back(i < 0 ? nullptr : buffers[static_cast<size_t>(i)]);
    }
    // A profiler's memory, which nothing uses.
    addresses.push_back(nullptr);
    for (void*& address : addresses) parameters.push_back(&address);

    CUlaunchAttribute attributes[2] = {};
    unsigned int count = 0;
    if (launch.cluster > 1) {
      attributes[count].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
      attributes[count].value.clusterDim.x = static_cast<unsigned int>(launch.cluster);
      attributes[count].value.clusterDim.y = attributes[count].value.clusterDim.z = 1;
      ++count;
    }
    if (launch.is_dependent) {
      attributes[count].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
      attributes[count++].value.programmaticStreamSerializationAllowed = 1;
    }
    CUlaunchConfig config = {};
    config.gridDimX = static_cast<unsigned int>(launch.grid[0] * launch.cluster);
    config.gridDimY = static_cast<unsigned int>(launch.grid[1]);
    config.gridDimZ = static_cast<unsigned int>(launch.grid[2]);
    config.blockDimX = static_cast<unsigned int>(launch.threads);
    config.blockDimY = config.blockDimZ = 1;
    config.sharedMemBytes = static_cast<unsigned int>(launch.shared);
    config.hStream = stream;
    config.attrs = attributes;
    config.numAttrs = count;
    if (CUresult code = TheDriver().launch_kernel_ex(&config, functions[image], parameters.data(), nullptr)) {
      return Failed(code, "the launch", images_[image].name);
    }
  }
  return ffi::Error::Success();
}

// The chain of these attributes, parsed once in a process.
ffi::ErrorOr<Chain*> Find(ffi::Span<const int64_t> plan, std::string_view names, std::string_view images,
                          std::string_view digest) {
  static auto* const mutex = new std::mutex();
  static auto* const chains = new std::map<std::string, std::unique_ptr<Chain>, std::less<>>();
  std::lock_guard<std::mutex> lock(*mutex);
  auto found = chains->find(digest);
  if (found == chains->end()) {
    auto chain = Chain::Parse(plan, names, images);
    if (chain.has_error()) return ffi::Unexpected(chain.error());
    found = chains->emplace(digest, std::move(chain.value())).first;
  }
  return found->second.get();
}

ffi::Error Load(ffi::Span<const int64_t> plan, std::string_view names, std::string_view images,
                std::string_view digest) {
  auto chain = Find(plan, names, images, digest);
  if (chain.has_error()) return chain.error();
  std::vector<CUfunction> functions;
  return (*chain)->Load(&functions);
}

ffi::Error Run(CUstream stream, ffi::RemainingArgs arguments, ffi::RemainingRets results,
               ffi::Span<const int64_t> plan, std::string_view names, std::string_view images,
               std::string_view digest) {
  std::vector<void*> buffers;
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto buffer = arguments.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return buffer.error();
    buffers.push_back(buffer->untyped_data());
  }
  for (size_t i = 0; i < results.size(); ++i) {
    auto buffer = results.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return buffer.error();
    buffers.push_back((*buffer)->untyped_data());
  }
  auto chain = Find(plan, names, images, digest);
  if (chain.has_error()) return chain.error();
  return (*chain)->Run(stream, buffers);
}

// For tests on a CPU, whose calls have no stream.
ffi::Error RunWithoutStream(ffi::RemainingArgs arguments, ffi::RemainingRets results, ffi::Span<const int64_t> plan,
                            std::string_view names, std::string_view images, std::string_view digest) {
  return Run(nullptr, arguments, results, plan, names, images, digest);
}

}  // namespace

// Loads the driver from a file such as libcuda.so.1; later calls report an error where that fails.
extern "C" void DflashDriver(const char* path) {
  Driver& driver = TheDriver();
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  driver.error = library ? "" : dlerror();
  auto find = [&](auto* function, const char* name) {
    *reinterpret_cast<void**>(function) = library ? dlsym(library, name) : nullptr;
    if (library && *function == nullptr) driver.error = std::string(path) + " has no " + name;
  };
  find(&driver.ctx_get_current, "cuCtxGetCurrent");
  find(&driver.module_load_data, "cuModuleLoadData");
  find(&driver.module_get_function, "cuModuleGetFunction");
  find(&driver.func_set_attribute, "cuFuncSetAttribute");
  find(&driver.launch_kernel_ex, "cuLaunchKernelEx");
  find(&driver.get_error_string, "cuGetErrorString");
}

#define DFLASH_ATTRIBUTES                 \
  Attr<ffi::Span<const int64_t>>("plan")  \
      .Attr<std::string_view>("names")    \
      .Attr<std::string_view>("images")   \
      .Attr<std::string_view>("digest")

XLA_FFI_DEFINE_HANDLER_SYMBOL(DflashLoad, Load, ffi::Ffi::BindInitialize().DFLASH_ATTRIBUTES);

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    DflashRun, Run,
    ffi::Ffi::Bind().Ctx<ffi::PlatformStream<CUstream>>().RemainingArgs().RemainingRets().DFLASH_ATTRIBUTES,
    {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(DflashRunWithoutStream, RunWithoutStream,
                              ffi::Ffi::Bind().RemainingArgs().RemainingRets().DFLASH_ATTRIBUTES);
