#include "memory.h"

#include "device.h"
#include "streams.h"

#include <csignal>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

namespace strict {
namespace {

constexpr size_t kSpan = size_t{1} << 36; // of addresses, for each device
constexpr int kNaN = 0xff; // this byte, repeated, is NaN in every floating type, -1 in integers

// CUDACachingAllocator's figures.
constexpr size_t kRound = 512;
constexpr size_t kSmall = 1 << 20;        // at most this comes from segments for small blocks
constexpr size_t kSmallSegment = 2 << 20;
constexpr size_t kMiddleSegment = 20 << 20; // of blocks of less than
constexpr size_t kLarge = 10 << 20;         // this; larger ones have a segment of their own,
constexpr size_t kRoundLarge = 2 << 20;     // rounded to this

size_t rounded(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

struct Block {
  int device;
  int stream; // it was allocated on
  size_t size;
  size_t asked = 0;
  char* at;
  bool small;
  bool taken = false;
  bool segment_start = false;
  Block* before = nullptr; // in its segment
  Block* after = nullptr;
  std::set<int> used_by;    // other streams
  std::vector<Mark> marks;  // what must be done before it may be given again
};

struct Better { // the order of best fit
  bool operator()(const Block* a, const Block* b) const {
    if (a->stream != b->stream) return a->stream < b->stream;
    if (a->size != b->size) return a->size < b->size;
    return a->at < b->at;
  }
};
using Pool = std::set<Block*, Better>;

struct Space {
  char* window = nullptr;
  char* bytes = nullptr;
  std::map<size_t, size_t> holes; // unused stretches of the window, by offset
};

char* reserve(int protection) {
  void* at = mmap(nullptr, kSpan, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(at != MAP_FAILED, "strict: cannot reserve ", kSpan, " bytes of addresses");
  madvise(at, kSpan, MADV_DONTDUMP);
  return static_cast<char*>(at);
}

Space g_spaces[kMostDevices];
std::mutex g_space_mutex;

Space& space(int device) {
  std::lock_guard<std::mutex> lock(g_space_mutex);
  Space& own = g_spaces[device];
  if (own.window == nullptr) {
    own.bytes = reserve(PROT_READ | PROT_WRITE);
    own.window = reserve(PROT_NONE);
    own.holes[0] = kSpan;
  }
  return own;
}

// Statistics: three numbers of each kind, all blocks and those of the two pools.
void more(c10::CachingAllocator::StatArray& stats, bool small, size_t amount) {
  stats[0].increase(amount);
  stats[small ? 1 : 2].increase(amount);
}
void less(c10::CachingAllocator::StatArray& stats, bool small, size_t amount) {
  stats[0].decrease(amount);
  stats[small ? 1 : 2].decrease(amount);
}

struct Heap {
  int device = 0;
  Pool small;
  Pool large;
  std::vector<Block*> pending; // freed, with marks that are not done
  c10::CachingDeviceAllocator::DeviceStats stats;

  Pool& pool(bool is_small) { return is_small ? small : large; }
};

class Caching final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device();
    const c10::Device where(c10::DeviceType::PrivateUse1, device);
    void* at = bytes == 0 ? nullptr : take(device, current_stream(device), bytes);
    return {at, at, &give_back, where};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t count) const override {
    const int device = current_device();
    give(device, current_stream(device), [=] { std::memcpy(real(to), real(from), count); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (int i = 0; i < device_count(); ++i) release(i);
  }
  void recordStream(const c10::DataPtr& ptr, c10::Stream stream) override {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = taken_.find(ptr.get());
    if (found == taken_.end()) return;
    if (stream.id() != found->second->stream)
      found->second->used_by.insert(static_cast<int>(stream.id()));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return heap(device).stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    each(device, [](c10::CachingAllocator::Stat& s) { s.reset_accumulated(); });
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    each(device, [](c10::CachingAllocator::Stat& s) { s.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return {limit_ - held(device), limit_};
  }
  void set_limit(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    limit_ = bytes;
  }

 private:
  static void give_back(void* at);

  Heap& heap(int device) {
    heaps_[device].device = device;
    return heaps_[device];
  }
  size_t held(int device) {
    return static_cast<size_t>(heap(device).stats.reserved_bytes[0].current);
  }

  template <typename F>
  void each(int device, F change) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& s = heap(device).stats;
    for (auto* stats : {&s.allocation, &s.segment, &s.active, &s.inactive_split,
                        &s.allocated_bytes, &s.reserved_bytes, &s.active_bytes,
                        &s.inactive_split_bytes, &s.requested_bytes})
      for (auto& stat : *stats) change(stat);
  }

  void* take(int device, int stream, size_t asked) {
    const size_t size = rounded(asked, kRound);
    const bool small = size <= kSmall;
    std::unique_lock<std::mutex> lock(mutex_);
    Heap& h = heap(device);
    collect(h);
    Block* found = fit(h, stream, size, small);
    if (found == nullptr) found = grow(h, stream, size, small);
    if (found == nullptr) { // as CUDA's: give cached segments back, which waits for the device
      lock.unlock();
      release(device);
      lock.lock();
      ++h.stats.num_alloc_retries;
      found = fit(h, stream, size, small);
      if (found == nullptr) found = grow(h, stream, size, small);
    }
    if (found == nullptr) refuse(h, asked);
    split(h, found, size);
    found->taken = true;
    found->asked = asked;
    taken_[found->at] = found;
    more(h.stats.allocation, small, 1);
    more(h.stats.active, small, 1);
    more(h.stats.allocated_bytes, small, found->size);
    more(h.stats.active_bytes, small, found->size);
    more(h.stats.requested_bytes, small, asked);
    return found->at;
  }

  Block* fit(Heap& h, int stream, size_t size, bool small) {
    Block key{h.device, stream, size, 0, nullptr, small};
    Pool& pool = h.pool(small);
    auto at = pool.lower_bound(&key);
    if (at == pool.end() || (*at)->stream != stream) return nullptr;
    Block* found = *at;
    pool.erase(at);
    return found;
  }

  Block* grow(Heap& h, int stream, size_t size, bool small) {
    const size_t bytes = small ? kSmallSegment
        : size < kLarge        ? kMiddleSegment
                               : rounded(size, kRoundLarge);
    if (held(h.device) + bytes > limit_) return nullptr;
    Space& own = space(h.device);
    for (auto& [offset, length] : own.holes) {
      if (length < bytes) continue;
      const size_t at = offset, left = length - bytes;
      own.holes.erase(offset);
      if (left > 0) own.holes[at + bytes] = left;
      std::memset(own.bytes + at, kNaN, bytes);
      auto* made = new Block{h.device, stream, bytes, 0, own.window + at, small};
      made->segment_start = true;
      more(h.stats.segment, small, 1);
      more(h.stats.reserved_bytes, small, bytes);
      ++h.stats.num_device_alloc;
      return made;
    }
    return nullptr;
  }

  // Cut what is too much off a block and keep it for others.
  void split(Heap& h, Block* block, size_t size) {
    const size_t left = block->size - size;
    if (block->small ? left < kRound : left <= kSmall) return;
    auto* rest = new Block{block->device, block->stream, left, 0, block->at + size, block->small};
    rest->before = block;
    rest->after = block->after;
    if (rest->after != nullptr) rest->after->before = rest;
    block->after = rest;
    block->size = size;
    h.pool(block->small).insert(rest);
  }

  [[noreturn]] void refuse(Heap& h, size_t asked) {
    ++h.stats.num_ooms;
    const auto mib = [](int64_t bytes) { return std::to_string(bytes / double(1 << 20)); };
    const std::string text = "strict out of memory. Tried to allocate " +
        mib(static_cast<int64_t>(asked)) + " MiB. Device " + std::to_string(h.device) +
        " has a total capacity of " + mib(static_cast<int64_t>(limit_)) + " MiB of which " +
        mib(static_cast<int64_t>(limit_ - held(h.device))) + " MiB is free; " +
        mib(h.stats.allocated_bytes[0].current) + " MiB is allocated in tensors, " +
        mib(h.stats.reserved_bytes[0].current) + " MiB reserved.";
    TORCH_CHECK_WITH(OutOfMemoryError, false, text);
    std::abort(); // not reached
  }

  void free(void* at) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = taken_.find(at);
    TORCH_INTERNAL_ASSERT(found != taken_.end(), "freed twice");
    Block* block = found->second;
    taken_.erase(found);
    Heap& h = heap(block->device);
    less(h.stats.allocation, block->small, 1);
    less(h.stats.allocated_bytes, block->small, block->size);
    less(h.stats.requested_bytes, block->small, block->asked);
    for (int stream : block->used_by) block->marks.push_back(record(block->device, stream));
    block->used_by.clear();
    if (block->marks.empty())
      keep(h, block);
    else
      h.pending.push_back(block);
  }

  // The streams that used a block are done with it: the next one of its own stream may have it.
  void keep(Heap& h, Block* block) {
    less(h.stats.active, block->small, 1);
    less(h.stats.active_bytes, block->small, block->size);
    void* const bytes = real(block->at);
    const size_t size = block->size;
    give_quietly(block->device, block->stream, [=] { std::memset(bytes, kNaN, size); });
    block->taken = false;
    merge(h, block, block->before);
    merge(h, block, block->after);
    h.pool(block->small).insert(block);
  }

  void merge(Heap& h, Block* block, Block* other) {
    if (other == nullptr || other->taken) return;
    h.pool(block->small).erase(other);
    if (other == block->before) {
      block->at = other->at;
      block->segment_start = other->segment_start;
      block->before = other->before;
      if (block->before != nullptr) block->before->after = block;
    } else {
      block->after = other->after;
      if (block->after != nullptr) block->after->before = block;
    }
    block->size += other->size;
    delete other;
  }

  void collect(Heap& h) {
    std::vector<Block*> still;
    for (Block* block : h.pending) {
      bool done = true;
      for (const Mark& mark : block->marks) done = done && is_done(mark);
      if (done) {
        block->marks.clear();
        keep(h, block);
      } else {
        still.push_back(block);
      }
    }
    h.pending = std::move(still);
  }

  // Give unused segments back. As cudaFree it waits for all that the device was given.
  void release(int device) {
    finish_device(device);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      collect(heap(device));
    }
    finish_device(device); // the filling of what was collected
    std::lock_guard<std::mutex> lock(mutex_);
    Heap& h = heap(device);
    for (Pool* pool : {&h.small, &h.large})
      for (auto at = pool->begin(); at != pool->end();) {
        Block* block = *at;
        if (block->before != nullptr || block->after != nullptr) {
          ++at;
          continue;
        }
        at = pool->erase(at);
        less(h.stats.segment, block->small, 1);
        less(h.stats.reserved_bytes, block->small, block->size);
        ++h.stats.num_device_free;
        hole(space(device), static_cast<size_t>(block->at - space(device).window), block->size);
        delete block;
      }
  }

  static void hole(Space& own, size_t offset, size_t size) {
    madvise(own.bytes + offset, size, MADV_DONTNEED);
    auto next = own.holes.lower_bound(offset);
    if (next != own.holes.end() && offset + size == next->first) {
      size += next->second;
      next = own.holes.erase(next);
    }
    if (next != own.holes.begin()) {
      auto before = std::prev(next);
      if (before->first + before->second == offset) {
        before->second += size;
        return;
      }
    }
    own.holes[offset] = size;
  }

  std::mutex mutex_;
  Heap heaps_[kMostDevices];
  std::unordered_map<void*, Block*> taken_;
  size_t limit_ = size_t{2} << 30;
};

Caching* caching() {
  static Caching* const only = new Caching;
  return only;
}

void Caching::give_back(void* at) {
  if (at != nullptr) caching()->free(at);
}

// Pinned memory of the host: blocks of powers of two, kept for the next who asks, as CUDA's.
struct Pinned {
  char* at;
  size_t size;
  std::vector<Mark> marks;
};

class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &give_back, c10::DeviceType::CPU};
    Pinned* block = take(bytes);
    return {block->at, block, &give_back, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t count) const override {
    std::memcpy(to, from, count);
  }
  bool record_event(void* at, void*, c10::Stream stream) override {
    return use(at, stream.device_index(), static_cast<int>(stream.id()));
  }
  void empty_cache() override {
    std::lock_guard<std::mutex> lock(mutex_);
    collect();
    for (auto& [size, block] : free_) {
      blocks_.erase(block->at);
      munmap(block->at, block->size);
      stats_.allocated_bytes.decrease(size);
      stats_.allocations.decrease(1);
      delete block;
    }
    free_.clear();
  }
  at::HostStats get_stats() override {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
  }
  void reset_accumulated_stats() override { each(&c10::CachingAllocator::Stat::reset_accumulated); }
  void reset_peak_stats() override { each(&c10::CachingAllocator::Stat::reset_peak); }

  Pinned* find(const void* address) { // with the lock held
    auto at = blocks_.upper_bound(static_cast<const char*>(address));
    if (at == blocks_.begin()) return nullptr;
    Pinned* block = std::prev(at)->second;
    return static_cast<const char*>(address) < block->at + block->size ? block : nullptr;
  }
  bool use(const void* address, int device, int stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    Pinned* block = find(address);
    if (block == nullptr) return false;
    block->marks.push_back(record(device, stream));
    return true;
  }
  bool has(const void* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    return find(address) != nullptr;
  }
  void set_limit(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    limit_ = bytes;
  }

 private:
  static void give_back(void* context);

  void each(void (c10::CachingAllocator::Stat::*change)()) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto* stat : {&stats_.active_requests, &stats_.active_bytes, &stats_.allocations,
                       &stats_.allocated_bytes})
      (stat->*change)();
  }

  Pinned* take(size_t asked) {
    size_t size = 4096;
    while (size < asked) size *= 2;
    std::lock_guard<std::mutex> lock(mutex_);
    collect();
    stats_.active_requests.increase(1);
    auto kept = free_.find(size);
    if (kept != free_.end()) {
      Pinned* block = kept->second;
      free_.erase(kept);
      stats_.active_bytes.increase(size);
      return block;
    }
    const auto held = static_cast<size_t>(stats_.allocated_bytes.current);
    TORCH_CHECK(held + size <= limit_, "strict: pinned memory of the host is used up: ", size,
                " bytes asked for, ", limit_ - held, " of ", limit_, " left");
    void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(at != MAP_FAILED, "strict: the host has no ", size, " bytes to pin");
    std::memset(at, kNaN, size);
    auto* block = new Pinned{static_cast<char*>(at), size};
    blocks_[block->at] = block;
    stats_.active_bytes.increase(size);
    stats_.allocations.increase(1);
    stats_.allocated_bytes.increase(size);
    return block;
  }

  void free(Pinned* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    stats_.active_requests.decrease(1);
    stats_.active_bytes.decrease(block->size);
    pending_.push_back(block);
    collect();
  }

  void collect() {
    std::vector<Pinned*> still;
    for (Pinned* block : pending_) {
      bool done = true;
      for (const Mark& mark : block->marks) done = done && is_done(mark);
      if (!done) {
        still.push_back(block);
        continue;
      }
      block->marks.clear();
      std::memset(block->at, kNaN, block->size);
      free_.emplace(block->size, block);
    }
    pending_ = std::move(still);
  }

  std::mutex mutex_;
  std::map<const char*, Pinned*> blocks_;
  std::multimap<size_t, Pinned*> free_;
  std::vector<Pinned*> pending_;
  at::HostStats stats_;
  size_t limit_ = size_t{1} << 30;
};

PinnedAllocator* pinning() {
  static PinnedAllocator* const only = new PinnedAllocator;
  return only;
}

void PinnedAllocator::give_back(void* context) {
  if (context != nullptr) pinning()->free(static_cast<Pinned*>(context));
}

struct sigaction g_before[2];

// Async-signal-safe: says what happened and hands on to whoever handled it before.
void on_fault(int signal, siginfo_t* info, void* context) {
  const int device = device_of(info->si_addr);
  if (device >= 0) {
    char text[160];
    const int size = snprintf(
        text, sizeof text,
        "strict: the host read or wrote memory of device %d at %p; copy it to the host first\n",
        device, info->si_addr);
    if (write(2, text, static_cast<size_t>(size)) < 0) _exit(1);
  }
  sigaction(signal, &g_before[signal == SIGBUS], nullptr); // the faulting line runs again, into it
  (void)context;
}

} // namespace

int device_of(const void* address) {
  const auto* at = static_cast<const char*>(address);
  for (int i = 0; i < kMostDevices; ++i) {
    const char* window = g_spaces[i].window;
    if (window != nullptr && at >= window && at < window + kSpan) return i;
  }
  return -1;
}

void* real(const void* address) {
  if (address == nullptr) return nullptr;
  const int device = device_of(address);
  TORCH_INTERNAL_ASSERT(device >= 0, "not an address of a device");
  const Space& own = g_spaces[device];
  return own.bytes + (static_cast<const char*>(address) - own.window);
}

c10::DeviceAllocator* allocator() { return caching(); }
at::HostAllocator* pinned_allocator() { return pinning(); }
bool is_pinned(const void* address) { return pinning()->has(address); }
void use_pinned(const void* address, int device, int stream) {
  pinning()->use(address, device, stream);
}

void set_limits(int64_t device_bytes, int64_t pinned_bytes) {
  caching()->set_limit(static_cast<size_t>(device_bytes));
  pinning()->set_limit(static_cast<size_t>(pinned_bytes));
}

void guard_window() {
  struct sigaction now = {};
  sigaction(SIGSEGV, nullptr, &now);
  if (now.sa_sigaction == on_fault) return;
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &g_before[0]);
  sigaction(SIGBUS, &action, &g_before[1]);
}

} // namespace strict
