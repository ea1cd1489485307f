// Stands for libcuda: writes down what is asked of it, and computes the kernels of test_call.py on the host.
#include <cuda.h>

#include <cstdint>
#include <sstream>
#include <string>

namespace {

constexpr int kLength = 8;

std::ostringstream& Written() {
  static auto* const written = new std::ostringstream();
  return *written;
}

std::string failing;

CUresult Result(const std::string& function) {
  return failing == function ? CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES : CUDA_SUCCESS;
}

uintptr_t context = 1;

}  // namespace

extern "C" {

// What was asked since the last call, a line each.
const char* StubWritten() {
  static std::string text;
  text = Written().str();
  Written().str("");
  return text.c_str();
}

// Makes a function of the driver fail, or none of them; and changes the context, as another device does.
void StubFail(const char* function) { failing = function; }
void StubContext(uintptr_t value) { context = value; }

CUresult cuCtxGetCurrent(CUcontext* current) {
  *current = reinterpret_cast<CUcontext>(context);
  return Result("cuCtxGetCurrent");
}

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  *module = reinterpret_cast<CUmodule>(const_cast<void*>(image));
  Written() << "load " << static_cast<const char*>(image) << "\n";
  return Result("cuModuleLoadData");
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  *function = reinterpret_cast<CUfunction>(new std::string(name));
  return Result("cuModuleGetFunction");
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  Written() << "set " << *reinterpret_cast<std::string*>(function) << " " << attribute << " " << value << "\n";
  return Result("cuFuncSetAttribute");
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters, void**) {
  const auto& name = *reinterpret_cast<std::string*>(function);
  Written() << name << " grid " << config->gridDimX << "," << config->gridDimY << "," << config->gridDimZ << " threads "
            << config->blockDimX << " shared " << config->sharedMemBytes;
  for (unsigned int i = 0; i < config->numAttrs; ++i) {
    const CUlaunchAttribute& attribute = config->attrs[i];
    if (attribute.id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) Written() << " cluster " << attribute.value.clusterDim.x;
    if (attribute.id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION) Written() << " dependent";
  }
  auto array = [&](int i) { return *static_cast<float**>(parameters[i]); };
  const int arrays = name == "_add" ? 3 : 1;
  for (int i = arrays; i < arrays + 2; ++i) Written() << (array(i) ? " own" : " none");
  Written() << "\n";
  for (int i = 0; i < kLength && name == "_add"; ++i) array(2)[i] = array(0)[i] + array(1)[i];
  for (int i = 0; i < kLength && name == "_double"; ++i) array(0)[i] *= 2;
  return Result("cuLaunchKernelEx");
}

CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "too many resources requested";
  return CUDA_SUCCESS;
}

}
