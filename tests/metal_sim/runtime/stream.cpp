// The symbols of libtorch's MPS part that a launcher calls.
#include "stream.h"

#include <ATen/core/ATen_fwd.h>
#include <ATen/mps/MPSDevice.h>
#include <ATen/mps/MPSStream.h>

#include <atomic>
#include <mutex>

#include "encoder.h"

namespace metal_sim {

// A block, as the compiler lays it out; called with itself as its first argument.
struct Block {
  void* isa;
  int flags, reserved;
  void (*invoke)(Block*);
};

namespace {

std::mutex queue_mutex;
thread_local bool on_queue = false;
std::atomic<size_t> encoders{0}, commits{0};
Encoder* encoder = nullptr;  // guarded by the queue

void end_encoder() {
  if (!encoder) return;
  encoder->ended = true;
  release(std::exchange(encoder, nullptr));
}

void count_commit() {
  ++commits;
  end_encoder();
}

// What stream->commandBuffer() gives.
struct CommandBuffer : Object {
  CommandBuffer();
};
const ClassObject command_buffer_class(
    "MPSCommandBuffer",
    {
        method(
            "commit", +[](Object*, Selector*) { count_commit(); }),
        method(
            "commitAndContinue", +[](Object*, Selector*) { count_commit(); }),
        method(
            "waitUntilCompleted", +[](Object*, Selector*) {}),
        method(
            "computeCommandEncoder",
            +[](Object*, Selector*) -> Object* {
              throw Fault("computeCommandEncoder: PyTorch's own encoder, stream->commandEncoder(), has to be used");
            }),
    });
CommandBuffer::CommandBuffer() : Object(command_buffer_class) {}

}  // namespace

bool on_stream_queue() { return on_queue; }

void run_on_queue(const std::function<void()>& work) {
  if (on_queue) throw Fault("dispatch_sync on the queue that runs this block: a deadlock on macOS");
  std::lock_guard<std::mutex> guard(queue_mutex);
  on_queue = true;
  const size_t pools = pool_depth();
  try {
    work();
  } catch (...) {
    on_queue = false;
    drain_pools(pools);  // those that the exception left
    if (encoder) encoder->forget();
    throw;
  }
  on_queue = false;
}

std::map<std::string, size_t> stream_counters() { return {{"encoders", encoders}, {"commits", commits}}; }

void clear_stream_counters() {
  encoders = 0;
  commits = 0;
}

}  // namespace metal_sim

using namespace metal_sim;

// An exception must not leave a block given to dispatch_sync: it ends the process, as on macOS.
extern "C" void dispatch_sync(dispatch_queue_t, metal_sim::Block* block) noexcept {
  run_on_queue([&] { block->invoke(block); });
}

namespace at::mps {

MPSDevice::MPSDevice() : _mtl_device(metal_sim::device()) {}
MPSDevice::~MPSDevice() = default;
MPSDevice* MPSDevice::getInstance() {
  static auto* device = new MPSDevice;
  return device;
}
std::string MPSDevice::getName() const { return "simulated Metal device"; }
bool is_available() { return true; }

MPSStream::MPSStream(Stream stream) : _stream(stream) {}
MPSStream* getCurrentMPSStream() {
  static auto* stream = new MPSStream(Stream(Stream::UNSAFE, Device(kMPS, 0), 0));
  return stream;
}
MPSStream* getDefaultMPSStream() { return getCurrentMPSStream(); }
MTLDevice_t MPSStream::device() const { return metal_sim::device(); }

MTLComputeCommandEncoder_t MPSStream::commandEncoder() {
  if (!on_queue) throw Fault("commandEncoder() is called outside the stream's queue (dispatch_sync_with_rethrow)");
  if (!encoder) {
    encoder = new Encoder;
    ++encoders;
  }
  return encoder;
}
MPSCommandBuffer_t MPSStream::commandBuffer() {
  static auto* buffer = new CommandBuffer;
  return reinterpret_cast<MPSCommandBuffer_t>(buffer);
}
void MPSStream::endKernelCoalescing() { end_encoder(); }
void MPSStream::synchronize(SyncType type) {
  if (type != SyncType::NONE) count_commit();
}

// Declared for Objective-C++ only, with a block parameter; mangled alike here (see the assembler label).
void dispatch_sync_with_rethrow(dispatch_queue_t, metal_sim::Block* block) __asm__(
    "_ZN2at3mps26dispatch_sync_with_rethrowEP16dispatch_queue_sU13block_pointerFvvE");
void dispatch_sync_with_rethrow(dispatch_queue_t, metal_sim::Block* block) {
  run_on_queue([&] { block->invoke(block); });
}

// The profiler: never on. torch's header reads its members inline, so the object has to be as large, and zero.
namespace Profiler {
class MPSProfiler {
 public:
  uint64_t beginProfileKernel(const void*, const std::string&, bool);
  uint64_t beginProfileKernel(const void*, const std::string&, const TensorList&);
  void endProfileKernel(const void*, SyncType);
};
uint64_t MPSProfiler::beginProfileKernel(const void*, const std::string&, bool) { return 0; }
uint64_t MPSProfiler::beginProfileKernel(const void*, const std::string&, const TensorList&) { return 0; }
void MPSProfiler::endProfileKernel(const void*, SyncType) {}
}  // namespace Profiler
Profiler::MPSProfiler& getMPSProfiler() {
  static uint64_t zeros[512] = {};
  return *reinterpret_cast<Profiler::MPSProfiler*>(zeros);
}

}  // namespace at::mps
