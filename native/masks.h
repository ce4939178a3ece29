// Selection lane by lane, and integer extrema. Included inside a level's namespace. Integers stay below 2^31, so signed
// comparisons, which every level has, serve.

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
