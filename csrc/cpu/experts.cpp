// expert_linear on the CPU. Rows of x are sorted by their experts, and the rows of an expert are multiplied together by
// the kernels of linear. Threads share the panels of all experts: one token's eight experts keep all of them busy.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "ops_cpu.h"

namespace qgemv {
namespace {

// Rows of one expert that are multiplied together: `order` has their numbers, from `first` on.
struct Group {
  int64_t expert, first, count;
};

struct Routes {
  std::vector<int64_t> order;  // rows, by their experts
  std::vector<Group> groups;   // of experts that have rows
};

Routes routes_of(const char* op, const at::Tensor& ids, int64_t experts, int64_t most_rows) {
  const at::Tensor numbers = ids.to(at::kLong).contiguous();
  const int64_t* id = static_cast<const int64_t*>(numbers.const_data_ptr());
  std::vector<int64_t> begin(experts + 1);
  for (int64_t i = 0; i < ids.numel(); ++i) {
    TORCH_CHECK_INDEX(0 <= id[i] && id[i] < experts, "torch_qgemv.", op, ": expert ", id[i],
                      " of ids is out of range for ", experts, " experts");
    ++begin[id[i] + 1];
  }
  for (int64_t e = 0; e < experts; ++e) begin[e + 1] += begin[e];
  Routes routes{std::vector<int64_t>(ids.numel()), {}};
  for (int64_t e = 0; e < experts; ++e)
    for (int64_t first = begin[e]; first < begin[e + 1]; first += most_rows)
      routes.groups.push_back({e, first, std::min(most_rows, begin[e + 1] - first)});
  for (int64_t i = 0; i < ids.numel(); ++i) routes.order[begin[id[i]]++] = i;
  return routes;
}

// Of `count` items that take `cost` units of work each, the first of which begins at unit `start`: where those begin
// that begin at `unit` or later.
int64_t item_at(int64_t unit, int64_t start, int64_t cost, int64_t count) {
  return std::clamp<int64_t>((unit - start + cost - 1) / cost, 0, count);
}

struct ExpertProduct {
  const Kernels& kernels;
  const Weight& first_expert;
  int64_t expert_stride;  // bytes
  const char* x;          // rows of K
  int64_t ids_per_row;    // of x
  char* y;                // rows of N
  cpu::Dtype dtype;
  const std::vector<int64_t>& order;

  int64_t item() const { return dtype == cpu::Dtype::f32 ? 4 : 2; }
  Weight weight(const Group& group) const {
    Weight w = first_expert;
    w.data += group.expert * expert_stride;
    return w;
  }
  const char* x_row(int64_t place) const { return x + order[place] / ids_per_row * first_expert.K * item(); }
  char* y_row(int64_t place) const { return y + order[place] * first_expert.N * item(); }

  // Some groups, neighbours in `order`.
  void run(const Group* begin_group, const Group* end_group) const {
    const int64_t first = begin_group->first, rows = end_group[-1].first + end_group[-1].count - first;
    const int64_t N = first_expert.N, K = first_expert.K, y_bytes = N * item();
    const int64_t row_bytes = (K + cpu::chunk - 1) / cpu::chunk * int64_t(kernels.activation_bytes(dtype));
    const at::Tensor activations = at::empty({rows * row_bytes}, at::kByte),
                     sorted = at::empty({rows * y_bytes}, at::kByte);
    char *packed = static_cast<char*>(activations.mutable_data_ptr()),
         *out = static_cast<char*>(sorted.mutable_data_ptr());
    std::vector<char> regular(rows);
    at::parallel_for(0, rows, grain(K * item()), [&](int64_t begin, int64_t end) {
      for (const Group* g = begin_group; g < end_group; ++g) {
        const int64_t start = g->first - first, last = item_at(end, start, 1, g->count);
        for (int64_t m = item_at(begin, start, 1, g->count); m < last; ++m)
          regular[start + m] =
              kernels.pack(first_expert, x_row(g->first + m), dtype, m, g->count, packed + start * row_bytes);
      }
    });

    const int64_t panels = (N + cpu::panel_rows - 1) / cpu::panel_rows;
    auto cost = [](const Group& g) { return (g.count + 3) / 4; };  // of a panel
    int64_t units = 0;
    for (const Group* g = begin_group; g < end_group; ++g) units += panels * cost(*g);
    at::parallel_for(0, units, grain(cpu::panel_rows * first_expert.row_stride), [&](int64_t begin, int64_t end) {
      int64_t start = 0;
      for (const Group* g = begin_group; g < end_group; start += panels * cost(*g), ++g) {
        const int64_t from = item_at(begin, start, cost(*g), panels), to = item_at(end, start, cost(*g), panels);
        const int64_t place = g->first - first;
        if (from < to)
          kernels.linear({weight(*g), packed + place * row_bytes, g->count, nullptr, out + place * y_bytes, dtype},
                         from, to);
      }
    });

    at::parallel_for(0, rows, grain(y_bytes), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) std::memcpy(y_row(first + i), out + i * y_bytes, y_bytes);
    });
    for (const Group* g = begin_group; g < end_group; ++g)
      for (int64_t i = g->first; i < g->first + g->count; ++i)
        if (!regular[i - first]) linear_exact_row(weight(*g), x_row(i), nullptr, y_row(i), dtype);
  }
};

// Rows that are packed at a time, about: what they take in memory does not grow with x.
constexpr int64_t rows_at_once = 1024;

at::Tensor expert_linear_cpu(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& ids, int64_t quant_type) {
  const MatrixSize size = check_expert_linear(x, weight, ids, quant_type);
  const at::Tensor y = at::empty_symint(with_size(ids, size.N), x.options());
  const Routes routes = routes_of("expert_linear", ids, weight.size(0), cpu::token_block);
  if (y.numel() == 0) return y;
  if (size.K == 0) return y.zero_();

  const at::Tensor rows = x.contiguous(), packed = with_dense_rows(weight);
  const Weight first_expert = view(packed.select(0, 0), quant_type, size);
  const ExpertProduct product{best_kernels(),
                              first_expert,
                              packed.stride(0),
                              static_cast<const char*>(rows.const_data_ptr()),
                              ids.dim() == x.dim() ? ids.size(-1) : 1,
                              static_cast<char*>(y.mutable_data_ptr()),
                              dtype_of(x.scalar_type()),
                              routes.order};
  const Group *begin = routes.groups.data(), *const last = begin + routes.groups.size();
  while (begin < last) {
    const Group* end = begin + 1;
    while (end < last && end->first + end->count - begin->first <= rows_at_once) ++end;
    product.run(begin, end);
    begin = end;
  }
  return y;
}

at::Tensor expert_linear_transposed_cpu(const at::Tensor& grad_y, const at::Tensor& weight, const at::Tensor& ids,
                                        int64_t quant_type) {
  const MatrixSize size = check_expert_linear_transposed(grad_y, weight, ids, quant_type);
  const at::Tensor grad_x = at::empty_symint(with_size(ids, size.K), grad_y.options());
  const Routes routes = routes_of("expert_linear_transposed", ids, weight.size(0), std::max<int64_t>(1, ids.numel()));
  if (grad_x.numel() == 0) return grad_x;
  const at::Tensor from = grad_y.reshape({-1, grad_y.size(-1)}), to = grad_x.view({-1, grad_x.size(-1)});
  for (const Group& g : routes.groups) {
    const auto* numbers = routes.order.data() + g.first;
    const at::Tensor places = at::empty({g.count}, ids.options().dtype(at::kLong));
    std::copy(numbers, numbers + g.count, static_cast<int64_t*>(places.mutable_data_ptr()));
    to.index_copy_(0, places,
                   linear_transposed_cpu(from.index_select(0, places), weight.select(0, g.expert), quant_type));
  }
  return grad_x;
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_qgemv, CPU, m) {
  m.impl("expert_linear", &expert_linear_cpu);
  m.impl("expert_linear_transposed", &expert_linear_transposed_cpu);
}

}  // namespace qgemv
