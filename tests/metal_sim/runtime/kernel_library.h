// Shared objects compiled from Metal source.
#pragma once
#include <map>
#include <mutex>
#include <string>

#include "kernel_abi.h"

namespace metal_sim {

struct KernelLibrary {  // stays loaded for the life of the process
  std::string path;
  char *image_begin = nullptr, *image_end = nullptr;  // where it is mapped
  std::map<std::string, MslKernel> kernels;
  std::string needs_constants;  // names of function constants, of a library that is not specialised
};

// Held while a kernel library's code runs: a launch, or the initialisers of a library that is being loaded.
std::mutex& kernel_code_mutex();

// Loads each path once. Throws Fault. Safe to call from several threads.
KernelLibrary* load_kernel_library(const std::string& path);

}  // namespace metal_sim
