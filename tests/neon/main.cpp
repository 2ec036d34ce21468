// Runs the CPU kernels on the cases of a file: main ISA CASES RESULTS. __init__.py describes both files.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "../../csrc/cpu/kernels.h"

using namespace qgemv::cpu;
using Bytes = std::vector<uint8_t>;

namespace {

enum Operation : int64_t { op_linear, op_dequantize, op_interleave, op_deinterleave, op_quantize, op_read };

struct Header {
  int64_t operation, quant_type, rows, columns, row_bytes, interleaved, dtype, tokens, has_bias;
};

struct Case : Header {
  Bytes weight, x, bias;

  Weight view() const { return {quant_type, weight.data(), row_bytes, rows, columns, interleaved != 0}; }
  Dtype type() const { return Dtype(dtype); }
  int64_t item() const { return type() == Dtype::f32 ? 4 : 2; }
};

bool read_bytes(std::FILE* file, void* to, size_t count) { return std::fread(to, 1, count, file) == count; }

bool read_case(std::FILE* file, Case& c) {
  if (!read_bytes(file, static_cast<Header*>(&c), sizeof(Header))) return false;
  c.weight.resize(c.rows * c.row_bytes);
  c.x.resize(c.tokens * c.columns * c.item());
  c.bias.resize(c.has_bias ? (c.operation == op_quantize ? c.columns : c.rows) * sizeof(float) : 0);
  for (Bytes* part : {&c.weight, &c.x, &c.bias})
    if (!read_bytes(file, part->data(), part->size())) std::abort();
  return true;
}

// As the operator does it, on one thread. Before y: for each row of x, whether it could be packed.
Bytes linear(const Kernels& kernels, const Case& c) {
  const Weight w = c.view();
  const int64_t M = c.tokens, x_bytes = w.K * c.item(), y_bytes = w.N * c.item(), chunks = (w.K + chunk - 1) / chunk;
  const size_t size = chunks * M * kernels.activation_bytes(c.type());
  void* packed = std::aligned_alloc(64, size);
  Bytes out(M + M * y_bytes);
  for (int64_t m = 0; m < M; ++m) out[m] = kernels.pack(w, c.x.data() + m * x_bytes, c.type(), m, M, packed);
  const auto* bias = c.has_bias ? reinterpret_cast<const float*>(c.bias.data()) : nullptr;
  kernels.linear({w, packed, M, bias, out.data() + M, c.type()}, 0, (w.N + panel_rows - 1) / panel_rows);
  std::free(packed);
  for (int64_t m = 0; m < M; ++m) {
    if (out[m]) continue;
    std::vector<float> row(w.K), y(w.N);
    to_float(c.x.data() + m * x_bytes, c.type(), w.K, row.data());
    linear_exact(w, row.data(), bias, y.data(), 0, w.N);
    from_float(y.data(), c.type(), w.N, out.data() + M + m * y_bytes);
  }
  return out;
}

Bytes run(const Kernels& kernels, const Case& c) {
  const Weight w = c.view();
  Bytes out;
  switch (c.operation) {
    case op_linear:
      return linear(kernels, c);
    case op_dequantize:
      out.resize(w.N * w.K * c.item());
      for (int64_t n = 0; n < w.N; ++n) kernels.dequantize_row(w, n, 0, w.K, c.type(), out.data() + n * w.K * c.item());
      return out;
    case op_interleave:
      out = c.weight;  // the rows left over stay as they are
      kernels.interleave(w, 0, w.N / panel_rows, out.data());
      return out;
    case op_deinterleave:
      out.resize(c.weight.size());
      for (int64_t n = 0; n < w.N; ++n) deinterleave_row(w, n, out.data() + n * c.row_bytes);
      return out;
    case op_quantize: {  // x is the matrix, bias the importance; weight has the size of the result
      out.resize(c.weight.size());
      const auto* importance = c.has_bias ? reinterpret_cast<const float*>(c.bias.data()) : nullptr;
      const int64_t batches = w.N * w.K;  // more than there are
      if (kernels.quantize({w.quant_type, c.x.data(), importance, w.N, w.K, c.type(), out.data()}, 0, batches) != -1)
        std::abort();
      return out;
    }
    case op_read:
      out.resize(4);
      const uint32_t all = kernels.read(w.data, int64_t(c.weight.size()));
      std::memcpy(out.data(), &all, 4);
      return out;
  }
  std::abort();
}

const Kernels* find(const char* isa) {
  for (const Kernels* kernels : all_kernels)
    if (std::strcmp(kernels->name, isa) == 0 && kernels->supported()) return kernels;
  return nullptr;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const Kernels* kernels = find(argv[1]);
  if (!kernels) return std::fprintf(stderr, "no %s here\n", argv[1]), 3;
  std::FILE *cases = std::fopen(argv[2], "rb"), *results = std::fopen(argv[3], "wb");
  if (!cases || !results) return 2;
  for (Case c; read_case(cases, c);) {
    const Bytes out = run(*kernels, c);
    std::fwrite(out.data(), 1, out.size(), results);
  }
  return std::fclose(results) == 0 ? 0 : 2;
}
