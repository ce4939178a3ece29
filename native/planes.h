// Codes, one byte each, to and from the planes of a group of 128. Included inside a level's namespace.
// Fields stay inside their byte when shifted left, and are masked after a shift right, so wide shifts serve all bytes.

// The bytes of a plane that fit into a vector.
template <int kBytes>
struct Plane {
  static constexpr int kStep = kBytes < 4 * kLanes ? kBytes : 4 * kLanes;
  typedef uint64_t Vector __attribute__((vector_size(kStep)));
};

static constexpr uint64_t every_byte(uint64_t b) { return b * 0x0101010101010101ull; }

template <int kWidth>
static inline void pack_plane(const uint8_t* codes, int low, uint8_t* to) {
  constexpr int kBytes = 16 * kWidth, kFields = 8 / kWidth;
  using Vector = typename Plane<kBytes>::Vector;
  const uint64_t mask = every_byte((1u << kWidth) - 1);
  for (int j = 0; j < kBytes; j += (int)sizeof(Vector)) {
    Vector packed = {};
    for (int k = 0; k < kFields; k++) {
      const Vector field = (load<Vector>(codes + j + k * kBytes) >> low) & mask;
      packed |= field << (k * kWidth);
    }
    store(to + j, packed);
  }
}

template <int kWidth>
static inline void unpack_plane(const uint8_t* from, int low, uint8_t* codes) {
  constexpr int kBytes = 16 * kWidth, kFields = 8 / kWidth;
  using Vector = typename Plane<kBytes>::Vector;
  const uint64_t mask = every_byte((1u << kWidth) - 1);
  for (int j = 0; j < kBytes; j += (int)sizeof(Vector)) {
    const Vector packed = load<Vector>(from + j);
    for (int k = 0; k < kFields; k++) {
      Vector field = ((packed >> (k * kWidth)) & mask) << low;
      if (low) field |= load<Vector>(codes + j + k * kBytes);
      store(codes + j + k * kBytes, field);
    }
  }
}

// `groups` groups of 128 codes to 16 * bits bytes each.
THINWIRE_APART static void pack(const uint8_t* codes, int64_t groups, int bits, uint8_t* to) {
  if (bits == 8) {
    std::memcpy(to, codes, groups * kGroup);
    return;
  }
  for (int64_t g = 0; g < groups; g++, codes += kGroup) {
    int low = 0;
    if (bits & 4) pack_plane<4>(codes, low, to), low += 4, to += 64;
    if (bits & 2) pack_plane<2>(codes, low, to), low += 2, to += 32;
    if (bits & 1) pack_plane<1>(codes, low, to), low += 1, to += 16;
  }
}

THINWIRE_APART static void unpack(const uint8_t* from, int64_t groups, int bits, uint8_t* codes) {
  if (bits == 8) {
    std::memcpy(codes, from, groups * kGroup);
    return;
  }
  for (int64_t g = 0; g < groups; g++, codes += kGroup) {
    int low = 0;
    if (bits & 4) unpack_plane<4>(from, low, codes), low += 4, from += 64;
    if (bits & 2) unpack_plane<2>(from, low, codes), low += 2, from += 32;
    if (bits & 1) unpack_plane<1>(from, low, codes), low += 1, from += 16;
  }
}
