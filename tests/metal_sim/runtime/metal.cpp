// The device, libraries, functions and pipelines.
#include "metal.h"

#include <cstdlib>
#include <cstring>
#include <utility>

#include "foundation.h"

extern "C" {
int __objc_class_name_MTLCompileOptions = 0;
int __objc_class_name_MTLFunctionConstantValues = 0;
}

namespace metal_sim {

std::function<std::string(const CompileRequest&)> compile_source;

namespace {

using S = Selector;
using Bool = signed char;

// ---- MTLCompileOptions ---------------------------------------------------------------------------------------------

struct CompileOptions : Object {
  CompileOptions();
  uint64_t language_version = 0;
  bool safe_math = false;  // Metal's default is fast math
  Object* macros = nullptr;
};
Object* new_options(Object*, S*) { return new CompileOptions; }
const ClassObject options_meta("MTLCompileOptions class", {method("new", &new_options), method("alloc", &new_options)});
const ClassObject options_class(
    "MTLCompileOptions", options_meta,
    {
        method(
            "setLanguageVersion:", +[](CompileOptions* self, S*, uint64_t v) { self->language_version = v; }),
        method(
            "setMathMode:", +[](CompileOptions* self, S*, int64_t mode) { self->safe_math = mode == 0; }),
        method(
            "setFastMathEnabled:", +[](CompileOptions* self, S*, Bool fast) { self->safe_math = !fast; }),
        method(
            "setMathFloatingPointFunctions:", +[](CompileOptions*, S*, int64_t) {}),
        method(
            "setPreprocessorMacros:",
            +[](CompileOptions* self, S*, Object* macros) { release(std::exchange(self->macros, retain(macros))); }),
    },
    +[](Object* self) { release(static_cast<CompileOptions*>(self)->macros); });
CompileOptions::CompileOptions() : Object(options_class) {}

// ---- MTLFunctionConstantValues -------------------------------------------------------------------------------------

size_t constant_size(uint64_t type) {
  switch (type) {  // MTLDataType
    case 45:
    case 49:
    case 53:
      return 1;  // char, uchar, bool
    case 16:
    case 37:
    case 41:
      return 2;  // half, short, ushort
    case 3:
    case 29:
    case 33:
      return 4;  // float, int, uint
    case 81:
    case 82:
      return 8;  // long, ulong
  }
  throw Fault("function constants of MTLDataType " + std::to_string(type) + " are not simulated");
}

struct ConstantValues : Object {
  ConstantValues();
  CompileRequest::Constants values;
  void set(std::variant<int, std::string> key, const void* value, uint64_t type) {
    values[key] = {int(type), std::string(static_cast<const char*>(value), constant_size(type))};
  }
};
Object* new_values(Object*, S*) { return new ConstantValues; }
const ClassObject values_meta("MTLFunctionConstantValues class",
                              {method("new", &new_values), method("alloc", &new_values)});
const ClassObject values_class(
    "MTLFunctionConstantValues", values_meta,
    {
        method(
            "setConstantValue:type:atIndex:", +[](ConstantValues* self, S*, const void* value, uint64_t type,
                                                  uint64_t index) { self->set(int(index), value, type); }),
        method(
            "setConstantValue:type:withName:", +[](ConstantValues* self, S*, const void* value, uint64_t type,
                                                   Object* name) { self->set(text_of(name), value, type); }),
        method(
            "reset", +[](ConstantValues* self, S*) { self->values.clear(); }),
    });
ConstantValues::ConstantValues() : Object(values_class) {}

// ---- MTLLibrary, MTLFunction, MTLComputePipelineState --------------------------------------------------------------

struct KernelFunction : Object {
  KernelFunction(const KernelLibrary* l, const MslKernel& k);
  const KernelLibrary* library;
  MslKernel kernel;
};
const ClassObject function_class("MTLFunction",
                                 {
                                     method(
                                         "name", +[](KernelFunction* self,
                                                     S*) { return autorelease(new_string(self->kernel.name)); }),
                                 });
KernelFunction::KernelFunction(const KernelLibrary* l, const MslKernel& k)
    : Object(function_class), library(l), kernel(k) {}

struct Library : Object {
  Library(CompileRequest r, const KernelLibrary* l);
  CompileRequest request;
  const KernelLibrary* compiled;
};

Object* new_function(const KernelLibrary* library, Object* name, Object** error) {
  auto found = library->kernels.find(text_of(name));
  if (found == library->kernels.end()) return fail(error, "no kernel named " + text_of(name) + " in the library");
  return new KernelFunction(library, found->second);
}

const ClassObject library_class(
    "MTLLibrary", {
                      method(
                          "newFunctionWithName:",
                          +[](Library* self, S*, Object* name) -> Object* {
                            if (!self->compiled->needs_constants.empty()) {
                              throw Fault("newFunctionWithName: of a library with function constants (" +
                                          self->compiled->needs_constants +
                                          "): use newFunctionWithName:constantValues:error:");
                            }
                            return new_function(self->compiled, name, nullptr);
                          }),
                      method(
                          "newFunctionWithName:constantValues:error:",
                          +[](Library* self, S*, Object* name, ConstantValues* values, Object** error) -> Object* {
                            if (!values) return fail(error, "no function constant values");
                            try {
                              CompileRequest request = self->request;
                              request.constants = values->values;
                              return new_function(load_kernel_library(compile_source(request)), name, error);
                            } catch (const std::exception& e) {
                              return fail(error, e.what());
                            }
                          }),
                  });
Library::Library(CompileRequest r, const KernelLibrary* l)
    : Object(library_class), request(std::move(r)), compiled(l) {}

const ClassObject pipeline_class("MTLComputePipelineState",
                                 {
                                     method(
                                         "maxTotalThreadsPerThreadgroup",
                                         +[](Pipeline* self, S*) { return uint64_t(max_threads(self->kernel)); }),
                                     method(
                                         "threadExecutionWidth", +[](Pipeline*, S*) { return uint64_t(32); }),
                                 });

// ---- MTLDevice -----------------------------------------------------------------------------------------------------

Object* new_library(Object*, S*, Object* source, CompileOptions* options, Object** error) {
  if (!options || !options->safe_math) {
    return fail(error,
                "compiled without the safe math mode: set mathMode = MTLMathModeSafe (macOS 15) or "
                "fastMathEnabled = NO; fast math may flush half subnormals and lose NaN");
  }
  const uint64_t version = options->language_version;
  if (version < (3 << 16) + 1) return fail(error, "ask for MTLLanguageVersion3_1, the first with bfloat");
  try {
    CompileRequest request;
    request.source = text_of(source);
    request.macros = entries_of(options->macros);
    request.language_version = int(version >> 16) * 100 + int(version & 0xffff) * 10;
    const KernelLibrary* compiled = load_kernel_library(compile_source(request));
    return new Library(std::move(request), compiled);
  } catch (const std::exception& e) {
    return fail(error, e.what());
  }
}

Object* new_pipeline(Object*, S*, KernelFunction* function, Object** error) {
  if (!function) return fail(error, "newComputePipelineStateWithFunction: was given nil");
  return new Pipeline(function->library, function->kernel);
}

const ClassObject device_class(
    "MTLDevice", {
                     method("newLibraryWithSource:options:error:", &new_library),
                     method("newComputePipelineStateWithFunction:error:", &new_pipeline),
                     method(
                         "name", +[](Object*, S*) { return autorelease(new_string("simulated Metal device")); }),
                     method(
                         "supportsFamily:", +[](Object*, S*, int64_t) -> Bool { return 1; }),
                     method(
                         "maxThreadgroupMemoryLength", +[](Object*, S*) { return uint64_t(max_threadgroup_memory); }),
                     method(
                         "maxBufferLength", +[](Object*, S*) { return uint64_t(16) << 30; }),
                     method(
                         "newCommandQueue", +[](Object*, S*) { return new_queue(); }),
                     method(
                         "newBufferWithLength:options:",
                         +[](Object*, S*, uint64_t length, uint64_t) -> Object* { return new Buffer(length); }),
                 });

// ---- MTLBuffer -----------------------------------------------------------------------------------------------------

constexpr size_t margin = 4096;
std::atomic<size_t> allocated{0};

const ClassObject buffer_class(
    "MTLBuffer",
    {
        method(
            "length", +[](Buffer* self, S*) { return uint64_t(self->size); }),
        method(
            "contents", +[](Buffer* self, S*) { return static_cast<void*>(self->data); }),
    },
    +[](Object* self) {
      auto* buffer = static_cast<Buffer*>(self);
      allocated -= buffer->size;
      free(buffer->data - margin);
    });

}  // namespace

Buffer::Buffer(size_t n) : Object(buffer_class), size(n) {
  char* block = static_cast<char*>(aligned_alloc(margin, (n + 3 * margin - 1) / margin * margin));
  if (!block) throw std::bad_alloc();
  data = block + margin;  // page-aligned, as Metal's are
  memset(data, 0xff, n);
  allocated += n;
}
size_t allocated_bytes() { return allocated; }

Pipeline::Pipeline(const KernelLibrary* l, const MslKernel& k) : Object(pipeline_class), library(l), kernel(k) {}

Object* device() {
  static Object* d = new Object(device_class);
  return d;
}

}  // namespace metal_sim
