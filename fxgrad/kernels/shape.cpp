// A convolution's sizes: of the kernels of weight gradients for each sample.

// As the caller fills it, all in int64; outputs and channels are those of a group.
struct Shape {
  int64_t samples, images, outs, out_rows, out_columns, channels, rows, columns, kernel_rows, kernel_columns;
  int64_t row_stride, column_stride, row_padding, column_padding, row_dilation, column_dilation, groups;
};
static_assert(sizeof(Shape) == 17 * sizeof(int64_t), "window_kernel.Shape has these numbers, one behind the other");
