// What the kernels of this folder begin with: sums of products in registers, and sums of squares.

#include <ATen/cpu/vec/vec.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <new>
#include <type_traits>
#include <vector>

constexpr int64_t LINE = 64;  // bytes that a cache reads at once

template <typename T>
struct AtLine {  // memory that begins where a line does: a vector across two of them takes two reads
  using value_type = T;
  AtLine() = default;
  template <typename Other>
  AtLine(const AtLine<Other>&) {}
  T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t(LINE))); }
  void deallocate(T* values, size_t) { ::operator delete(values, std::align_val_t(LINE)); }
  bool operator==(const AtLine&) const { return true; }
};

template <typename T>
using Memory = std::vector<T, AtLine<T>>;

// Let the cache fetch `rows` rows of numbers, which are read later.
static inline void fetch(const float* from, int64_t of_row, int64_t rows, int64_t columns) {
#if defined(__GNUC__)
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t at = 0; at < columns; at += LINE / 4) __builtin_prefetch(from + row * of_row + at);
#endif
}

template <typename T>
using VecOf = at::vec::Vectorized<T>;
using Vec = VecOf<float>;
constexpr int64_t V = Vec::size();
constexpr int64_t CHAIN = 512;  // products that are added one after another, at most; then those sums: see norms.gamma

constexpr int64_t TILE = V >= 16 ? 16 : 8;  // numbers that are turned over at once, by as many
constexpr double LOST = 1.2e-38;  // of a square that underflows, at most, also where denormals are flushed

// A matrix transposed: `rows` rows of `columns` numbers, `of_row` apart, become columns of rows that are `to_row` apart. A
// whole tile by the form whose sizes the compiler knows: with AVX2 the other one goes number by number.
template <typename T>
void turn_over(const T* from, int64_t of_row, int64_t rows, int64_t columns, T* to, int64_t to_row) {
  for (int64_t r = 0; r < rows; r += TILE)
    for (int64_t c = 0; c < columns; c += TILE) {
      const T* tile = from + r * of_row + c;
      T* turned = to + c * to_row + r;
      const int64_t high = std::min(TILE, rows - r), wide = std::min(TILE, columns - c);
      if (high == TILE && wide == TILE)
        at::vec::transpose_mxn<T, TILE, TILE>(tile, of_row, turned, to_row);
      else
        at::vec::transpose_mxn<T>(tile, of_row, turned, to_row, high, wide);
    }
}

constexpr int64_t OS = V >= 16 ? 8 : 4;  // the outputs, and vectors of inputs, whose products are summed in registers
constexpr int64_t VECTORS = 3;  // at most

// V numbers of a position, as rows of panels that are OS wide.
static inline void put_in_panels(const Vec& numbers, float* into, int64_t of_panel) {
  float lanes[V];
  numbers.store(lanes);
  for (int64_t at = 0; at < V; at += OS) std::copy_n(lanes + at, OS, into + at / OS * of_panel);
}

// Of a position and the next one: whole vectors, as half of one would be written twice as often.
static inline void put_in_panels(const Vec& numbers, const Vec& next, float* into, int64_t of_panel) {
#if defined(CPU_CAPABILITY_AVX512)
  _mm512_storeu_ps(into, _mm512_shuffle_f32x4(numbers, next, 0x44));
  _mm512_storeu_ps(into + of_panel, _mm512_shuffle_f32x4(numbers, next, 0xEE));
#elif defined(CPU_CAPABILITY_AVX2)
  _mm256_storeu_ps(into, _mm256_permute2f128_ps(numbers, next, 0x20));
  _mm256_storeu_ps(into + of_panel, _mm256_permute2f128_ps(numbers, next, 0x31));
#else
  put_in_panels(numbers, into, of_panel);
  put_in_panels(next, into + OS, of_panel);
#endif
}

// Of V vectors the sums of their lanes, in their order. Two vectors become one whose lanes are theirs in turn, each added to
// another of the same vector; then two of those do.
static inline Vec lanes_added(const Vec (&vectors)[V]) {
#if defined(CPU_CAPABILITY_AVX512)
  Vec fours[4], eights[2];
#pragma GCC unroll 4
  for (int64_t at = 0; at < 4; ++at) {
    const Vec* of = vectors + 4 * at;
    const Vec one = Vec(_mm512_unpacklo_ps(of[0], of[1])) + Vec(_mm512_unpackhi_ps(of[0], of[1]));
    const Vec two = Vec(_mm512_unpacklo_ps(of[2], of[3])) + Vec(_mm512_unpackhi_ps(of[2], of[3]));
    fours[at] = Vec(_mm512_shuffle_ps(one, two, 0x44)) + Vec(_mm512_shuffle_ps(one, two, 0xEE));
  }
#pragma GCC unroll 2
  for (int64_t at = 0; at < 2; ++at) {
    const Vec *one = fours + 2 * at, *two = one + 1;
    eights[at] = Vec(_mm512_shuffle_f32x4(*one, *two, 0x44)) + Vec(_mm512_shuffle_f32x4(*one, *two, 0xEE));
  }
  return Vec(_mm512_shuffle_f32x4(eights[0], eights[1], 0x88)) + Vec(_mm512_shuffle_f32x4(eights[0], eights[1], 0xDD));
#elif defined(CPU_CAPABILITY_AVX2)
  Vec fours[2];
#pragma GCC unroll 2
  for (int64_t at = 0; at < 2; ++at) {
    const Vec* of = vectors + 4 * at;
    const Vec one = Vec(_mm256_unpacklo_ps(of[0], of[1])) + Vec(_mm256_unpackhi_ps(of[0], of[1]));
    const Vec two = Vec(_mm256_unpacklo_ps(of[2], of[3])) + Vec(_mm256_unpackhi_ps(of[2], of[3]));
    fours[at] = Vec(_mm256_shuffle_ps(one, two, 0x44)) + Vec(_mm256_shuffle_ps(one, two, 0xEE));
  }
  return Vec(_mm256_permute2f128_ps(fours[0], fours[1], 0x20)) + Vec(_mm256_permute2f128_ps(fours[0], fours[1], 0x31));
#else
  float lanes[V], totals[V];
  for (int64_t at = 0; at < V; ++at) {
    vectors[at].store(lanes);
    totals[at] = 0;
    for (const float lane : lanes) totals[at] += lane;
  }
  return Vec::loadu(totals);
#endif
}

// How many vectors of the `left` that are left are next: a single one at the end would take as long as two.
static inline int64_t next_of(int64_t left) { return left == 4 ? 2 : std::min(VECTORS, left); }

static inline int64_t up(int64_t size, int64_t step) { return (size + step - 1) / step * step; }

static inline double total_of(const Vec& sums) {
  float lanes[V];
  sums.store(lanes);
  double parts[4] = {0, 0, 0, 0};
  for (int64_t k = 0; k < V; ++k) parts[k % 4] += lanes[k];
  return (parts[0] + parts[1]) + (parts[2] + parts[3]);
}

// A sum of squares. A lane adds at most CHAIN of them before they go on as doubles.
struct Squares {
  static constexpr int64_t LANES = 4;  // of vectors, which do not wait for each other
  Vec sums[LANES] = {Vec(0), Vec(0), Vec(0), Vec(0)};
  int64_t chain = 0;
  double total = 0;

  void add(const float* values, int64_t count) {
    for (int64_t k = 0; k < count; k += LANES * V, ++chain) {
      if (chain == CHAIN - 2) flush();
#pragma GCC unroll 4
      for (int64_t r = 0; r < LANES; ++r)
        if (const int64_t left = count - k - r * V; left > 0) {
          const Vec value = Vec::loadu(values + k + r * V, std::min(V, left));
          sums[r] = at::vec::fmadd(value, value, sums[r]);
        }
    }
  }

  void flush() {
    total += total_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (Vec& sum : sums) sum = Vec(0);
    chain = 0;
  }

  double value() {
    flush();
    return total;
  }
};

static inline double squares(const float* values, int64_t count) {
  Squares found;
  found.add(values, count);
  return found.value();
}

constexpr double UNIT = 1.0 / (1 << 24);  // the roundoff of float32: see precision.unit
constexpr double SQUARED = (CHAIN + 2) * UNIT;  // how far the root of a sum of squares in float32 may be off: see norms.gamma
constexpr double SMALL = 1e-12;  // norms below this may have lost digits to underflow: see norms.SMALL

// Of each sample its gradient's norm and a bound of it, [2, n]: NaN where float32's range may have spoilt them.
struct Norms {
  double* found;
  int64_t n;

  void set(int64_t sample, double norm, double bound, bool lost) const {
    const bool spoilt = lost || !std::isfinite(bound);
    found[sample] = spoilt ? NAN : norm;
    found[n + sample] = spoilt ? NAN : bound;
  }

  int64_t count_spoilt() const {
    return std::count_if(found, found + n, [](double norm) { return std::isnan(norm); });
  }
};

static inline double summed(const double* parts, int64_t count) {
  double total = 0;
  for (int64_t part = 0; part < count; ++part) total += parts[part];
  return total;
}

constexpr int64_t WRITTEN = 4 << 20;  // bytes of results from which they are not in the cache when somebody reads them

// Numbers times a factor, of a result that is large or not. A large one is written past the cache, line by line: a usual
// store reads what it is about to write over. Until `drain`, other threads may not see it.
static inline void write(const float* from, int64_t count, float* to, bool large, float factor = 1) {
  int64_t at = 0;
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  if (large) {
    const int64_t behind = reinterpret_cast<uintptr_t>(to) % LINE, head = std::min(count, behind ? (LINE - behind) / 4 : 0);
    for (; at < head; ++at) to[at] = factor * from[at];
    for (; at + LINE / 4 <= count; at += LINE / 4)
      for (int64_t part = at; part < at + LINE / 4; part += V) {
        const Vec value = Vec::loadu(from + part) * Vec(factor);
#if defined(CPU_CAPABILITY_AVX512)
        _mm512_stream_ps(to + part, value);
#else
        _mm256_stream_ps(to + part, value);
#endif
      }
  }
#endif
  for (; at < count; at += V) {  // the compiler is told not to vectorise loops by itself
    const int64_t size = std::min(V, count - at);
    (Vec::loadu(from + at, size) * Vec(factor)).store(to + at, size);
  }
}

static inline void drain() {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  _mm_sfence();
#endif
}

// Keep a value in its register. g++ would read it from memory again for each of its uses, which takes as long as a
// product does.
#if defined(__GNUC__) && defined(CPU_CAPABILITY_AVX512)
template <typename T>
void hold(VecOf<T>& value) {
  std::conditional_t<std::is_same_v<T, float>, __m512, __m512d> held = value;
  asm("" : "+v"(held));
  value = held;
}
#elif defined(__GNUC__) && defined(CPU_CAPABILITY_AVX2)
template <typename T>
void hold(VecOf<T>& value) {
  std::conditional_t<std::is_same_v<T, float>, __m256, __m256d> held = value;
  asm("" : "+x"(held));
  value = held;
}
#else
template <typename T>
void hold(VecOf<T>&) {}
#endif

// Where what is multiplied with each position begins: as far apart as rows of a matrix, or anywhere.
struct Apart {
  int64_t step;
  int64_t operator()(int64_t position) const { return position * step; }
};

struct Anywhere {
  const int64_t* starts;
  int64_t operator()(int64_t position) const { return starts[position]; }
};

// total[o, :] (+)= the sum over some positions of g[position, o] input[where(position), :], for OS o and N vectors. One loop:
// one inside of another, such as over rows of eight pixels, takes a third longer.
template <int64_t N, typename T, typename Where>
void multiply(const T* g, int64_t of_g, const T* input, Where where, int64_t positions, T* total, int64_t of_total,
              bool first) {
  constexpr int64_t size = VecOf<T>::size();
  VecOf<T> sums[OS][N];  // zeros
  for (int64_t position = 0; position < positions; ++position, g += of_g) {
    const T* values = input + where(position);
    VecOf<T> run[N];
#pragma GCC unroll 3
    for (int64_t r = 0; r < N; ++r) {
      run[r] = VecOf<T>::loadu(values + r * size);
      hold<T>(run[r]);
    }
#pragma GCC unroll 8
    for (int64_t o = 0; o < OS; ++o) {
      const VecOf<T> factor(g[o]);
#pragma GCC unroll 3
      for (int64_t r = 0; r < N; ++r) sums[o][r] = at::vec::fmadd(factor, run[r], sums[o][r]);
    }
  }
  for (int64_t o = 0; o < OS; ++o)
    for (int64_t r = 0; r < N; ++r) {
      T* to = total + o * of_total + r * size;
      (first ? sums[o][r] : VecOf<T>::loadu(to) + sums[o][r]).store(to);
    }
}

template <typename T = float, typename Where = Apart>
auto multiply_by(int64_t vectors) {
  return vectors == 3 ? multiply<3, T, Where> : vectors == 2 ? multiply<2, T, Where> : multiply<1, T, Where>;
}
