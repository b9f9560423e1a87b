// The product that each step of a recurrence waits for: of all states with the weights of some hidden units.
//
// A thread has some of the units from the first step to the last: their weights stay in its cache, and what it computes
// for them stays its own. Only what a product is of, the states before the step or the gradients of all gates, comes
// from every thread, and is shared.

#ifdef _OPENMP
#include <omp.h>
#endif

template <typename T>
constexpr int64_t SIZE = VecOf<T>::size();

constexpr int64_t AT_ONCE = 256;  // numbers of a sample in a product: with their weights they stay in the first cache
constexpr int64_t WORTH = 1 << 16;  // products of a step from which a thread is worth what waiting for it takes

template <typename T>
struct Layer {
  int64_t batch, hidden;
  int parts;  // that the units are divided into, one for each thread

  Layer(int64_t batch, int64_t hidden, int threads) : batch(batch), hidden(hidden) {
    const int64_t worth = std::min(vectors(), batch * 4 * hidden * hidden / WORTH);
    parts = std::max<int64_t>(1, std::min<int64_t>(threads, worth));
  }

  int64_t vectors() const { return up(hidden, SIZE<T>) / SIZE<T>; }
  int64_t filled() const { return vectors() * SIZE<T>; }  // the units with what fills the last vector
  int64_t rows() const { return up(batch, OS); }
};

// Units of a layer: whole vectors, but at the end of all.
template <typename T>
struct Part {
  const Layer<T>& layer;
  int64_t from, width, units;  // the first one, and how many, with and without what fills the last vector

  Part(const Layer<T>& layer, int64_t part)
      : layer(layer),
        from(part * layer.vectors() / layer.parts * SIZE<T>),
        width((part + 1) * layer.vectors() / layer.parts * SIZE<T> - from),
        units(std::min(width, layer.hidden - from)) {}

  template <typename Do>
  void panels(Do each) const {  // of up to VECTORS vectors: the unit where one begins, and how many vectors they are
    for (int64_t at = from, left = width / SIZE<T>; left > 0; at += next_of(left) * SIZE<T>, left -= next_of(left))
      each(at, next_of(left));
  }
};

// Call `each` with the parts of this thread. OpenMP may give fewer threads than there are parts.
template <typename T, typename Do>
void own_parts(const Layer<T>& layer, Do each) {
#ifdef _OPENMP
  const int first = omp_get_thread_num(), step = omp_get_num_threads();
#else
  const int first = 0, step = 1;
#endif
  for (int64_t part = first; part < layer.parts; part += step) each(Part<T>(layer, part));
}

// W [4 H, H] as the products read it, panel by panel, and k by k in a panel. Forward they give the gates, W h; back
// they give units, of the gradients of the gates.
template <typename T>
void lay_out(const T* w, T* to, bool back, const Layer<T>& layer) {
  const int64_t hidden = layer.hidden, gates = 4 * hidden;
#pragma omp parallel for num_threads(layer.parts) if (layer.parts > 1)
  for (int64_t part = 0; part < layer.parts; ++part)
    Part<T>(layer, part).panels([&](int64_t at, int64_t vectors) {
      const int64_t width = vectors * SIZE<T>, count = std::min(width, hidden - at);
      if (back)
        for (int64_t k = 0; k < gates; ++k) std::copy_n(w + k * hidden + at, count, to + at * gates + k * width);
      else
        for (int64_t gate = 0; gate < 4; ++gate)
          turn_over(w + (gate * hidden + at) * hidden, hidden, count, hidden,
                    to + (gate * layer.filled() + at) * hidden, width);
    });
}

// What is shared, [B, k], lies as blocks [k, TILE] of samples, twice: what the products of this step read, and what
// those of the next one will.
template <typename T>
class Shared {
 public:
  Shared(const Layer<T>& layer, int64_t k) : batch(layer.batch), k(k), values(2 * up(batch, TILE) * k) {}

  // Give `count` numbers of every sample, from `at` on, to the products of a step.
  void give(int64_t step, const T* from, int64_t of_row, int64_t at, int64_t count) {
    for (int64_t row = 0; row < batch; row += TILE)
      turn_over(from + row * of_row, of_row, std::min(TILE, batch - row), count, of(step) + row * k + at * TILE, TILE);
  }

  // out [B, width] = the product of a step with the weights of a part's units.
  void product(int64_t step, const T* weights, const Part<T>& part, T* out) {
    part.panels([&](int64_t at, int64_t vectors) {
      const int64_t width = vectors * SIZE<T>;
      for (int64_t start = 0; start < k; start += AT_ONCE)
        for (int64_t row = 0; row < batch; row += OS)
          multiply_by<T>(vectors)(of(step) + (row / TILE * k + start) * TILE + row % TILE, TILE,
                                  weights + at * k + start * width, {width}, std::min(AT_ONCE, k - start),
                                  out + row * part.width + at - part.from, part.width, start == 0);
    });
  }

 private:
  T* of(int64_t step) { return values.data() + step % 2 * (values.size() / 2); }

  const int64_t batch, k;
  Memory<T> values;
};
