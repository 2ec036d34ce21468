// The functions that clang's sanitizers make kernels call: every load and store comes here, and every undefined
// operation. The kernels are compiled with -fsanitize=kernel-address, whose user brings these functions himself.
#include <cstdint>
#include <cstring>

#include "machine.h"

using metal_sim::access;
using metal_sim::fault_at;

namespace {

// The records that the undefined-behaviour sanitizer hands over start with the source position.
struct SourceLocation {
  const char* file;
  unsigned line, column;
};

struct TypeDescriptor {
  unsigned short kind, info;
  char name[1];
};

struct TypeMismatch {
  SourceLocation at;
  const TypeDescriptor* type;
  unsigned char log_alignment, access_kind;
};

// clang calls the functions with a size in their name where it relies on that alignment, else those with an N. (For
// 16 bytes it does so from an alignment of 8, but no vectoriser runs and MSL has no such type.)
void aligned_access(void* p, size_t size, bool write, void* place) {
  if (reinterpret_cast<uintptr_t>(p) % size) {
    metal_sim::fault(
        "misaligned access: " + std::to_string(size) + " bytes at an address that is " + metal_sim::describe_address(p),
        place);
  }
  access(p, size, write, false, place);
}

std::string position(const SourceLocation& at) {
  return std::string("\n    at ") + at.file + ":" + std::to_string(at.line);
}

}  // namespace

extern "C" {

#define ACCESS(n)                                                                                      \
  void __asan_load##n##_noabort(void* p) { aligned_access(p, n, false, __builtin_return_address(0)); } \
  void __asan_store##n##_noabort(void* p) { aligned_access(p, n, true, __builtin_return_address(0)); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
#undef ACCESS

void __asan_loadN_noabort(void* p, size_t n) { access(p, n, false, false, __builtin_return_address(0)); }
void __asan_storeN_noabort(void* p, size_t n) { access(p, n, true, false, __builtin_return_address(0)); }

void* __asan_memcpy(void* to, const void* from, size_t n) {
  access(const_cast<void*>(from), n, false, false, __builtin_return_address(0));
  access(to, n, true, false, __builtin_return_address(0));
  return memcpy(to, from, n);
}
void* __asan_memmove(void* to, const void* from, size_t n) {
  access(const_cast<void*>(from), n, false, false, __builtin_return_address(0));
  access(to, n, true, false, __builtin_return_address(0));
  return memmove(to, from, n);
}
void* __asan_memset(void* to, int value, size_t n) {
  access(to, n, true, false, __builtin_return_address(0));
  return memset(to, value, n);
}

void __asan_handle_no_return() {}

void __ubsan_handle_type_mismatch_v1(const TypeMismatch* record, void* address) {
  fault_at(std::string("misaligned access: ") + record->type->name + " needs " +
               std::to_string(1u << record->log_alignment) + " bytes' alignment, its address is " +
               metal_sim::describe_address(address),
           position(record->at));
}

#define UNDEFINED(name, what) \
  void __ubsan_handle_##name(const SourceLocation* at) { fault_at(what, position(*at)); }
UNDEFINED(out_of_bounds, "index outside an array")
UNDEFINED(shift_out_of_bounds, "shift by more than the type's width, or of a negative number")
UNDEFINED(add_overflow, "signed addition overflows")
UNDEFINED(sub_overflow, "signed subtraction overflows")
UNDEFINED(mul_overflow, "signed multiplication overflows")
UNDEFINED(negate_overflow, "negation overflows")
UNDEFINED(divrem_overflow, "division by zero, or its result overflows")
UNDEFINED(float_cast_overflow, "conversion of a float that the integer type cannot hold")
#undef UNDEFINED

}  // extern "C"
