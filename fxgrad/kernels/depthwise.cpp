// The same where groups are small and many, as in a depthwise convolution, where one output sees one channel:
//
//     D[group, o, c, i, j] = sum over images, y, x of g[group, o, y, x] input[group, c, y sy + i dy - py, ..]
//
// Groups stand side by side in a vector, one in each lane. For a few (i, j) at a time the sums stay in registers, while
// a padded copy of some groups' images, groups last, is read shifted by each of them.

struct Steps {  // from one row to the next, and from one column
  int64_t row, column;
};

// total[i, j] (+)= the sum over some positions of g[position] input[starts[position] + (i, j)], of V lanes each.
template <int64_t I, int64_t J>
void shift(const float* g, const float* input, const int64_t* starts, Steps of_place, int64_t positions, float* total,
           int64_t of_total, bool first) {
  Vec sums[I][J];  // zeros
  for (int64_t position = 0; position < positions; ++position) {
    const float* values = input + starts[position];
    const Vec factor = Vec::loadu(g + position * V);
#pragma GCC unroll 4
    for (int64_t i = 0; i < I; ++i)
#pragma GCC unroll 8
      for (int64_t j = 0; j < J; ++j)
        sums[i][j] = at::vec::fmadd(factor, Vec::loadu(values + i * of_place.row + j * of_place.column), sums[i][j]);
  }
  for (int64_t i = 0; i < I; ++i)
    for (int64_t j = 0; j < J; ++j) {
      float* to = total + i * of_total + j * V;
      (first ? sums[i][j] : Vec::loadu(to) + sums[i][j]).store(to);
    }
}

using Shift = decltype(&shift<1, 1>);
constexpr int64_t HIGH = 3, WIDE = 4, LONG = 8;  // places whose sums are in registers: 3 rows of up to 4, or 8 of one
constexpr Shift BLOCKS[] = {shift<3, 1>, shift<3, 2>, shift<3, 3>, shift<3, 4>};
constexpr Shift ROWS[] = {shift<1, 1>, shift<1, 2>, shift<1, 3>, shift<1, 4>,
                          shift<1, 5>, shift<1, 6>, shift<1, 7>, shift<1, 8>};

// One channel of some groups, which become the lanes of a vector.
static inline void copy_lanes(const float* from, int64_t lane, int64_t row, int64_t column, int64_t lanes,
                              int64_t rows, int64_t columns, float* into, int64_t of_row) {
  for (int64_t y = 0; y < rows; ++y, from += row, into += of_row) {
    if (lane == 1) {
      for (int64_t x = 0; x < columns; ++x) Vec::loadu(from + x * column, lanes).store(into + x * V);
    } else if (column == 1) {
      turn_over(from, lane, lanes, columns, into, V);
    } else {
      for (int64_t x = 0; x < columns; ++x)
        for (int64_t l = 0; l < lanes; ++l) into[x * V + l] = from[x * column + l * lane];
    }
  }
}

// The gradients of V groups, in memory that a thread uses again for others.
struct Groups {
  const Shape s;
  const int64_t of_g_row = s.out_columns * V, of_g = s.out_rows * of_g_row;
  const int64_t of_row = (s.columns + 2 * s.column_padding) * V, of_image = (s.rows + 2 * s.row_padding) * of_row;
  const std::vector<int64_t> starts = window_starts(s, of_row, V);
  Memory<float> gs = Memory<float>(s.images * s.outs * of_g);
  Memory<float> inputs = Memory<float>(s.images * s.channels * of_image);
  Memory<float> total = Memory<float>(s.kernel_rows * s.kernel_columns * V);

  void load(const Values& g, const Values& input, int64_t n, int64_t group, int64_t lanes) {
    if (lanes < V) {  // nothing of other groups
      std::fill(gs.begin(), gs.end(), 0);
      std::fill(inputs.begin(), inputs.end(), 0);
    }
    float* inside = inputs.data() + s.row_padding * of_row + s.column_padding * V;
    load_side(g, n, group, lanes, s.outs, s.out_rows, s.out_columns, gs.data(), of_g, of_g_row);
    load_side(input, n, group, lanes, s.channels, s.rows, s.columns, inside, of_image, of_row);
  }

  void load_side(const Values& from, int64_t n, int64_t group, int64_t lanes, int64_t channels, int64_t rows,
                 int64_t columns, float* into, int64_t of_channel, int64_t of_row) {
    const int64_t *steps = from.steps, lane = channels * steps[2];
    for (int64_t k = 0; k < s.images; ++k)
      for (int64_t c = 0; c < channels; ++c)
        copy_lanes(from.data + n * steps[0] + k * steps[1] + group * lane + c * steps[2], lane, steps[3], steps[4],
                   lanes, rows, columns, into + (k * channels + c) * of_channel, of_row);
  }

  void add_up(int64_t o, int64_t c) {
    for (int64_t i = 0, high; i < s.kernel_rows; i += high) {
      high = s.kernel_rows - i >= HIGH ? HIGH : 1;
      const int64_t most = high == 1 ? LONG : WIDE;
      for (int64_t j = 0, wide; j < s.kernel_columns; j += wide) {
        const int64_t left = s.kernel_columns - j;
        wide = up(left, up(left, most) / most) / (up(left, most) / most);  // blocks of one size, about
        add_places(o, c, i, j, (high == 1 ? ROWS : BLOCKS)[wide - 1]);
      }
    }
  }

  void add_places(int64_t o, int64_t c, int64_t i, int64_t j, Shift of_places) {
    const Steps to_place{s.row_dilation * of_row, s.column_dilation * V};
    by_blocks(s, [&](int64_t k, int64_t position, int64_t positions, bool first) {
      const float* factors = gs.data() + (k * s.outs + o) * of_g + position * V;
      const float* values = inputs.data() + (k * s.channels + c) * of_image + i * to_place.row + j * to_place.column;
      of_places(factors, values, starts.data() + position, to_place, positions,
                total.data() + (i * s.kernel_columns + j) * V, s.kernel_columns * V, first);
    });
  }

  void write(int64_t lanes, float* out, int64_t of_group) const {  // [groups, places]
    const int64_t places = s.kernel_rows * s.kernel_columns;
    for (int64_t l = 0; l < lanes; ++l)
      for (int64_t place = 0; place < places; ++place) out[l * of_group + place] = total[place * V + l];
  }
};

// As `window_rows`, found is [3, samples, parts]: a part is some groups.
extern "C" void depthwise_rows(const float* g, const int64_t* g_steps, const float* input, const int64_t* input_steps,
                               const int64_t* sizes, float* out, double* found, int64_t parts, int threads) {
  const Shape s = *reinterpret_cast<const Shape*>(sizes);
  const int64_t places = s.kernel_rows * s.kernel_columns, of_group = s.outs * s.channels * places;
  const int64_t units = s.samples * parts, of_part = up(up(s.groups, parts) / parts, V);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Groups own{s};
#pragma omp for
    for (int64_t unit = 0; unit < units; ++unit) {
      const int64_t n = unit / parts, start = unit % parts * of_part, end = std::min(s.groups, start + of_part);
      Squares of_rows, of_g, of_input;
      for (int64_t group = start; group < end; group += V) {
        const int64_t lanes = std::min(V, end - group);
        own.load({g, g_steps}, {input, input_steps}, n, group, lanes);
        for (int64_t o = 0; o < s.outs; ++o)
          for (int64_t c = 0; c < s.channels; ++c) {
            own.add_up(o, c);
            of_rows.add(own.total.data(), own.total.size());
            if (out) own.write(lanes, out + (n * s.groups + group) * of_group + (o * s.channels + c) * places, of_group);
          }
        of_g.add(own.gs.data(), own.gs.size());
        of_input.add(own.inputs.data(), own.inputs.size());
      }
      found[unit] = of_rows.value();
      found[units + unit] = of_g.value();
      found[2 * units + unit] = of_input.value();
    }
  }
}
