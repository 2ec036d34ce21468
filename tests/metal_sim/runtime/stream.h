// The simulated MPS stream: its serial queue, its encoder, and counts of what happened to them.
#pragma once
#include <cstddef>
#include <functional>
#include <map>
#include <string>

namespace metal_sim {

// Runs the work on the stream's serial queue, one at a time. Throws Fault for a call from within it.
void run_on_queue(const std::function<void()>& work);

// "encoders": command encoders made so far; "commits": command buffers committed by anyone but PyTorch's own
// synchronisation.
std::map<std::string, size_t> stream_counters();
void clear_stream_counters();

}  // namespace metal_sim
