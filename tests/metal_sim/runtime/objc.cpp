#include "objc.h"

#include <unwind.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "fault.h"
#include "foundation.h"

namespace metal_sim {
namespace {

std::unordered_map<std::string_view, const ClassObject*>& classes() {  // by name; filled by the constructors
  static auto* map = new std::unordered_map<std::string_view, const ClassObject*>;
  return *map;
}

std::mutex hidden_mutex;
std::set<std::string, std::less<>> hidden_selectors;

// What every object understands.
const std::unordered_map<std::string_view, Method>& root_methods() {
  static const auto* map = [] {
    auto* methods = new std::unordered_map<std::string_view, Method>;
    for (const Method& m : {
             method(
                 "retain", +[](Object* self, Selector*) { return retain(self); }),
             method(
                 "release", +[](Object* self, Selector*) { release(self); }),
             method(
                 "autorelease", +[](Object* self, Selector*) { return autorelease(self); }),
             method(
                 "init", +[](Object* self, Selector*) { return self; }),
             method(
                 "retainCount", +[](Object* self, Selector*) { return uint64_t(self->references); }),
             method(
                 "respondsToSelector:",
                 +[](Object* self, Selector*, Selector* asked) -> signed char {
                   return self->isa->find(asked->name) != nullptr;
                 }),
         }) {
      methods->emplace(m.name, m);
    }
    return methods;
  }();
  return *map;
}

struct AutoreleasePool : Object {
  AutoreleasePool();
  std::vector<Object*> objects;  // to be released
};
thread_local std::vector<AutoreleasePool*> pools;  // they nest

const ClassObject& autorelease_pool() {
  static const ClassObject meta("NSAutoreleasePool class",
                                {
                                    method(
                                        "alloc", +[](Object*, Selector*) -> Object* { return new AutoreleasePool; }),
                                    method(
                                        "new", +[](Object*, Selector*) -> Object* { return new AutoreleasePool; }),
                                });
  static const ClassObject c("NSAutoreleasePool", meta,
                             {
                                 method(
                                     "drain",
                                     +[](AutoreleasePool* self, Selector*) {
                                       const auto place = std::find(pools.begin(), pools.end(), self);
                                       if (place == pools.end())
                                         throw Fault("an autorelease pool is drained twice, or by another thread");
                                       drain_pools(place - pools.begin());
                                     }),
                             });
  return c;
}
AutoreleasePool::AutoreleasePool() : Object(autorelease_pool()) { pools.push_back(this); }
[[maybe_unused]] const ClassObject& registered = autorelease_pool();

}  // namespace

Object::Object(const ClassObject& c) : isa(&c) { ++c.live; }

Object* retain(Object* object) {
  if (object && !object->isa->immortal) ++object->references;
  return object;
}

void release(Object* object) {
  if (!object || object->isa->immortal) return;
  const int left = --object->references;
  if (left < 0) throw Fault("an object of class " + object->isa->name + " is released too often");
  if (left > 0) return;
  if (object->isa->dispose) object->isa->dispose(object);
  --object->isa->live;
}

Object* autorelease(Object* object) {
  if (object->isa->immortal) return object;
  if (pools.empty()) {
    throw Fault("an object of class " + object->isa->name + " is autoreleased outside every @autoreleasepool");
  }
  pools.back()->objects.push_back(object);
  return object;
}

size_t pool_depth() { return pools.size(); }

void drain_pools(size_t depth) {
  while (pools.size() > depth) {
    AutoreleasePool* pool = pools.back();
    pools.pop_back();
    for (Object* object : std::exchange(pool->objects, {})) release(object);
    release(pool);
  }
}

std::map<std::string, int> live_objects() {
  std::map<std::string, int> out;
  for (auto& [name, c] : classes()) {
    if (c->live) out[std::string(name)] = c->live;
  }
  return out;
}

void hide_selector(const std::string& name, bool hidden) {
  std::lock_guard<std::mutex> guard(hidden_mutex);
  if (hidden) {
    hidden_selectors.insert(name);
  } else {
    hidden_selectors.erase(name);
  }
}

ClassObject::ClassObject(const char* n, std::initializer_list<Method> list, Dispose dispose)
    : ClassObject(n, *this, list, dispose) {}
ClassObject::ClassObject(const char* n, const ClassObject& class_methods, std::initializer_list<Method> list, Dispose d)
    : Object(class_methods, Uncounted()), name(n), dispose(d) {
  for (const Method& m : list) methods.emplace(m.name, m);
  classes()[name] = this;
}

const Method* ClassObject::find(std::string_view selector) const {
  {
    std::lock_guard<std::mutex> guard(hidden_mutex);
    if (!hidden_selectors.empty() && hidden_selectors.count(selector)) return nullptr;
  }
  if (auto found = methods.find(selector); found != methods.end()) return &found->second;
  if (auto found = root_methods().find(selector); found != root_methods().end()) return &found->second;
  return nullptr;
}

}  // namespace metal_sim

using namespace metal_sim;

namespace {

// What the compiler emits for a source file, in GCC's layout.
struct StaticInstances {
  const char* class_name;
  Object* instances[];
};
struct SymbolTable {
  unsigned long selector_count;
  Selector* selectors;
  unsigned short class_count, category_count;
  void* definitions[];  // classes, categories, then the list of StaticInstances
};
struct Module {
  unsigned long version, size;
  const char* name;
  SymbolTable* symbols;
};

}  // namespace

extern "C" {

Function objc_msg_lookup(Object* receiver, Selector* selector) {
  if (!receiver) return reinterpret_cast<Function>(+[]() -> uintptr_t { return 0; });  // a message to nil answers 0
  if (!receiver->isa->immortal && receiver->references <= 0) {
    throw Fault("[" + receiver->isa->name + " " + selector->name + "] is sent to an object already freed");
  }
  const Method* found = receiver->isa->find(selector->name);
  if (!found) {
    throw Fault("[" + receiver->isa->name + " " + selector->name + "] is not simulated: see tests/metal_sim/README.md");
  }
  if (selector->types) {  // "v40@0:8@16Q24Q32": the first number is the size of all arguments
    const int bytes = atoi(selector->types + strcspn(selector->types, "0123456789"));
    if (bytes != found->argument_bytes) {
      throw Fault(std::string(selector->name) + ": the stub header's declaration (" + selector->types +
                  ") and the simulator's function differ");
    }
  }
  return found->function;
}

Object* objc_get_class(const char* name) {
  auto found = classes().find(name);
  if (found == classes().end()) throw Fault(std::string("class ") + name + " is not simulated");
  return const_cast<ClassObject*>(found->second);
}
Object* objc_lookup_class(const char* name) { return objc_get_class(name); }

// Called as the launcher is loaded. It defines no classes; its @"strings" get their class here.
void __objc_exec_class(Module* module) {
  SymbolTable* symbols = module->symbols;
  auto* lists = static_cast<StaticInstances**>(symbols->definitions[symbols->class_count + symbols->category_count]);
  if (!lists) return;
  for (; *lists; ++lists) {
    for (Object** object = (*lists)->instances; *object; ++object) (*object)->isa = &constant_string_class();
  }
}

// Exceptions of Objective-C++ code are C++ exceptions here.
_Unwind_Reason_Code __gxx_personality_v0(int, _Unwind_Action, _Unwind_Exception_Class, _Unwind_Exception*,
                                         _Unwind_Context*);
_Unwind_Reason_Code __gnu_objc_personality_v0(int version, _Unwind_Action actions, _Unwind_Exception_Class kind,
                                              _Unwind_Exception* exception, _Unwind_Context* context) {
  return __gxx_personality_v0(version, actions, kind, exception, context);
}

// Blocks (`^{ ... }`): these two only ever mark a block's kind, and captured objects are not retained, which is right
// for blocks that run before their function returns.
void* _NSConcreteStackBlock[32];
void* _NSConcreteGlobalBlock[32];
void _Block_object_assign(void* to, const void* object, int) { *static_cast<const void**>(to) = object; }
void _Block_object_dispose(const void*, int) {}

}  // extern "C"
