// Of g [n, k, o] and x [n, k, i] for each sample: the products D = sum over k of g_k (x) x_k, their squared norms, and
// what bounds their rounding, the sum over k of |g_k| |x_k|, and how much of that is only for squares that underflow.
//
// Both sides are copied so that what a few sums need lies in one run of memory: OS of g, and VECTORS vectors of x.

struct Side {
  const float* data;
  const int64_t* steps;  // of n, k and the elements
};

// `count` numbers of every row, one row behind the other, `WIDTH` apart; what is behind `count` stays as it was.
template <int64_t WIDTH>
void pack(const float* from, const int64_t* steps, int64_t k, int64_t count, float* into) {
  for (int64_t row = 0; row < k; ++row, from += steps[1], into += WIDTH)
    if (steps[2] == 1 && count == WIDTH) {
      std::copy_n(from, WIDTH, into);
    } else {
      for (int64_t c = 0; c < count; ++c) into[c] = from[c * steps[2]];
    }
}

static inline double square_of(const float* row, int64_t size, int64_t step) {
  if (step == 1) return squares(row, size);
  double total = 0;
  for (int64_t at = 0; at < size; ++at) total += double(row[at * step]) * row[at * step];
  return total;
}

// `out` [n, o, i], contiguous, may be null: then only what is in `found` [3, n, parts] is wanted.
extern "C" void product_rows(const float* g_data, const int64_t* g_steps, const float* x_data, const int64_t* x_steps,
                             int64_t n, int64_t k, int64_t o, int64_t i, float* out, double* found, int64_t parts,
                             int threads) {
  const Side g{g_data, g_steps}, x{x_data, x_steps};
  const int64_t units = n * parts, of_part = up((o + parts - 1) / parts, OS);
  const bool large = n * o * i * 4 >= WRITTEN;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Memory<float> gs(k * of_part), xs(k * up(i, V)), tile(OS * VECTORS * V);
#pragma omp for
    for (int64_t unit = 0; unit < units; ++unit) {
      const int64_t sample = unit / parts, start = unit % parts * of_part, end = std::max(start, std::min(o, start + of_part));
      const float *own = g.data + sample * g.steps[0] + start * g.steps[2], *inputs = x.data + sample * x.steps[0];
      if (parts > 1) std::fill(gs.begin(), gs.end(), 0);  // the last part is smaller
      for (int64_t at = 0; at < end - start; at += OS)
        pack<OS>(own + at * g.steps[2], g.steps, k, std::min(OS, end - start - at), gs.data() + at * k);
      for (int64_t at = 0, left = up(i, V) / V; left > 0; at += next_of(left) * V, left -= next_of(left)) {
        const auto pack_some = next_of(left) == 3 ? pack<3 * V> : next_of(left) == 2 ? pack<2 * V> : pack<V>;
        pack_some(inputs + at * x.steps[2], x.steps, k, std::min(next_of(left) * V, i - at), xs.data() + at * k);
      }
      Squares square;
      for (int64_t block = start; block < end; block += OS)
        for (int64_t at = 0, left = up(i, V) / V; left > 0; at += next_of(left) * V, left -= next_of(left)) {
          const int64_t width = next_of(left) * V, count = std::min(width, i - at);
          for (int64_t row = 0; row < k; row += CHAIN) {
            const float* factors = gs.data() + (block - start) * k + row * OS;
            const float* values = xs.data() + at * k + row * width;
            multiply_by(next_of(left))(factors, OS, values, {width}, std::min(CHAIN, k - row), tile.data(), width,
                                       row == 0);
          }
          square.add(tile.data(), OS * width);  // what is behind the end is 0, or the sample is not finite anyway
          if (out)
            for (int64_t m = 0; m < std::min(OS, end - block); ++m)
              write(tile.data() + m * width, count, out + (sample * o + block + m) * i + at, large);
        }
      double lengths = 0, lost = 0;
      for (int64_t row = 0; row < k; ++row) {
        const double of_g = square_of(own + row * g.steps[1], end - start, g.steps[2]);
        const double of_x = square_of(inputs + row * x.steps[1], i, x.steps[2]);
        const double length = std::sqrt(of_g + (end - start) * LOST) * std::sqrt(of_x + i * LOST);
        lengths += length;
        lost += length - std::sqrt(of_g) * std::sqrt(of_x);
      }
      found[unit] = square.value();
      found[units + unit] = lengths;
      found[2 * units + unit] = lost;
    }
    drain();
  }
}

// Of what `product_rows` found, in parts: the norms. `rounding` of the lengths is what they may be off by.
extern "C" int64_t product_norms(const double* sums, int64_t n, int64_t parts, double rounding, double* found, int threads) {
  const Norms norms{found, n};
  for (int64_t sample = 0; sample < n; ++sample) {
    const double* own = sums + sample * parts;
    const double norm = std::sqrt(summed(own, parts));
    const double lengths = summed(own + n * parts, parts), lost = summed(own + 2 * n * parts, parts);
    norms.set(sample, norm, norm * (1 + SQUARED) + rounding * lengths, norm < SMALL || rounding * lost > 1e-4 * norm);
  }
  return norms.count_spoilt();
}

// The products of g [n, o] and x [n, i], contiguous, as [n, o, i].
extern "C" void outer_rows(const float* g, const float* x, int64_t n, int64_t o, int64_t i, float* out, int threads) {
  const bool large = n * o * i * 4 >= WRITTEN;
#pragma omp parallel num_threads(threads) if (threads > 1 && large)
  {
#pragma omp for
    for (int64_t row = 0; row < n * o; ++row) write(x + row / o * i, i, out + row * i, large, g[row]);
    drain();
  }
}
