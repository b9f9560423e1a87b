// What a step of an LSTM does beside its product, in one pass over the gates: the loops in lstm.py say the same.
//
//     c' = f c + i n        h' = o tanh(c')        gates: i, f, n, o, each [B, H]
//
// A sample that is over (going_on is 0 there) keeps its states and gets no gradient.

#include <ATen/cpu/vec/vec.h>
#include <algorithm>
#include <cstdint>

template <typename T>
using Vec = at::vec::Vectorized<T>;

template <typename T>
Vec<T> sigmoid(Vec<T> x) {
  return Vec<T>(1) / (Vec<T>(1) + x.neg().exp());
}

template <typename T>
Vec<T> tanh(Vec<T> x) {  // a third of the time of Vec's own; off by a rounding of 1, not of tanh(x)
  return Vec<T>(2) * sigmoid<T>(Vec<T>(2) * x) - Vec<T>(1);
}

// Gates before their activation -> i, f, n, o;  c, h -> c_after, h_after.
template <typename T>
void forward(const T* before, T* gates, const T* c, T* c_after, const T* h, T* h_after, const T* going_on,
             int64_t batch, int64_t hidden, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t row = b * hidden;
    if (going_on && going_on[b] == 0) {
      std::copy_n(c + row, hidden, c_after + row);
      std::copy_n(h + row, hidden, h_after + row);
      std::fill_n(gates + 4 * row, 4 * hidden, T(0));  // nothing in an operator's result is left as memory was
      continue;
    }
    T *i = gates + 4 * row, *f = i + hidden, *n = f + hidden, *o = n + hidden;
    for (int64_t k = 0; k < hidden; k += Vec<T>::size()) {
      const int64_t size = std::min<int64_t>(Vec<T>::size(), hidden - k);
      const auto load = [&](const T* from) { return Vec<T>::loadu(from + k, size); };
      const auto gate = [&](const T* of) { return load(before + (of - gates)); };
      const Vec<T> vi = sigmoid<T>(gate(i)), vf = sigmoid<T>(gate(f)), vn = tanh<T>(gate(n)), vo = sigmoid<T>(gate(o));
      const Vec<T> cell = vf * load(c + row) + vi * vn;
      vi.store(i + k, size);
      vf.store(f + k, size);
      vn.store(n + k, size);
      vo.store(o + k, size);
      cell.store(c_after + row + k, size);
      (vo * tanh<T>(cell)).store(h_after + row + k, size);
    }
  }
}

// dh and dc, the gradients of the states after the step -> d, those of the gates before their activation, and dc
// before the step.
template <typename T>
void backward(const T* gates, const T* c, const T* c_after, const T* dh, T* dc, T* d, const T* going_on,
              int64_t batch, int64_t hidden, int threads) {
  const Vec<T> one(1);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t row = b * hidden;
    if (going_on && going_on[b] == 0) {
      std::fill_n(d + 4 * row, 4 * hidden, T(0));
      continue;
    }
    const T *i = gates + 4 * row, *f = i + hidden, *n = f + hidden, *o = n + hidden;
    for (int64_t k = 0; k < hidden; k += Vec<T>::size()) {
      const int64_t size = std::min<int64_t>(Vec<T>::size(), hidden - k);
      const auto load = [&](const T* from) { return Vec<T>::loadu(from + k, size); };
      const auto store = [&](Vec<T> value, int64_t gate) { value.store(d + 4 * row + gate * hidden + k, size); };
      const Vec<T> vi = load(i), vf = load(f), vn = load(n), vo = load(o);
      const Vec<T> tanh_c = tanh<T>(load(c_after + row)), output = load(dh + row);
      const Vec<T> cell = load(dc + row) + output * vo * (one - tanh_c * tanh_c);
      store(cell * vn * vi * (one - vi), 0);
      store(cell * load(c + row) * vf * (one - vf), 1);
      store(cell * vi * (one - vn * vn), 2);
      store(output * tanh_c * vo * (one - vo), 3);
      (cell * vf).store(dc + row + k, size);
    }
  }
}

// `Library` reads these declarations: no macro.
extern "C" void forward_float32(float* before, float* gates, float* c, float* c_after, float* h, float* h_after, float* going_on,
                                int64_t batch, int64_t hidden, int threads) {
  forward<float>(before, gates, c, c_after, h, h_after, going_on, batch, hidden, threads);
}

extern "C" void backward_float32(float* gates, float* c, float* c_after, float* dh, float* dc, float* d, float* going_on,
                                 int64_t batch, int64_t hidden, int threads) {
  backward<float>(gates, c, c_after, dh, dc, d, going_on, batch, hidden, threads);
}

extern "C" void forward_float64(double* before, double* gates, double* c, double* c_after, double* h, double* h_after, double* going_on,
                                int64_t batch, int64_t hidden, int threads) {
  forward<double>(before, gates, c, c_after, h, h_after, going_on, batch, hidden, threads);
}

extern "C" void backward_float64(double* gates, double* c, double* c_after, double* dh, double* dc, double* d, double* going_on,
                                 int64_t batch, int64_t hidden, int threads) {
  backward<double>(gates, c, c_after, dh, dc, d, going_on, batch, hidden, threads);
}
