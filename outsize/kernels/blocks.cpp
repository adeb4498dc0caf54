// A run of blocks over the tokens of a step of serving, in one call: x + attention(norm(x)), then
// x + mlp(norm(x)), by the very passes that the modules call one by one, so that the bits are theirs.
// What a block is, is said as data (outsize/kernels/blocks.py).

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "codes.h"
#include "storage.h"
#include "team.h"
#include "tiles.h"

using outsize::Joint;
using outsize::Matrix;
using outsize::Team;
using std::int32_t;
using std::int64_t;

extern "C" {
void outsize_rms_norm(int, int, const void*, const void*, float, float, void*, float*, int64_t,
                      int64_t, int);
void outsize_rope(int, const void*, const int64_t*, const float*, const float*, int64_t, void*,
                  const int64_t*, int64_t, int, float, int);
void outsize_gate(int, const void*, const void*, void*, int64_t, int);
int64_t outsize_eights_floats(const Matrix*, int64_t);
void* outsize_eights_rows(const Matrix*, int64_t, float*);
void outsize_eights_drop(void*);
int outsize_eights_alike(const Matrix*, const Matrix*);
void outsize_eights_round(int, const void*, void*, int64_t, int64_t);
void outsize_eights_times(int, const void*, const Matrix*, void*, int, int);
void outsize_attention_share(int, const void*, const void*, const void*, const int64_t*, const int64_t*,
                             void*, float*, const int64_t*, const int64_t*, float, float, int, int);
}

namespace {

using outsize::DTYPE;
using outsize::narrow;
using outsize::wide;

constexpr int64_t LINE = 64;  // numbers: shares of flat tensors begin whole cache lines
constexpr int64_t TILE = outsize::BLOCK;  // tokens of a tile of attention.cpp
constexpr int AS_STORED = 0;  // a form of pages, as pages.cpp has it

// Functions of other libraries, which one that serves without them need not have compiled.
using Product = void(const void*, const Matrix*, void*, int64_t, int, int);  // of rows.cpp
using Put = void(int, const void*, void*, void*, const int64_t*, int64_t, int64_t, int64_t);  // of pages.cpp
using Attend = void(int, const void*, const void*, const void*, const void*, const void*, void*, const int64_t*,
                    const int64_t*, const int64_t*, const int64_t*, int64_t, float, float, int, int, void*);

struct Norm {
    const void* weight;  // null: none
    float eps, offset;
    int32_t dtype, unused;
};

struct Layer {
    Norm attention, query, key, attention_out, mlp, mlp_out;
    Matrix q, k, v, o, gate, up, down;
    void *keys, *key_scales, *values, *value_scales;
    Product* product;  // null where all weights have rows rounded
    Put* put;
    Attend* attend;
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
    int64_t threads;
};

// Tokens [first, last) that are attended at once: each alone, or as a prompt's by the tiles of training,
// which gives the same bits. rooms: of the tokens of its sequence, where they lie; none: each alone.
struct Stretch {
    int64_t first, last;
    std::vector<int64_t> rooms;
};

// Those of a step: of a prompt what begins a tile.
std::vector<Stretch> stretches(const Step& s) {
    std::vector<Stretch> found;
    const auto alone = [&](int64_t first, int64_t last) {
        if (first == last) return;
        if (found.empty() || !found.back().rooms.empty()) found.push_back({first, last, {}});
        found.back().last = last;
    };
    for (int64_t first = 0, last; first < s.tokens; first = last) {
        const int64_t place = s.positions[first], *pages = s.tables + s.begins[first];
        for (last = first + 1; last < s.tokens && s.begins[last] == s.begins[first] &&
                               s.positions[last] == place + last - first;)
            ++last;
        const int64_t begin = std::min(last, first + (TILE - place % TILE) % TILE);
        if (last - begin < TILE) {
            alone(first, last);
            continue;
        }
        alone(first, begin);
        found.push_back({begin, last, {}});
        for (int64_t at = 0; at < place + last - first; ++at)
            found.back().rooms.push_back(pages[at / s.page] * s.page + at % s.page);
    }
    return found;
}

// Numbers of a token that work takes, for the largest layer: as few as the modules would hold. Norms'
// inverses come last, as products are slow where rows do not begin whole lines of a cache.
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
    int64_t all(int64_t tokens) const {  // an even number
        const int64_t one = (behind ? 2 : 1) * hidden + std::max(2 * queries + 2 * pairs, 3 * inner);
        return tokens * one + tokens * one % 2;
    }
};

// What is multiplied by weights whose products round it to 8 bits, by their formats: rounded once for
// all weights that read it, each row by one thread, or by each of them all rows for itself. What has
// another length is read at another time, and shares memory.
class Rounds {
  public:
    Rounds(const Step& s, const Layer* layers, int64_t count) {
        for (const Layer* l = layers; l < layers + count; ++l)
            for (const Matrix* w : {&l->q, &l->k, &l->v, &l->o, &l->gate, &l->up, &l->down})
                if (w->eights && !of(*w)) found.push_back({w, place(w->inner), nullptr});
        for (const Format& one : found) {
            rooms.resize(std::max(rooms.size(), one.place + 1));
            std::vector<float>& room = rooms[one.place];
            room.resize(std::max<int64_t>(room.size(), outsize_eights_floats(one.like, s.tokens)));
        }
        for (Format& one : found) one.rows = outsize_eights_rows(one.like, s.tokens, rooms[one.place].data());
    }
    Rounds(const Rounds&) = delete;
    ~Rounds() {
        for (const Format& one : found) outsize_eights_drop(one.rows);
    }
    struct Format {
        const Matrix* like;
        size_t place;  // of its memory
        void* rows;
    };
    const Format* of(const Matrix& w) const {
        for (const Format& one : found)
            if (outsize_eights_alike(one.like, &w)) return &one;
        return nullptr;
    }

  private:
    std::vector<Format> found;
    std::vector<std::vector<float>> rooms;

    size_t place(int64_t inner) const {
        return std::count_if(found.begin(), found.end(), [=](const Format& f) { return f.like->inner == inner; });
    }
};

// One of the threads that go through the blocks together: what is of single tokens is shared by
// tokens, products by outputs, attention by heads.
template <class T>
struct Run {
    const Step& step;
    const Room room;
    const Rounds& rounds;
    const bool apart;  // what is rounded is this thread's own
    const std::vector<Stretch>& parts;
    const Team team;
    Joint& joint;
    T* x;
    T *normed, *given, *branch;
    float* inverse;
    const int64_t first, last, count;  // tokens of this thread, and how many all are

    Run(const Step& s, const Room& r, const Rounds& n, bool a, const std::vector<Stretch>& p, Team t,
        Joint& j, void* stream, void* work)
        : step(s), room(r), rounds(n), apart(a), parts(p), team(t), joint(j), x(static_cast<T*>(stream)),
          normed(static_cast<T*>(work)), first(t.first(s.tokens)), last(t.last(s.tokens)),
          count(s.tokens) {
        inverse = reinterpret_cast<float*>(normed + room.all(count));
        given = room.behind ? normed + count * room.hidden : normed;
        branch = given + count * room.hidden;
    }

    void meet() const {
        if (team.count > 1) joint.meeting.meet();
    }

    // Of this thread's tokens, each of so many rows; what the result lies in.
    T* norm(const Norm& one, T* from, T* to, int64_t rows, int64_t size) const {
        if (!one.weight) return from;
        const int64_t at = first * rows;
        if (first < last)
            outsize_rms_norm(DTYPE, one.dtype, from + at * size, one.weight, one.eps, one.offset,
                             to + at * size, inverse + at, (last - first) * rows, size, 1);
        return to;
    }

    // This thread's tokens, or all, for products of all by such weights; whether others wait for them.
    bool round(std::initializer_list<const Matrix*> by, const T* from) const {
        std::vector<const void*> had;
        for (const Matrix* w : by) {
            const Rounds::Format* format = rounds.of(*w);
            if (!format || std::count(had.begin(), had.end(), format->rows)) continue;
            outsize_eights_round(DTYPE, from, format->rows, apart ? 0 : first, apart ? count : last);
            had.push_back(format->rows);
        }
        return !apart && !had.empty();
    }

    // What this thread has of it is done, for products by such weights.
    void ready(std::initializer_list<const Matrix*> by, const T* from) const {
        if (apart) meet();
        round(by, from);
        if (!apart) meet();
    }

    void product(const Layer& l, const Matrix& w, const T* from, T* to) const {
        if (const Rounds::Format* format = rounds.of(w))
            return outsize_eights_times(DTYPE, format->rows, &w, to, team.count, team.index);
        l.product(from, &w, to, count, team.count, team.index);
    }

    // Queries or keys of this thread's tokens by head, normed and turned; spare: room for as many.
    // Both trade places with each.
    void by_head(const Layer& l, const Norm& one, T*& from, T*& spare, int64_t heads) const {
        if (norm(one, from, spare, heads, l.head) == spare) std::swap(from, spare);
        if (l.rope < 0) return;
        const int64_t wide = heads * l.head, pairs = step.pairs[l.rope];
        const int64_t strides[] = {wide, l.head, 1}, shape[] = {last - first, heads, l.head};
        if (first < last)
            outsize_rope(DTYPE, from + first * wide, strides, step.cos[l.rope] + first * pairs,
                         step.sin[l.rope] + first * pairs, pairs, spare + first * wide, shape, pairs,
                         l.interleaved, 1.0f, 1);
        std::swap(from, spare);
    }

    void put(const Layer& l, const T* from, void* data, void* scales, int64_t size) const {
        l.put(l.form, from + first * l.groups * size, data, scales,
              step.where + first, last - first, l.groups, size);
    }

    void attend(const Layer& l, const Stretch& part, const T* q, T* to) const {
        const int64_t first = part.first, many = part.last - first, past = step.positions[first];
        q += first * l.heads * l.head;
        to += first * l.heads * l.value;
        if (part.rooms.empty() || l.form != AS_STORED) {
            const int64_t sizes[] = {step.page, l.heads, l.groups, l.head, l.value, l.window, l.value};
            l.attend(l.form, q, l.keys, l.key_scales, l.values, l.value_scales, to, step.tables,
                     step.begins + first, step.positions + first, sizes, many, l.scale, l.softcap,
                     team.count, team.index, &joint);
            return;
        }
        const int64_t facts[] = {many, l.heads, l.groups, l.head, l.value, l.window, past};
        const int64_t strides[] = {l.heads * l.head, l.head, l.groups * l.head, l.head,
                                   l.groups * l.value, l.value};
        const int64_t bounds[] = {0, past + many};
        outsize_attention_share(DTYPE, q, l.keys, l.values, strides, part.rooms.data(), to,
                                inverse + first * l.heads, facts, bounds, l.scale, l.softcap,
                                team.count, team.index);
    }

    void add(const Norm& behind) {
        const T* more = norm(behind, given, normed, 1, room.hidden);
        for (int64_t i = first * room.hidden; i < last * room.hidden; ++i)
            x[i] = narrow<T>(wide(x[i]) + wide(more[i]));
    }

    void attention(const Layer& l) {
        T *q = branch, *spare = q + count * room.queries, *k = spare + count * room.queries,
          *v = k + count * room.pairs;
        const T* from = norm(l.attention, x, normed, 1, room.hidden);
        ready({&l.q, &l.k, &l.v}, from);
        product(l, l.q, from, q);
        product(l, l.k, from, k);
        product(l, l.v, from, v);
        meet();
        by_head(l, l.query, q, spare, l.heads);
        T* others = spare + first * (l.heads - l.groups) * l.head;  // this thread's part of it
        by_head(l, l.key, k, others, l.groups);
        put(l, k, l.keys, l.key_scales, l.head);
        put(l, v, l.values, l.value_scales, l.value);
        meet();
        for (const Stretch& part : parts) attend(l, part, q, spare);
        meet();
        if (round({&l.o}, spare)) meet();
        product(l, l.o, spare, given);
        meet();
        add(l.attention_out);
    }

    void mlp(const Layer& l) {
        const int64_t wide = l.gate.outputs, all = count * wide, lines = (all + LINE - 1) / LINE;
        const bool own = !apart && rounds.of(l.down);  // its tokens are rounded then
        const int64_t begin = own ? first * wide : team.first(lines) * LINE;
        const int64_t end = own ? last * wide : std::min(all, team.last(lines) * LINE);
        T *gate = branch, *up = gate + all, *inner = up + all;
        const T* from = norm(l.mlp, x, normed, 1, room.hidden);
        ready({&l.gate, &l.up}, from);
        product(l, l.gate, from, gate);
        product(l, l.up, from, up);
        meet();
        outsize_gate(DTYPE, gate + begin, up + begin, inner + begin, end - begin, 1);
        ready({&l.down}, inner);
        product(l, l.down, inner, given);
        meet();
        add(l.mlp_out);
    }

    void all(const Layer* layers, int64_t many) {
        for (const Layer* l = layers; l < layers + many; ++l) {
            attention(*l);
            mlp(*l);
        }
    }
};

template <class T>
void together(const Step& step, const Layer* layers, int64_t count, void* x, void* work) {
    const Room room(step, layers, count);
    const bool apart = step.tokens < step.threads;  // who waits for another to round saves nothing
    const Rounds all(step, layers, apart ? 0 : count);
    const std::vector<Stretch> parts = stretches(step);
    Joint joint;
#pragma omp parallel num_threads(step.threads)
    {
        const Team team(omp_get_num_threads(), omp_get_thread_num());  // as many as there are
#pragma omp single
        joint.meeting.of(team.count);
        const Rounds own(step, layers, apart ? count : 0);
        Run<T>(step, room, apart ? own : all, apart, parts, team, joint, x, work).all(layers, count);
    }
}

}  // namespace

extern "C" {

// Bytes that a step works in.
int64_t outsize_blocks_work(const Step* step, const Layer* layers, int64_t count) {
    const Room room(*step, layers, count);
    const int64_t floats = step->tokens * room.heads * sizeof(float);
    return floats + room.all(step->tokens) * int64_t(sizeof(outsize::Number));
}

// x (tokens, hidden) through `count` blocks, in place.
void outsize_blocks(const Step* step, const Layer* layers, int64_t count, void* x, void* work) {
    together<outsize::Number>(*step, layers, count, x, work);
}

}  // extern "C"
