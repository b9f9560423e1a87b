// Sums of squares of the rows of many matrices, which have one number of rows.

// A sum of squares of float32 in float64, where none over- or underflows.
static inline double wide_squares(const float* values, int64_t count) {
  using Wide = at::vec::VectorizedN<double, 2>;
  Wide sums[2] = {Wide(0.0), Wide(0.0)};  // which do not wait for each other
  for (int64_t at = 0; at < count; at += 2 * V)
#pragma GCC unroll 2
    for (int64_t r = 0; r < 2; ++r)
      if (const int64_t left = count - at - r * V; left > 0) {
        const Vec some = Vec::loadu(values + at + r * V, std::min(V, left));
        const Wide wide = at::vec::convert<double, 2, float, 1>(at::vec::VectorizedN<float, 1>(some));
        sums[r] = wide * wide + sums[r];
      }
  double lanes[V], total = 0;
  (sums[0] + sums[1]).store(lanes);
  for (const double lane : lanes) total += lane;
  return total;
}

// ``out[m, n]`` from addresses [many] of matrices [n, widths[m]], whose rows are steps[m] apart.
extern "C" void squares_of_rows(const int64_t* addresses, const int64_t* widths, const int64_t* steps, int64_t many,
                                int64_t n, double* out, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t at = 0; at < many * n; ++at) {
    const int64_t m = at / n, row = at % n;
    const float* matrix = reinterpret_cast<const float*>(addresses[m]);
    out[at] = wide_squares(matrix + row * steps[m], widths[m]);
  }
}
