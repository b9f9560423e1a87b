// Of a table's gradients, from ids [n, k] and g [n, k, d].

#include <cstring>

static inline void add(float* to, const float* row, int64_t d, float weight) {
  const Vec times(weight);
  for (int64_t at = 0; at < d; at += V) {
    const int64_t size = std::min(V, d - at);
    at::vec::fmadd(Vec::loadu(row + at, size), times, Vec::loadu(to + at, size)).store(to + at, size);
  }
}

struct Sum {
  int64_t id, count;
  double lengths;  // of the rows, added up, where there are several
};

// Before a row is added to the sum that is in memory: how many there are, and how long.
static inline void count_row(Sum& sum, const float* to, const float* row, int64_t d) {
  if (sum.count == 1) sum.lengths = std::sqrt(squares(to, d));
  if (sum.count > 0) sum.lengths += std::sqrt(squares(row, d));
  sum.count += 1;
}

// How far rounding may put a gradient off: its rows are sums of float32, one after another.
static inline double off_by(const std::vector<Sum>& sums) {
  double off = 0;
  for (const Sum& sum : sums) {
    if (sum.count < 2) continue;
    const double added = sum.count;  // one more than additions: rows may be off, too
    const double relative = added / std::max(0.5, 1 - added * 6e-8) * sum.lengths;
    off += relative * relative;
  }
  return off;
}

static inline void set_norms(const Norms& norms, int64_t sample, double squared, const std::vector<Sum>& sums) {
  const double norm = std::sqrt(squared), rounding = std::sqrt(off_by(sums)) * UNIT;
  norms.set(sample, norm, norm * (1 + SQUARED) + 1.001 * rounding, norm < SMALL);
}

// The gradients themselves, [n, classes, d]: a sample's is added to right after it was cleared. With `found`, their norms.
extern "C" int64_t table_grads(const int64_t* ids, const float* g, const int64_t* steps, int64_t n, int64_t k, int64_t d,
                               int64_t padding, int64_t classes, float* out, double* found, int threads) {
  const Norms norms{found, n};
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<Sum> sums(found ? classes : 0);
#pragma omp for
    for (int64_t sample = 0; sample < n; ++sample) {
      float* own = out + sample * classes * d;
      std::memset(own, 0, classes * d * sizeof(float));
      std::fill(sums.begin(), sums.end(), Sum{0, 0, 0});
      for (int64_t i = 0; i < k; ++i) {
        const int64_t id = ids[sample * k + i];
        if (id == padding) continue;
        const float* row = g + sample * steps[0] + i * steps[1];
        if (found) count_row(sums[id], own + id * d, row, d);
        add(own + id * d, row, d, 1);
      }
      if (found) set_norms(norms, sample, squares(own, classes * d), sums);
    }
  }
  return found ? norms.count_spoilt() : 0;
}

// Their sum with weights c [n], added to `out` [classes, d]. Each thread looks at all ids and adds up its own share of the
// rows, so that no two write to the same and the order is always one; rows of less than a cache line go together.
extern "C" void table_sum(const int64_t* ids, const float* g, const int64_t* steps, int64_t n, int64_t k, int64_t d,
                          int64_t padding, const float* c, float* out, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int share = 0; share < threads; ++share) {
    for (int64_t sample = 0; sample < n; ++sample) {
      if (c[sample] == 0) continue;
      for (int64_t i = 0; i < k; ++i) {
        const int64_t id = ids[sample * k + i];
        const uint32_t mixed = static_cast<uint32_t>(id * d / 16) * 0x9E3779B1u;
        if (id == padding || static_cast<int>(uint64_t(mixed) * threads >> 32) != share) continue;
        add(out + id * d, g + sample * steps[0] + i * steps[1], d, c[sample]);
      }
    }
  }
}

// The norms alone. Rows of ids that occur once are read where they lie; those of one id are added up. `places` finds an id
// among those of its sample: an open hash table with room for twice as many.
extern "C" int64_t row_norms(const int64_t* ids, const float* g, const int64_t* steps, int64_t n, int64_t k, int64_t d,
                             int64_t padding, double* found, int threads) {
  const Norms norms{found, n};
  int bits = 1;
  while ((int64_t(1) << bits) < 2 * k) ++bits;
  const int64_t room = int64_t(1) << bits;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<int64_t> places(room), of(k), to;  // of a row: its id's sum; of a sum: where it lies, if several rows add up
    std::vector<Sum> sums;
    Memory<float> rows;  // sums of several
#pragma omp for
    for (int64_t sample = 0; sample < n; ++sample) {
      std::fill(places.begin(), places.end(), -1);
      sums.clear();
      for (int64_t i = 0; i < k; ++i) {
        const int64_t id = ids[sample * k + i];
        of[i] = -1;
        if (id == padding) continue;
        int64_t place = static_cast<uint64_t>(id) * 0x9E3779B97F4A7C15u >> (64 - bits);
        while (places[place] >= 0 && sums[places[place]].id != id) place = (place + 1) & (room - 1);
        if (places[place] < 0) {
          places[place] = sums.size();
          sums.push_back({id, 0, 0});
        }
        of[i] = places[place];
        sums[of[i]].count += 1;
      }
      to.assign(sums.size(), -1);
      const int64_t most = std::count_if(sums.begin(), sums.end(), [](const Sum& sum) { return sum.count > 1; });
      if (most * d > int64_t(rows.size())) rows.resize(most * d);
      int64_t several = 0;
      Squares once;
      for (int64_t i = 0; i < k; ++i) {
        if (of[i] < 0) continue;
        const float* row = g + sample * steps[0] + i * steps[1];
        Sum& sum = sums[of[i]];
        if (sum.count == 1) {
          once.add(row, d);
          continue;
        }
        sum.lengths += std::sqrt(squares(row, d));
        int64_t& own = to[of[i]];
        if (own < 0) {
          own = several++;
          std::memcpy(rows.data() + own * d, row, d * sizeof(float));
        } else {
          add(rows.data() + own * d, row, d, 1);
        }
      }
      set_norms(norms, sample, once.value() + squares(rows.data(), several * d), sums);
    }
  }
  return norms.count_spoilt();
}
