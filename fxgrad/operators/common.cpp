// What the kernels of this folder begin with: sums of products in registers, and sums of squares.

#include <ATen/cpu/vec/vec.h>
#include <algorithm>
#include <cmath>
#include <cstdint>

using Vec = at::vec::Vectorized<float>;
constexpr int64_t V = Vec::size();
constexpr int64_t CHAIN = 512;  // products that are added one after another, at most; then those sums: see norms.gamma

constexpr int64_t OS = V >= 16 ? 8 : 4;  // the outputs, and vectors of inputs, whose products are summed in registers
constexpr int64_t VECTORS = 3;

int64_t up(int64_t size, int64_t step) { return (size + step - 1) / step * step; }

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

struct Steps {  // from one row to the next, and from one column
  int64_t row, column;
};

// total[o, :] (+)= the sum over some rows of positions of g[position, o] input[position, :], for OS o and N vectors.
template <int64_t N>
void multiply(const float* g, Steps of_g, const float* input, Steps of_input, int64_t rows, int64_t columns,
              float* total, int64_t of_total, bool first) {
  Vec sums[OS][N];
  for (auto& of_o : sums)
    for (auto& sum : of_o) sum = Vec(0);
  for (int64_t y = 0; y < rows; ++y) {
    const float *gs = g + y * of_g.row, *values = input + y * of_input.row;
    for (int64_t x = 0; x < columns; ++x, gs += of_g.column, values += of_input.column) {
      Vec run[N];
#pragma GCC unroll 3
      for (int64_t r = 0; r < N; ++r) run[r] = Vec::loadu(values + r * V);
#pragma GCC unroll 8
      for (int64_t o = 0; o < OS; ++o) {
        const Vec factor(gs[o]);
#pragma GCC unroll 3
        for (int64_t r = 0; r < N; ++r) sums[o][r] = at::vec::fmadd(factor, run[r], sums[o][r]);
      }
    }
  }
  for (int64_t o = 0; o < OS; ++o)
    for (int64_t r = 0; r < N; ++r) {
      float* to = total + o * of_total + r * V;
      (first ? sums[o][r] : Vec::loadu(to) + sums[o][r]).store(to);
    }
}
