// The Objective-C runtime, as far as calling Metal needs one.
//
// clang compiles the launcher for GCC's Objective-C ABI (-fobjc-runtime=gcc). There, `[object doIt:x]` is a call of
// objc_msg_lookup(object, selector), which finds a function, and then of that function. So the classes may be C++:
// a class is a table from selector names to functions.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>

namespace metal_sim {

struct Selector {  // laid out by the compiler
  const char* name;
  const char* types;  // encodes the call's argument types, as the header declares them
};

using Function = void (*)();

struct Method {
  const char* name;
  Function function;
  int argument_bytes;  // checked against the selector's types: catches a stub header and a method that disagree
};

// A method is a function of the object, the selector and the message's arguments.
template <typename R, typename Self, typename... A>
Method method(const char* name, R (*function)(Self*, Selector*, A...)) {
  return {name, reinterpret_cast<Function>(function),
          int(2 * sizeof(void*) + (std::max(sizeof(A), sizeof(int)) + ... + 0))};
}

struct ClassObject;

// Every object that an `id` may point to starts with its class. Objects are counted as in manual reference counting,
// but never deleted: when the count falls to 0 an object only gives back what it holds, so that a message sent to it
// later is noticed.
struct Object {
  const ClassObject* isa;
  std::atomic<int> references{1};
  explicit Object(const ClassObject& c);

 protected:
  struct Uncounted {};
  Object(const ClassObject& c, Uncounted) : isa(&c) {}  // for classes, which stay
};

// A class, which is itself an object: `[MTLCompileOptions new]` sends `new` to it.
struct ClassObject : Object {
  using Dispose = void (*)(Object*);
  std::string name;
  std::unordered_map<std::string_view, Method> methods;
  Dispose dispose = nullptr;
  bool immortal = false;             // its objects are not counted
  mutable std::atomic<int> live{0};  // objects of the class
  ClassObject(const char* name, std::initializer_list<Method> methods, Dispose dispose = nullptr);
  ClassObject(const char* name, const ClassObject& class_methods, std::initializer_list<Method> methods,
              Dispose dispose = nullptr);
  const Method* find(std::string_view selector) const;
};

Object* retain(Object* object);
void release(Object* object);  // nil is fine
Object* autorelease(Object* object);
std::map<std::string, int> live_objects();  // by class: those not released yet; more than there should be is a leak

// An exception leaves @autoreleasepool without draining; on macOS the pool around it does that. The simulator calls
// this where such a pool would end. `depth`: how many pools of this thread stay.
size_t pool_depth();
void drain_pools(size_t depth);

// Test switch: selectors that this macOS is to lack, as an older one would.
void hide_selector(const std::string& name, bool hidden);

}  // namespace metal_sim
