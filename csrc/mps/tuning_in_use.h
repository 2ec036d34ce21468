// The process's one table of gemv kernels.
#pragma once
#include "tuning.h"

namespace qgemv::mps {

// Empty, so that the built-in choice holds, until torch.ops.torch_qgemv._use_tuning is called; nothing else sets it.
// Thread-safe, and valid for the rest of the process.
const Tuning& tuning_in_use();

}  // namespace qgemv::mps
