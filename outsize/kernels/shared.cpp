// Collectives among processes of one host, over memory that all of them have mapped.
//
// Everything is made of one kind of step: a worker writes its slot, publishes the step's number,
// waits until everyone has published it, and reads the others' slots. Slots are double: when step s
// is written, everyone has published s - 1 and so has finished reading s - 2, whose slot s takes.
// A tensor of any size goes through the slots by pieces that fit the caches. Sums are formed in the
// order of ranks, bfloat16 in float32, and rounded once.
//
// Whoever waits gives way to others some times (with a core to itself that is a look every 0.3 us;
// without, spinning keeps the awaited worker from coming), then sleeps on the awaited worker's word
// (futex). It wakes at least every 50 ms and asks its caller (`look`) whether to go on.

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "storage.h"

namespace {

using outsize::bfloat16;
using outsize::narrow;
using outsize::wide;

inline double wide(double x) { return x; }
inline int64_t wide(int64_t x) { return x; }
inline int32_t wide(int32_t x) { return x; }
template <class T, class W> inline T stored(W x) {
    if constexpr (sizeof(T) == 2) return narrow<T>(x);
    else return x;
}

// One a worker; it alone writes, but for `waiters`. shared.py reads the same layout.
struct alignas(128) Line {
    std::atomic<uint32_t> step;     // the last one published
    std::atomic<uint32_t> waiters;  // who sleep on `step`
    std::atomic<int32_t> operation, calls, awaited;  // what, how many so far, for whom it waits
    std::atomic<int32_t> left;                       // whether it has closed the group
    std::atomic<int64_t> rounds[2];                  // an exchange's, by the step's parity
};

struct alignas(128) Head {
    std::atomic<int32_t> aborted;
};

struct Group {
    char *base;
    int32_t rank, size;
    int64_t slot;  // bytes, a multiple of 128
    int32_t yields;
    int32_t (*look)(int32_t);
    uint32_t step;

    Head &head() const { return *reinterpret_cast<Head *>(base); }
    Line &line(int r) const { return reinterpret_cast<Line *>(base + sizeof(Head))[r]; }
    char *at(int r, uint32_t s) const {
        return base + sizeof(Head) + size * sizeof(Line) + (int64_t(r) * 2 + (s & 1)) * slot;
    }
};

long futex(std::atomic<uint32_t> *word, int what, uint32_t value, const timespec *limit) {
    return syscall(SYS_futex, reinterpret_cast<uint32_t *>(word), what, value, limit, nullptr, 0);
}

bool reached(const std::atomic<uint32_t> &word, uint32_t step) {
    return int32_t(word.load(std::memory_order_acquire) - step) >= 0;
}

int sleep_until(Group &g, int r) {
    Line &theirs = g.line(r), &mine = g.line(g.rank);
    const timespec limit = {0, 50'000'000};
    int code = 0;
    mine.awaited.store(r, std::memory_order_relaxed);
    theirs.waiters.fetch_add(1);
    while (!code) {
        const uint32_t seen = theirs.step.load();
        if (int32_t(seen - g.step) >= 0) break;
        const bool woken = futex(&theirs.step, FUTEX_WAIT, seen, &limit) == 0;
        if (!woken || g.head().aborted.load()) code = reached(theirs.step, g.step) ? 0 : g.look(r);
    }
    theirs.waiters.fetch_sub(1);
    mine.awaited.store(-1, std::memory_order_relaxed);
    return code;
}

void publish(Group &g) {
    Line &mine = g.line(g.rank);
    mine.step.store(g.step);
    if (mine.waiters.load()) futex(&mine.step, FUTEX_WAKE, INT_MAX, nullptr);
}

// Publish the step and wait for everyone's; non-zero where the caller was told to give up.
int meet(Group &g) {
    publish(g);
    for (int d = 1; d < g.size; ++d) {
        const int r = (g.rank + d) % g.size;
        const auto &word = g.line(r).step;
        for (int i = 0; i < g.yields && !reached(word, g.step); ++i) sched_yield();
        if (!reached(word, g.step))
            if (const int code = sleep_until(g, r)) return code;
    }
    return 0;
}

void begin(Group &g, int operation) {
    Line &mine = g.line(g.rank);
    mine.operation.store(operation, std::memory_order_relaxed);
    mine.calls.fetch_add(1, std::memory_order_relaxed);
}

constexpr int64_t LARGE = 4 << 20;  // bytes of an operation that leave the caches
constexpr int64_t SMALL = 16 << 10;  // bytes that everyone sums whole: one step instead of two

// Past the caches: what is written is not read again soon.
void stream(char *to, const char *from, int64_t bytes) {
#if defined(__AVX512F__)
    const int64_t head = std::min<int64_t>(bytes, -reinterpret_cast<intptr_t>(to) & 63);
    std::memcpy(to, from, head);
    int64_t i = head;
    for (; i + 64 <= bytes; i += 64)
        _mm512_stream_si512(reinterpret_cast<__m512i *>(to + i), _mm512_loadu_si512(from + i));
    std::memcpy(to + i, from + i, bytes - i);
    _mm_sfence();
#else
    std::memcpy(to, from, bytes);
#endif
}

void copy(char *to, const char *from, int64_t bytes, bool past) {
    if (past) stream(to, from, bytes);
    else std::memcpy(to, from, bytes);
}

struct Sum {
    template <class W> static W of(W a, W b) { return a + b; }
};
struct Max {  // a NaN stays one
    template <class W> static W of(W a, W b) { return a > b || a != a ? a : b; }
};

// to[i] (and also[i]) = from[0][i] then from[1][i] then ...; `to` may be one of them.
template <class T, class Op>
void combine(T *to, T *also, const T *const *from, int n, int64_t count) {
    using W = decltype(wide(T()));
    constexpr int64_t TILE = 512;
    W total[TILE];
    for (int64_t i = 0; i < count; i += TILE) {
        const int64_t m = std::min(TILE, count - i);
        for (int64_t j = 0; j < m; ++j) total[j] = wide(from[0][i + j]);
        for (int r = 1; r < n; ++r)
            for (int64_t j = 0; j < m; ++j) total[j] = Op::of(total[j], W(wide(from[r][i + j])));
        for (int64_t j = 0; j < m; ++j) to[i + j] = stored<T>(total[j]);
        if (also) std::memcpy(also + i, to + i, m * sizeof(T));
    }
}

// Where part p of n begins, at a multiple of 16 elements.
int64_t cut(int64_t count, int p, int n) { return p == n ? count : count * p / n / 16 * 16; }

constexpr int MOST = 256;  // workers of a group; shared.py says so before

template <class T, class Op> int all_reduce(Group &g, T *x, int64_t count) {
    const int n = g.size, me = g.rank;
    const T *from[MOST];
    if (count * int64_t(sizeof(T)) <= std::min(SMALL, g.slot)) {
        ++g.step;
        std::memcpy(g.at(me, g.step), x, count * sizeof(T));
        if (const int code = meet(g)) return code;
        for (int r = 0; r < n; ++r)
            from[r] = r == me ? x : reinterpret_cast<const T *>(g.at(r, g.step));
        combine<T, Op>(x, nullptr, from, n, count);
        return 0;
    }
    // A slot: what this worker has of everybody's parts of a block, then the finished own part of
    // the block before. So one step carries both directions.
    const int64_t part = g.slot / int64_t(sizeof(T)) / (n + 1) / 64 * 64, block = part * n;
    const int64_t blocks = (count + block - 1) / block;
    for (int64_t b = 0; b <= blocks; ++b) {
        ++g.step;
        const int64_t here = std::clamp<int64_t>(count - b * block, 0, block);
        T *mine = reinterpret_cast<T *>(g.at(me, g.step)), *at = x + b * block;
        for (int p = 0; p < n; ++p)
            if (p != me)
                std::memcpy(mine + p * part, at + cut(here, p, n),
                            (cut(here, p + 1, n) - cut(here, p, n)) * sizeof(T));
        if (const int code = meet(g)) return code;
        const int64_t first = cut(here, me, n);
        for (int r = 0; r < n; ++r)
            from[r] = r == me ? at + first
                              : reinterpret_cast<const T *>(g.at(r, g.step)) + me * part;
        combine<T, Op>(at + first, reinterpret_cast<T *>(g.at(me, g.step + 1)) + block, from, n,
                       cut(here, me + 1, n) - first);
        if (b == 0) continue;
        const int64_t before = std::min(count - (b - 1) * block, block);
        for (int d = 1; d < n; ++d) {
            const int p = (me + d) % n;
            std::memcpy(at - block + cut(before, p, n),
                        reinterpret_cast<const T *>(g.at(p, g.step)) + block,
                        (cut(before, p + 1, n) - cut(before, p, n)) * sizeof(T));
        }
    }
    return 0;
}

template <class T>
int reduce_scatter(Group &g, const T *x, const int64_t *spans, T *out) {
    const int n = g.size, me = g.rank;
    const T *from[MOST];
    const int64_t part = g.slot / int64_t(sizeof(T)) / n / 64 * 64;
    int64_t longest = 0;
    for (int r = 0; r < n; ++r) longest = std::max(longest, spans[2 * r + 1] - spans[2 * r]);
    for (int64_t at = 0; at < longest; at += part) {
        ++g.step;
        const auto length = [&](int r) {
            return std::clamp<int64_t>(spans[2 * r + 1] - spans[2 * r] - at, 0, part);
        };
        T *mine = reinterpret_cast<T *>(g.at(me, g.step));
        for (int r = 0; r < n; ++r)
            if (r != me)
                std::memcpy(mine + r * part, x + spans[2 * r] + at, length(r) * sizeof(T));
        if (const int code = meet(g)) return code;
        for (int r = 0; r < n; ++r)
            from[r] = r == me ? x + spans[2 * me] + at
                              : reinterpret_cast<const T *>(g.at(r, g.step)) + me * part;
        combine<T, Sum>(out + at, nullptr, from, n, length(me));
    }
    return 0;
}

template <class F> int by_dtype(int dtype, F &&f) {
    switch (dtype) {
    case 0: return f(float());
    case 1: return f(bfloat16());
    case 2: return f(double());
    case 3: return f(int64_t());
    default: return f(int32_t());
    }
}

}  // namespace

extern "C" {

void *outsize_shared_open(char *base, int rank, int size, int64_t slot, int yields,
                          int32_t (*look)(int32_t)) {
    Group *g = new Group{base, rank, size, slot, yields, look, 0};
    g->line(rank).awaited.store(-1);
    return g;
}

void outsize_shared_close(void *group) {
    Group *g = static_cast<Group *>(group);
    g->line(g->rank).left.store(1);
    delete g;
}

int64_t outsize_shared_bytes(int size, int64_t slot) {
    return sizeof(Head) + size * (sizeof(Line) + 2 * slot);
}

// Wakes everyone who sleeps, to look at the word that says `aborted`.
void outsize_shared_abort(void *group) {
    Group &g = *static_cast<Group *>(group);
    g.head().aborted.store(1);
    for (int r = 0; r < g.size; ++r) futex(&g.line(r).step, FUTEX_WAKE, INT_MAX, nullptr);
}

int outsize_shared_aborted(void *group) {
    return static_cast<Group *>(group)->head().aborted.load();
}

// What worker r does: operation, calls, awaited (-1: nobody), left.
void outsize_shared_state(void *group, int r, int32_t *out) {
    const Line &line = static_cast<Group *>(group)->line(r);
    out[0] = line.operation.load();
    out[1] = line.calls.load();
    out[2] = line.awaited.load();
    out[3] = line.left.load();
}

int outsize_shared_barrier(void *group, int name) {
    Group &g = *static_cast<Group *>(group);
    begin(g, name);
    ++g.step;
    return meet(g);
}

int outsize_shared_all_reduce(void *group, int name, int dtype, int largest, void *x,
                              int64_t count) {
    Group &g = *static_cast<Group *>(group);
    begin(g, name);
    return by_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        return largest ? all_reduce<T, Max>(g, static_cast<T *>(x), count)
                       : all_reduce<T, Sum>(g, static_cast<T *>(x), count);
    });
}

int outsize_shared_reduce_scatter(void *group, int name, int dtype, const void *x,
                                  const int64_t *spans, void *out) {
    Group &g = *static_cast<Group *>(group);
    begin(g, name);
    return by_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        return reduce_scatter(g, static_cast<const T *>(x), spans, static_cast<T *>(out));
    });
}

// Spans in bytes.
int outsize_shared_all_gather(void *group, int name, const char *mine, const int64_t *spans,
                              char *out) {
    Group &g = *static_cast<Group *>(group);
    begin(g, name);
    const int n = g.size, me = g.rank;
    int64_t longest = 0, total = 0;
    for (int r = 0; r < n; ++r) {
        longest = std::max(longest, spans[2 * r + 1] - spans[2 * r]);
        total += spans[2 * r + 1] - spans[2 * r];
    }
    if (mine != out + spans[2 * me])
        std::memmove(out + spans[2 * me], mine, spans[2 * me + 1] - spans[2 * me]);
    for (int64_t at = 0; at < longest; at += g.slot) {
        ++g.step;
        const auto length = [&](int r) {
            return std::clamp<int64_t>(spans[2 * r + 1] - spans[2 * r] - at, 0, g.slot);
        };
        std::memcpy(g.at(me, g.step), out + spans[2 * me] + at, length(me));
        if (const int code = meet(g)) return code;
        for (int d = 1; d < n; ++d) {
            const int r = (me + d) % n;
            copy(out + spans[2 * r] + at, g.at(r, g.step), length(r), total > LARGE);
        }
    }
    return 0;
}

// Bytes given and got, by worker; the others' are not known here, so rounds are told first.
int outsize_shared_all_to_all(void *group, int name, const char *const *given,
                              const int64_t *give, char *const *out, const int64_t *get) {
    Group &g = *static_cast<Group *>(group);
    begin(g, name);
    const int n = g.size, me = g.rank;
    const int64_t part = g.slot / n / 64 * 64;
    int64_t longest = 0, total = 0, rounds = 1;
    for (int r = 0; r < n; ++r) {
        if (r != me) longest = std::max(longest, give[r]);
        total += get[r];
    }
    std::memmove(out[me], given[me], get[me]);
    for (int64_t k = 0; k < rounds; ++k) {
        ++g.step;
        for (int r = 0; r < n; ++r)
            if (r != me && give[r] > k * part)
                std::memcpy(g.at(me, g.step) + r * part, given[r] + k * part,
                            std::min(give[r] - k * part, part));
        if (k == 0) g.line(me).rounds[g.step & 1].store((longest + part - 1) / part);
        if (const int code = meet(g)) return code;
        if (k == 0)
            for (int r = 0; r < n; ++r)
                rounds = std::max(rounds, g.line(r).rounds[g.step & 1].load());
        for (int d = 1; d < n; ++d) {
            const int r = (me + d) % n;
            if (get[r] > k * part)
                copy(out[r] + k * part, g.at(r, g.step) + me * part,
                     std::min(get[r] - k * part, part), total > LARGE);
        }
    }
    return 0;
}

int outsize_shared_broadcast(void *group, int name, char *x, int64_t bytes, int source) {
    Group &g = *static_cast<Group *>(group);
    begin(g, name);
    for (int64_t at = 0; at < bytes; at += g.slot) {
        ++g.step;
        const int64_t here = std::min(bytes - at, g.slot);
        if (g.rank == source) std::memcpy(g.at(source, g.step), x + at, here);
        if (const int code = meet(g)) return code;
        if (g.rank != source) copy(x + at, g.at(source, g.step), here, bytes > LARGE);
    }
    return 0;
}

}  // extern "C"
