// numpy.random.default_rng([a, b, c]).choice(n, count, replace=False), as a set.
//
// SeedSequence and PCG64 are stable by numpy's compatibility policy (NEP 19), how `choice` draws
// is not: vtoken/kernels/tables.py compares the two when it loads this, and keeps to numpy where
// they differ. Source: numpy/random/bit_generator.pyx, src/pcg64, _generator.pyx (2.x).

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace vtoken {

class NumpyRng {
 public:
  explicit NumpyRng(const int64_t (&entropy)[3]) {
    uint32_t pool[4];
    mix_entropy(entropy, pool);
    uint64_t words[4];
    generate(pool, words);
    const Wide seed = Wide{words[0]} << 64 | words[1], stream = Wide{words[2]} << 64 | words[3];
    increment_ = stream << 1 | 1;
    state_ = increment_ + seed;  // a step from 0, then the seed
    step();
  }

  // Even over 0 .. most (< 2^32 - 1), by Lemire's method.
  uint32_t bounded(uint32_t most) {
    if (most == 0) return 0;
    const uint32_t range = most + 1;
    uint64_t product = uint64_t{next32()} * range;
    if (static_cast<uint32_t>(product) < range) {
      const uint32_t threshold = (UINT32_MAX - most) % range;
      while (static_cast<uint32_t>(product) < threshold) product = uint64_t{next32()} * range;
    }
    return static_cast<uint32_t>(product >> 32);
  }

 private:
  __extension__ typedef unsigned __int128 Wide;

  static uint32_t hash(uint32_t value, uint32_t& constant, uint32_t multiplier) {
    value ^= constant;
    constant *= multiplier;
    value *= constant;
    return value ^ value >> 16;
  }

  static uint32_t mix(uint32_t x, uint32_t y) {
    const uint32_t mixed = 0xca01f9ddu * x - 0x4973f715u * y;
    return mixed ^ mixed >> 16;
  }

  static void mix_entropy(const int64_t (&entropy)[3], uint32_t (&pool)[4]) {
    uint32_t words[6], constant = 0x43b0d7e5u;
    int size = 0;
    for (const int64_t number : entropy) {
      words[size++] = static_cast<uint32_t>(number);
      if (number >> 32) words[size++] = static_cast<uint32_t>(number >> 32);
    }
    const auto hashed = [&](uint32_t value) { return hash(value, constant, 0x931e8875u); };
    for (int i = 0; i < 4; i++) pool[i] = hashed(i < size ? words[i] : 0);
    for (int from = 0; from < 4; from++) {
      for (int to = 0; to < 4; to++) {
        if (from != to) pool[to] = mix(pool[to], hashed(pool[from]));
      }
    }
    for (int from = 4; from < size; from++) {
      for (int to = 0; to < 4; to++) pool[to] = mix(pool[to], hashed(words[from]));
    }
  }

  static void generate(const uint32_t (&pool)[4], uint64_t (&words)[4]) {
    uint32_t constant = 0x8b51f9ddu;
    for (int i = 0; i < 4; i++) {
      const uint64_t low = hash(pool[2 * i % 4], constant, 0x58f38dedu);
      words[i] = low | uint64_t{hash(pool[(2 * i + 1) % 4], constant, 0x58f38dedu)} << 32;
    }
  }

  void step() {
    const Wide multiplier = Wide{2549297995355413924ull} << 64 | 4865540595714422341ull;
    state_ = state_ * multiplier + increment_;
  }

  uint32_t next32() {
    if (has_half_) {
      has_half_ = false;
      return half_;
    }
    step();
    const uint64_t folded = static_cast<uint64_t>(state_ >> 64) ^ static_cast<uint64_t>(state_);
    const unsigned turn = static_cast<unsigned>(state_ >> 122);
    const uint64_t number = folded >> turn | folded << (-turn & 63);
    half_ = static_cast<uint32_t>(number >> 32);
    has_half_ = true;
    return static_cast<uint32_t>(number);
  }

  Wide state_, increment_;
  uint32_t half_ = 0;
  bool has_half_ = false;
};

// `count` of 0 .. size - 1, each once, by Floyd's method.
inline void draw(const int64_t (&entropy)[3], int64_t size, int64_t count,
                 std::vector<int64_t>& taken, int64_t* out) {
  NumpyRng rng(entropy);
  std::size_t mask = 1;
  while (mask < 2 * static_cast<std::size_t>(count)) mask *= 2;
  taken.assign(mask--, -1);  // an open-addressed set
  const auto place_of = [&](int64_t value) {
    std::size_t at = static_cast<std::size_t>(value) & mask;
    while (taken[at] != -1 && taken[at] != value) at = (at + 1) & mask;
    return at;
  };
  for (int64_t j = size - count; j < size; j++) {
    int64_t value = rng.bounded(static_cast<uint32_t>(j));
    std::size_t at = place_of(value);
    if (taken[at] == value) at = place_of(value = j);
    taken[at] = *out++ = value;
  }
}

}  // namespace vtoken
