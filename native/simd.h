// Vectors of one instruction-set level, in GCC's and Clang's portable notation; intrinsics only where that notation
// cannot say it (NaN-indifferent minimum, half precision, prefetch). Included inside a level's namespace.

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
typedef uint8_t Codes __attribute__((vector_size(kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
typedef uint64_t Bytes16 __attribute__((vector_size(16))); // 16 bytes, worked on as bits

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

// Whether the comparison fails or an operand is NaN, `kept` stays.
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
static inline Floats lesser(Floats v, Floats kept) { return v < kept ? v : kept; }
static inline Floats greater(Floats v, Floats kept) { return v > kept ? v : kept; }
#endif

// Over all lanes, none of which is NaN where the result matters.
static inline float across_lesser(Floats v) {
#if defined(__AVX512F__)
  return _mm512_reduce_min_ps((__m512)v);
#else
  float kept = v[0];
  for (int i = 1; i < kLanes; i++) kept = v[i] < kept ? v[i] : kept;
  return kept;
#endif
}

static inline float across_greater(Floats v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float kept = v[0];
  for (int i = 1; i < kLanes; i++) kept = v[i] > kept ? v[i] : kept;
  return kept;
#endif
}

// 512 bytes: a group of fp32 values.
static inline void prefetch_read(const float* p) {
  for (int i = 0; i < 128; i += 16) __builtin_prefetch(p + i, 0);
}

static inline void prefetch_write(const float* p) {
  for (int i = 0; i < 128; i += 16) __builtin_prefetch(p + i, 1);
}

// Codes as floats, in two steps: GCC takes u8 to i32 apart lane by lane.
static inline Floats widen(Codes codes) {
  return __builtin_convertvector(__builtin_convertvector(__builtin_convertvector(codes, Halves), Ints), Floats);
}
