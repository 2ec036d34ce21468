// What a compiled kernel library and the simulator know of each other. Included by both; includes nothing.
#pragma once

enum MslId {  // the rows of MslLane::ids
  thread_index_in_simdgroup,
  simdgroup_index_in_threadgroup,
  thread_index_in_threadgroup,
  simdgroups_per_threadgroup,
  dispatch_simdgroups_per_threadgroup,
  threads_per_simdgroup,
  thread_execution_width,
  threadgroup_position_in_grid,
  thread_position_in_threadgroup,
  thread_position_in_grid,
  threads_per_threadgroup,
  dispatch_threads_per_threadgroup,
  threadgroups_per_grid,
  threads_per_grid,
  msl_id_count
};

struct MslParameter {  // what one kernel parameter is filled with
  enum Kind { buffer_argument, threadgroup_argument, id_argument } kind;
  int index;      // of the buffer, of the threadgroup allocation, or an MslId
  bool writable;  // a buffer declared without const
};

constexpr int msl_max_arguments = 31;  // Metal's limit of buffer indices

struct MslLane {  // one thread's arguments
  const MslParameter* parameters;
  void* buffers[msl_max_arguments];
  void* threadgroup_memory[msl_max_arguments];
  unsigned ids[msl_id_count][3];
};

struct MslKernel {
  const char* name;
  void (*run)(const MslLane*);
  const MslParameter* parameters;
  int parameter_count;
  unsigned max_threads;  // of a threadgroup, as the kernel declares; 0 where it does not
};

struct MslSlot {  // what one lane hands to the others of its SIMD-group
  unsigned long long word[2];
};

enum { msl_device_flag = 1, msl_threadgroup_flag = 2 };  // of a barrier

extern "C" {
// Called by a kernel library while it is being loaded.
void msl_register(MslKernel kernel);
void msl_needs_constants(const char* names);  // function constants without values

// Called by running kernels. `line` tells apart the operations of one kernel; `place` is a code address near it, for
// messages. A lane waits in these calls until all lanes of its SIMD-group (or threadgroup) have arrived.
const MslSlot* msl_gather(MslSlot mine, const char* operation, int line, void* place);  // the lanes' 32 slots
void msl_threadgroup_barrier(int flags, int line, void* place);
void msl_simdgroup_barrier(int flags, int line, void* place);

unsigned msl_lane();  // index in the SIMD-group
unsigned msl_matrix_lane(
    unsigned lane);           // whose elements of an 8x8 matrix a lane holds, by Apple's order; see machine.h
unsigned msl_active_lanes();  // fewer than 32 in the last SIMD-group of an odd-sized threadgroup

// A variable that a kernel declares in threadgroup memory; `key` identifies it. All lanes get the same memory.
void* msl_threadgroup_variable(const void* key, const char* name, unsigned long size, unsigned long align, void* place);

// Bounds check of an access that lanes may make at the same time.
void msl_atomic_access(void* address, unsigned long size, void* place);

// Ends the launch with a message.
void msl_fault(const char* what, void* place);
}
