// The loops over time of an LSTM, forward and backward: the loops in lstm.py say the same.
//
//     c' = f c + i n        h' = o tanh(c')        gates: i, f, n, o, each [B, H]
//
// A sample that is over (going_on is 0 there) keeps its states and gets no gradient.

template <typename T>
VecOf<T> sigmoid(VecOf<T> x) {
  return VecOf<T>(1) / (VecOf<T>(1) + x.neg().exp());
}

template <typename T>
VecOf<T> tanh(VecOf<T> x) {  // a third of the time of at::vec's own; off by a rounding of 1, not of tanh(x)
  return VecOf<T>(2) * sigmoid<T>(VecOf<T>(2) * x) - VecOf<T>(1);
}

// Where a part's units of a gate begin in [B, 4, H].
template <typename T>
int64_t at_gate(const Part<T>& part, int64_t b, int64_t gate) {
  return (4 * b + gate) * part.layer.hidden + part.from;
}

template <typename T>
struct States {  // [B, H]
  const T* before;
  T* after;
};

// Products [4, B, width] + projections of the input are the gates before their activation -> i, f, n, o, and the states
// after the step.
template <typename T>
void step_forward(const Part<T>& part, const T* products, const T* projected, T* gates, States<T> c, States<T> h,
                  const T* going_on) {
  for (int64_t b = 0; b < part.layer.batch; ++b) {
    const int64_t row = b * part.layer.hidden + part.from;
    if (going_on && going_on[b] == 0) {
      std::copy_n(c.before + row, part.units, c.after + row);
      std::copy_n(h.before + row, part.units, h.after + row);
      for (int64_t g = 0; g < 4; ++g)  // nothing is left as memory was
        std::fill_n(gates + at_gate(part, b, g), part.units, T(0));
      continue;
    }
    for (int64_t k = 0; k < part.units; k += SIZE<T>) {
      const int64_t size = std::min(SIZE<T>, part.units - k);
      const auto input = [&](int64_t g) {
        const T* product = products + (g * part.layer.rows() + b) * part.width + k;
        return VecOf<T>::loadu(projected + at_gate(part, b, g) + k, size) + VecOf<T>::loadu(product);
      };
      const auto store = [&](VecOf<T> value, int64_t g) { value.store(gates + at_gate(part, b, g) + k, size); };
      const VecOf<T> i = sigmoid<T>(input(0)), f = sigmoid<T>(input(1));
      const VecOf<T> n = tanh<T>(input(2)), o = sigmoid<T>(input(3));
      const VecOf<T> cell = f * VecOf<T>::loadu(c.before + row + k, size) + i * n;
      store(i, 0);
      store(f, 1);
      store(n, 2);
      store(o, 3);
      cell.store(c.after + row + k, size);
      (o * tanh<T>(cell)).store(h.after + row + k, size);
    }
  }
}

// From the gates, dh [B, width] and dc, the gradients of the states after the step -> d, those of the gates before
// their activation, and dc before the step.
template <typename T>
void step_backward(const Part<T>& part, const T* gates, States<const T> c, const T* dh, T* dc, T* d,
                   const T* going_on) {
  const VecOf<T> one(1);
  for (int64_t b = 0; b < part.layer.batch; ++b) {
    const int64_t row = b * part.layer.hidden + part.from;
    if (going_on && going_on[b] == 0) {
      for (int64_t g = 0; g < 4; ++g) std::fill_n(d + at_gate(part, b, g), part.units, T(0));
      continue;
    }
    for (int64_t k = 0; k < part.units; k += SIZE<T>) {
      const int64_t size = std::min(SIZE<T>, part.units - k);
      const auto load = [&](int64_t g) { return VecOf<T>::loadu(gates + at_gate(part, b, g) + k, size); };
      const auto store = [&](VecOf<T> value, int64_t g) { value.store(d + at_gate(part, b, g) + k, size); };
      const VecOf<T> i = load(0), f = load(1), n = load(2), o = load(3);
      const VecOf<T> before = VecOf<T>::loadu(c.before + row + k, size);
      const VecOf<T> tanh_c = tanh<T>(VecOf<T>::loadu(c.after + row + k, size));
      const VecOf<T> output = VecOf<T>::loadu(dh + b * part.width + k);
      const VecOf<T> cell = VecOf<T>::loadu(dc + row + k, size) + output * o * (one - tanh_c * tanh_c);
      store(cell * n * i * (one - i), 0);
      store(cell * before * f * (one - f), 1);
      store(cell * i * (one - n * n), 2);
      store(output * tanh_c * o * (one - o), 3);
      (cell * f).store(dc + row + k, size);
    }
  }
}

// dh [B, width] before the step: what arrives there [B, H], the product, and of a sample that is over dh itself.
template <typename T>
void carry(const Part<T>& part, const T* products, const T* arriving, T* dh, const T* going_on) {
  for (int64_t b = 0; b < part.layer.batch; ++b)
    for (int64_t k = 0; k < part.units; k += SIZE<T>) {
      T* to = dh + b * part.width + k;
      const T* from = arriving + b * part.layer.hidden + part.from + k;
      const VecOf<T> kept = going_on ? VecOf<T>(T(1) - going_on[b]) * VecOf<T>::loadu(to) : VecOf<T>(0);
      const VecOf<T> arrives = VecOf<T>::loadu(from, std::min(SIZE<T>, part.units - k));
      (VecOf<T>::loadu(products + b * part.width + k) + (arrives + kept)).store(to);
    }
}

// Call `each` with the steps in their order: number, time, and the rows of the states before and after it.
template <typename Do>
void walk(int64_t steps, bool reverse, Do each) {
  for (int64_t step = 0; step < steps; ++step) {
    const int64_t time = reverse ? steps - 1 - step : step;
    each(step, time, time + reverse, time + !reverse);
  }
}

template <typename T>
void forward(const Layer<T>& layer, int64_t steps, bool reverse, const T* projected, const T* weights, T* gates,
             T* cells, T* hs, const T* going_on) {
  const int64_t hidden = layer.hidden, of_state = layer.batch * hidden, of_gates = 4 * of_state;
  Memory<T> products(4 * layer.rows() * layer.filled());
  Shared<T> states(layer, hidden);
#pragma omp parallel num_threads(layer.parts) if (layer.parts > 1)
  {
    const auto give = [&](const Part<T>& part, int64_t step, int64_t row) {
      states.give(step, hs + row * of_state + part.from, hidden, part.from, part.units);
    };
    own_parts(layer, [&](const Part<T>& part) { give(part, 0, reverse ? steps : 0); });
#pragma omp barrier
    walk(steps, reverse, [&](int64_t step, int64_t time, int64_t before, int64_t after) {
      own_parts(layer, [&](const Part<T>& part) {
        T* own = products.data() + part.from * 4 * layer.rows();
        for (int64_t g = 0; g < 4; ++g)
          states.product(step, weights + g * layer.filled() * hidden, part, own + g * layer.rows() * part.width);
        step_forward<T>(part, own, projected + time * of_gates, gates + time * of_gates,
                        {cells + before * of_state, cells + after * of_state},
                        {hs + before * of_state, hs + after * of_state},
                        going_on ? going_on + time * layer.batch : nullptr);
        give(part, step + 1, after);
      });
#pragma omp barrier
    });
  }
}

// dhs [T + 1, B, H]: what arrives at every state; dh: what arrives at the last one -> at the first.
template <typename T>
void backward(const Layer<T>& layer, int64_t steps, bool reverse, const T* dhs, const T* weights, const T* gates,
              const T* cells, const T* going_on, T* d, T* dh, T* dc) {
  const int64_t hidden = layer.hidden, of_state = layer.batch * hidden, of_gates = 4 * of_state;
  Memory<T> products(layer.rows() * layer.filled()), carried(products.size());
  Shared<T> gradients(layer, 4 * hidden);
#pragma omp parallel num_threads(layer.parts) if (layer.parts > 1)
  {
    const auto own = [&](Memory<T>& of, const Part<T>& part) { return of.data() + part.from * layer.rows(); };
    own_parts(layer, [&](const Part<T>& part) {
      for (int64_t b = 0; b < layer.batch; ++b)
        std::copy_n(dh + b * hidden + part.from, part.units, own(carried, part) + b * part.width);
    });
    walk(steps, !reverse, [&](int64_t step, int64_t time, int64_t after, int64_t before) {
      const T* of_samples = going_on ? going_on + time * layer.batch : nullptr;
      own_parts(layer, [&](const Part<T>& part) {
        T* to = d + time * of_gates;
        step_backward<T>(part, gates + time * of_gates, {cells + before * of_state, cells + after * of_state},
                         own(carried, part), dc, to, of_samples);
        for (int64_t g = 0; g < 4; ++g)
          gradients.give(step, to + at_gate(part, 0, g), 4 * hidden, g * hidden + part.from, part.units);
      });
#pragma omp barrier
      own_parts(layer, [&](const Part<T>& part) {
        gradients.product(step, weights, part, own(products, part));
        carry(part, own(products, part), dhs + before * of_state, own(carried, part), of_samples);
      });
    });
    own_parts(layer, [&](const Part<T>& part) {
      for (int64_t b = 0; b < layer.batch; ++b)
        std::copy_n(own(carried, part) + b * part.width, part.units, dh + b * hidden + part.from);
    });
  }
}

// `Library` reads these declarations: no macro.
extern "C" void lay_out_float32(const float* w, float* to, int back, int64_t batch, int64_t hidden, int threads) {
  lay_out<float>(w, to, back, {batch, hidden, threads});
}

extern "C" void forward_float32(const float* projected, const float* weights, float* gates, float* cells, float* hs,
                                const float* going_on, int64_t steps, int reverse, int64_t batch, int64_t hidden,
                                int threads) {
  forward<float>({batch, hidden, threads}, steps, reverse, projected, weights, gates, cells, hs, going_on);
}

extern "C" void backward_float32(const float* dhs, const float* weights, const float* gates, const float* cells,
                                 const float* going_on, float* d, float* dh, float* dc, int64_t steps, int reverse,
                                 int64_t batch, int64_t hidden, int threads) {
  backward<float>({batch, hidden, threads}, steps, reverse, dhs, weights, gates, cells, going_on, d, dh, dc);
}

extern "C" void lay_out_float64(const double* w, double* to, int back, int64_t batch, int64_t hidden, int threads) {
  lay_out<double>(w, to, back, {batch, hidden, threads});
}

extern "C" void forward_float64(const double* projected, const double* weights, double* gates, double* cells,
                                double* hs, const double* going_on, int64_t steps, int reverse, int64_t batch,
                                int64_t hidden, int threads) {
  forward<double>({batch, hidden, threads}, steps, reverse, projected, weights, gates, cells, hs, going_on);
}

extern "C" void backward_float64(const double* dhs, const double* weights, const double* gates, const double* cells,
                                 const double* going_on, double* d, double* dh, double* dc, int64_t steps, int reverse,
                                 int64_t batch, int64_t hidden, int threads) {
  backward<double>({batch, hidden, threads}, steps, reverse, dhs, weights, gates, cells, going_on, d, dh, dc);
}
