// Stacks that take turns on one thread of the CPU.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace metal_sim {

// A fiber calls `body` again and again, with a pause after each call, so it outlives what it runs.
class Fibers {
 public:
  explicit Fibers(void (*body)()) : body_(body) {}
  void provide(size_t count);  // makes fibers 0 .. count - 1; throws Fault where there is no memory

  void resume(size_t index);    // goes on with the fiber until it pauses
  void pause();                 // called by a fiber: back to resume's caller
  [[noreturn]] void abandon();  // the same, and neither this fiber nor any other goes on from where it is
  void forget();                // what abandon does to the others; not called by a fiber

  bool on_stack(size_t index, uintptr_t address) const {
    return address - reinterpret_cast<uintptr_t>(fibers_[index]->stack) < stack_size;
  }

 private:
  struct Fiber {
    char* stack = nullptr;
    bool started = false;
    ucontext_t context;
    jmp_buf here;
  };
  static constexpr size_t stack_size = 64 << 10;

  void (*body_)();
  std::vector<std::unique_ptr<Fiber>> fibers_;
  Fiber* current_ = nullptr;
  jmp_buf caller_;

  static void main(unsigned high, unsigned low);
};

}  // namespace metal_sim
