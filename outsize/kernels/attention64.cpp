// Causal attention of packed documents on a processor, forward and backward, in float64: what
// attention.cpp is, in little. Exactness is judged in float64, mostly over few tokens, where the
// operators around a library's kernel cost more than attention itself.
//
// Scores are held transposed, keys down and queries across, as in attention.cpp. A task owns what it
// writes: forward queries of a head, backward a document of a key head. So results are bitwise the
// same for any number of threads, and a document's whatever lies beside it.
//
// K and W: head sizes of keys and of values; BLOCK queries or keys a tile.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace {

using std::int64_t;

#if defined(__AVX512F__)
constexpr int LANES = 8;
#elif defined(__AVX__)
constexpr int LANES = 4;
#else
constexpr int LANES = 2;
#endif
constexpr int BLOCK = 64, ROWS = 4;      // ROWS: of a product, held in registers at once
constexpr double FEW = 1 << 18;          // multiplications for which no thread is woken
constexpr double LOG2E = 1.4426950408889634;
constexpr double NEVER = -1e300;         // a score that is not seen; finite, so that differences are
constexpr double SHIFT = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer

typedef double vec __attribute__((vector_size(LANES * 8)));
typedef int64_t longs __attribute__((vector_size(LANES * 8)));

inline vec load(const double* x) {
    vec y;
    std::memcpy(&y, x, sizeof y);
    return y;
}
inline void store(double* x, vec y) { std::memcpy(x, &y, sizeof y); }
inline vec all(double x) { return x - vec{}; }
inline int rounded(int x) { return (x + LANES - 1) / LANES * LANES; }

// 2^x for x up to 1023; 2^-1022 below -1022; NaN for NaN. x = n + r with |r| <= 1/2, and 2^r by its
// series, ln(2)^n / n!, of which the first term left out is 4e-18.
inline vec power(vec x) {
    constexpr double series[] = {
        1.3691488853904128e-12, 2.5678435993488206e-11, 4.4455382718708116e-10,
        7.054911620801123e-09, 1.01780860092397e-07, 1.321548679014431e-06,
        1.5252733804059841e-05, 0.0001540353039338161, 0.0013333558146428443,
        0.009618129107628477, 0.05550410866482158, 0.24022650695910072,
        0.6931471805599453, 1.0};
    const vec low = all(-1022.0), held = x < low ? low : x;
    const vec shifted = held + all(SHIFT), r = held - (shifted - all(SHIFT));
    vec p = all(series[0]);
    for (int n = 1; n < 14; ++n) p = all(series[n]) + p * r;
    return vec(longs(p) + (longs(shifted) << 52));
}

// Which part of a product a tile on the diagonal needs, where keys and queries start together.
enum Part {
    WHOLE,
    RIGHT,   // of C, the columns from the row on: scores
    AFTER,   // of the sum, the terms from the row on: gradients of keys, over queries
    BEFORE,  // of the sum, the terms up to the row: results of queries, over keys
};

// C (rows, columns) = A B or C + A B; columns: whole vectors. down, along: from one row of A and from
// one term to the next.
struct Product {
    double* c;
    int c_row;
    const double* a;
    int down, along;
    const double* b;
    int b_row, rows, columns, terms;
    Part part;
    bool into;
};

template <int TALL, int VECTORS>
inline void micro(const Product& p, int row, int column, int first, int last) {
    vec sum[TALL][VECTORS] = {};
    const double* a = p.a + row * p.down + first * p.along;
    const double* b = p.b + first * p.b_row + column;
    for (int k = first; k < last; ++k, a += p.along, b += p.b_row)
        for (int i = 0; i < TALL; ++i)
            for (int j = 0; j < VECTORS; ++j) sum[i][j] += all(a[i * p.down]) * load(b + j * LANES);
    for (int i = 0; i < TALL; ++i)
        for (int j = 0; j < VECTORS; ++j) {
            double* to = p.c + (row + i) * p.c_row + column + j * LANES;
            store(to, p.into ? load(to) + sum[i][j] : sum[i][j]);
        }
}

template <int TALL>
void across(const Product& p, int row) {
    const int first = p.part == AFTER ? row : 0;
    const int last = p.part == BEFORE ? std::min(p.terms, row + TALL) : p.terms;
    int column = p.part == RIGHT ? row / LANES * LANES : 0;
    for (; column + 2 * LANES <= p.columns; column += 2 * LANES)
        micro<TALL, 2>(p, row, column, first, last);
    if (column < p.columns) micro<TALL, 1>(p, row, column, first, last);
}

void product(const Product& p) {
    int row = 0;
    for (; row + ROWS <= p.rows; row += ROWS) across<ROWS>(p, row);
    for (; row < p.rows; ++row) across<1>(p, row);
}

// Tokens of one head: tokens and heads may lie any distance apart, a head's numbers may not.
struct Heads {
    const double* data;
    int64_t by_token, by_head;
    int size;

    int row() const { return rounded(size); }
    const double* at(int64_t token, int64_t head) const {
        return data + token * by_token + head * by_head;
    }
    // (count, row()) of these numbers, with zeros behind each.
    void copy(int64_t token, int64_t head, int count, double* to) const {
        for (int i = 0; i < count; ++i, to += row()) {
            std::copy_n(at(token + i, head), size, to);
            std::fill(to + size, to + row(), 0.0);
        }
    }
    // (size, BLOCK) of them times a factor, with zeros behind the last, to whole vectors.
    void turn(int64_t token, int64_t head, int count, double factor, double* to) const {
        for (int i = 0; i < rounded(count); ++i)
            for (int d = 0; d < size; ++d)
                to[d * BLOCK + i] = i < count ? at(token + i, head)[d] * factor : 0.0;
    }
};

// What queries of a tile see of a tile of keys; both by their places in the document.
struct Sight {
    int64_t query, key, window;

    bool none(int keys) const { return key + keys - 1 <= query - window; }
    bool whole(int queries) const {
        return key + BLOCK - 1 <= query && key > query + queries - 1 - window;
    }
    // Lanes, all ones or zeros, of queries `first` + 0, 1, ... that see key `row`.
    longs lanes(int row, int first) const {
        longs ahead;
        for (int l = 0; l < LANES; ++l) ahead[l] = query - key + first - row + l;
        return (ahead >= 0) & (ahead < window);
    }
    Part part(Part diagonal) const { return query == key ? diagonal : WHOLE; }
};

struct Call {
    Heads go, q, k, v, o;
    double *out, *lse;  // (tokens, heads, W); (heads, tokens), base 2, of scaled scores
    double *gq, *gk, *gv;  // contiguous, added to
    int64_t tokens, heads, groups, window, past;
    double scale;

    int shared() const { return int(heads / groups); }  // query heads that read one key head
    void forward(int64_t first, int64_t length, int64_t query, int64_t head, double* space) const;
    void backward(int64_t first, int64_t length, int64_t start, int64_t group, double* space) const;
    void pull(const Sight& sight, int queries, int keys, bool into, double* space) const;
    int64_t room() const {
        return int64_t(BLOCK) * (2 * BLOCK + 8 + 6 * (q.row() + v.row()));
    }
};

// Scores of a tile to weights against the running maximum; the sums, and the earlier output times
// what is left of it.
void soften(double* scores, int keys, int queries, const Sight& sight, double* top, double* total,
            double* out, int row) {
    const bool whole = sight.whole(queries);
    for (int i = 0; i < queries; i += LANES) {
        const vec before = load(top + i);
        vec now = before, sum = vec{};
        for (int j = 0; j < keys; ++j) {
            double* s = scores + j * BLOCK + i;
            vec x = load(s);
            if (!whole) store(s, x = sight.lanes(j, i) ? x : all(NEVER));
            now = x > now ? x : now;
        }
        for (int j = 0; j < keys; ++j) {
            double* s = scores + j * BLOCK + i;
            vec p = power(load(s) - now);
            if (!whole) p = sight.lanes(j, i) ? p : vec{};
            sum += p;
            store(s, p);
        }
        const vec fade = power(before - now);
        store(top + i, now);
        store(total + i, load(total + i) * fade + sum);
        for (int l = 0; l < LANES && i + l < queries; ++l)
            for (int d = 0; d < row; ++d) out[(i + l) * row + d] *= fade[l];
    }
}

void Call::forward(int64_t first, int64_t length, int64_t query, int64_t head, double* space) const {
    const int queries = int(std::min<int64_t>(BLOCK, length - query)), row = v.row();
    double *scores = space, *top = scores + BLOCK * BLOCK, *total = top + BLOCK;
    double *turned = total + BLOCK, *keys = turned + BLOCK * q.row();
    double *values = keys + BLOCK * q.row(), *sums = values + BLOCK * row;
    q.turn(first + query, head, queries, scale * LOG2E, turned);
    std::fill_n(top, BLOCK, NEVER);
    std::fill_n(total, BLOCK, 0.0);
    std::fill_n(sums, BLOCK * row, 0.0);
    for (int64_t key = std::max<int64_t>(0, query - window + 1) / BLOCK * BLOCK; key <= query;
         key += BLOCK) {
        const int count = int(std::min<int64_t>(BLOCK, length - key));
        const Sight sight{query, key, window};
        k.copy(first + key, head / shared(), count, keys);
        v.copy(first + key, head / shared(), count, values);
        product({scores, BLOCK, keys, k.row(), 1, turned, BLOCK, count, rounded(queries), k.size,
                 sight.part(RIGHT), false});
        soften(scores, count, queries, sight, top, total, sums, row);
        product({sums, row, scores, 1, BLOCK, values, row, queries, row, count, sight.part(BEFORE),
                 true});
    }
    for (int i = 0; i < queries; ++i) {
        const int64_t token = first + query + i;
        double* to = out + (token * heads + head) * v.size;
        for (int d = 0; d < v.size; ++d) to[d] = sums[i * row + d] / total[i];
        lse[head * tokens + token] = top[i] + std::log2(total[i]);
    }
}

// Rows of a tile times a factor to the gradient of a head.
void add(const double* from, int row, int count, double* to, int64_t stride, int size, double factor) {
    for (int i = 0; i < count; ++i)
        for (int d = 0; d < size; ++d) to[i * stride + d] += from[i * row + d] * factor;
}

// Tiles of a space, backward: what the queries of a tile are, and the keys.
struct Tiles {
    double *scores, *slopes, *lse, *delta;
    double *queries, *turned, *pulls, *turned_pulls, *gqueries;
    double *keys, *values, *gkeys, *gvalues;

    Tiles(double* space, int size, int value_size) {
        auto next = [&](int width) {
            double* made = space;
            space += BLOCK * width;
            return made;
        };
        scores = next(BLOCK), slopes = next(BLOCK), lse = next(1), delta = next(1);
        for (auto* one : {&queries, &turned, &gqueries, &keys, &gkeys}) *one = next(size);
        for (auto* one : {&pulls, &turned_pulls, &values, &gvalues}) *one = next(value_size);
    }
};

// Scores and gradients of weights made again, to weights and gradients of scores; then what these
// give queries, keys and values.
void Call::pull(const Sight& sight, int queries, int keys, bool into, double* space) const {
    const Tiles t(space, q.row(), v.row());
    const int columns = rounded(queries), row = q.row(), value_row = v.row();
    const Part right = sight.part(RIGHT), after = sight.part(AFTER);
    product({t.scores, BLOCK, t.keys, row, 1, t.turned, BLOCK, keys, columns, k.size, right, false});
    product({t.slopes, BLOCK, t.values, value_row, 1, t.turned_pulls, BLOCK, keys, columns, v.size,
             right, false});
    const bool whole = sight.whole(queries);
    for (int j = 0; j < keys; ++j)
        for (int i = 0; i < columns; i += LANES) {
            double *s = t.scores + j * BLOCK + i, *g = t.slopes + j * BLOCK + i;
            vec p = power(load(s) - load(t.lse + i)), d = load(g) - load(t.delta + i);
            if (!whole) {
                const longs lanes = sight.lanes(j, i);
                p = lanes ? p : vec{};
                d = lanes ? d : vec{};
            }
            store(s, p);
            store(g, p * d);
        }
    product({t.gvalues, value_row, t.scores, BLOCK, 1, t.pulls, value_row, keys, value_row, queries,
             after, into});
    product({t.gkeys, row, t.slopes, BLOCK, 1, t.queries, row, keys, row, queries, after, into});
    product({t.gqueries, row, t.slopes, 1, BLOCK, t.keys, row, queries, row, keys,
             sight.part(BEFORE), false});
}

// A tile of keys after another, and of each all queries that see it.
void Call::backward(int64_t first, int64_t length, int64_t start, int64_t group,
                    double* space) const {
    const Tiles t(space, q.row(), v.row());
    for (int64_t key = 0; key < length; key += BLOCK) {
        const int keys = int(std::min<int64_t>(BLOCK, length - key));
        bool into = false;
        k.copy(first + key, group, keys, t.keys);
        v.copy(first + key, group, keys, t.values);
        for (int64_t head = group * shared(); head < (group + 1) * shared(); ++head)
            for (int64_t query = std::max(start, key); query < length; query += BLOCK) {
                const Sight sight{query, key, window};
                if (sight.none(keys)) break;
                const int queries = int(std::min<int64_t>(BLOCK, length - query));
                const int64_t token = first + query;
                q.copy(token, head, queries, t.queries);
                go.copy(token, head, queries, t.pulls);
                q.turn(token, head, queries, scale * LOG2E, t.turned);
                go.turn(token, head, queries, 1.0, t.turned_pulls);
                for (int i = 0; i < rounded(queries); ++i) {
                    double sum = 0;
                    const double *x = o.at(token + i, head), *y = t.pulls + i * v.row();
                    for (int d = 0; i < queries && d < v.size; ++d) sum += x[d] * y[d];
                    t.delta[i] = sum;
                    t.lse[i] = i < queries ? lse[head * tokens + token + i] : 0.0;
                }
                pull(sight, queries, keys, into, space);
                into = true;
                add(t.gqueries, q.row(), queries, gq + (token * heads + head) * q.size,
                    heads * q.size, q.size, scale);
            }
        if (!into) continue;
        const int64_t place = (first + key) * groups + group;
        add(t.gkeys, q.row(), keys, gk + place * k.size, groups * k.size, k.size, scale);
        add(t.gvalues, v.row(), keys, gv + place * v.size, groups * v.size, v.size, 1.0);
    }
}

struct Task {
    int64_t first, length, query, head;
    double cost;
};

// Costly tasks first, so that threads end together; no more threads than there is work for.
template <class Run>
void run(const Call& call, std::vector<Task>& tasks, int threads, Run one) {
    std::stable_sort(tasks.begin(), tasks.end(),
                     [](const Task& a, const Task& b) { return a.cost > b.cost; });
    double cost = 0;
    for (const Task& task : tasks) cost += task.cost;
    const double most = std::min({double(threads), double(tasks.size()), 1 + cost / FEW});
    const int useful = std::max(1, int(most));
#pragma omp parallel num_threads(useful) if (useful > 1)
    {
        const std::unique_ptr<double[]> space(new double[call.room()]);
#pragma omp for schedule(dynamic, 1)
        for (size_t n = 0; n < tasks.size(); ++n) one(tasks[n], space.get());
    }
}

// facts: tokens of queries, heads, key heads, K, W, window, past: queries of the first document that
// are not asked for, a multiple of BLOCK; q, o, their gradients and lse begin at the first that is.
Call call_of(const void* const* inputs, const int64_t* strides, const int64_t* facts, double scale) {
    Call call{};
    Heads* heads[] = {&call.q, &call.k, &call.v, &call.go, &call.o};
    for (int n = 0; n < 5 && inputs[n]; ++n)
        *heads[n] = {static_cast<const double*>(inputs[n]), strides[2 * n], strides[2 * n + 1],
                     int(facts[n < 2 ? 3 : 4])};
    call.tokens = facts[0], call.heads = facts[1], call.groups = facts[2];
    call.window = facts[5], call.past = facts[6], call.scale = scale;
    for (auto* x : {&call.q, &call.go, &call.o})
        if (x->data) x->data -= call.past * x->by_token;  // a token's place is then that of its keys
    return call;
}

}  // namespace

extern "C" {

// inputs: q, k, v and, backward, the gradient of the output and the output; null behind the last.
// Strides: of a token and of a head, for each.
void outsize_float64_attention(const void* const* inputs, const int64_t* strides, double* o,
                               double* lse, const int64_t* facts, const int64_t* bounds,
                               int64_t documents, double scale, int threads) {
    Call call = call_of(inputs, strides, facts, scale);
    call.out = o - call.past * call.heads * call.v.size;
    call.lse = lse - call.past;
    std::vector<Task> tasks;
    for (int64_t n = 0; n < documents; ++n)
        for (int64_t length = bounds[n + 1] - bounds[n], at = n ? 0 : call.past; at < length;
             at += BLOCK)
            for (int64_t head = 0; head < call.heads; ++head)
                tasks.push_back({bounds[n], length, at, head,
                                 double(std::min<int64_t>(BLOCK, length - at)) *
                                     double(std::min(at + BLOCK / 2, call.window)) *
                                     (call.q.size + call.v.size)});
    run(call, tasks, threads, [&](const Task& task, double* space) {
        call.forward(task.first, task.length, task.query, task.head, space);
    });
}

// gq, gk and gv are added to.
void outsize_float64_attention_backward(const void* const* inputs, const int64_t* strides,
                                        double* lse, double* gq, double* gk, double* gv,
                                        const int64_t* facts, const int64_t* bounds,
                                        int64_t documents, double scale, int threads) {
    Call call = call_of(inputs, strides, facts, scale);
    call.lse = lse - call.past;
    call.gq = gq - call.past * call.heads * call.q.size;
    call.gk = gk, call.gv = gv;
    std::vector<Task> tasks;
    for (int64_t n = 0; n < documents; ++n) {
        const int64_t length = bounds[n + 1] - bounds[n], start = n ? 0 : call.past;
        for (int64_t group = 0; group < call.groups; ++group)
            tasks.push_back({bounds[n], length, start, group,
                             double(length - start) * double(std::min(length, call.window)) *
                                 (call.q.size + call.v.size) * call.shared()});
    }
    run(call, tasks, threads, [&](const Task& task, double* space) {
        call.backward(task.first, task.length, task.query, task.head, space);
    });
}

}  // extern "C"
