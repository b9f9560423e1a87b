// A convolution's weight gradient for each sample, and the squares of what bounds its rounding:
//
//     D[o, c, i, j] = sum over images, y, x of g[o, y, x] input[c, y sy + i dy - py, x sx + j dx - px]
//
// In a padded copy of an image with its channels last, row i of the window at (y, x) is one run of kw C numbers (where
// dx is 1; else C numbers for each j). So D is, for a few o at a time, a product of [o, positions] by [positions, run]
// whose right side's rows overlap in memory: no window is ever copied, and the sums stay in registers.

constexpr int64_t PLACES = 16;  // of a window, at most, that are written as vectors

struct Values {  // [samples, images, channels, rows, columns], and the steps between them
  const float* data;
  const int64_t* steps;
};

// Some channels of an image, channels last, into the inside of a larger one.
static inline void copy(const float* from, const int64_t* steps, int64_t channels, int64_t rows, int64_t columns,
                        float* into, int64_t of_row, int64_t of_pixel) {
  const int64_t channel = steps[2], row = steps[3], column = steps[4];
  for (int64_t y = 0; y < rows; ++y) {
    const float* here = from + y * row;
    float* there = into + y * of_row;
    if (channel == 1 || channels == 1) {
      for (int64_t x = 0; x < columns; ++x) std::copy_n(here + x * column, channels, there + x * of_pixel);
    } else if (column == 1) {
      turn_over(here, channel, channels, columns, there, of_pixel);
    } else {
      for (int64_t c = 0; c < channels; ++c)
        for (int64_t x = 0; x < columns; ++x) there[x * of_pixel + c] = here[c * channel + x * column];
    }
  }
}

// Some channels of an image as panels of OS, each with the positions one behind the other. There is room for V channels at
// a time: behind those that are there come zeros.
static inline void copy_panels(const float* from, const int64_t* steps, int64_t channels, int64_t rows, int64_t columns,
                               float* into, int64_t of_panel) {
  const int64_t channel = steps[2], row = steps[3], column = steps[4];
  float tile[TILE * TILE];  // channels last
  for (int64_t c = 0; c < channels; c += TILE)
    for (int64_t y = 0; y < rows; ++y)
      for (int64_t x = 0; x < columns; x += TILE) {
        const int64_t high = std::min(TILE, channels - c), wide = std::min(TILE, columns - x);
        const float* here = from + c * channel + y * row + x * column;
        if (channel != 1 && column == 1) {
          turn_over(here, channel, high, wide, tile, TILE);
        } else if (channel != 1) {
          for (int64_t at = 0; at < wide; ++at)
            for (int64_t r = 0; r < high; ++r) tile[at * TILE + r] = here[r * channel + at * column];
        }
        for (int64_t part = 0; part < high; part += V) {
          const auto numbers = [&](int64_t at) {
            const float* own = channel != 1 ? tile + at * TILE + part : here + at * column + part;
            return part + V <= high ? Vec::loadu(own) : Vec::loadu(own, high - part);
          };
          float* to = into + (c + part) / OS * of_panel + (y * columns + x) * OS;
          for (int64_t at = 0; at + 2 <= wide; at += 2) put_in_panels(numbers(at), numbers(at + 1), to + at * OS, of_panel);
          if (wide % 2) put_in_panels(numbers(wide - 1), to + (wide - 1) * OS, of_panel);
        }
      }
}

// Where the window of each position begins in a padded copy of an image.
static inline std::vector<int64_t> window_starts(const Shape& s, int64_t of_row, int64_t of_pixel) {
  std::vector<int64_t> starts;
  for (int64_t y = 0; y < s.out_rows; ++y)
    for (int64_t x = 0; x < s.out_columns; ++x) starts.push_back(y * s.row_stride * of_row + x * s.column_stride * of_pixel);
  return starts;
}

// Every position of a sample's outputs, at most CHAIN at a time: what these come to is added up afterwards. `add` gets an
// image, the first position and how many, and whether nothing has been added up before.
template <typename Add>
void by_blocks(const Shape& s, Add add) {
  const int64_t positions = s.out_rows * s.out_columns;
  bool first = true;
  for (int64_t k = 0; k < s.images; ++k)
    for (int64_t start = 0; start < positions; start += CHAIN, first = false)
      add(k, start, std::min(CHAIN, positions - start), first);
}

// The gradients of a sample's weights for some of its outputs, in memory that a thread uses again for each.
struct Worker {
  const Shape s;
  const int64_t outs;  // at most
  const bool joined = s.column_dilation == 1;  // a window's row is one run
  const int64_t runs = joined ? s.kernel_rows : s.kernel_rows * s.kernel_columns;
  const int64_t length = joined ? s.kernel_columns * s.channels : s.channels, padded = up(length, V);
  const int64_t of_g = s.out_rows * s.out_columns * OS, of_panel = s.images * of_g;
  const int64_t of_row = (s.columns + 2 * s.column_padding) * s.channels, of_image = (s.rows + 2 * s.row_padding) * of_row;
  const std::vector<int64_t> starts = window_starts(s, of_row, s.channels);
  Memory<float> gs = Memory<float>(up(outs, V) / OS * of_panel);
  Memory<float> inputs = Memory<float>(s.images * of_image + VECTORS * V);  // the last run is read too far
  // `turn` reads PLACES rows, of which the last may not be there.
  Memory<float> total = Memory<float>(OS * runs * padded + PLACES * std::max(padded, s.channels));

  void load(const Values& g, const Values& input, int64_t n, int64_t start, int64_t end) {
    if (outs < s.outs) std::fill(gs.begin(), gs.end(), 0);  // the last outputs may be fewer
    for (int64_t k = 0; k < s.images; ++k) {
      const float* first = g.data + n * g.steps[0] + k * g.steps[1] + start * g.steps[2];
      copy_panels(first, g.steps, end - start, s.out_rows, s.out_columns, gs.data() + k * of_g, of_panel);
      float* inside = inputs.data() + k * of_image + s.row_padding * of_row + s.column_padding * s.channels;
      copy(input.data + n * input.steps[0] + k * input.steps[1], input.steps, s.channels, s.rows, s.columns, inside,
           of_row, s.channels);
    }
  }

  void add_up(int64_t o) {
    for (int64_t run = 0; run < runs; ++run) {
      const int64_t i = joined ? run : run / s.kernel_columns, j = joined ? 0 : run % s.kernel_columns;
      const int64_t shift = i * s.row_dilation * of_row + j * s.column_dilation * s.channels;
      for (int64_t at = 0, left = padded / V; left > 0; at += next_of(left) * V, left -= next_of(left))
        by_blocks(s, [&](int64_t k, int64_t position, int64_t positions, bool first) {
          const float* factors = gs.data() + o / OS * of_panel + k * of_g + position * OS;
          const float* values = inputs.data() + k * of_image + shift + at;
          multiply_by<float, Anywhere>(next_of(left))(factors, OS, values, {starts.data() + position}, positions,
                                                      total.data() + run * padded + at, runs * padded, first);
        });
    }
  }

  void square(int64_t o, Squares& sum) const {
    for (int64_t run = 0; run < runs; ++run) sum.add(total.data() + (o * runs + run) * padded, length);
  }

  void put(int64_t o, float* out) const {  // [channels, kernel_rows, kernel_columns]
    const float* of_o = total.data() + o * runs * padded;
    const int64_t places = s.kernel_rows * s.kernel_columns, step = joined ? s.channels : padded;
    if (places == 1) {
      std::copy_n(of_o, s.channels, out);
    } else if (places <= PLACES && (!joined || padded == length)) {
      turn(of_o, step, out, places);
    } else {
      for (int64_t place = 0; place < places; ++place) {
        const int64_t i = place / s.kernel_columns, j = place % s.kernel_columns;
        const float* from = joined ? of_o + i * padded + j * s.channels : of_o + place * padded;
        for (int64_t c = 0; c < s.channels; ++c) out[c * places + place] = from[c];
      }
    }
  }

  // [places, channels], `step` apart, as [channels, places]. Whole vectors are stored, and what is behind a channel's
  // places is stored over by the next channel: masked stores, or one number after another, take several times as long.
  void turn(const float* from, int64_t step, float* out, int64_t places) const {
    float tile[PLACES * PLACES];
    for (int64_t start = 0; start < s.channels; start += PLACES) {
      const int64_t channels = std::min(PLACES, s.channels - start);
      turn_over(from + start, step, PLACES, channels, tile, PLACES);
      for (int64_t c = 0; c < channels; ++c, out += places) {
        const int64_t left = (s.channels - start - c) * places;
        for (int64_t at = 0; at < places; at += V) Vec::loadu(tile + c * PLACES + at).store(out + at, std::min(V, left - at));
      }
    }
  }
};

// `out`, contiguous, may be null: then only the squares are found, of the gradients, g and input, [3, samples, groups,
// parts]. A group is a convolution of its own.
extern "C" void window_rows(const float* g, const int64_t* g_steps, const float* input, const int64_t* input_steps,
                            const int64_t* sizes, float* out, double* found, int64_t parts, int threads) {
  const Shape s = *reinterpret_cast<const Shape*>(sizes);
  const int64_t weights = s.channels * s.kernel_rows * s.kernel_columns, units = s.samples * s.groups * parts;
  const int64_t of_part = up(up(s.outs, parts) / parts, OS);
  const bool large = s.samples * s.groups * s.outs * weights * 4 >= WRITTEN;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Worker worker{s, std::min(s.outs, of_part)};
    Memory<float> row(large ? weights : 0);
#pragma omp for
    for (int64_t unit = 0; unit < units; ++unit) {
      const int64_t each = unit / parts, n = each / s.groups, group = each % s.groups;
      const int64_t start = std::min(s.outs, unit % parts * of_part);
      const int64_t end = std::min(s.outs, start + of_part);
      if (start == end) {  // more parts than blocks of outputs
        found[unit] = found[units + unit] = found[2 * units + unit] = 0;
        continue;
      }
      const Values own{g + group * s.outs * g_steps[2], g_steps};
      worker.load(own, {input + group * s.channels * input_steps[2], input_steps}, n, start, end);
      Squares of_rows;
      for (int64_t block = start; block < end; block += OS) {
        worker.add_up(block - start);
        for (int64_t o = block; o < std::min(end, block + OS); ++o) {
          worker.square(o - block, of_rows);
          if (!out) continue;
          float* to = out + (each * s.outs + o) * weights;
          worker.put(o - block, large ? row.data() : to);
          if (large) write(row.data(), weights, to, true);
        }
      }
      found[unit] = of_rows.value();
      found[units + unit] = squares(worker.gs.data(), worker.gs.size());
      found[2 * units + unit] = start == 0 ? squares(worker.inputs.data(), worker.inputs.size()) : 0;
    }
    drain();
  }
}

// Of what `window_rows` or `depthwise_rows` found, in parts: the norms. They may be off by `relative` of the product of those
// of g and of the input.
extern "C" int64_t window_norms(const double* sums, int64_t n, int64_t parts, double relative, double* found, int threads) {
  const Norms norms{found, n};
  for (int64_t sample = 0; sample < n; ++sample) {
    double each[3];
    for (int64_t which = 0; which < 3; ++which) each[which] = std::sqrt(summed(sums + (which * n + sample) * parts, parts));
    const double bound = each[0] * (1 + SQUARED) + each[1] * each[2] * relative;
    norms.set(sample, each[0], bound, std::min({each[0], each[1], each[2]}) < SMALL);
  }
  return norms.count_spoilt();
}
