#include "encoder.h"

#include <mutex>
#include <utility>

namespace metal_sim {
namespace {

using S = Selector;

std::mutex record_mutex;
std::vector<Dispatch> recorded;

void check_usable(const Encoder* encoder) {
  if (encoder->ended) throw Fault("the encoder is used after its end: ask the stream for commandEncoder() anew");
  if (!encoder->later && !on_stream_queue())
    throw Fault("the encoder is used outside the stream's queue (dispatch_sync_with_rethrow)");
}

int argument_index(uint64_t index) {
  if (index >= msl_max_arguments) throw Fault("Metal has no argument index " + std::to_string(index));
  return int(index);
}

void set_pipeline(Encoder* self, S*, Pipeline* pipeline) {
  check_usable(self);
  if (!pipeline) throw Fault("setComputePipelineState: was given nil");
  self->launch.library = pipeline->library;
  self->launch.kernel = pipeline->kernel;
}

void set_buffer(Encoder* self, S*, Buffer* buffer, uint64_t offset, uint64_t at) {
  check_usable(self);
  const int index = argument_index(at);
  self->record.bytes.erase(index);
  if (!buffer) {
    self->launch.buffers.erase(index);
    self->record.buffers.erase(index);
    return;
  }
  if (offset > buffer->size) {
    throw Fault("buffer " + std::to_string(index) + ": offset " + std::to_string(offset) + " is beyond its " +
                std::to_string(buffer->size) + " bytes");
  }
  self->launch.buffers[index] = {buffer->data + offset, buffer->size - offset};
  self->record.buffers[index] = {buffer, offset, buffer->size - offset};
}

void set_bytes(Encoder* self, S*, const char* bytes, uint64_t length, uint64_t at) {
  check_usable(self);
  const int index = argument_index(at);
  if (length == 0 || length > 4096) {
    throw Fault("setBytes takes 1 to 4096 bytes, not " + std::to_string(length));
  }
  std::string& copy = self->record.bytes[index];
  copy.assign(bytes, length);
  self->record.buffers.erase(index);
  self->launch.buffers[index] = {copy.data(), length, /*constant=*/true};
}

void set_threadgroup_memory(Encoder* self, S*, uint64_t length, uint64_t at) {
  check_usable(self);
  if (length % 16) throw Fault("a threadgroup memory length must be a multiple of 16 bytes");
  if (length > max_threadgroup_memory) {
    throw Fault("setThreadgroupMemoryLength: " + std::to_string(length) + " bytes, more than the " +
                std::to_string(max_threadgroup_memory) + " there are");
  }
  self->launch.threadgroup_memory[argument_index(at)] = length;
}

struct Size {  // MTLSize
  uint64_t width, height, depth;
};

Extent extent(const Size& size, const char* what) {
  for (uint64_t n : {size.width, size.height, size.depth}) {
    if (n == 0) throw Fault(std::string("a dispatch with no ") + what);
    if (n > 0xffffffff) throw Fault(std::string("a dispatch with 2^32 or more ") + what);
  }
  return {unsigned(size.width), unsigned(size.height), unsigned(size.depth)};
}

void dispatch(Encoder* self, const Extent& grid, const Extent& groups, const Extent& threads) {
  Launch& launch = self->launch;
  if (!launch.library) throw Fault("a dispatch without a pipeline");
  const uint64_t count = uint64_t(threads[0]) * threads[1] * threads[2];
  if (count > max_threads_per_threadgroup) {
    throw Fault(std::string("kernel ") + launch.kernel.name + ": threadgroups of " + std::to_string(count) +
                " threads, more than the " + std::to_string(max_threads_per_threadgroup) + " there may be");
  }
  launch.grid = grid;
  launch.threads = threads;
  Dispatch record = std::exchange(self->record, {});
  record.kernel = launch.kernel.name;
  record.groups = groups;
  record.threads = threads;
  record.grid = grid;
  record.threadgroup_memory = launch.threadgroup_memory;
  // Metal keeps what was bound for the next dispatch, which on PyTorch's shared encoder is anyone's. Forgetting it
  // here makes a launcher that binds too little fail every time.
  const Work work{std::exchange(launch, {}), std::move(record)};
  if (self->later) {
    self->later->push_back(work);
    return;
  }
  {
    std::lock_guard<std::mutex> guard(record_mutex);
    recorded.push_back(work.record);
  }
  run(work);
}

void dispatch_threadgroups(Encoder* self, S*, Size groups_in, Size threads_in) {
  check_usable(self);
  const Extent groups = extent(groups_in, "threadgroups"), threads = extent(threads_in, "threads per threadgroup");
  Extent grid;
  for (int d = 0; d < 3; ++d) {
    const uint64_t n = uint64_t(groups[d]) * threads[d];
    if (n > 0xffffffff) throw Fault("a dispatch whose thread positions pass 2^32");
    grid[d] = unsigned(n);
  }
  dispatch(self, grid, groups, threads);
}

void dispatch_threads(Encoder* self, S*, Size grid_in, Size threads_in) {
  check_usable(self);
  const Extent grid = extent(grid_in, "threads"), threads = extent(threads_in, "threads per threadgroup");
  Extent groups;
  for (int d = 0; d < 3; ++d) groups[d] = unsigned((uint64_t(grid[d]) + threads[d] - 1) / threads[d]);
  dispatch(self, grid, groups, threads);
}

const ClassObject encoder_class("MTLComputeCommandEncoder",
                                {
                                    method("setComputePipelineState:", &set_pipeline),
                                    method("setBuffer:offset:atIndex:", &set_buffer),
                                    method("setBytes:length:atIndex:", &set_bytes),
                                    method("setThreadgroupMemoryLength:atIndex:", &set_threadgroup_memory),
                                    method("dispatchThreadgroups:threadsPerThreadgroup:", &dispatch_threadgroups),
                                    method("dispatchThreads:threadsPerThreadgroup:", &dispatch_threads),
                                    method(
                                        "pushDebugGroup:", +[](Encoder*, S*, Object*) {}),
                                    method(
                                        "popDebugGroup", +[](Encoder*, S*) {}),
                                    method(
                                        "endEncoding",
                                        +[](Encoder* self, S*) {
                                          check_usable(self);
                                          if (!self->later) {
                                            throw Fault(
                                                "endEncoding: the encoder is PyTorch's, which goes on using it");
                                          }
                                          self->ended = true;
                                        }),
                                });

}  // namespace

Encoder::Encoder(std::vector<Work>* work) : Object(encoder_class), later(work) {}

void run(const Work& work) {
  Launch launch = work.launch;
  for (auto& [index, bytes] : work.record.bytes) launch.buffers[index].data = const_cast<char*>(bytes.data());
  run(launch);
}

std::vector<Dispatch> dispatches() {
  std::lock_guard<std::mutex> guard(record_mutex);
  return recorded;
}
void clear_dispatches() {
  std::lock_guard<std::mutex> guard(record_mutex);
  recorded.clear();
}

}  // namespace metal_sim
