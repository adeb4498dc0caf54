// Weights of few bits, decoded in one pass: a block of bytes becomes its group's numbers, each code's
// value times the group's scale, rounded once to what is stored. The twin is `plain` in codes.py.

#include <cstdint>

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
inline void stored(const uint8_t* block, const Layout& layout, const float* table, float scale,
                   float* out) {
    one(block, layout, table, scale, out);
}

inline void stored(const uint8_t* block, const Layout& layout, const float* table, float scale,
                   bfloat16* out) {
    float wide[MOST];
    one(block, layout, table, scale, wide);
    for (int64_t i = 0; i < layout.group; ++i) out[i] = narrow<bfloat16>(wide[i]);
}

template <class T>
void decode(const uint8_t* blocks, const Layout& layout, const float* scales, const float* table,
            T* out, int64_t count, int threads) {
    const int many = count * layout.group < GRAIN ? 1 : threads;
#pragma omp parallel for num_threads(many) schedule(static)
    for (int64_t i = 0; i < count; ++i)
        stored(blocks + i * layout.block, layout, table, scales[i], out + i * layout.group);
}

}  // namespace

extern "C" {

// Numbers of `count` blocks; dtype: 0 float32, 1 bfloat16; group: MOST at most, of halves and pairs
// even. table: the values of 16 codes, not read where codes are bytes.
void outsize_decode(int dtype, int order, const void* blocks, const float* scales,
                    const float* table, void* out, int64_t count, int64_t group, int64_t block,
                    int64_t head, int threads) {
    const Layout layout{order, group, block, head};
    const uint8_t* raw = static_cast<const uint8_t*>(blocks);
    if (dtype == 0)
        decode(raw, layout, scales, table, static_cast<float*>(out), count, threads);
    else
        decode(raw, layout, scales, table, static_cast<bfloat16*>(out), count, threads);
}

}  // extern "C"
