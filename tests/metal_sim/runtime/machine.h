// Runs a kernel's grid on the CPU, one fiber per thread, and watches every memory access it makes.
#pragma once
#include <array>
#include <map>
#include <vector>

#include "fault.h"
#include "kernel_library.h"

namespace metal_sim {

using Extent = std::array<unsigned, 3>;

constexpr size_t max_threadgroup_memory = 32 << 10;  // bytes, of every Apple GPU
constexpr unsigned max_threads_per_threadgroup = 1024;

struct Binding {  // what setBuffer or setBytes bound: the bytes from the bound offset to the buffer's end
  char* data = nullptr;
  size_t size = 0;
  bool constant = false;  // setBytes
};

struct Launch {
  const KernelLibrary* library = nullptr;
  MslKernel kernel{};
  std::map<int, Binding> buffers;
  std::map<int, size_t> threadgroup_memory;  // bytes per argument index
  Extent grid{};                             // threads in all, which need not fill the last threadgroups
  Extent threads{};                          // per threadgroup
};

// What a kernel's threadgroups may have.
inline unsigned max_threads(const MslKernel& kernel) {
  return kernel.max_threads ? kernel.max_threads : max_threads_per_threadgroup;
}

// Throws Fault. Launches of several threads run one after the other.
void run(const Launch& launch);

// Lane i of a SIMD-group holds the elements of 8x8 matrices that are lane i ^ matrix_lane_order's on Apple's GPUs so
// far.
extern unsigned matrix_lane_order;

// For the functions that kernels call. Ends the launch: run() throws what is said here.
[[noreturn]] void fault(const std::string& what, void* place);
[[noreturn]] void fault_at(const std::string& what, const std::string& position);
void access(void* address, size_t size, bool write, bool atomic, void* place);
// "12 bytes into buffer 0 (124 bytes)"
std::string describe_address(void* address);

}  // namespace metal_sim
