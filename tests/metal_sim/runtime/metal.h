// The simulated Metal device: C++ objects behind the Objective-C classes of stubs/Metal/Metal.h.
#pragma once
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "machine.h"
#include "objc.h"

namespace metal_sim {

// What newLibraryWithSource: and newFunctionWithName:constantValues: ask the compiler for.
struct CompileRequest {
  std::string source;
  std::map<std::string, std::string> macros;
  int language_version = 0;  // 310 is 3.1
  struct Constant {
    int data_type;  // MTLDataType
    std::string bytes;
  };
  using Constants = std::map<std::variant<int, std::string>, Constant>;
  std::optional<Constants> constants;  // none: the library is not specialised
};

// Turns Metal source into the path of a loadable library, or throws with the compiler's messages. Set from Python.
extern std::function<std::string(const CompileRequest&)> compile_source;

// A buffer of exactly `size` bytes. On each side lie bytes that belong to no buffer, so that a small overrun cannot
// land in another one unseen. Its contents start undefined (0xff bytes: NaN in every float type).
struct Buffer : Object {
  explicit Buffer(size_t size);
  char* data;
  size_t size;
};
size_t allocated_bytes();  // of all live buffers

struct Pipeline : Object {  // keeps what it needs of the function, not the function: a leaked function shows
  Pipeline(const KernelLibrary* l, const MslKernel& k);
  const KernelLibrary* library;
  MslKernel kernel;
};

Object* device();
Object* new_queue();  // a command queue of a launcher's own

}  // namespace metal_sim
