// Of g [n, k, o] and x [n, k, i] for each sample, with the Gram matrices G = g gT and X = x xT of its positions:
//
//     sum G X   sum |G X|   sum |g_a| |g_b| |X_ab|   sum |x_a| |x_b| |G_ab|   sum |g_a| |x_a|   sum |g_a|   sum |x_a|
//
// The first is the squared norm of sum_k g_k (x) x_k, the others bound its rounding. The matrices are symmetric: what
// is above the diagonal counts twice. Some features of all positions are turned at a time, and stay in a near cache.

constexpr int64_t NEAR = 6144, FEATURES = 96;  // numbers, and features at least: gram_kernel.py knows of the second

struct Gram {
  const int64_t k, padded = up(k, V), most = std::clamp(NEAR / padded / TILE * TILE, FEATURES, CHAIN);
  Memory<float> features = Memory<float>(most * padded);
  Memory<float> matrix = Memory<float>(padded * padded), lengths = Memory<float>(padded);
  double length = 0;  // of all positions, added up

  // [k, count] as [count, padded]; what is behind the positions stays 0.
  void load(const float* from, const int64_t* steps, int64_t count) {
    if (steps[2] == 1) {
      turn_over(from, steps[1], k, count, features.data(), padded);
    } else {
      for (int64_t f = 0; f < count; ++f)
        for (int64_t position = 0; position < k; ++position)
          features[f * padded + position] = from[position * steps[1] + f * steps[2]];
    }
  }

  // `next` is read behind these. While products are computed, the cache fetches what comes after the features in work.
  void add_up(const float* from, const int64_t* steps, int64_t size, const float* next, int64_t of_next) {
    for (int64_t start = 0; start < size; start += most) {
      const int64_t count = std::min(most, size - start);
      load(from + start * steps[2], steps, count);
      const bool more = start + most < size;
      const float* ahead = more ? from + (start + most) * steps[2] : next;
      const int64_t of_row = more ? steps[1] : of_next;
      for (int64_t a = 0; a < k; a += OS) {
        fetch(ahead + a * of_row, of_row, std::min(OS, k - a), most);
        for (int64_t b = a / V * V, left = (padded - b) / V; left > 0; b += next_of(left) * V, left -= next_of(left))
          multiply_by(next_of(left))(features.data() + a, {0, padded}, features.data() + b, {0, padded}, 1, count,
                                     matrix.data() + a * padded + b, padded, start == 0);
      }
    }
    length = 0;
    for (int64_t a = 0; a < k; ++a) {
      lengths[a] = std::sqrt(std::max(0.0, double(matrix[a * padded + a])) + size * LOST);
      length += lengths[a];
    }
  }
};

// `off_g`, `off_x` and `off_sum` say how far rounding may put off a product of two g, one of two x, and a sum over positions.
extern "C" void gram_norms(const float* g_data, const int64_t* g_steps, const float* x_data, const int64_t* x_steps,
                           int64_t n, int64_t k, int64_t o, int64_t i, double off_g, double off_x, double off_sum,
                           double* found, bool* doubtful, int threads) {
  const Norms norms{found, doubtful, n};
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Gram g{k}, x{k};
    Memory<float> counts(g.padded);  // how often an entry of a row counts
#pragma omp for
    for (int64_t sample = 0; sample < n; ++sample) {
      const float *of_g = g_data + sample * g_steps[0], *of_x = x_data + sample * x_steps[0];
      g.add_up(of_g, g_steps, o, of_x, x_steps[1]);
      x.add_up(of_x, x_steps, i, of_g + g_steps[0], g_steps[1]);
      std::fill_n(counts.begin(), k, 2.0f);
      double sums[5] = {0, 0, 0, 0, 0};
      for (int64_t a = 0; a < k; ++a) {
        counts[a] = 1;
        Vec square(0), size(0), by_g(0), by_x(0);
        for (int64_t b = a / V * V; b < g.padded; b += V) {
          const Vec count = Vec::loadu(counts.data() + b);
          const Vec in_g = Vec::loadu(g.matrix.data() + a * g.padded + b);
          const Vec in_x = Vec::loadu(x.matrix.data() + a * g.padded + b);
          const Vec product = in_g * in_x;
          square = at::vec::fmadd(count, product, square);
          size = at::vec::fmadd(count, product.abs(), size);
          by_g = at::vec::fmadd(count * Vec::loadu(g.lengths.data() + b), in_x.abs(), by_g);
          by_x = at::vec::fmadd(count * Vec::loadu(x.lengths.data() + b), in_g.abs(), by_x);
        }
        counts[a] = 0;
        sums[0] += total_of(square);
        sums[1] += total_of(size);
        sums[2] += total_of(by_g) * g.lengths[a];
        sums[3] += total_of(by_x) * x.lengths[a];
        sums[4] += double(g.lengths[a]) * x.lengths[a];
      }
      const double lost = LOST * (o * x.length * x.length + i * g.length * g.length);  // to underflow
      const double slack = off_g * sums[2] + off_x * sums[3] + off_g * off_x * sums[4] * sums[4] + off_sum * sums[1] + lost;
      const double square = sums[0] < 0 ? 0 : sums[0];
      const double bound = std::sqrt(square + 1.01 * slack) * (1 + 1e-12);
      norms.set(sample, std::sqrt(square), bound, bound < SMALL || lost > 1e-7 * sums[0]);
    }
  }
}
