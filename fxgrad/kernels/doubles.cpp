// Vectors of float32 to float64 and back. PyTorch's conversion writes each number to memory, and reads more of them at
// once than it wrote, which has to wait: a loop of a few operations takes twice as long.

#include <ATen/cpu/vec/vec.h>

namespace at::vec {
inline namespace CPU_CAPABILITY {

#if defined(CPU_CAPABILITY_AVX512)
template <>
struct VecConvert<double, 2, float, 1> {
  static inline VectorizedN<double, 2> apply(const VectorizedN<float, 1>& from) {
    const __m512 all = from[0];
    return {Vectorized<double>(_mm512_cvtps_pd(_mm512_castps512_ps256(all))),
            Vectorized<double>(_mm512_cvtps_pd(_mm512_extractf32x8_ps(all, 1)))};
  }
};

template <>
struct VecConvert<float, 1, double, 2> {
  static inline VectorizedN<float, 1> apply(const VectorizedN<double, 2>& from) {
    const __m256 low = _mm512_cvtpd_ps(from[0]), high = _mm512_cvtpd_ps(from[1]);
    return Vectorized<float>(_mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1));
  }
};
#elif defined(CPU_CAPABILITY_AVX2)
template <>
struct VecConvert<double, 2, float, 1> {
  static inline VectorizedN<double, 2> apply(const VectorizedN<float, 1>& from) {
    const __m256 all = from[0];
    return {Vectorized<double>(_mm256_cvtps_pd(_mm256_castps256_ps128(all))),
            Vectorized<double>(_mm256_cvtps_pd(_mm256_extractf128_ps(all, 1)))};
  }
};

template <>
struct VecConvert<float, 1, double, 2> {
  static inline VectorizedN<float, 1> apply(const VectorizedN<double, 2>& from) {
    const __m128 low = _mm256_cvtpd_ps(from[0]), high = _mm256_cvtpd_ps(from[1]);
    return Vectorized<float>(_mm256_insertf128_ps(_mm256_castps128_ps256(low), high, 1));
  }
};
#endif

}  // namespace CPU_CAPABILITY
}  // namespace at::vec
