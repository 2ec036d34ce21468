// Which gemv kernels were found to be fastest on the user's own GPU. Plain C++, as launch_plan.h; where such a table
// comes from and how long it is in use: tuning.mm.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>
#include <optional>
#include <vector>

namespace qgemv::mps {

// A variant of gemv_shapes by format (index in formats), type of x, and the powers of two between which N and K lie. To
// look one up is to read a byte: a launch takes 2 us in all.
class Tuning {
 public:
  // False, and nothing is changed, where there is an entry for such weights already.
  bool add(int format, int dtype, int64_t N, int64_t K, int variant) {
    const size_t place = place_of(format, dtype, N, K);
    if (place >= variants.size()) variants.resize(place + 1, none);
    if (variants[place] != none) return false;
    variants[place] = int8_t(variant);
    return true;
  }

  std::optional<int> find(int format, int dtype, int64_t N, int64_t K) const {
    const size_t place = place_of(format, dtype, N, K);
    if (place >= variants.size() || variants[place] == none) return std::nullopt;
    return variants[place];
  }

 private:
  static constexpr int8_t none = -1;
  static constexpr int dtypes = 3;         // of x
  static constexpr int size_classes = 33;  // the last one from 2^31 on; no kernel's K reaches 2^32

  static constexpr size_t size_class(int64_t size) {
    return size_t(std::min<int>(std::bit_width(uint64_t(size)), size_classes - 1));
  }
  static constexpr size_t place_of(int format, int dtype, int64_t N, int64_t K) {
    return ((size_t(format) * dtypes + size_t(dtype)) * size_classes + size_class(N)) * size_classes + size_class(K);
  }

  std::vector<int8_t> variants;  // up to the last entry's
};

}  // namespace qgemv::mps
