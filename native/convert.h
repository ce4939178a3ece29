// fp32 from and to the 16-bit floats. Included inside a level's namespace.

static inline void bfloat16_to_float(const uint16_t* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; i++) {
    const uint32_t wide = (uint32_t)from[i] << 16;
    std::memcpy(to + i, &wide, 4);
  }
}

static inline void float_to_bfloat16(const float* from, int64_t n, uint16_t* to) {
  for (int64_t i = 0; i < n; i++) {
    uint32_t bits;
    std::memcpy(&bits, from + i, 4);
    const bool nan = (bits & 0x7FFFFFFF) > 0x7F800000;
    const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16; // to nearest even
    to[i] = (uint16_t)(nan ? 0x7FC0 : rounded);
  }
}

// Shifting the exponent and significand into place leaves a factor of 2^112, exact also for subnormals.
static inline float half_to_float(uint16_t half) {
  uint32_t bits = (uint32_t)(half & 0x7FFF) << 13;
  float value;
  std::memcpy(&value, &bits, 4);
  value *= 0x1p112f;
  std::memcpy(&bits, &value, 4);
  if ((half & 0x7C00) == 0x7C00) bits |= 0x7F800000; // Inf or NaN
  bits |= (uint32_t)(half & 0x8000) << 16;
  std::memcpy(&value, &bits, 4);
  return value;
}

static inline uint16_t float_to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t sign = (bits >> 16) & 0x8000;
  bits &= 0x7FFFFFFF;
  uint32_t half;
  if (bits > 0x7F800000) {
    half = 0x7E00;
  } else if (bits >= 0x477FF000) { // rounds to 65536 or more
    half = 0x7C00;
  } else if (bits < 0x38800000) { // below 2^-14: subnormal; adding 0.5 rounds at 2^-24
    float shifted;
    std::memcpy(&shifted, &bits, 4);
    shifted += 0.5f;
    std::memcpy(&half, &shifted, 4);
    half -= 0x3F000000;
  } else {
    half = (bits - 0x38000000 + 0xFFF + ((bits >> 13) & 1)) >> 13;
  }
  return (uint16_t)(sign | half);
}

static void float16_to_float(const uint16_t* from, int64_t n, float* to) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16) _mm512_storeu_ps(to + i, _mm512_cvtph_ps(load<__m256i>(from + i)));
#elif defined(__F16C__)
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(load<__m128i>(from + i)));
#endif
  for (; i < n; i++) to[i] = half_to_float(from[i]);
}

static void float_to_float16(const float* from, int64_t n, uint16_t* to) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16) store(to + i, _mm512_cvtps_ph(_mm512_loadu_ps(from + i), 0));
#elif defined(__F16C__)
  for (; i + 8 <= n; i += 8) store(to + i, _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
#endif
  for (; i < n; i++) to[i] = float_to_half(from[i]);
}

static inline int64_t size_of(Dtype dtype) { return dtype == kFloat32 ? 4 : 2; }

// Elements [at, at + n) of `from` as fp32.
static inline void read_floats(const void* from, Dtype dtype, int64_t at, int64_t n, float* to) {
  if (dtype == kFloat32) {
    std::memmove(to, (const float*)from + at, 4 * n); // may be the same place
  } else if (dtype == kBFloat16) {
    bfloat16_to_float((const uint16_t*)from + at, n, to);
  } else {
    float16_to_float((const uint16_t*)from + at, n, to);
  }
}

// The opposite, rounding to nearest even.
static inline void write_floats(const float* from, int64_t n, void* to, Dtype dtype, int64_t at) {
  if (dtype == kFloat32) {
    std::memmove((float*)to + at, from, 4 * n);
  } else if (dtype == kBFloat16) {
    float_to_bfloat16(from, n, (uint16_t*)to + at);
  } else {
    float_to_float16(from, n, (uint16_t*)to + at);
  }
}
