// Of g [n, k, o] and x [n, k, i] for each sample, with the Gram matrices G = g gT and X = x xT of its positions:
//
//     sum G X   sum |G X|   sum |g_a| |g_b| |X_ab|   sum |x_a| |x_b| |G_ab|   sum |g_a| |x_a|   sum |g_a|   sum |x_a|
//
// The first is the squared norm of sum_k g_k (x) x_k, the others bound its rounding. The matrices are symmetric: what
// is above the diagonal counts twice.
//
// Where positions are few and have many features, one behind the other in memory, V features are multiplied at once, and V
// sums of V lanes are added up together. Else V positions are: some features of all positions are turned over, and
// stay in a near cache.

constexpr int64_t NEAR = 6144, FEATURES = 96;  // numbers, and features at least: gram_kernel.py knows of the second
constexpr int64_t FEW = 4 * V, MANY = 4;       // positions, and features for each of them
constexpr int64_t LONGEST = 1024;              // features of OWN positions that stay in the cache while others go by
constexpr int64_t OWN = 4, OTHERS = V / OWN;   // positions that are multiplied with others: V sums of V lanes

// Lets the cache fetch what is read later, some of it at each step: first one block of memory, then another.
struct Ahead {
  const float *at, *end, *then, *end_then;

  void step() {
#if defined(__GNUC__)
    __builtin_prefetch(at, 0, 2);  // into the second cache
#endif
    at += LINE / 8;
  }

  void go_on() {
    if (at < end) return;
    at = then;
    end = end_then;
  }
};

// The sums over `count` features of the products of OWN positions with OTHERS: [OTHERS, OWN], V of them. About as many of
// both: then the fewest vectors are read, and to read them takes as long as to multiply.
static inline Vec products(const float* const* own, const float* const* others, int64_t count, Ahead& ahead) {
  Vec sums[V];  // zeros
  const auto add = [&](int64_t f, int64_t width) {
    Vec values[OTHERS];
#pragma GCC unroll 4
    for (int64_t r = 0; r < OTHERS; ++r) {
      values[r] = width == V ? Vec::loadu(others[r] + f) : Vec::loadu(others[r] + f, width);
      hold<float>(values[r]);
    }
#pragma GCC unroll 4
    for (int64_t o = 0; o < OWN; ++o) {
      const Vec value = width == V ? Vec::loadu(own[o] + f) : Vec::loadu(own[o] + f, width);
#pragma GCC unroll 4
      for (int64_t r = 0; r < OTHERS; ++r) sums[r * OWN + o] = at::vec::fmadd(value, values[r], sums[r * OWN + o]);
    }
  };
  Ahead here = ahead;  // in registers
  int64_t f = 0;
  for (; f + V <= count; f += V) {
    here.step();
    add(f, V);
  }
  ahead = here;
  if (f < count) add(f, count - f);
  return lanes_added(sums);
}

// The products of positions with each other. They are symmetric: only what is not below the diagonal counts.
struct Pairs {
  const int64_t k, padded = up(k, V);
  Memory<float> matrix = Memory<float>(padded * padded), lengths = Memory<float>(padded);
  double length = 0;  // of all positions, added up

  explicit Pairs(int64_t k) : k(k) {}

  void measure(int64_t size) {
    length = 0;
    for (int64_t a = 0; a < k; ++a) {
      lengths[a] = std::sqrt(std::max(0.0, double(matrix[a * padded + a])) + size * LOST);
      length += lengths[a];
    }
  }
};

struct Gram : Pairs {
  const int64_t most = std::clamp(NEAR / padded / TILE * TILE, FEATURES, CHAIN);
  Memory<float> features = Memory<float>(most * padded);

  using Pairs::Pairs;

  void add_up(const float* from, const int64_t* steps, int64_t size, Ahead& ahead, const float* next, int64_t of_next) {
    if (steps[2] == 1 && k <= FEW && size >= MANY * k)
      by_features(from, steps[1], size, ahead);
    else
      by_positions(from, steps, size, next, of_next);
    measure(size);
  }

  // What is behind the last position is that one again, and is not counted.
  void by_features(const float* from, int64_t of_position, int64_t size, Ahead& ahead) {
    const auto position = [&](int64_t at) { return from + std::min(at, k - 1) * of_position; };
    for (int64_t start = 0; start < size; start += LONGEST)
      for (int64_t a = 0; a < k; a += OWN) {
        const float *own[OWN], *others[OTHERS];
        for (int64_t o = 0; o < OWN; ++o) own[o] = position(a + o) + start;
        for (int64_t b = 0; b < std::min(a + OWN, k); b += OTHERS) {
          for (int64_t r = 0; r < OTHERS; ++r) others[r] = position(b + r) + start;
          ahead.go_on();
          float sums[V];
          products(own, others, std::min(LONGEST, size - start), ahead).store(sums);
          for (int64_t r = 0; r < OTHERS; ++r) {
            float* to = matrix.data() + (b + r) * padded + a;
            const Vec sum = Vec::loadu(sums + r * OWN, OWN);
            (start == 0 ? sum : sum + Vec::loadu(to, OWN)).store(to, OWN);
          }
        }
      }
  }

  // `next` is read behind these. While products are computed, the cache fetches what comes after the features in work.
  void by_positions(const float* from, const int64_t* steps, int64_t size, const float* next, int64_t of_next) {
    for (int64_t start = 0; start < size; start += most) {
      const int64_t count = std::min(most, size - start);
      load(from + start * steps[2], steps, count);
      const bool more = start + most < size;
      const float* ahead = more ? from + (start + most) * steps[2] : next;
      const int64_t of_row = more ? steps[1] : of_next;
      for (int64_t a = 0; a < k; a += OS) {
        fetch(ahead + a * of_row, of_row, std::min(OS, k - a), most);
        for (int64_t b = a / V * V, left = (padded - b) / V; left > 0; b += next_of(left) * V, left -= next_of(left))
          multiply_by(next_of(left))(features.data() + a, padded, features.data() + b, {padded}, count,
                                     matrix.data() + a * padded + b, padded, start == 0);
      }
    }
  }

  // [k, count] as [count, padded]; what is behind the positions stays 0.
  void load(const float* from, const int64_t* steps, int64_t count) {
    if (steps[2] == 1) {
      turn_over(from, steps[1], k, count, features.data(), padded);
    } else if (steps[1] == 1) {
      for (int64_t f = 0; f < count; ++f) std::copy_n(from + f * steps[2], k, features.data() + f * padded);
    } else {
      for (int64_t f = 0; f < count; ++f)
        for (int64_t position = 0; position < k; ++position)
          features[f * padded + position] = from[position * steps[1] + f * steps[2]];
    }
  }
};

// The sum of vectors, lane by lane as doubles.
struct Wide {
  VecOf<double> lanes[2] = {VecOf<double>(0), VecOf<double>(0)};

  void add(const Vec& values) {
    const auto wide = at::vec::convert<double, 2, float, 1>(values);
    lanes[0] = lanes[0] + wide[0];
    lanes[1] = lanes[1] + wide[1];
  }

  double total() const {
    double parts[V];
    lanes[0].store(parts);
    lanes[1].store(parts + V / 2);
    return summed(parts, V);
  }
};

// What two matrices come to for each sample. `off_g` and `off_x` say how far rounding may put off a product of two g, of `o`
// features, and one of two x.
struct Meeting {
  const int64_t o, i;
  const double off_g, off_x;
  const Norms norms;
  Memory<float> counts;  // how often an entry of a row counts

  void meet(int64_t sample, const Pairs& g, const Pairs& x) {
    counts.assign(g.padded, 0);
    std::fill_n(counts.begin(), g.k, 2.0f);
    Wide squares, sizes, by_g, by_x;
    double lengths = 0;
    for (int64_t a = 0; a < g.k; ++a) {
      counts[a] = 1;
      Vec of_row[4] = {Vec(0), Vec(0), Vec(0), Vec(0)};
      for (int64_t b = a / V * V; b < g.padded; b += V) {
        const Vec count = Vec::loadu(counts.data() + b);
        const Vec in_g = Vec::loadu(g.matrix.data() + a * g.padded + b);
        const Vec in_x = Vec::loadu(x.matrix.data() + a * g.padded + b);
        const Vec product = in_g * in_x;
        of_row[0] = at::vec::fmadd(count, product, of_row[0]);
        of_row[1] = at::vec::fmadd(count, product.abs(), of_row[1]);
        of_row[2] = at::vec::fmadd(count * Vec::loadu(g.lengths.data() + b), in_x.abs(), of_row[2]);
        of_row[3] = at::vec::fmadd(count * Vec::loadu(x.lengths.data() + b), in_g.abs(), of_row[3]);
      }
      counts[a] = 0;
      squares.add(of_row[0]);
      sizes.add(of_row[1]);
      by_g.add(of_row[2] * Vec(g.lengths[a]));
      by_x.add(of_row[3] * Vec(x.lengths[a]));
      lengths += double(g.lengths[a]) * x.lengths[a];
    }
    const double lost = LOST * (o * x.length * x.length + i * g.length * g.length);  // to underflow
    const double off_sum = (g.padded / V + 4) * UNIT;
    const double slack = off_g * by_g.total() + off_x * by_x.total() + off_g * off_x * lengths * lengths +
                         off_sum * sizes.total() + lost;
    const double found = squares.total(), square = found < 0 ? 0 : found;
    const double bound = std::sqrt(square + 1.01 * slack) * (1 + 1e-12);
    norms.set(sample, std::sqrt(square), bound, bound < SMALL || lost > 1e-7 * found);
  }
};

extern "C" int64_t gram_norms(const float* g_data, const int64_t* g_steps, const float* x_data, const int64_t* x_steps,
                              int64_t n, int64_t k, int64_t o, int64_t i, double off_g, double off_x, double* found,
                              int threads) {
  const Norms norms{found, n};
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Gram g{k}, x{k};
    Meeting meeting{o, i, off_g, off_x, norms, {}};
#pragma omp for
    for (int64_t sample = 0; sample < n; ++sample) {
      const float *of_g = g_data + sample * g_steps[0], *of_x = x_data + sample * x_steps[0];
      const float *next_g = of_g + g_steps[0], *next_x = of_x + x_steps[0];
      Ahead ahead{next_g, next_g + (k - 1) * g_steps[1] + o, next_x, next_x + (k - 1) * x_steps[1] + i};
      g.add_up(of_g, g_steps, o, ahead, of_x, x_steps[1]);
      x.add_up(of_x, x_steps, i, ahead, next_g, g_steps[1]);
      meeting.meet(sample, g, x);
    }
  }
  return norms.count_spoilt();
}
