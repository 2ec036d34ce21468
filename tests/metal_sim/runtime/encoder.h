// The stream's command encoder, and the record of what was dispatched through it.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "machine.h"
#include "metal.h"

namespace metal_sim {

struct Dispatch {  // one launch, for tests that look at what the launcher did
  struct Bound {
    const Buffer* buffer;
    size_t offset, size;  // size: from the offset to the buffer's end
  };
  std::string kernel;
  Extent groups, threads, grid;  // threadgroups, threads per threadgroup, threads in all
  std::map<int, Bound> buffers;
  std::map<int, std::string> bytes;  // what setBytes copied
  std::map<int, size_t> threadgroup_memory;
};

struct Work {  // a launch to be made, and what it has bound
  Launch launch;
  Dispatch record;
};
void run(const Work& work);

struct Encoder : Object {
  explicit Encoder(std::vector<Work>* later = nullptr);
  Launch launch;
  Dispatch record;
  std::vector<Work>* later;  // of a launcher's own command buffer; none: PyTorch's, whose work is done at once
  bool ended = false;
  void forget() {  // what was bound
    launch = {};
    record = {};
  }
};

std::vector<Dispatch> dispatches();
void clear_dispatches();

// Defined with the stream: whether this thread runs a block on its queue.
bool on_stream_queue();

}  // namespace metal_sim
