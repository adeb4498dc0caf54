// Causal attention of packed documents on a processor, forward and backward, in float32 arithmetic
// (Dao, "FlashAttention-2", 2023: blocks of keys, a running maximum, scores made again backward).
//
// Scores are held transposed, keys down and queries across: a vector holds one key's scores of LANES
// queries, so maxima, sums, log-sum-exps and gradients of rows are plain vector arithmetic, and the
// queries are the only tensor that is transposed, once for all the keys that they see. The five
// products are one micro-kernel: a block of C held in registers, A broadcast from memory.
//
// A task owns what it writes: queries of a segment forward; backward a segment of queries and one of
// keys, in rounds where no two tasks share either. So results are bitwise the same for any number of
// threads. Storage is float32 or bfloat16 (dtype 0 or 1).
//
// K and W: head sizes of keys and of values, up to WIDTH; BLOCK queries or keys a tile.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "team.h"
#include "tiles.h"

namespace {

using namespace outsize;

constexpr int SEGMENT = 256;  // queries or keys of a task
constexpr int TILES = SEGMENT / BLOCK;

// What queries of a tile see of a tile of keys; positions are those in the document.
struct Sight {
    int64_t query, key;  // at which the tiles start
    int64_t window;      // keys that a query sees at most, itself among them

    bool none(int keys) const { return key + keys - 1 <= query - window; }
    bool whole(int queries) const {
        return key + BLOCK - 1 <= query && key > query + queries - 1 - window;
    }
    // Lanes, all ones or zeros, of queries `first` + 0, 1, ... that see key `row`.
    ints lanes(int row, int first) const {
        ints ahead;
        for (int l = 0; l < LANES; ++l) ahead[l] = l;
        ahead += int(query - key) + first - row;
        return (ahead >= 0) & (ahead < int(std::min<int64_t>(window, 1 << 30)));
    }
};

inline int reach(int vector, bool diagonal, int keys) {
    return diagonal ? std::min(keys, (vector + 1) * LANES) : keys;
}

// Scores of a tile to weights against the running maximum; the sums and what the earlier output is
// to be multiplied with. Vectors of queries one after another.
template <bool MASKED>
void soften(float* scores, int keys, int vectors, const Sight& sight, float* top, float* total,
            float* factor) {
    const bool diagonal = sight.query == sight.key;
    const int padded = rounded(keys, EVEN);
    for (int v = 0; v < vectors; ++v) {
        float* s = scores + v * LANES;
        const int seen = reach(v, diagonal, keys);
        const vec before = load(top + v * LANES);
        vec most[4] = {before, before, before, before};
        for (int j = 0; j < seen; ++j) {
            vec x = load(s + j * BLOCK);
            if (MASKED) {
                x = sight.lanes(j, v * LANES) ? x : all(NEVER);
                store(s + j * BLOCK, x);
            }
            vec& m = most[j & 3];
            m = x > m ? x : m;
        }
        most[0] = most[0] > most[1] ? most[0] : most[1];
        most[2] = most[2] > most[3] ? most[2] : most[3];
        const vec now = most[0] > most[2] ? most[0] : most[2];
        vec sums[LANES];
#pragma GCC unroll 16
        for (int l = 0; l < LANES; ++l) sums[l] = vec{};
        for (int first = 0; first < seen; first += LANES)
#pragma GCC unroll 16
            for (int l = 0; l < LANES; ++l) {
                const int j = first + l;
                if (j >= seen) break;
                const vec x = load(s + j * BLOCK);
                vec p = power(x - now);
                if (MASKED) p = x == NEVER ? vec{} : p;
                sums[l] += p;
                store(s + j * BLOCK, p);
            }
        for (int width = LANES / 2; width > 0; width /= 2)
            for (int l = 0; l < width; ++l) sums[l] += sums[l + width];
        for (int j = seen; j < padded; ++j) store(s + j * BLOCK, vec{});
        const vec fade = power(before - now);
        store(top + v * LANES, now);
        store(factor + v * LANES, fade);
        store(total + v * LANES, fused(sums[0], load(total + v * LANES), fade));
    }
}

// Scores to weights, gradients of weights to gradients of scores.
template <bool MASKED>
void slopes(float* scores, float* gradient, int keys, int vectors, const Sight& sight, const Cap& cap,
            const float* lse, const float* delta) {
    const bool diagonal = sight.query == sight.key;
    const vec inverse = all(cap.size > 0 ? 1 / cap.size : 0.0f);  // 0: no cap has a slope of 1
    const int padded = rounded(keys, EVEN);
    for (int v = 0; v < vectors; ++v) {
        float *s = scores + v * LANES, *g = gradient + v * LANES;
        const vec sum = load(lse + v * LANES), along = load(delta + v * LANES);
        const int seen = reach(v, diagonal, keys);
        for (int j = 0; j < seen; ++j) {
            const vec score = load(s + j * BLOCK), bent = score * inverse;
            vec p = power(score - sum), d = (load(g + j * BLOCK) - along) * (1 - bent * bent);
            if (MASKED) {
                const ints lanes = sight.lanes(j, v * LANES);
                p = lanes ? p : vec{};
                d = lanes ? d : vec{};
            }
            store(s + j * BLOCK, p);
            store(g + j * BLOCK, p * d);
        }
        for (int j = seen; j < padded; ++j) {
            store(s + j * BLOCK, vec{});
            store(g + j * BLOCK, vec{});
        }
    }
}

// Rows of a tile times turned ones: (rows, columns), a part of a head's numbers after another, so
// that no sum in float32 is longer than TERMS.
constexpr int TERMS = 128;
void score(const float* tile, const float* turned, int size, float* to, int rows, int columns,
           Part part) {
    for (int d = 0; d < size; d += TERMS)
        product<ROW, 1>({to, BLOCK, tile + d, turned + d * BLOCK, BLOCK, rows, columns,
                         std::min(TERMS, size - d), part, d > 0, nullptr});
}

void capped(float* scores, int rows, int columns, const Cap& cap) {
    if (cap.size > 0)
        for (int i = 0; i < rows; ++i)
            for (int j = 0; j < columns; j += LANES) {
                float* x = scores + i * BLOCK + j;
                store(x, cap(load(x)));
            }
}

// Tasks ---------------------------------------------------------------------------------------------

// Tensors of a call: tokens and heads may lie any distance apart, a head's numbers may not. rooms: of
// the tokens of the one document that there is then.
template <class T>
struct Tensor {
    const T* data;
    int64_t by_token, by_head;
    int size;
    const int64_t* rooms = nullptr;

    Rows<T> head(int64_t first, int64_t head) const {
        return {data + first * by_token + head * by_head, by_token, size, rooms};
    }
};

struct Task {
    int64_t first;   // token at which the document starts
    int64_t length;  // of the document
    int64_t head;
    int64_t queries, keys;  // at which the segments start, in the document
    double cost;
};

template <class T>
struct Forward {
    Tensor<T> q, k, v;
    T* o;        // (tokens, heads, W)
    float* lse;  // (heads, tokens), base 2, of scaled scores
    int64_t tokens, heads, shared;  // shared: query heads that read one key head
    float scale;
    int64_t window;
    Cap cap;

    struct Space {
        Buffer turned, tile, keys, values, scores, out;
        alignas(64) float top[SEGMENT], total[SEGMENT], factor[BLOCK];

        Space(int size, int value_size)
            : turned(buffer(int64_t(TILES) * rounded(size, LANES) * BLOCK)),
              tile(buffer(BLOCK * ROW)),
              keys(buffer(BLOCK * ROW)),
              values(buffer(BLOCK * ROW)),
              scores(buffer(BLOCK * BLOCK)),
              out(buffer(int64_t(SEGMENT) * rounded(value_size, LANES))) {}
    };

    void run(const Task& task, Space& space) const {
        const int queries = int(std::min<int64_t>(SEGMENT, task.length - task.queries));
        const int tall = rounded(q.size, LANES) * BLOCK;
        for (int at = 0, t = 0; at < queries; at += BLOCK, ++t) {
            const int count = std::min(BLOCK, queries - at);
            copy(q.head(task.first, task.head), task.queries + at, count, space.tile.get());
            transpose(space.tile.get(), count, q.size, scale * LOG2E, space.turned.get() + t * tall);
        }
        std::fill_n(space.top, SEGMENT, NEVER);
        std::fill_n(space.total, SEGMENT, 0.0f);
        std::fill_n(space.out.get(), SEGMENT * rounded(v.size, LANES), 0.0f);
        const int64_t low = std::max<int64_t>(0, task.queries - window + 1) / BLOCK * BLOCK;
        for (int64_t key = low; key < task.queries + queries; key += BLOCK) {
            const int keys = int(std::min<int64_t>(BLOCK, task.length - key));
            copy(k.head(task.first, task.head / shared), key, keys, space.keys.get());
            copy(v.head(task.first, task.head / shared), key, keys, space.values.get());
            for (int at = int(std::max<int64_t>(0, key - task.queries)); at < queries; at += BLOCK)
                tile(task, space, at, std::min(BLOCK, queries - at), key, keys);
        }
        finish(task, space, queries);
    }

    void tile(const Task& task, Space& space, int at, int queries, int64_t key, int keys) const {
        const Sight sight{task.queries + at, key, window};
        if (sight.none(keys)) return;
        const bool diagonal = sight.query == sight.key;
        const int columns = rounded(queries, LANES), wide = rounded(v.size, LANES);
        const float* turned = space.turned.get() + at / BLOCK * rounded(q.size, LANES) * BLOCK;
        float* scores = space.scores.get();
        score(space.keys.get(), turned, q.size, scores, rounded(keys, EVEN), columns,
              diagonal ? RIGHT : WHOLE);
        capped(scores, keys, columns, cap);
        auto* soft = sight.whole(queries) ? soften<false> : soften<true>;
        soft(scores, keys, columns / LANES, sight, space.top + at, space.total + at, space.factor);
        product<1, BLOCK>({space.out.get() + at * wide, wide, scores, space.values.get(), ROW,
                           rounded(queries, EVEN), wide, keys, diagonal ? BEFORE : WHOLE, true,
                           space.factor});
    }

    void finish(const Task& task, Space& space, int queries) const {
        const int wide = rounded(v.size, LANES);
        for (int i = 0; i < queries; ++i) {
            const int64_t token = task.first + task.queries + i;
            const float inverse = 1.0f / space.total[i];
            const float* from = space.out.get() + i * wide;
            T* to = o + (token * heads + task.head) * v.size;
            for (int d = 0; d < v.size; ++d) to[d] = narrow<T>(from[d] * inverse);
            lse[task.head * tokens + token] = space.top[i] + std::log2(space.total[i]);
        }
    }
};

template <class T>
struct Backward {
    Tensor<T> go, q, k, v, o;
    const float* lse;
    float *gq, *gk, *gv;  // contiguous, added to
    int64_t tokens, heads, shared;
    float scale;
    int64_t window;
    Cap cap;

    struct Space {
        Buffer queries, turned, pulls, turned_pulls, outputs, gqueries;
        Buffer keys, values, scores, slopes, gkeys, gvalues;
        alignas(64) float lse[SEGMENT], delta[SEGMENT];

        Space(int size, int value_size)
            : queries(buffer(SEGMENT * ROW)),
              turned(buffer(int64_t(TILES) * rounded(size, LANES) * BLOCK)),
              pulls(buffer(SEGMENT * ROW)),
              turned_pulls(buffer(int64_t(TILES) * rounded(value_size, LANES) * BLOCK)),
              outputs(buffer(BLOCK * ROW)),
              gqueries(buffer(SEGMENT * ROW)),
              keys(buffer(BLOCK * ROW)),
              values(buffer(BLOCK * ROW)),
              scores(buffer(BLOCK * BLOCK)),
              slopes(buffer(BLOCK * BLOCK)),
              gkeys(buffer(BLOCK * ROW)),
              gvalues(buffer(BLOCK * ROW)) {}
    };

    void run(const Task& task, Space& space) const {
        for (int64_t head = task.head * shared; head < (task.head + 1) * shared; ++head) {
            const int queries = int(std::min<int64_t>(SEGMENT, task.length - task.queries));
            prepare(task, head, queries, space);
            const int64_t stop = std::min(task.length, task.keys + SEGMENT);
            for (int64_t key = task.keys; key < stop; key += BLOCK)
                column(task, queries, key, int(std::min<int64_t>(BLOCK, stop - key)), space);
            add(space.gqueries.get(), queries, gq + head * q.size, heads * q.size,
                task.first + task.queries, q.size, scale);
        }
    }

    // Queries and gradients of outputs of a segment, as they are and turned.
    void prepare(const Task& task, int64_t head, int queries, Space& space) const {
        const int64_t first = task.first + task.queries;
        for (int at = 0, t = 0; at < queries; at += BLOCK, ++t) {
            const int count = std::min(BLOCK, queries - at);
            float *rows = space.queries.get() + at * ROW, *pulls = space.pulls.get() + at * ROW;
            copy(q.head(first, head), at, count, rows);
            copy(go.head(first, head), at, count, pulls);
            copy(o.head(first, head), at, count, space.outputs.get());
            for (int i = 0; i < BLOCK; ++i) {
                const float *x = space.outputs.get() + i * ROW, *y = pulls + i * ROW;
                float sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int d = 0; d < v.size; ++d) sum += x[d] * y[d];
                space.delta[at + i] = i < count ? sum : 0.0f;
                space.lse[at + i] = i < count ? lse[head * tokens + first + at + i] : 0.0f;
            }
            transpose(rows, count, q.size, scale * LOG2E,
                      space.turned.get() + t * rounded(q.size, LANES) * BLOCK);
            transpose(pulls, count, v.size, 1.0f,
                      space.turned_pulls.get() + t * rounded(v.size, LANES) * BLOCK);
        }
        std::fill_n(space.gqueries.get(), rounded(queries, EVEN) * ROW, 0.0f);
    }

    // One tile of keys against all queries of the segment that see it.
    void column(const Task& task, int queries, int64_t key, int keys, Space& space) const {
        const int from = int(std::max<int64_t>(0, key - task.queries));
        if (from >= queries || Sight{task.queries + from, key, window}.none(keys)) return;
        copy(k.head(task.first, task.head), key, keys, space.keys.get());
        copy(v.head(task.first, task.head), key, keys, space.values.get());
        bool into = false;
        for (int at = from; at < queries; at += BLOCK) {
            const Sight sight{task.queries + at, key, window};
            if (sight.none(keys)) break;
            tile(sight, at, std::min(BLOCK, queries - at), keys, into, space);
            into = true;
        }
        const int64_t first = task.first + key, groups = heads / shared;
        add(space.gkeys.get(), keys, gk + task.head * k.size, groups * k.size, first, k.size, scale);
        add(space.gvalues.get(), keys, gv + task.head * v.size, groups * v.size, first, v.size, 1.0f);
    }

    void tile(const Sight& sight, int at, int queries, int keys, bool into, Space& space) const {
        const bool diagonal = sight.query == sight.key;
        const int columns = rounded(queries, LANES), rows = rounded(keys, EVEN);
        const int size = rounded(q.size, LANES), value_size = rounded(v.size, LANES);
        float *scores = space.scores.get(), *slope = space.slopes.get();
        const Part part = diagonal ? RIGHT : WHOLE, after = diagonal ? AFTER : WHOLE;
        score(space.keys.get(), space.turned.get() + at * size, q.size, scores, rows, columns, part);
        score(space.values.get(), space.turned_pulls.get() + at * value_size, v.size, slope, rows,
              columns, part);
        capped(scores, keys, columns, cap);
        auto* bend = sight.whole(queries) ? slopes<false> : slopes<true>;
        bend(scores, slope, keys, columns / LANES, sight, cap, space.lse + at, space.delta + at);
        product<BLOCK, 1>({space.gvalues.get(), ROW, scores, space.pulls.get() + at * ROW, ROW, rows,
                           value_size, queries, after, into, nullptr});
        product<BLOCK, 1>({space.gkeys.get(), ROW, slope, space.queries.get() + at * ROW, ROW, rows,
                           size, queries, after, into, nullptr});
        product<1, BLOCK>({space.gqueries.get() + at * ROW, ROW, slope, space.keys.get(), ROW,
                           rounded(queries, EVEN), size, keys, diagonal ? BEFORE : WHOLE, true,
                           nullptr});
    }

    // Rows of a tile times a factor to the gradient of a head.
    static void add(const float* from, int count, float* to, int64_t stride, int64_t first, int size,
                    float factor) {
        for (int i = 0; i < count; ++i) {
            const float* __restrict__ x = from + i * ROW;
            float* __restrict__ y = to + (first + i) * stride;
            for (int d = 0; d < size; ++d) y[d] += x[d] * factor;
        }
    }
};

double pairs(int64_t queries, int64_t query, int64_t keys, int64_t key) {
    return double(queries) * double(keys) * (query == key ? 0.5 : 1.0);
}

// Costly tasks first, so that threads end together.
void ordered(std::vector<Task>& tasks) {
    std::stable_sort(tasks.begin(), tasks.end(),
                     [](const Task& a, const Task& b) { return a.cost > b.cost; });
}

// past: queries of the first document that are not asked for, a multiple of BLOCK.
std::vector<Task> forward_tasks(const int64_t* bounds, int64_t documents, int64_t heads,
                                int64_t past) {
    std::vector<Task> tasks;
    for (int64_t n = 0; n < documents; ++n) {
        const int64_t length = bounds[n + 1] - bounds[n];
        for (int64_t at = n == 0 ? past : 0; at < length; at += SEGMENT)
            for (int64_t head = 0; head < heads; ++head) {
                const int64_t queries = std::min<int64_t>(SEGMENT, length - at);
                const double cost = double(queries) * (double(at) + double(queries) / 2);
                tasks.push_back({bounds[n], length, head, at, 0, cost});
            }
    }
    ordered(tasks);
    return tasks;
}

// Rounds of tasks. Segments i of queries and j of keys meet in round (i + j) mod the number of
// those of keys: in one round every i and every j is met at most once, and rounds are about equally
// long.
std::vector<std::vector<Task>> backward_tasks(const int64_t* bounds, int64_t documents,
                                              int64_t heads, int64_t window, int64_t past) {
    std::vector<std::vector<Task>> rounds;
    for (int64_t n = 0; n < documents; ++n) {
        const int64_t length = bounds[n + 1] - bounds[n];
        const int64_t segments = (length + SEGMENT - 1) / SEGMENT;
        if (int64_t(rounds.size()) < segments) rounds.resize(segments);
        const int64_t start = n == 0 ? past : 0;
        for (int64_t i = 0; start + i * SEGMENT < length; ++i)
            for (int64_t j = 0; j < segments; ++j) {
                const int64_t query = start + i * SEGMENT, key = j * SEGMENT;
                if (key >= query + SEGMENT || key + SEGMENT - 1 <= query - window) continue;
                const double cost =
                    pairs(std::min<int64_t>(SEGMENT, length - query), query, SEGMENT, key);
                for (int64_t head = 0; head < heads; ++head)
                    rounds[(i + j) % segments].push_back({bounds[n], length, head, query, key, cost});
            }
    }
    for (auto& tasks : rounds) ordered(tasks);
    return rounds;
}

template <class Call>
void run(const Call& call, const std::vector<std::vector<Task>>& rounds, int size, int value_size,
         Team team) {
    const int threads = team.count;
    size_t most = 0;
    for (const auto& tasks : rounds) most = std::max(most, tasks.size());
    if (!team.starts()) {  // costly and cheap ones in turn
        typename Call::Space space(size, value_size);
        for (const auto& tasks : rounds)
            for (size_t n = std::max(team.index, 0); n < tasks.size(); n += threads)
                call.run(tasks[n], space);
        return;
    }
    const int useful = int(std::max<size_t>(1, std::min<size_t>(most, size_t(threads))));
#pragma omp parallel num_threads(useful) if (useful > 1)
    {
        typename Call::Space space(size, value_size);
        for (const auto& tasks : rounds) {
#pragma omp for schedule(dynamic, 1)
            for (size_t n = 0; n < tasks.size(); ++n) call.run(tasks[n], space);
        }
    }
}

// facts: tokens of queries, heads, key heads, K, W, window, past. With a past, q, o, their gradients
// and lse begin at the first query that is asked for. Strides: of a token and of a head, for each input.
template <class T>
Tensor<T> tensor(const void* data, const int64_t*& strides, int64_t size,
                 const int64_t* rooms = nullptr) {
    const Tensor<T> made{static_cast<const T*>(data), strides[0], strides[1], int(size), rooms};
    strides += 2;
    return made;
}

template <class T>
void forward(const void* q, const void* k, const void* v, const int64_t* strides,
             const int64_t* rooms, void* o, float* lse, const int64_t* facts, const int64_t* bounds,
             int64_t documents, float scale, float softcap, Team team) {
    const int64_t past = facts[6];
    Forward<T> call{tensor<T>(q, strides, facts[3]), tensor<T>(k, strides, facts[3], rooms),
                    tensor<T>(v, strides, facts[4], rooms), static_cast<T*>(o), lse, facts[0], facts[1],
                    facts[1] / facts[2], scale, facts[5], Cap(softcap)};
    call.q.data -= past * call.q.by_token;  // a token's place is then that of its keys
    call.o -= past * facts[1] * facts[4];
    call.lse -= past;
    run(call, {forward_tasks(bounds, documents, facts[1], past)}, int(facts[3]), int(facts[4]), team);
}

template <class T>
void backward(const void* const* inputs, const int64_t* strides, const float* lse, float* gq,
              float* gk, float* gv, const int64_t* facts, const int64_t* bounds, int64_t documents,
              float scale, float softcap, int threads) {
    Backward<T> call{tensor<T>(inputs[0], strides, facts[4]), tensor<T>(inputs[1], strides, facts[3]),
                     tensor<T>(inputs[2], strides, facts[3]), tensor<T>(inputs[3], strides, facts[4]),
                     tensor<T>(inputs[4], strides, facts[4]), lse, gq, gk, gv, facts[0], facts[1],
                     facts[1] / facts[2], scale, facts[5], Cap(softcap)};
    const int64_t past = facts[6];
    for (auto* x : {&call.go, &call.q, &call.o}) x->data -= past * x->by_token;
    call.lse -= past;
    call.gq -= past * facts[1] * facts[3];
    run(call, backward_tasks(bounds, documents, facts[2], facts[5], past), int(facts[3]),
        int(facts[4]), Team(threads));
}

}  // namespace

extern "C" {
#if !defined(OUTSIZE_BACKWARD)

// softcap 0: none.
void outsize_attention(int dtype, const void* q, const void* k, const void* v,
                       const int64_t* strides, void* o, float* lse, const int64_t* facts,
                       const int64_t* bounds, int64_t documents, float scale, float softcap,
                       int threads) {
    auto* call = dtype == 0 ? forward<float> : forward<bfloat16>;
    call(q, k, v, strides, nullptr, o, lse, facts, bounds, documents, scale, softcap, Team(threads));
}

// The share of one of a team. Keys and values of the one document lie in rooms, by token.
void outsize_attention_share(int dtype, const void* q, const void* k, const void* v,
                             const int64_t* strides, const int64_t* rooms, void* o, float* lse,
                             const int64_t* facts, const int64_t* bounds, float scale, float softcap,
                             int threads, int index) {
    auto* call = dtype == 0 ? forward<float> : forward<bfloat16>;
    call(q, k, v, strides, rooms, o, lse, facts, bounds, 1, scale, softcap, Team(threads, index));
}

#else  // a library of its own: who serves does without

// inputs: the gradient of the output, q, k, v and the output. gq, gk and gv are added to.
void outsize_attention_backward(int dtype, const void* const* inputs, const int64_t* strides,
                                const float* lse, float* gq, float* gk, float* gv,
                                const int64_t* facts, const int64_t* bounds, int64_t documents,
                                float scale, float softcap, int threads) {
    auto* call = dtype == 0 ? backward<float> : backward<bfloat16>;
    call(inputs, strides, lse, gq, gk, gv, facts, bounds, documents, scale, softcap, threads);
}

#endif
}  // extern "C"
