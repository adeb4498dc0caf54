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

}  // namespace

extern "C" {

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
