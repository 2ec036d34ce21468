#include "fibers.h"

#include <sys/mman.h>

#include "fault.h"

namespace metal_sim {

constexpr size_t guard_size = 64 << 10;  // below each stack; a page or more everywhere

void Fibers::provide(size_t count) {
  while (fibers_.size() < count) {
    void* memory = mmap(nullptr, guard_size + stack_size, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    if (memory == MAP_FAILED) throw Fault("no memory for the threads' stacks");
    mprotect(memory, guard_size, PROT_NONE);
    auto fiber = std::make_unique<Fiber>();
    fiber->stack = static_cast<char*>(memory) + guard_size;
    fibers_.push_back(std::move(fiber));
  }
}

// makecontext passes ints only, so `this` comes in two.
void Fibers::main(unsigned high, unsigned low) {
  auto* fibers = reinterpret_cast<Fibers*>(uintptr_t(high) << 32 | low);
  for (;;) {
    fibers->body_();
    fibers->pause();
  }
}

// ucontext makes a fiber; _setjmp and _longjmp then switch, ten times faster, as they leave the signal mask alone.
void Fibers::resume(size_t index) {
  current_ = fibers_[index].get();
  if (_setjmp(caller_)) return;
  if (current_->started) _longjmp(current_->here, 1);
  current_->started = true;
  ucontext_t& context = current_->context;
  getcontext(&context);
  context.uc_stack = {.ss_sp = current_->stack, .ss_flags = 0, .ss_size = stack_size};
  context.uc_link = nullptr;
  const auto self = reinterpret_cast<uintptr_t>(this);
  makecontext(&context, reinterpret_cast<void (*)()>(&Fibers::main), 2, unsigned(self >> 32), unsigned(self));
  setcontext(&context);
}

void Fibers::pause() {
  if (!_setjmp(current_->here)) _longjmp(caller_, 1);
}

void Fibers::abandon() {
  forget();
  _longjmp(caller_, 1);
}

void Fibers::forget() {
  for (auto& fiber : fibers_) fiber->started = false;
}

}  // namespace metal_sim
