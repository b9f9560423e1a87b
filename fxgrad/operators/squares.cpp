// What the kernels of this folder begin with: sums of squares in float32, `CHAIN` of them at a time, and of those in double.

#include <ATen/cpu/vec/vec.h>
#include <algorithm>
#include <cmath>
#include <cstdint>

using Vec = at::vec::Vectorized<float>;
constexpr int64_t V = Vec::size();
constexpr int64_t CHAIN = 512;  // products that are added one after another, at most: norms.py counts on it

double squares(const float* values, int64_t count) {
  double total = 0;
  for (int64_t start = 0; start < count; start += CHAIN * V) {
    Vec sums(0);
    const int64_t end = std::min(count, start + CHAIN * V);
    for (int64_t k = start; k < end; k += V) {
      const Vec value = Vec::loadu(values + k, std::min(V, end - k));
      sums = at::vec::fmadd(value, value, sums);
    }
    float lanes[V];
    sums.store(lanes);
    for (const float lane : lanes) total += lane;
  }
  return total;
}
