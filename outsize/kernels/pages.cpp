// Attention of tokens over the pages of their sequences, each token alone.
//
// A token's numbers are summed in the order of attention.cpp, over tiles of BLOCK places of its
// sequence: bit for bit what the forward pass of training gives that token, whatever is computed
// beside it. Tokens of one sequence that follow one another share what is read. Here keys lie across
// a vector and not queries: a step of serving may have a single one.
//
// Storage of queries and results is float32 or bfloat16, as this is compiled, of keys and values that or
// codes with a scale for each token and head. A value may be the first numbers of its key, and heads
// may have any size.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include <omp.h>

#include "codes.h"
#include "team.h"
#include "tiles.h"

namespace {

using namespace outsize;

// Codes of whole numbers, a vector of them: bytes, or from -8 on pairs in a byte, the first one low.
template <int BITS>
inline vec numbers_of(const uint8_t* codes) {
    return __builtin_convertvector(BITS == 8 ? signed_of(codes) : pairs_of(codes) - 8, vec);
}

constexpr int TERMS = 128;  // of a head's numbers in one sum, as in attention.cpp
constexpr int SPAN = 16;    // tokens that share what is read
constexpr int64_t HEADS = 16;  // query heads of a task: more share their keys with those of others

struct Pages {
    const int64_t* tables;     // pages of each sequence, one behind another
    const int64_t* begins;     // by token, where its sequence's pages begin
    const int64_t* positions;  // by token, its place in the sequence
    int64_t page, heads, groups, key, value, window;
    float scale;
    Cap cap;

    // Of a token's sequence, the rooms of places [first, last) among those of all pages.
    void rooms(int64_t token, int64_t first, int64_t last, int64_t* to) const {
        const int64_t* table = tables + begins[token] + first / page;
        for (int64_t place = first / page * page; place < last; place += page, ++table)
            for (int64_t at = std::max(first, place); at < std::min(last, place + page); ++at)
                *to++ = *table * page + at - place;
    }
};

// What pages hold of a token's head, as float32: where it lies, if it does so in whole vectors, or
// read to room for it. row: numbers of a head there, of which these are the first.
template <class S>
struct Stored {
    const S* data;
    int64_t groups, size, row;

    const float* lying(int64_t room, int64_t group) const {
        if constexpr (std::is_same<S, float>::value)
            if (size % LANES == 0) return data + (room * groups + group) * row;
        return nullptr;
    }

    const void* at(int64_t room, int64_t group) const { return data + (room * groups + group) * row; }
    int64_t bytes() const { return row * int64_t(sizeof(S)); }

    void read(int64_t room, int64_t group, float* __restrict__ to) const {
        const S* __restrict__ from = data + (room * groups + group) * row;
        for (int64_t d = 0; d < size; ++d) to[d] = wide(from[d]);
    }
};

// The same as codes of BITS bits, GROUP of a head's numbers with a scale.
constexpr int64_t GROUP = 32;

template <int BITS>
struct Coded {
    const uint8_t* codes;
    const bfloat16* scales;
    int64_t groups, size, row;

    const float* lying(int64_t, int64_t) const { return nullptr; }
    const void* at(int64_t room, int64_t group) const { return codes + (room * groups + group) * bytes(); }
    int64_t bytes() const { return (row * BITS + 7) / 8; }

    static float one(const uint8_t* from, int64_t d) {
        return BITS == 8 ? float(int8_t(from[d])) : float((from[d / 2] >> (d % 2 * 4) & 15) - 8);
    }

    void read(int64_t room, int64_t group, float* __restrict__ to) const {
        const int64_t first = room * groups + group;
        const uint8_t* __restrict__ from = codes + first * bytes();
        const bfloat16* own = scales + first * ((row + GROUP - 1) / GROUP);
        int64_t d = 0;
        for (; d + GROUP <= size; d += GROUP, ++own) {
            const float scale = wide(*own);
            for (int64_t i = d; i < d + GROUP; i += LANES) {
                const uint8_t* some = from + i * BITS / 8;
                store(to + i, numbers_of<BITS>(some) * all(scale));
            }
        }
        for (; d < size; ++d) to[d] = one(from, d) * wide(*own);
    }
};

// A tile of keys, turned, and of values; what is kept of the queries of a span.
struct Space {
    int row = 0;  // floats of a row of a tile: ROW, or more for larger heads
    Buffer tile, turned, values;
    std::vector<float> queries, sums, top, total;

    void begin(int64_t rows, int64_t key, int64_t value) {
        const int wide = std::max(WIDTH, rounded(int(std::max(key, value)), LANES)) + 16;
        if (wide > row) {
            row = wide;
            for (Buffer* one : {&tile, &turned, &values}) *one = buffer(int64_t(row) * BLOCK);
        }
        queries.resize(rows * key);
        sums.assign(rows * value, 0.0f);
        top.assign(rows, NEVER);
        total.assign(rows, 0.0f);
    }
};

// Scores of a query against keys [first, last) of a tile, in whole vectors; base 2.
inline void score(const float* query, const float* turned, int size, int first, int last,
                  const Cap& cap, float* to) {
    constexpr int WIDE = 4;  // vectors at once
    static_assert(BLOCK % (WIDE * LANES) == 0, "a tile is whole");
    for (int at = first / (WIDE * LANES) * WIDE * LANES; at < last; at += WIDE * LANES) {
        vec whole[WIDE];
        for (int d = 0; d < size; d += TERMS) {
            vec sum[WIDE] = {};
            for (int i = d; i < std::min(d + TERMS, size); ++i) {
                const vec left = all(query[i]);
#pragma GCC unroll 4
                for (int n = 0; n < WIDE; ++n)
                    sum[n] = fused(sum[n], left, load(turned + i * BLOCK + at + n * LANES));
            }
#pragma GCC unroll 4
            for (int n = 0; n < WIDE; ++n) whole[n] = d > 0 ? sum[n] + whole[n] : sum[n];
        }
        for (int n = 0; n < WIDE; ++n)
            store(to + at + n * LANES, cap.size > 0 ? cap(whole[n]) : whole[n]);
    }
    std::fill(to + first / LANES * LANES, to + first, NEVER);
    std::fill(to + last, to + rounded(last, LANES), NEVER);
}

// The same of one query against keys that lie anywhere, turned in registers: STRIPS of them side by
// side, so that sums need not wait for one another.
constexpr int STRIPS = 4, LINE = 64;  // LINE: bytes of a line of a cache

inline void score_rows(const float* query, const float* const* keys, int size, int first, int last,
                       const Cap& cap, float* to) {
    for (int at = first / LANES * LANES; at < last; at += STRIPS * LANES) {
        const int strips = std::min(STRIPS, (last - at + LANES - 1) / LANES);
        vec whole[STRIPS] = {}, sum[STRIPS] = {};
        for (int d = 0; d < size; d += LANES) {
            const int wide = std::min(LANES, size - d);
            for (int n = 0; n < strips; ++n) {
                vec x[LANES];
                const float* const* own = keys + at + n * LANES;
#pragma GCC unroll 16
                for (int l = 0; l < LANES; ++l) x[l] = load(own[l] + d);
                exchange<1>(x);
                if (wide == LANES) {
#pragma GCC unroll 16
                    for (int i = 0; i < LANES; ++i) sum[n] = fused(sum[n], all(query[d + i]), x[i]);
                } else {
                    for (int i = 0; i < wide; ++i) sum[n] = fused(sum[n], all(query[d + i]), x[i]);
                }
            }
            if ((d + LANES) % TERMS == 0 || d + LANES >= size)
                for (int n = 0; n < strips; ++n) {
                    whole[n] = d >= TERMS ? sum[n] + whole[n] : sum[n];
                    sum[n] = vec{};
                }
        }
        for (int n = 0; n < strips; ++n)
            store(to + at + n * LANES, cap.size > 0 ? cap(whole[n]) : whole[n]);
    }
    std::fill(to + first / LANES * LANES, to + first, NEVER);
    std::fill(to + last, to + rounded(last, LANES), NEVER);
}

// The largest of some scores and of what was before.
inline float largest(const float* scores, int first, int last, float before) {
    vec most = all(before);
    for (int j = first / LANES * LANES; j < last; j += LANES) {
        const vec x = load(scores + j);
        most = x > most ? x : most;
    }
    float now = most[0];
    for (int l = 1; l < LANES; ++l) now = most[l] > now ? most[l] : now;
    return now;
}

// Scores to weights against the running maximum, as `soften` does; what is earlier fades so much.
inline float soften(float* scores, int first, int last, float& top, float& total) {
    const int from = first / LANES * LANES;
    const float now = largest(scores, first, last, top);
    vec sum = vec{};
    for (int j = from; j < last; j += LANES) {
        const vec x = load(scores + j);
        vec p = power(x - all(now));
        p = x == all(NEVER) ? vec{} : p;
        sum += p;
        store(scores + j, p);
    }
    const float fade = power(all(top - now))[0];
    top = now;
    total = fused(all(together(sum)), all(total), all(fade))[0];
    return fade;
}

// sums = sums * fade, or nothing, + weights [first, last) times rows of values, of `size` numbers, whole
// vectors.
template <int WIDE, bool MORE>
inline int add_some(float* sums, float fade, const float* weights, const float* const* values,
                    int first, int last, int d, int size) {
    for (; d + WIDE * LANES <= size; d += WIDE * LANES) {
        vec sum[WIDE] = {};
        for (int j = first; j < last; ++j) {
            const vec weight = all(weights[j]);
#pragma GCC unroll 8
            for (int n = 0; n < WIDE; ++n)
                sum[n] = fused(sum[n], weight, load(values[j] + d + n * LANES));
        }
#pragma GCC unroll 8
        for (int n = 0; n < WIDE; ++n) {
            float* to = sums + d + n * LANES;
            store(to, MORE ? fused(sum[n], load(to), all(fade)) : sum[n]);
        }
    }
    return d;
}

template <bool MORE = true>
inline void add(float* sums, float fade, const float* weights, const float* const* values, int first,
                int last, int size) {
    int d = add_some<8, MORE>(sums, fade, weights, values, first, last, 0, size);
    d = add_some<4, MORE>(sums, fade, weights, values, first, last, d, size);
    add_some<1, MORE>(sums, fade, weights, values, first, last, d, size);
}

// A row's result to that of a head.
template <class T>
void give(const Pages& p, const Space& space, int64_t row, T* out, int64_t head) {
    const float inverse = 1.0f / space.total[row];
    const float* sums = space.sums.data() + row * rounded(int(p.value), LANES);
    for (int64_t d = 0; d < p.value; ++d) out[head * p.value + d] = narrow<T>(sums[d] * inverse);
}

// Tokens [first, first + count) of one sequence, one behind the other, with `repeat` queries of a
// group from head `head` on.
template <class T, class Held>
void span(const Pages& p, const T* q, const Held& keys, const Held& values, T* out, int64_t first,
          int64_t count, int64_t head, int64_t repeat, Space& space) {
    const int64_t group = head / (p.heads / p.groups), wide_value = rounded(int(p.value), LANES);
    space.begin(count * repeat, p.key, wide_value);
    const float factor = p.scale * LOG2E;
    for (int64_t t = 0; t < count; ++t)
        for (int64_t d = 0; d < repeat * p.key; ++d)
            space.queries[t * repeat * p.key + d] =
                wide(q[((first + t) * p.heads + head) * p.key + d]) * factor;
    const int64_t begin = p.positions[first], end = begin + count;
    const int64_t low = std::max<int64_t>(0, begin - p.window + 1);
    alignas(64) float scores[BLOCK];
    int64_t rooms[BLOCK];
    const float* held[BLOCK];
    for (int i = 0; i < BLOCK; ++i) held[i] = space.values.get() + i * space.row;
    for (int64_t at = low / BLOCK * BLOCK; at < end; at += BLOCK) {
        const int from = int(std::max<int64_t>(0, low - at)), to = int(std::min<int64_t>(BLOCK, end - at));
        p.rooms(first, at + from, at + to, rooms + from);
        for (int i = 0; i < to; ++i) {
            float *k = space.tile.get() + i * space.row, *v = space.values.get() + i * space.row;
            const int64_t read = i < from ? 0 : 1;
            std::fill(k + read * p.key, k + rounded(int(p.key), LANES), 0.0f);
            std::fill(v + read * p.value, v + wide_value, 0.0f);
            if (i < from) continue;
            keys.read(rooms[i], group, k);
            values.read(rooms[i], group, v);
        }
        if (to % EVEN) std::fill_n(space.tile.get() + to * space.row, rounded(int(p.key), LANES), 0.0f);
        transpose(space.tile.get(), to, int(p.key), 1.0f, space.turned.get(), space.row);
        for (int64_t t = 0; t < count; ++t) {
            const int64_t place = begin + t;
            const int own = int(std::max<int64_t>(0, place - p.window + 1 - at));
            const int last = int(std::min<int64_t>(to, place + 1 - at));
            for (int64_t row = t * repeat; own < last && row < (t + 1) * repeat; ++row) {
                score(space.queries.data() + row * p.key, space.turned.get(), int(p.key), own, last,
                      p.cap, scores);
                const float fade = soften(scores, own, last, space.top[row], space.total[row]);
                float* sums = space.sums.data() + row * wide_value;
                add(sums, fade, scores, held, own, last, int(wide_value));
            }
        }
    }
    for (int64_t t = 0; t < count; ++t)
        for (int64_t r = 0; r < repeat; ++r)
            give(p, space, t * repeat + r, out, (first + t) * p.heads + head + r);
}

// The rows of a room as they lie, or read to `spare`, zeros to whole vectors.
template <class Held>
inline const float* row_of(const Held& from, int64_t room, int64_t group, float* spare) {
    if (const float* lying = from.lying(room, group)) return lying;
    from.read(room, group, spare);
    std::fill(spare + from.size, spare + rounded(int(from.size), LANES), 0.0f);
    return spare;
}

// A tile of what a token sees of its sequence: places [from, to) of it, and their rooms.
struct Tile {
    int from, to;
    int64_t rooms[BLOCK];

    Tile(const Pages& p, int64_t token, int64_t index) {
        const int64_t end = p.positions[token] + 1, low = std::max<int64_t>(0, end - p.window);
        const int64_t at = index * BLOCK;
        from = int(std::max<int64_t>(0, low - at)), to = int(std::min<int64_t>(BLOCK, end - at));
        p.rooms(token, at + from, at + to, rooms + from);
    }
    static int64_t first(const Pages& p, int64_t token) {
        return std::max<int64_t>(0, p.positions[token] + 1 - p.window) / BLOCK;
    }
    static int64_t last(const Pages& p, int64_t token) { return p.positions[token] / BLOCK + 1; }

    // A line of each of some heads is loaded, in the order in which they lie: so a processor reads on
    // by itself, which it does neither for what is asked for nor from one room to the next of one head.
    template <class Held>
    void come(const Held& held, int64_t head, int64_t heads) const {
        for (int i = from; i < to; ++i) {
            const volatile char* row = static_cast<const char*>(held.at(rooms[i], head));
            for (int64_t d = 0; d < heads * held.bytes(); d += LINE) static_cast<void>(row[d]);
        }
    }

    // Rows of a head; in the place of those that are not seen and of a vector that is, the first of them.
    template <class Held>
    void rows(const Held& held, int64_t head, float* spare, int row, const float** to_rows) const {
        for (int i = from; i < to; ++i) to_rows[i] = row_of(held, rooms[i], head, spare + i * row);
        std::fill(to_rows + from / LANES * LANES, to_rows + from, to_rows[from]);
        std::fill(to_rows + to, to_rows + rounded(to, LANES), to_rows[from]);
    }
};

// Scores of one query or more against keys of a tile, base 2: these are turned in registers for each, or
// once for several. to: by query, `step` from one to the next.
inline void score_all(const Pages& p, const float* queries, const Tile& tile, const float* const* keys,
                      float* to, int64_t step, float* turned) {
    const int size = int(p.key);
    const int64_t repeat = p.heads / p.groups;
    if (repeat == 1) return score_rows(queries, keys, size, tile.from, tile.to, p.cap, to);
    for (int i = tile.from / LANES * LANES; i < tile.to; i += LANES)
        for (int d = 0; d < size; d += LANES) {
            vec x[LANES];
#pragma GCC unroll 16
            for (int l = 0; l < LANES; ++l) x[l] = load(keys[i + l] + d);
            exchange<1>(x);
#pragma GCC unroll 16
            for (int l = 0; l < LANES; ++l) store(turned + (d + l) * BLOCK + i, x[l]);
        }
    for (int64_t r = 0; r < repeat; ++r)
        score(queries + r * size, turned, size, tile.from, tile.to, p.cap, to + r * step);
}

// Queries of some heads of a token, times what scores are multiplied by.
template <class T>
void ask(const Pages& p, const T* q, int64_t token, int64_t head, int64_t heads, Space& space) {
    space.begin(heads, p.key, rounded(int(p.value), LANES));
    const float factor = p.scale * LOG2E;
    for (int64_t d = 0; d < heads * p.key; ++d)
        space.queries[d] = wide(q[(token * p.heads + head) * p.key + d]) * factor;
}

// One token and groups [group, last) of its heads.
template <class T, class Held>
void single(const Pages& p, const T* q, const Held& keys, const Held& values, T* out, int64_t token,
            int64_t group, int64_t last, Space& space) {
    const int wide_value = rounded(int(p.value), LANES);
    const int64_t repeat = p.heads / p.groups, head = group * repeat, heads = (last - group) * repeat;
    ask(p, q, token, head, heads, space);
    alignas(64) float scores[HEADS * BLOCK];
    const float *k[BLOCK], *v[BLOCK];
    for (int64_t at = Tile::first(p, token); at < Tile::last(p, token); ++at) {
        const Tile tile(p, token, at);
        tile.come(keys, group, last - group);
        tile.come(values, group, last - group);
        for (int64_t h = 0; h < heads; h += repeat) {
            tile.rows(keys, group + h / repeat, space.tile.get(), space.row, k);
            tile.rows(values, group + h / repeat, space.values.get(), space.row, v);
            score_all(p, &space.queries[h * p.key], tile, k, scores, BLOCK, space.turned.get());
            for (int64_t r = 0; r < repeat; ++r) {
                float* own = scores + r * BLOCK;
                const float fade = soften(own, tile.from, tile.to, space.top[h + r], space.total[h + r]);
                add(&space.sums[(h + r) * wide_value], fade, own, v, tile.from, tile.to, wide_value);
            }
        }
    }
    for (int64_t h = 0; h < heads; ++h) give(p, space, h, out, token * p.heads + head + h);
}

// One token by a team, each of whom has tiles of its sequence, all heads of them: of half the heads
// two threads would each have the other's numbers come, as a processor reads on. What is left over of
// tiles they share by groups of heads. Scores come first, then weights, which need the largest score of all tiles
// before, then sums, in the order in which `single` has them.
template <class T, class Held>
struct Divided {
    const Pages& p;
    const Held &keys, &values;
    const int64_t token, first, tiles, each;  // each: tiles of a thread
    const Team team;
    float* room;
    Space& space;

    // Of a tile's head: weights, their sums by value, then these.
    enum { MOST, TOTAL, FADE, FACTS };
    int64_t wide_value() const { return rounded(int(p.value), LANES); }
    int64_t repeat() const { return p.heads / p.groups; }
    int64_t size() const { return BLOCK + wide_value() + FACTS; }
    float* of(int64_t tile, int64_t head) const { return room + (tile * p.heads + head) * size(); }
    float* facts(int64_t tile, int64_t head) const { return of(tile, head) + BLOCK + wide_value(); }

    // The tiles of a thread, and of those that are left over its groups.
    template <class F>
    void own(F with) const {
        const int64_t from = team.index * each, left = team.count * each;
        for (int64_t t = from; t < from + each; ++t) with(t, int64_t(0), p.groups);
        for (int64_t t = left; t < tiles; ++t) with(t, team.first(p.groups), team.last(p.groups));
    }

    void score() const {
        const float* k[BLOCK];
        own([&](int64_t t, int64_t group, int64_t last) {
            const Tile tile(p, token, first + t);
            tile.come(keys, group, last - group);
            for (int64_t g = group; g < last; ++g) {
                const int64_t head = g * repeat();
                tile.rows(keys, g, space.tile.get(), space.row, k);
                score_all(p, &space.queries[head * p.key], tile, k, of(t, head), size(),
                          space.turned.get());
                for (int64_t h = head; h < head + repeat(); ++h)
                    facts(t, h)[MOST] = largest(of(t, h), tile.from, tile.to, NEVER);
            }
        });
    }

    void weigh() const {
        const float* v[BLOCK];
        int64_t before = 0;  // tiles that `top` is of
        own([&](int64_t t, int64_t group, int64_t last) {
            for (; before < t; ++before)
                for (int64_t h = 0; h < p.heads; ++h)
                    space.top[h] = std::max(space.top[h], facts(before, h)[MOST]);
            const Tile tile(p, token, first + t);
            tile.come(values, group, last - group);
            for (int64_t g = group; g < last; ++g) {
                tile.rows(values, g, space.values.get(), space.row, v);
                for (int64_t h = g * repeat(); h < (g + 1) * repeat(); ++h) {
                    float *weights = of(t, h), *found = facts(t, h), top = space.top[h];
                    found[TOTAL] = 0;
                    found[FADE] = soften(weights, tile.from, tile.to, top, found[TOTAL]);
                    add<false>(weights + BLOCK, 0, weights, v, tile.from, tile.to, int(wide_value()));
                }
            }
        });
    }

    void end(T* out) const {
        for (int64_t h = team.first(p.heads); h < team.last(p.heads); ++h) {
            float* sums = space.sums.data() + h * wide_value();
            for (int64_t t = 0; t < tiles; ++t) {
                const float *found = facts(t, h), *more = of(t, h) + BLOCK;
                const vec fade = all(found[FADE]);
                space.total[h] = fused(all(found[TOTAL]), all(space.total[h]), fade)[0];
                for (int64_t d = 0; d < wide_value(); d += LANES)
                    store(sums + d, fused(load(more + d), load(sums + d), fade));
            }
            give(p, space, h, out, token * p.heads + h);
        }
    }
};

// One token by all of a team.
template <class T, class Held>
void divided(const Pages& p, const T* q, const Held& keys, const Held& values, T* out, int64_t token,
             const Team& team, Joint& joint, Space& space) {
    const int64_t first = Tile::first(p, token), tiles = Tile::last(p, token) - first;
    if (tiles < team.count) {
        const int64_t group = team.first(p.groups), last_group = team.last(p.groups);
        if (group < last_group) single(p, q, keys, values, out, token, group, last_group, space);
        return;
    }
    Divided<T, Held> own{p, keys, values, token, first, tiles, tiles / team.count, team, nullptr, space};
    if (team.index == 0) joint.room.resize(tiles * p.heads * own.size());
    joint.meeting.meet();
    own.room = joint.room.data();
    ask(p, q, token, 0, p.heads, space);
    own.score();
    joint.meeting.meet();
    own.weigh();
    joint.meeting.meet();
    own.end(out);
}

// The first tokens of spans, and behind the last one how many tokens there are.
std::vector<int64_t> spans(const Pages& p, int64_t tokens) {
    std::vector<int64_t> found;
    for (int64_t t = 0; t < tokens; ++t) {
        const bool goes_on = t > 0 && p.begins[t] == p.begins[t - 1] &&
                             p.positions[t] == p.positions[t - 1] + 1 && t - found.back() < SPAN;
        if (!goes_on) found.push_back(t);
    }
    found.push_back(tokens);
    return found;
}

// Where groups have few queries. Tokens that a team cannot deal out evenly it attends together.
template <class T, class Held>
void attend_whole(const Pages& p, const T* q, const Held& keys, const Held& values, T* out,
                  int64_t tokens, Team team, Joint* joint) {
    const std::vector<int64_t> firsts = spans(p, tokens);
    const int64_t many = int64_t(firsts.size()) - 1, left = many % team.count;
    const int64_t repeat = p.heads / p.groups;
    const auto attended = [&](int64_t n, int64_t group, int64_t last, Space& space) {
        const int64_t first = firsts[n], count = firsts[n + 1] - first;
        if (count == 1) return single(p, q, keys, values, out, first, group, last, space);
        for (int64_t g = group; g < last; ++g)
            span(p, q, keys, values, out, first, count, g * repeat, repeat, space);
    };
    const auto together = [&](const Team& own, Joint& all, Space& space) {
        for (int64_t n = many - left; n < many; ++n)
            if (firsts[n + 1] - firsts[n] == 1)
                divided(p, q, keys, values, out, firsts[n], own, all, space);
            else
                attended(n, own.first(p.groups), own.last(p.groups), space);
    };
    static thread_local Space mine;
    if (!team.starts()) {
        for (int64_t n = team.first(many - left); n < team.last(many - left); ++n)
            attended(n, 0, p.groups, mine);
        if (left) together(team, *joint, mine);
        return;
    }
    Joint own;
#pragma omp parallel num_threads(team.count)
    {
        static thread_local Space space;
#pragma omp for schedule(dynamic, 1)
        for (int64_t n = 0; n < many - left; ++n) attended(n, 0, p.groups, space);
        const Team here(omp_get_num_threads(), omp_get_thread_num());
#pragma omp single
        own.meeting.of(here.count);
        together(here, own, space);
    }
}

template <class T, class Held>
void attend(const Pages& p, const T* q, const Held& keys, const Held& values, T* out,
            int64_t tokens, Team team, Joint* joint) {
    if (p.heads / p.groups <= HEADS) return attend_whole(p, q, keys, values, out, tokens, team, joint);
    const std::vector<int64_t> firsts = spans(p, tokens);
    const int64_t repeat = p.heads / p.groups, parts = (repeat + HEADS - 1) / HEADS;
    const int64_t each = p.groups * parts, tasks = (int64_t(firsts.size()) - 1) * each;
    const int64_t begin = team.first(tasks), end = team.last(tasks);
    const int useful = int(std::max<int64_t>(1, std::min<int64_t>(tasks, team.count)));
#pragma omp parallel num_threads(useful) if (team.starts() && useful > 1)
    {
        static thread_local Space space;
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = begin; task < end; ++task) {
            const int64_t first = firsts[task / each], count = firsts[task / each + 1] - first;
            const int64_t begins = task % parts * HEADS, head = task % each / parts * repeat + begins;
            span(p, q, keys, values, out, first, count, head, std::min(HEADS, repeat - begins), space);
        }
    }
}

// Keys or values as they lie in memory, and scales where they are codes.
struct Lying {
    const void *data, *scales;
    int64_t groups, size, row;

    template <class S>
    Stored<S> stored() const {
        return {static_cast<const S*>(data), groups, size, row};
    }
    template <int BITS>
    Coded<BITS> coded() const {
        return {static_cast<const uint8_t*>(data), static_cast<const bfloat16*>(scales), groups, size,
                row};
    }
};

enum Form { AS_STORED, NARROW, INT8, INT4 };
#if defined(OUTSIZE_CODED)  // a library of its own: most serve without
constexpr bool CODED = true;
#else
constexpr bool CODED = false;
#endif

// Of GROUP numbers or fewer, codes and their scale. Where one is no number, so is the scale.
template <int BITS, class T>
bfloat16 code(const T* x, int64_t count, uint8_t* to) {
    float high = count < GROUP ? 0.0f : -INFINITY, low = count < GROUP ? 0.0f : INFINITY;
    bool numbers = true;
    for (int64_t d = 0; d < count; ++d) {
        const float one = wide(x[d]);
        numbers &= one == one;
        high = std::max(high, one);
        low = std::min(low, one);
    }
    const float most = BITS == 8 ? std::max(high, -low) / 127.0f : (high > -low ? high : low) / -8.0f;
    const bfloat16 scale = narrow<bfloat16>(numbers ? most : NAN);
    const float by = wide(scale) == 0 ? 1.0f : wide(scale);
    for (int64_t d = 0; d < count; ++d) {
        const float whole = numbers ? std::nearbyint(wide(x[d]) / by) : 0.0f;
        if constexpr (BITS == 8) {
            to[d] = uint8_t(int8_t(std::min(std::max(whole, -127.0f), 127.0f)));
        } else {
            const uint8_t half = uint8_t(std::min(std::max(whole, -8.0f), 7.0f) + 8.0f);
            to[d / 2] = d % 2 ? uint8_t(to[d / 2] | half << 4) : half;
        }
    }
    return scale;
}

template <int BITS, class T>
void put_codes(const T* x, uint8_t* data, bfloat16* scales, const int64_t* where, int64_t tokens,
               int64_t groups, int64_t size) {
    const int64_t row = (size * BITS + 7) / 8, own = (size + GROUP - 1) / GROUP;
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t g = 0; g < groups; ++g, x += size) {
            const int64_t room = where[t] * groups + g;
            for (int64_t n = 0; n < own; ++n)
                scales[room * own + n] = code<BITS>(x + n * GROUP, std::min(GROUP, size - n * GROUP),
                                                    data + room * row + n * GROUP * BITS / 8);
        }
}

template <class T>
void put(int form, const T* x, void* data, void* scales, const int64_t* where, int64_t tokens,
         int64_t groups, int64_t size) {
    const int64_t row = groups * size;
    uint8_t* codes = static_cast<uint8_t*>(data);
    bfloat16* own = static_cast<bfloat16*>(scales);
    if (CODED && form == INT8) return put_codes<8>(x, codes, own, where, tokens, groups, size);
    if (CODED && form == INT4) return put_codes<4>(x, codes, own, where, tokens, groups, size);
    for (int64_t t = 0; t < tokens; ++t, x += row)
        if (form == AS_STORED)
            std::memcpy(static_cast<T*>(data) + where[t] * row, x, row * sizeof(T));
        else
            for (int64_t d = 0; d < row; ++d)
                static_cast<bfloat16*>(data)[where[t] * row + d] = narrow<bfloat16>(wide(x[d]));
}

template <class T>
void attend(int form, const Pages& p, const void* queries, const Lying& k, const Lying& v, void* to,
            int64_t tokens, Team threads, Joint* joint) {
    const T* q = static_cast<const T*>(queries);
    T* out = static_cast<T*>(to);
    if constexpr (!CODED)
        return attend(p, q, k.stored<T>(), v.stored<T>(), out, tokens, threads, joint);
    else if (form == NARROW)
        return attend(p, q, k.stored<bfloat16>(), v.stored<bfloat16>(), out, tokens, threads, joint);
    else if (form == INT8)
        return attend(p, q, k.coded<8>(), v.coded<8>(), out, tokens, threads, joint);
    else
        return attend(p, q, k.coded<4>(), v.coded<4>(), out, tokens, threads, joint);
}

}  // namespace

extern "C" {

// Keys or values (tokens, groups, size) to the rooms of pages that `where` says.
void outsize_pages_put(int form, const void* x, void* data, void* scales, const int64_t* where,
                       int64_t tokens, int64_t groups, int64_t size) {
    put(form, static_cast<const Number*>(x), data, scales, where, tokens, groups, size);
}

// form: of keys and values; scales: of codes, or null. sizes: tokens of a page, heads, groups, key
// and value sizes, window, numbers of a head where its values lie. softcap 0: none. index: the share of one
// of `threads`, which share `joint`, or -1.
void outsize_pages_attend(int form, const void* q, const void* keys,
                          const void* key_scales, const void* values, const void* value_scales,
                          void* out, const int64_t* tables, const int64_t* begins, const int64_t* positions,
                          const int64_t* sizes, int64_t tokens, float scale, float softcap,
                          int threads, int index, void* joint) {
    const Pages p{tables,   begins,   positions, sizes[0], sizes[1],    sizes[2],
                  sizes[3], sizes[4], sizes[5],  scale,    Cap(softcap)};
    const Lying k{keys, key_scales, p.groups, p.key, p.key};
    const Lying v{values, value_scales, p.groups, p.value, sizes[6]};
    attend<Number>(form, p, q, k, v, out, tokens, Team(threads, index), static_cast<Joint*>(joint));
}

}  // extern "C"
