// Vectors of one instruction-set level, in the portable vector extensions of GCC and Clang, with intrinsics only where
// these do not suffice (minimum that ignores NaN, half precision, prefetch). Included inside a level's namespace.

// Functions of their own have all registers: inlined into each other, the kernels are a fifth slower.
#define THINWIRE_APART __attribute__((noinline))
// The loop of a kernel is always inlined, however many kernels there are.
#define THINWIRE_WITHIN __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));

template <class V, class T>
static inline V load(const T* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

template <class V, class T>
static inline void store(T* p, V v) {
  __builtin_memcpy(p, &v, sizeof v);
}

template <class To, class From>
static inline To bits_of(From v) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To to;
  __builtin_memcpy(&to, &v, sizeof v);
  return to;
}

static inline Floats splat(float v) { return v - Floats{}; }
static inline Words splat(uint32_t v) { return v + Words{}; }

// The lesser and the greater of two, lane by lane. If one is NaN, x86 returns `kept`;
// other architectures return the NaN.
#if defined(__AVX512F__)
static inline Floats lesser(Floats v, Floats kept) { return (Floats)_mm512_min_ps((__m512)v, (__m512)kept); }
static inline Floats greater(Floats v, Floats kept) { return (Floats)_mm512_max_ps((__m512)v, (__m512)kept); }
#elif defined(__AVX2__)
static inline Floats lesser(Floats v, Floats kept) { return (Floats)_mm256_min_ps((__m256)v, (__m256)kept); }
static inline Floats greater(Floats v, Floats kept) { return (Floats)_mm256_max_ps((__m256)v, (__m256)kept); }
#elif defined(__SSE2__)
static inline Floats lesser(Floats v, Floats kept) { return (Floats)_mm_min_ps((__m128)v, (__m128)kept); }
static inline Floats greater(Floats v, Floats kept) { return (Floats)_mm_max_ps((__m128)v, (__m128)kept); }
#else
static inline Floats lesser(Floats v, Floats kept) { return ((v < kept) | (v != v)) ? v : kept; }
static inline Floats greater(Floats v, Floats kept) { return ((v > kept) | (v != v)) ? v : kept; }
#endif

// The square root, rounded to nearest.
static inline Floats root(Floats v) {
#if defined(__AVX512F__)
  return (Floats)_mm512_sqrt_ps((__m512)v);
#elif defined(__AVX2__)
  return (Floats)_mm256_sqrt_ps((__m256)v);
#elif defined(__SSE2__)
  return (Floats)_mm_sqrt_ps((__m128)v);
#else
  for (int i = 0; i < kLanes; i++) v[i] = __builtin_sqrtf(v[i]);
  return v;
#endif
}

// The bits of |v|, whose order is that of the values; a NaN's are above those of infinity.
static inline Ints magnitude(Floats v) { return bits_of<Ints>(v) & 0x7FFFFFFF; }

static inline Ints greater_int(Ints a, Ints b) {
#if defined(__AVX512F__)
  return (Ints)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (Ints)_mm256_max_epi32((__m256i)a, (__m256i)b);
#elif defined(__SSE4_1__)
  return (Ints)_mm_max_epi32((__m128i)a, (__m128i)b);
#else
  return a > b ? a : b;
#endif
}

// Toward zero. Where lesser() hides NaNs, a NaN becomes the smallest integer, by which it is detected.
#if defined(__SSE2__)
constexpr bool kHidesNan = true;
#else
constexpr bool kHidesNan = false;
#endif
static inline Words truncate(Floats v) {
#if defined(__AVX512F__)
  return (Words)_mm512_cvttps_epi32((__m512)v);
#elif defined(__AVX2__)
  return (Words)_mm256_cvttps_epi32((__m256)v);
#elif defined(__SSE2__)
  return (Words)_mm_cvttps_epi32((__m128)v);
#else
  return bits_of<Words>(__builtin_convertvector(v, Ints));
#endif
}

// Over all lanes.
static inline float across_lesser(Floats v) {
#if defined(__AVX512F__)
  return _mm512_reduce_min_ps((__m512)v);
#else
  float kept = v[0];
  for (int i = 1; i < kLanes; i++) kept = v[i] < kept || v[i] != v[i] ? v[i] : kept;
  return kept;
#endif
}

static inline float across_greater(Floats v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float kept = v[0];
  for (int i = 1; i < kLanes; i++) kept = v[i] > kept || v[i] != v[i] ? v[i] : kept;
  return kept;
#endif
}

static inline float across_greater_int(Ints v) {
#if defined(__AVX512F__)
  const int32_t kept = _mm512_reduce_max_epi32((__m512i)v);
#else
  int32_t kept = v[0];
  for (int i = 1; i < kLanes; i++) kept = v[i] > kept ? v[i] : kept;
#endif
  float value;
  __builtin_memcpy(&value, &kept, 4);
  return value;
}

// Prefetches half a group of fp32 values, also before writes: prefetchw was measured to be slower. Into the L1 cache: into
// the L2 cache alone (prefetcht1), AMD's Zen 5 takes longer than without any prefetching.
static inline void prefetch(const float* p) {
  for (int i = 0; i < 64; i += 16) __builtin_prefetch(p + i, 0, 3);
}

// Non-temporal store to memory that is not read soon, so that it need not be loaded first; a multiple of a vector's
// bytes.
static inline void store_past_caches(float* p, Floats v) {
#if defined(__AVX512F__)
  _mm512_stream_ps(p, (__m512)v);
#elif defined(__AVX2__)
  _mm256_stream_ps(p, (__m256)v);
#elif defined(__SSE2__)
  _mm_stream_ps(p, (__m128)v);
#else
  store(p, v);
#endif
}

// Called before other threads may read what non-temporal stores wrote.
static inline void settle_stores() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// Copies with non-temporal stores.
THINWIRE_APART static void stream(const float* from, int64_t n, float* to) {
  int64_t i = 0;
  for (; i < n && (uintptr_t)(to + i) % 64; i++) to[i] = from[i];
  for (; i + 16 <= n; i += 16) {
    for (int j = 0; j < 16; j += kLanes) store_past_caches(to + i + j, load<Floats>(from + i + j));
  }
  for (; i < n; i++) to[i] = from[i];
}

// kLanes codes as integers. GCC converts u8 to i32 lane by lane, hence intrinsics.
static inline Words widen_words(const uint8_t* codes) {
#if defined(__AVX512F__)
  return (Words)_mm512_cvtepu8_epi32(load<__m128i>(codes));
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)codes));
#elif defined(__SSE4_1__)
  return (Words)_mm_cvtepu8_epi32(_mm_cvtsi32_si128(load<int32_t>(codes)));
#else
  Words wide;
  for (int i = 0; i < kLanes; i++) wide[i] = codes[i];
  return wide;
#endif
}

static inline Floats widen(const uint8_t* codes) { return __builtin_convertvector((Ints)widen_words(codes), Floats); }

// The low bytes of four vectors whose other bytes are 0, in order.
static inline void store_bytes(uint8_t* to, Words a, Words b, Words c, Words d) {
#if defined(__AVX512BW__)
  const __m512i pairs = _mm512_packus_epi32((__m512i)a, (__m512i)b);
  const __m512i others = _mm512_packus_epi32((__m512i)c, (__m512i)d);
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  store(to, _mm512_permutexvar_epi32(order, _mm512_packus_epi16(pairs, others)));
#elif defined(__AVX2__)
  const __m256i pairs = _mm256_packus_epi32((__m256i)a, (__m256i)b);
  const __m256i others = _mm256_packus_epi32((__m256i)c, (__m256i)d);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  store(to, _mm256_permutevar8x32_epi32(_mm256_packus_epi16(pairs, others), order));
#elif defined(__SSE4_1__)
  const __m128i pairs = _mm_packus_epi32((__m128i)a, (__m128i)b);
  const __m128i others = _mm_packus_epi32((__m128i)c, (__m128i)d);
  store(to, _mm_packus_epi16(pairs, others));
#else
  for (int i = 0; i < kLanes; i++) {
    to[i] = (uint8_t)a[i], to[i + kLanes] = (uint8_t)b[i];
    to[i + 2 * kLanes] = (uint8_t)c[i], to[i + 3 * kLanes] = (uint8_t)d[i];
  }
#endif
}

// Selection lane by lane, and integer extrema. Integers stay below 2^31, so signed comparisons, which every level has,
// serve.

// Lanes for which a condition holds: a mask register if the level has them, otherwise all bits of the lanes.
#if defined(__AVX512F__)
typedef __mmask16 Mask;
static inline Mask above(Words a, Words b) { return _mm512_cmpgt_epi32_mask((__m512i)a, (__m512i)b); }
static inline Mask negative(Words a) { return _mm512_movepi32_mask((__m512i)a); }
static inline Mask ordered(Floats a) { return _mm512_cmp_ps_mask((__m512)a, (__m512)a, _CMP_ORD_Q); }
static inline Mask below(Floats a, Floats b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LT_OQ); }
static inline Mask reaches(Floats a, Floats b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GE_OQ); }
static inline Words select(Mask is, Words a, Words b) {
  return (Words)_mm512_mask_mov_epi32((__m512i)b, is, (__m512i)a);
}
static inline Words keep(Mask is, Words a) { return (Words)_mm512_maskz_mov_epi32(is, (__m512i)a); }
static inline Words add_where(Mask is, Words a, Words b) {
  return (Words)_mm512_mask_add_epi32((__m512i)a, is, (__m512i)a, (__m512i)b);
}
static inline Words least(Words a, Words b) { return (Words)_mm512_min_epi32((__m512i)a, (__m512i)b); }
static inline Words most(Words a, Words b) { return (Words)_mm512_max_epi32((__m512i)a, (__m512i)b); }
static inline bool any_bits(Words a) { return _mm512_test_epi32_mask((__m512i)a, (__m512i)a) != 0; }
#else
typedef Words Mask;
static inline Mask above(Words a, Words b) { return (Words)((Ints)a > (Ints)b); }
static inline Mask negative(Words a) { return (Words)((Ints)a >> 31); }
static inline Mask ordered(Floats a) { return (Words)(a == a); }
static inline Mask below(Floats a, Floats b) { return (Words)(a < b); }
static inline Mask reaches(Floats a, Floats b) { return (Words)(a >= b); }
static inline Words select(Mask is, Words a, Words b) { return (is & a) | (~is & b); }
static inline Words keep(Mask is, Words a) { return is & a; }
static inline Words add_where(Mask is, Words a, Words b) { return a + (is & b); }
#if defined(__AVX2__)
static inline Words least(Words a, Words b) { return (Words)_mm256_min_epi32((__m256i)a, (__m256i)b); }
static inline Words most(Words a, Words b) { return (Words)_mm256_max_epi32((__m256i)a, (__m256i)b); }
static inline bool any_bits(Words a) { return !_mm256_testz_si256((__m256i)a, (__m256i)a); }
#else
static inline Words least(Words a, Words b) { return select(above(a, b), b, a); }
static inline Words most(Words a, Words b) { return select(above(a, b), a, b); }
static inline bool any_bits(Words a) {
  uint32_t any = 0;
  for (int i = 0; i < kLanes; i++) any |= a[i];
  return any != 0;
}
#endif
#endif
