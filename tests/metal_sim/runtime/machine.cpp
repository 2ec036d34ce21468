#include "machine.h"

#include <cstring>
#include <memory>

#include "fibers.h"
#include "memory.h"

namespace metal_sim {
namespace {

// Metal's GPUs flush subnormal floats (but not halves): so do these fibers.
class FlushSubnormals {
 public:
#if defined(__x86_64__)
  FlushSubnormals() : saved_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(saved_ | 0x8040); }
  ~FlushSubnormals() { __builtin_ia32_ldmxcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FlushSubnormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(saved_ | (1ul << 24)));
  }
  ~FlushSubnormals() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }

 private:
  unsigned long saved_;
#endif
};

struct Lane {
  enum State { ready, at_simdgroup, at_threadgroup, done } state;
  const char* operation;  // what it waits in, and where
  int line;
  void* place;
  unsigned gathers;               // SIMD-group operations so far
  unsigned threadgroup_epoch[2];  // barriers passed that order device memory, threadgroup memory
  unsigned simdgroup_epoch[2];
  MslLane arguments;
};

struct Exchange {  // values passed between the lanes of a SIMD-group; two sets, used in turn, so that a lane that
  MslSlot set[2][simd_width];  // runs ahead to the next operation does not overwrite what others still read
};

struct ThreadgroupVariable {
  std::string name;
  size_t size;
  std::unique_ptr<char[]> memory;
  char* data;
};

constexpr size_t threadgroup_margin = 256;  // bytes on both sides of a variable that belong to none

ThreadgroupVariable make_variable(const std::string& name, size_t size) {
  auto memory = std::make_unique<char[]>(size + 2 * threadgroup_margin);
  char* data = reinterpret_cast<char*>((uintptr_t(memory.get()) + threadgroup_margin) & ~uintptr_t(127));
  return {name, size, std::move(memory), data};
}

void run_lane();

// The launch in progress: one at a time, under kernel_code_mutex().
struct Machine {
  const Launch* launch;
  std::vector<Lane> lanes;
  Fibers fibers{&run_lane};
  std::vector<Exchange> exchange;  // one per SIMD-group
  Memory memory;
  std::map<int, ThreadgroupVariable> arguments;          // threadgroup memory by argument index
  std::map<const void*, ThreadgroupVariable> variables;  // declared by the kernel
  size_t threadgroup_bytes;
  Lane* current = nullptr;
  uint32_t group;  // linear index of the threadgroup
  std::string fault;

  size_t index(const Lane* lane) const { return lane - lanes.data(); }
} machine;

void run_lane() {
  Lane* lane = machine.current;
  machine.launch->kernel.run(&lane->arguments);
  lane->state = Lane::done;
}

void wait(Lane::State state, const char* operation, int line, void* place) {
  Lane* lane = machine.current;
  lane->state = state;
  lane->operation = operation;
  lane->line = line;
  lane->place = place;
  machine.fibers.pause();
}

// ---- Scheduling ----------------------------------------------------------------------------------------------------

std::string kernel_text() { return std::string("kernel ") + machine.launch->kernel.name; }

[[noreturn]] void divergence(const char* scope, const Lane& a, const Lane& b) {
  auto place = [](const Lane& l) {
    const std::string thread = "thread " + std::to_string(machine.index(&l));
    if (l.state == Lane::done) return thread + " has returned";
    return thread + " waits in " + l.operation + source_position(l.place);
  };
  throw Fault(kernel_text() + ": not every thread of the " + scope + " reaches the same operation: " + place(a) +
              ";\n  " + place(b));
}

// Lets lanes that have all arrived at the same place go on. Returns whether they did.
bool release(size_t begin, size_t end, Lane::State state, const char* scope) {
  auto& lanes = machine.lanes;
  for (size_t i = begin; i < end; ++i) {
    const bool together = lanes[i].state == state && lanes[i].line == lanes[begin].line &&
                          !strcmp(lanes[i].operation, lanes[begin].operation);
    if (together) continue;
    // A SIMD-group may be at a threadgroup barrier, or done, as a whole; a mixture cannot go on.
    for (size_t k = begin; k < end; ++k) {
      if (lanes[k].state == state) divergence(scope, lanes[k], lanes[k == i ? begin : i]);
    }
    return false;
  }
  for (size_t i = begin; i < end; ++i) lanes[i].state = Lane::ready;
  return true;
}

void run_threadgroup() {
  auto& lanes = machine.lanes;
  for (Lane& lane : lanes) {
    lane.state = Lane::ready;
    lane.operation = "";
    lane.line = 0;
    lane.gathers = 0;
    memset(lane.threadgroup_epoch, 0, sizeof lane.threadgroup_epoch);
    memset(lane.simdgroup_epoch, 0, sizeof lane.simdgroup_epoch);
  }
  for (;;) {
    bool all_done = true;
    for (Lane& lane : lanes) {
      if (lane.state == Lane::ready) {
        machine.current = &lane;
        machine.fibers.resume(machine.index(&lane));
        machine.current = nullptr;
      }
      if (!machine.fault.empty()) throw Fault(machine.fault);
      all_done &= lane.state == Lane::done;
    }
    if (all_done) return;
    bool released = false;
    for (size_t g = 0; g < lanes.size(); g += simd_width) {
      released |= release(g, std::min(g + simd_width, lanes.size()), Lane::at_simdgroup, "SIMD-group");
    }
    if (!released) release(0, lanes.size(), Lane::at_threadgroup, "threadgroup");
  }
}

// ---- One launch ----------------------------------------------------------------------------------------------------

void use_threadgroup_memory(size_t bytes) {
  machine.threadgroup_bytes += bytes;
  if (machine.threadgroup_bytes <= max_threadgroup_memory) return;
  const std::string what = std::to_string(machine.threadgroup_bytes) + " bytes of threadgroup memory, more than the " +
                           std::to_string(max_threadgroup_memory) + " there are";
  if (machine.current) fault(what, nullptr);
  throw Fault(kernel_text() + ": " + what);
}

Region region_of(const ThreadgroupVariable& v) {
  return {Region::threadgroup, v.name, uintptr_t(v.data), uintptr_t(v.data) + v.size, true};
}

// Which buffer arguments the kernel declares without const.
bool writes_buffer(const MslKernel& kernel, int index) {
  for (int i = 0; i < kernel.parameter_count; ++i) {
    const MslParameter& p = kernel.parameters[i];
    if (p.kind == MslParameter::buffer_argument && p.index == index) return p.writable;
  }
  return false;
}

void set_up_memory(const Launch& launch) {
  Machine& m = machine;
  m.memory.clear();
  m.arguments.clear();
  m.variables.clear();
  m.threadgroup_bytes = 0;
  for (auto& [index, b] : launch.buffers) {
    if (!b.data) continue;
    const bool writable = !b.constant && writes_buffer(launch.kernel, index);
    m.memory.add(
        {Region::device, "buffer " + std::to_string(index), uintptr_t(b.data), uintptr_t(b.data) + b.size, writable});
  }
  for (auto& [index, size] : launch.threadgroup_memory) {
    use_threadgroup_memory(size);
    auto [entry, _] = m.arguments.emplace(index, make_variable("threadgroup memory " + std::to_string(index), size));
    m.memory.add(region_of(entry->second));
  }
  auto internal = [&](const void* begin, const void* end) {
    m.memory.add({Region::internal, "", uintptr_t(begin), uintptr_t(end), true});
  };
  internal(m.lanes.data(), m.lanes.data() + m.lanes.size());
  internal(m.exchange.data(), m.exchange.data() + m.exchange.size());
  internal(launch.library->image_begin, launch.library->image_end);
}

// Threadgroup memory starts undefined: NaNs show a read before the first write.
void forget_threadgroup_memory() {
  for (auto& [_, v] : machine.arguments) memset(v.data, 0xff, v.size);
  for (auto& [_, v] : machine.variables) memset(v.data, 0xff, v.size);
  machine.memory.next_threadgroup();
}

MslLane bound_arguments(const Launch& launch) {
  MslLane a{};
  a.parameters = launch.kernel.parameters;
  for (int i = 0; i < msl_max_arguments; ++i) {
    a.buffers[i] = Memory::unbound(false, i);
    a.threadgroup_memory[i] = Memory::unbound(true, i);
  }
  for (auto& [index, b] : launch.buffers) {
    if (b.data) a.buffers[index] = b.data;
  }
  for (auto& [index, v] : machine.arguments) a.threadgroup_memory[index] = v.data;
  return a;
}

void number_lanes(const Launch& launch, const MslLane& arguments, const Extent& groups, const Extent& group) {
  Extent size;  // of this threadgroup: those at the grid's edge may be smaller
  for (int d = 0; d < 3; ++d) size[d] = std::min(launch.threads[d], launch.grid[d] - group[d] * launch.threads[d]);
  const unsigned count = size[0] * size[1] * size[2];
  auto simdgroups = [](const Extent& e) { return (e[0] * e[1] * e[2] + simd_width - 1) / simd_width; };
  machine.lanes.resize(count);
  for (unsigned t = 0; t < count; ++t) {
    MslLane& a = machine.lanes[t].arguments;
    a = arguments;
    const Extent thread = {t % size[0], t / size[0] % size[1], t / (size[0] * size[1])};
    a.ids[thread_index_in_simdgroup][0] = t % simd_width;
    a.ids[simdgroup_index_in_threadgroup][0] = t / simd_width;
    a.ids[thread_index_in_threadgroup][0] = t;
    a.ids[simdgroups_per_threadgroup][0] = simdgroups(size);
    a.ids[dispatch_simdgroups_per_threadgroup][0] = simdgroups(launch.threads);
    a.ids[threads_per_simdgroup][0] = simd_width;
    a.ids[thread_execution_width][0] = simd_width;
    for (int d = 0; d < 3; ++d) {
      a.ids[threadgroup_position_in_grid][d] = group[d];
      a.ids[thread_position_in_threadgroup][d] = thread[d];
      a.ids[thread_position_in_grid][d] = group[d] * launch.threads[d] + thread[d];
      a.ids[threads_per_threadgroup][d] = size[d];
      a.ids[dispatch_threads_per_threadgroup][d] = launch.threads[d];
      a.ids[threadgroups_per_grid][d] = groups[d];
      a.ids[threads_per_grid][d] = launch.grid[d];
    }
  }
}

}  // namespace

void fault_at(const std::string& what, const std::string& position) {
  const unsigned* g = machine.current->arguments.ids[threadgroup_position_in_grid];
  machine.fault = kernel_text() + ", thread " + std::to_string(machine.index(machine.current)) + " of threadgroup (" +
                  std::to_string(g[0]) + ", " + std::to_string(g[1]) + ", " + std::to_string(g[2]) + "): " + what +
                  position;
  machine.fibers.abandon();
}

void fault(const std::string& what, void* place) { fault_at(what, source_position(place)); }

std::string describe_address(void* address) { return machine.memory.describe(uintptr_t(address)); }

void access(void* pointer, size_t size, bool write, bool atomic, void* place) {
  const Lane* lane = machine.current;
  if (!lane) return;  // initialisers run while the library is loaded
  const uintptr_t address = uintptr_t(pointer);
  const size_t index = machine.index(lane);
  if (machine.fibers.on_stack(index, address)) return;
  auto owner = [&](int memory) {
    return Owner{machine.group, uint16_t(index), uint16_t(lane->simdgroup_epoch[memory]),
                 lane->threadgroup_epoch[memory]};
  };
  const std::string wrong = machine.memory.check(address, size, write, atomic, owner(0), owner(1));
  if (!wrong.empty()) fault(wrong, place);
}

void run(const Launch& launch) {
  const uint64_t threads = uint64_t(launch.threads[0]) * launch.threads[1] * launch.threads[2];
  if (threads > max_threads(launch.kernel)) {
    throw Fault(std::string("kernel ") + launch.kernel.name + ": threadgroups of " + std::to_string(threads) +
                " threads, more than the " + std::to_string(max_threads(launch.kernel)) + " there may be");
  }
  std::lock_guard<std::mutex> guard(kernel_code_mutex());
  Machine& m = machine;
  m.launch = &launch;
  m.current = nullptr;
  m.fault.clear();

  const unsigned count = unsigned(threads);
  Extent groups;
  for (int d = 0; d < 3; ++d) groups[d] = (uint64_t(launch.grid[d]) + launch.threads[d] - 1) / launch.threads[d];
  m.fibers.provide(count);
  m.lanes.resize(count);
  m.exchange.assign((count + simd_width - 1) / simd_width, {});
  set_up_memory(launch);
  const MslLane arguments = bound_arguments(launch);
  struct Abandon {  // after a fault the fibers are somewhere in the kernel: none may be resumed
    bool finished = false;
    ~Abandon() {
      if (finished) return;
      machine.fibers.forget();
    }
  } abandon;

  FlushSubnormals flush;
  m.group = 0;
  for (unsigned z = 0; z < groups[2]; ++z) {
    for (unsigned y = 0; y < groups[1]; ++y) {
      for (unsigned x = 0; x < groups[0]; ++x, ++m.group) {
        number_lanes(launch, arguments, groups, {x, y, z});
        forget_threadgroup_memory();
        run_threadgroup();
      }
    }
  }
  abandon.finished = true;
}

}  // namespace metal_sim

unsigned metal_sim::matrix_lane_order = 0;

// ---- What kernels call ---------------------------------------------------------------------------------------------

using namespace metal_sim;

extern "C" {

unsigned msl_lane() { return machine.current->arguments.ids[thread_index_in_simdgroup][0]; }

unsigned msl_matrix_lane(unsigned lane) { return lane ^ matrix_lane_order; }

unsigned msl_active_lanes() {
  const size_t first = machine.index(machine.current) / simd_width * simd_width;
  return std::min<size_t>(simd_width, machine.lanes.size() - first);
}

const MslSlot* msl_gather(MslSlot mine, const char* operation, int line, void* place) {
  Lane* lane = machine.current;
  const size_t index = machine.index(lane);
  MslSlot* set = machine.exchange[index / simd_width].set[lane->gathers++ % 2];
  // Lanes that a smaller SIMD-group lacks have undefined values.
  if (index % simd_width == 0) {
    for (unsigned i = msl_active_lanes(); i < simd_width; ++i) set[i] = {~0ull, ~0ull};
  }
  set[index % simd_width] = mine;
  wait(Lane::at_simdgroup, operation, line, place);
  return set;
}

void msl_threadgroup_barrier(int flags, int line, void* place) {
  for (int memory = 0; memory < 2; ++memory) {
    if (flags & (memory ? msl_threadgroup_flag : msl_device_flag)) ++machine.current->threadgroup_epoch[memory];
  }
  wait(Lane::at_threadgroup, "threadgroup_barrier", line, place);
}

void msl_simdgroup_barrier(int flags, int line, void* place) {
  for (int memory = 0; memory < 2; ++memory) {
    if (flags & (memory ? msl_threadgroup_flag : msl_device_flag)) ++machine.current->simdgroup_epoch[memory];
  }
  wait(Lane::at_simdgroup, "simdgroup_barrier", line, place);
}

void* msl_threadgroup_variable(const void* key, const char* name, unsigned long size, unsigned long align,
                               void* place) {
  auto found = machine.variables.find(key);
  if (found == machine.variables.end()) {
    if (machine.threadgroup_bytes + size > max_threadgroup_memory) {
      fault(std::to_string(machine.threadgroup_bytes + size) + " bytes of threadgroup memory with " + name +
                ", more than the " + std::to_string(max_threadgroup_memory) + " there are",
            place);
    }
    machine.threadgroup_bytes += (size + align - 1) / align * align;
    found = machine.variables.emplace(key, make_variable(std::string("threadgroup variable ") + name, size)).first;
    memset(found->second.data, 0xff, size);
    machine.memory.add(region_of(found->second));
  }
  return found->second.data;
}

void msl_atomic_access(void* address, unsigned long size, void* place) { access(address, size, true, true, place); }

void msl_fault(const char* what, void* place) { fault(what, place); }

}  // extern "C"
