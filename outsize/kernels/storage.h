// How the passes in C++ store numbers: float32, or bfloat16 read and written through float32.

#pragma once

#include <cstdint>

namespace outsize {

struct bfloat16 {
    std::uint16_t bits;
};

inline float wide(float x) { return x; }
inline float wide(bfloat16 x) { return __builtin_bit_cast(float, std::uint32_t(x.bits) << 16); }

template <class T>
inline T narrow(float x);
template <>
inline float narrow<float>(float x) { return x; }
template <>
inline bfloat16 narrow<bfloat16>(float x) {
    // To nearest, ties to even; a NaN stays one.
    const std::uint32_t u = __builtin_bit_cast(std::uint32_t, x);
    const std::uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return {std::uint16_t((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded)};
}

#ifdef OUTSIZE_DTYPE
// What a library of one dtype reads and writes; DTYPE: its number, for passes that take either.
constexpr int DTYPE = OUTSIZE_DTYPE;
template <int>
struct Numbered {
    typedef float type;
};
template <>
struct Numbered<1> {
    typedef bfloat16 type;
};
typedef Numbered<DTYPE>::type Number;
#endif

}  // namespace outsize
