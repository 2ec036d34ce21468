// Errors of a kernel, of its launch, or of the launcher's use of Metal.
#pragma once
#include <stdexcept>
#include <string>

namespace metal_sim {

// Reaches Python as RuntimeError. On a GPU most of what throws it would go unnoticed.
struct Fault : std::runtime_error {
  explicit Fault(const std::string& what) : std::runtime_error("metal_sim: " + what) {}
};

// "\n    at file:line" of a code address in a kernel library, then of the callers it was inlined into.
std::string source_position(void* address);

}  // namespace metal_sim
