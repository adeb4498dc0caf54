// A run of blocks over the tokens of a step of serving, in one call: x + attention(norm(x)), then
// x + mlp(norm(x)), by the very passes that the modules call one by one, so that the bits are theirs.
// What a block is, is said as data (outsize/kernels/blocks.py).

#include <algorithm>
#include <cstdint>

#include "codes.h"
#include "storage.h"

using outsize::Matrix;
using std::int32_t;
using std::int64_t;

extern "C" {
void outsize_rms_norm(int, int, const void*, const void*, float, float, void*, float*, int64_t,
                      int64_t, int);
void outsize_rope(int, const void*, const int64_t*, const float*, const float*, int64_t, void*,
                  const int64_t*, int64_t, int, float, int);
void outsize_gate(int, const void*, const void*, void*, int64_t, int);
void outsize_rows_product(int, const void*, const Matrix*, void*, int64_t, int);
void outsize_pages_put(int, int, const void*, void*, void*, const int64_t*, int64_t, int64_t, int64_t);
void outsize_pages_attend(int, int, const void*, const void*, const void*, const void*, const void*,
                          void*, const int64_t*, const int64_t*, const int64_t*, const int64_t*,
                          int64_t, float, float, int);
}

namespace {

using outsize::bfloat16;
using outsize::narrow;
using outsize::wide;

constexpr int64_t GRAIN = 1 << 15;  // numbers below which a thread more costs more than it saves

struct Norm {
    const void* weight;  // null: none
    float eps, offset;
    int32_t dtype, unused;
};

struct Layer {
    Norm attention, query, key, attention_out, mlp, mlp_out;
    Matrix q, k, v, o, gate, up, down;
    void *keys, *key_scales, *values, *value_scales;
    int64_t heads, groups, head, value, window;
    int64_t rope;  // its table; -1: none
    float scale, softcap;
    int32_t interleaved, form;
};

struct Step {
    const int64_t *tables, *begins, *positions, *where;
    const float* const* cos;
    const float* const* sin;
    const int64_t* pairs;  // by table
    int64_t tokens, hidden, page;
    int32_t dtype, threads;
};

// Numbers of a token that work takes, for the largest layer: as few as the modules would hold.
struct Room {
    int64_t hidden = 0, heads = 1, queries = 0, pairs = 0, inner = 0;
    bool behind = false;  // a branch has a norm behind it

    Room(const Step& step, const Layer* layers, int64_t count) {
        hidden = step.hidden;
        for (const Layer* l = layers; l < layers + count; ++l) {
            heads = std::max(heads, l->heads);
            queries = std::max(queries, l->heads * std::max(l->head, l->value));
            pairs = std::max(pairs, l->groups * std::max(l->head, l->value));
            inner = std::max(inner, l->gate.outputs);
            behind |= l->attention_out.weight || l->mlp_out.weight;
        }
    }
    int64_t numbers() const {
        return (behind ? 2 : 1) * hidden + std::max(2 * queries + pairs, 3 * inner);
    }
};

template <class T>
struct Run {
    const Step& step;
    Room room;
    T* x;
    float* inverse;
    T *normed, *given, *branch;
    int64_t tokens;

    Run(const Step& s, const Room& r, void* stream, void* work)
        : step(s), room(r), x(static_cast<T*>(stream)), inverse(static_cast<float*>(work)),
          tokens(s.tokens) {
        normed = reinterpret_cast<T*>(inverse + tokens * room.heads);
        given = room.behind ? normed + tokens * room.hidden : normed;
        branch = given + tokens * room.hidden;
    }

    const T* norm(const Norm& one, const T* from, T* to, int64_t rows, int64_t size) const {
        if (!one.weight) return from;
        outsize_rms_norm(step.dtype, one.dtype, from, one.weight, one.eps, one.offset, to, inverse,
                         rows, size, step.threads);
        return to;
    }

    void product(const Matrix& w, const T* from, T* to) const {
        outsize_rows_product(step.dtype, from, &w, to, tokens, step.threads);
    }

    // Queries or keys by head, normed and turned; spare: room for as many. Gives the other one too.
    T* by_head(const Layer& l, const Norm& one, T* from, T*& spare, int64_t heads) const {
        if (norm(one, from, spare, tokens * heads, l.head) == spare) std::swap(from, spare);
        if (l.rope < 0) return from;
        const int64_t strides[] = {heads * l.head, l.head, 1}, shape[] = {tokens, heads, l.head};
        const int64_t pairs = step.pairs[l.rope];
        outsize_rope(step.dtype, from, strides, step.cos[l.rope], step.sin[l.rope], pairs, spare,
                     shape, pairs, l.interleaved, 1.0f, step.threads);
        std::swap(from, spare);
        return from;
    }

    void add(const Norm& behind) {
        const T* more = norm(behind, given, normed, tokens, room.hidden);
        const int64_t count = tokens * room.hidden;
#pragma omp parallel for num_threads(step.threads) schedule(static) if (count > GRAIN)
        for (int64_t i = 0; i < count; ++i) x[i] = narrow<T>(wide(x[i]) + wide(more[i]));
    }

    // Keys, and then values, go to their pages before others take their room.
    void attention(const Layer& l) {
        T *q = branch, *spare = q + tokens * room.queries, *more = spare + tokens * room.queries;
        const T* from = norm(l.attention, x, normed, tokens, room.hidden);
        product(l.q, from, q);
        q = by_head(l, l.query, q, spare, l.heads);
        product(l.k, from, spare);
        T* others = more;
        const T* k = by_head(l, l.key, spare, others, l.groups);
        outsize_pages_put(step.dtype, l.form, k, l.keys, l.key_scales, step.where, tokens, l.groups,
                          l.head);
        product(l.v, from, more);
        outsize_pages_put(step.dtype, l.form, more, l.values, l.value_scales, step.where, tokens,
                          l.groups, l.value);
        const int64_t sizes[] = {step.page, l.heads, l.groups, l.head, l.value, l.window};
        outsize_pages_attend(step.dtype, l.form, q, l.keys, l.key_scales, l.values, l.value_scales,
                             spare, step.tables, step.begins, step.positions, sizes, tokens, l.scale,
                             l.softcap, step.threads);
        product(l.o, spare, given);
    }

    void mlp(const Layer& l) {
        const int64_t count = tokens * l.gate.outputs;
        T *gate = branch, *up = gate + count, *inner = up + count;
        const T* from = norm(l.mlp, x, normed, tokens, room.hidden);
        product(l.gate, from, gate);
        product(l.up, from, up);
        outsize_gate(step.dtype, gate, up, inner, count, step.threads);
        product(l.down, inner, given);
    }

    void all(const Layer* layers, int64_t count) {
        for (const Layer* l = layers; l < layers + count; ++l) {
            attention(*l);
            add(l->attention_out);
            mlp(*l);
            add(l->mlp_out);
        }
    }
};

}  // namespace

extern "C" {

// Bytes that a step works in.
int64_t outsize_blocks_work(const Step* step, const Layer* layers, int64_t count) {
    const Room room(*step, layers, count);
    const int64_t size = step->dtype == 0 ? sizeof(float) : sizeof(bfloat16);
    return step->tokens * (room.heads * int64_t(sizeof(float)) + room.numbers() * size);
}

// x (tokens, hidden) through `count` blocks, in place.
void outsize_blocks(const Step* step, const Layer* layers, int64_t count, void* x, void* work) {
    const Room room(*step, layers, count);
    if (step->dtype == 0)
        Run<float>(*step, room, x, work).all(layers, count);
    else
        Run<bfloat16>(*step, room, x, work).all(layers, count);
}

}  // extern "C"
