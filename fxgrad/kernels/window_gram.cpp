// The norms of a convolution's weight gradients by Gram matrices: that of the positions of g, and that of their windows, which
// is that of the input's pixels, added up over the places of the kernel. No window is ever copied.
//
//     window_p window_q = sum over places (i, j) of pixel_(p, i, j) pixel_(q, i, j)

struct Windows : Pairs {
  const Shape s;

  explicit Windows(const Shape& s) : Pairs(s.out_rows * s.out_columns), s(s) {}

  void add_up(const Pairs& pixels) {
    std::fill(matrix.begin(), matrix.end(), 0.0f);
    for (int64_t y = 0; y < s.out_rows; ++y)
      for (int64_t x = 0; x < s.out_columns; ++x)
        for (int64_t i = 0; i < s.kernel_rows; ++i)
          for (int64_t j = 0; j < s.kernel_columns; ++j) {
            const int64_t row = y * s.row_stride + i * s.row_dilation - s.row_padding;
            const int64_t column = x * s.column_stride + j * s.column_dilation - s.column_padding;
            if (row >= 0 && row < s.rows && column >= 0 && column < s.columns) add_place(y, x, row, column, pixels);
          }
    measure(s.channels * s.kernel_rows * s.kernel_columns);
  }

  // The products of a pixel of the window at (y, x) with those in the same place of this and all later windows.
  void add_place(int64_t y, int64_t x, int64_t row, int64_t column, const Pairs& pixels) {
    const int64_t step = s.column_stride, before = std::min(x, column / step);
    const int64_t end = std::min(s.out_columns, x + (s.columns - 1 - column) / step + 1);
    const float* own = pixels.matrix.data() + (row * s.columns + column) * pixels.padded;
    float* sums = matrix.data() + (y * s.out_columns + x) * padded;
    for (int64_t other = y; other < s.out_rows && row < s.rows; ++other, row += s.row_stride) {
      const int64_t first = other == y ? x : x - before;
      add(own + row * s.columns + column + (first - x) * step, step, end - first, sums + other * s.out_columns + first);
    }
  }

  static void add(const float* from, int64_t step, int64_t count, float* to) {
    if (step == 1) {
      for (int64_t at = 0; at < count; at += V) {
        const int64_t size = std::min(V, count - at);
        (Vec::loadu(to + at, size) + Vec::loadu(from + at, size)).store(to + at, size);
      }
    } else {
      for (int64_t at = 0; at < count; ++at) to[at] += from[at * step];
    }
  }
};

// `g` [n, positions, outs] and `input` [n, pixels, channels], each with three steps.
extern "C" int64_t window_gram_norms(const float* g_data, const int64_t* g_steps, const float* input_data,
                                     const int64_t* input_steps, const int64_t* sizes, double off_g, double off_x,
                                     double* found, int threads) {
  const Shape s = *reinterpret_cast<const Shape*>(sizes);
  const Norms norms{found, s.samples};
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Gram g{s.out_rows * s.out_columns}, pixels{s.rows * s.columns};
    Windows windows{s};
    const int64_t length = s.channels * s.kernel_rows * s.kernel_columns;
    Meeting meeting{s.outs, length, off_g, off_x, norms, {}};
#pragma omp for
    for (int64_t sample = 0; sample < s.samples; ++sample) {
      const float *of_g = g_data + sample * g_steps[0], *of_input = input_data + sample * input_steps[0];
      const float *next_g = of_g + g_steps[0], *next_input = of_input + input_steps[0];
      Ahead ahead{next_g, next_g + g.k * s.outs, next_input, next_input + pixels.k * s.channels};
      g.add_up(of_g, g_steps, s.outs, ahead, of_input, input_steps[1]);
      pixels.add_up(of_input, input_steps, s.channels, ahead, next_g, g_steps[1]);
      windows.add_up(pixels);
      meeting.meet(sample, g, windows);
    }
  }
  return norms.count_spoilt();
}
