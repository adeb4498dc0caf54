// Weights of few bits, decoded in one pass: a block of bytes becomes its group's numbers, each code's
// value times the group's scale, rounded once to what is stored. The twin is `plain` in codes.py.
// The way back for even steps with a scale in bfloat16: its twins are `pack` of techniques/quant.

#include <cmath>
#include <cstdint>
#include <cstring>

#include "codes.h"
#include "storage.h"

namespace {

using std::int64_t;
using std::uint8_t;

using outsize::bfloat16;
using outsize::Layout;
using outsize::MOST;
using outsize::narrow;
using outsize::one;

constexpr int64_t GRAIN = 1 << 15;  // numbers below which a thread more costs more than it saves

inline void stored(const uint8_t* blocks, const Layout& layout, int64_t index, float* out) {
    one(blocks, layout, index, out);
}

inline void stored(const uint8_t* blocks, const Layout& layout, int64_t index, bfloat16* out) {
    float wide[MOST];
    one(blocks, layout, index, wide);
    for (int64_t i = 0; i < layout.group; ++i) out[i] = narrow<bfloat16>(wide[i]);
}

template <class T>
void decode(const uint8_t* blocks, const Layout& layout, T* out, int64_t count, int threads) {
    const int many = count * layout.group < GRAIN ? 1 : threads;
#pragma omp parallel for num_threads(many) schedule(static)
    for (int64_t i = 0; i < count; ++i) stored(blocks, layout, i, out + i * layout.group);
}

constexpr int32_t INFINITE = 0x7f800000;  // the bits of magnitudes from here on are of no number
constexpr float MOST_OF_8 = 127, ZERO_OF_4 = 8, MOST_OF_4 = 15;

inline int32_t magnitude(float x) { return __builtin_bit_cast(int32_t, x) & 0x7fffffff; }

// x divided by the scale, to the nearest whole number, ties to even, within bounds.
inline float step(float x, float scale, float zero, float least, float most) {
    const float code = std::nearbyint(x / scale + zero);
    return code < least ? least : code > most ? most : code;
}

// One group into its block: the scale, then a byte for each number, or for each two (the first half
// of the group in the lower bits). Numbers that are none have codes of 0 and a scale that is none.
template <bool BYTES>
void encode(const float* x, int64_t group, uint8_t* block) {
    int32_t most = 0;
    for (int64_t i = 0; i < group; ++i) most = most < magnitude(x[i]) ? magnitude(x[i]) : most;
    int64_t first = 0;  // of those that are farthest from zero, whose sign the scale has
    while (!BYTES && magnitude(x[first]) < most) ++first;
    const float farthest = BYTES ? __builtin_bit_cast(float, most) / MOST_OF_8 : x[first] / -ZERO_OF_4;
    const bfloat16 head = narrow<bfloat16>(farthest);
    std::memcpy(block, &head, sizeof head);
    block += sizeof head;
    if (most >= INFINITE) {
        std::memset(block, 0, BYTES ? group : group / 2);
        return;
    }
    const float held = outsize::wide(head), scale = held == 0 ? INFINITY : held;
    if (BYTES) {
        for (int64_t i = 0; i < group; ++i)
            block[i] = uint8_t(int8_t(step(x[i], scale, 0, -MOST_OF_8, MOST_OF_8)));
        return;
    }
    const float* upper = x + group / 2;
    for (int64_t i = 0; i < group / 2; ++i)
        block[i] = uint8_t(int32_t(step(x[i], scale, ZERO_OF_4, 0, MOST_OF_4)) |
                           int32_t(step(upper[i], scale, ZERO_OF_4, 0, MOST_OF_4)) << 4);
}

}  // namespace

extern "C" {

// Groups (count, group) of float32 into blocks, on this thread; order: 0 bytes, 1 halves, of even
// groups.
void outsize_encode(int order, const float* groups, int64_t count, int64_t group, uint8_t* blocks) {
    const int64_t size = int64_t(sizeof(bfloat16)) + (order == 0 ? group : group / 2);
    for (int64_t i = 0; i < count; ++i) {
        if (order == 0)
            encode<true>(groups + i * group, group, blocks + i * size);
        else
            encode<false>(groups + i * group, group, blocks + i * size);
    }
}

// The numbers (outputs, inner) of a weight that is coded; dtype: 0 float32, 1 bfloat16; group: MOST
// at most, of halves and pairs even.
void outsize_decode(int dtype, const outsize::Matrix* weight, void* out, int threads) {
    const Layout layout = weight->layout();
    const uint8_t* raw = static_cast<const uint8_t*>(weight->data);
    const int64_t count = weight->outputs * weight->inner / layout.group;
    if (dtype == 0)
        decode(raw, layout, static_cast<float*>(out), count, threads);
    else
        decode(raw, layout, static_cast<bfloat16*>(out), count, threads);
}

}  // extern "C"
