// What the benchmark measures the machine with: schemas, and the operators on the CPU. On MPS: csrc/mps/bench.mm.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <atomic>
#include <mutex>

#include "cpu/ops_cpu.h"

namespace qgemv {
namespace {

at::Tensor read_cpu(const at::Tensor& bytes, int64_t) {
  TORCH_CHECK_VALUE(bytes.is_contiguous(), "torch_qgemv._read: bytes must be contiguous");
  const auto* data = static_cast<const uint8_t*>(bytes.const_data_ptr());
  std::atomic<uint32_t> all{0};
  at::parallel_for(0, bytes.nbytes(), 1 << 16,
                   [&](int64_t begin, int64_t end) { all ^= best_kernels().read(data + begin, end - begin); });
  const at::Tensor sum = at::empty({1}, bytes.options().dtype(at::kInt));
  *static_cast<int32_t*>(sum.mutable_data_ptr()) = int32_t(all.load());
  return sum;
}

double fma_rate_cpu(at::Tensor& sums, int64_t passes) {
  TORCH_CHECK_VALUE(sums.is_contiguous() && sums.scalar_type() == at::kFloat,
                    "torch_qgemv._fma_rate: sums must be contiguous and of float32");
  auto* out = static_cast<float*>(sums.mutable_data_ptr());
  std::mutex mutex;
  double flops = 0;
  at::parallel_for(0, sums.numel(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const double made = best_kernels().fma_rate(passes, out + i);
      const std::lock_guard<std::mutex> lock(mutex);
      flops += made;
    }
  });
  return flops;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torch_qgemv, m) {
  // Reads every byte; the sums change with any of them. A thread of a GPU reads about vectors_per_thread times 16
  // bytes.
  m.def("_read(Tensor bytes, int vectors_per_thread=8) -> Tensor");
  // One thread's work of multiply-adds for each element of sums, float32; returns how many floating-point operations
  // that is.
  m.def("_fma_rate(Tensor(a!) sums, int passes) -> float");
  // x W^T for one row of x and a Q4_K weight by the published mapping: a baseline, on MPS only.
  m.def("_published(Tensor x, Tensor weight) -> Tensor");
}

TORCH_LIBRARY_IMPL(torch_qgemv, CPU, m) {
  m.impl("_read", &read_cpu);
  m.impl("_fma_rate", &fma_rate_cpu);
}

}  // namespace qgemv
