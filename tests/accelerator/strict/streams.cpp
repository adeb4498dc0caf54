#include "streams.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

// Of the interpreter that loads this library.
extern "C" int PyGILState_Check();
extern "C" void* PyEval_SaveThread();
extern "C" void PyEval_RestoreThread(void*);

namespace strict {
namespace {

constexpr uint64_t kAhead = 32; // pieces that the host hands out before a message goes out
constexpr auto kMoment = std::chrono::milliseconds(20);

struct Piece {
  std::function<void()> work; // or
  Mark awaited;               // what must be done before the stream goes on, or
  Mark reached;               // what is done when this piece is
};

// What a thread of the host has asked for.
struct Request {
  Mark target;        // until this is done
  int64_t steps = -1; // at most so many pieces, where it is not negative
  bool over = false;
};

using Queue = std::deque<Piece>;

struct State {
  std::mutex mutex; // never held while a piece runs
  std::condition_variable changed;
  std::array<std::vector<Queue>, kMostDevices> queues;
  std::array<int, kMostDevices> made{}; // streams asked for
  std::deque<Request*> requests;
  std::exception_ptr fault;
  Order order = kRandom;
  int last = 0;
  uint64_t draws = 0;
  uint64_t changes = 0; // what may let a request go on that was stopped
  int64_t run = 0;
  bool served = false; // some thread runs pieces
  int64_t recorded = 0;
  bool noting = false;
  std::vector<Note> notes;
};

thread_local int64_t t_label = -1;

void before_fork();
void in_parent();
void in_child();
const c10::impl::LocalDispatchKeySet& plain_keys();

State& state() {
  static State* const only = [] { // lives until the process ends: tensors may outlive it
    plain_keys();
    pthread_atfork(before_fork, in_parent, in_child);
    return new State;
  }();
  return *only;
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Called with the lock held.
void note(State& s, int64_t kind, int64_t stream, int64_t point) {
  if (s.noting) s.notes.push_back({kind, stream, point, syscall(SYS_gettid), t_label});
}

int64_t stream_number(int device, int stream) {
  return int64_t{kMostStreams} * device + stream;
}

// The next number below `count`: splitmix64 (Steele, Lea, Flood 2014).
uint64_t draw(State& s, uint64_t count) {
  uint64_t z = (s.draws += 0x9e3779b97f4a7c15ull);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return (z ^ (z >> 31)) % count;
}

Queue& queue(State& s, int device, int stream) {
  auto& own = s.queues.at(device);
  if (own.size() <= static_cast<size_t>(stream)) own.resize(stream + 1);
  return own[stream];
}

bool runnable(const Queue& q) {
  return !q.empty() && (!q.front().awaited || q.front().awaited->done);
}

// The stream whose next piece `target` waits for: its own, or the one that stops that.
Queue* demanded(State& s, const Mark& target) {
  Mark at = target;
  while (true) {
    Queue& q = queue(s, at->device, at->stream);
    if (q.empty()) return nullptr;
    if (runnable(q)) return &q;
    at = q.front().awaited;
    if (at->gate) return nullptr;
  }
}

// The gate that stands before `target`, so that only the host can let it be reached.
const Point* gate_before(State& s, const Mark& target) {
  for (Mark at = target; !at->done; at = queue(s, at->device, at->stream).front().awaited) {
    if (at->gate) return at.get();
    const Queue& q = queue(s, at->device, at->stream);
    if (q.empty() || !q.front().awaited) return nullptr;
  }
  return nullptr;
}

Queue* pick(State& s, const Request& request) {
  if (request.target && s.order == kDemand) return demanded(s, request.target);
  std::vector<Queue*> ready;
  for (auto& device : s.queues)
    for (size_t i = 0; i < device.size(); ++i) {
      const bool late = s.order == kLast && i == static_cast<size_t>(s.last);
      if (!late && runnable(device[i])) ready.push_back(&device[i]);
    }
  if (!ready.empty()) return ready[draw(s, ready.size())];
  return request.target ? demanded(s, request.target) : nullptr;
}

bool over(const Request& r) {
  return r.steps == 0 || (r.target && r.target->done);
}

// Run pieces for the first request until it is met. Called with the lock held.
void serve(State& s, std::unique_lock<std::mutex>& lock, Request& request) {
  while (!over(request)) {
    Queue* const from = pick(s, request);
    if (from == nullptr) break;
    Piece piece = std::move(from->front());
    from->pop_front();
    if (piece.work) {
      lock.unlock();
      std::exception_ptr fault;
      try {
        piece.work();
      } catch (...) {
        fault = std::current_exception();
      }
      piece.work = nullptr;
      lock.lock();
      if (fault && !s.fault) s.fault = fault;
    }
    if (piece.reached) {
      piece.reached->done = true;
      piece.reached->seconds = now();
    }
    ++s.run;
    if (request.steps > 0) --request.steps;
  }
}

// What threads know of dispatch that have entered nothing: pieces must not see what their caller is in.
const c10::impl::LocalDispatchKeySet& plain_keys() {
  static const auto only = [] {
    std::optional<c10::impl::LocalDispatchKeySet> keys;
    std::thread([&] { keys = c10::impl::tls_local_dispatch_key_set(); }).join();
    return *keys;
  }();
  return only;
}

// Serve the first request, and those after it, until `mine` is over.
void serve_until(State& s, std::unique_lock<std::mutex>& lock, const Request& mine) {
  const c10::impl::ForceDispatchKeyGuard plain(plain_keys());
  size_t stopped = 0; // requests in a row, none of which could go on
  uint64_t seen = 0;  // changes before the first of them
  while (!mine.over) {
    Request* const first = s.requests.front();
    if (stopped == 0) seen = s.changes;
    serve(s, lock, *first);
    s.requests.pop_front();
    if (first->target && !over(*first) && gate_before(s, first->target) != nullptr) {
      s.requests.push_back(first); // others may be served meanwhile
      if (++stopped >= s.requests.size()) {
        s.changed.wait(lock, [&] { return s.changes != seen; });
        stopped = 0;
      }
      continue;
    }
    stopped = 0;
    first->over = true;
    if (first != &mine) s.changed.notify_all();
  }
}

void before_fork() { state().mutex.lock(); }
void in_parent() { state().mutex.unlock(); }
void in_child() { // has none of the threads; its queues are copies of the parent's
  State& s = state();
  s.served = false;
  s.requests.clear();
  new (&s.changed) std::condition_variable;
  s.mutex.unlock();
}

// With the lock held: until the request is met, in this thread or in one that serves already.
void ask_for(State& s, std::unique_lock<std::mutex>& lock, Request& request) {
  s.requests.push_back(&request);
  ++s.changes;
  if (s.served) s.changed.notify_all();
  while (!request.over) {
    if (s.served) {
      s.changed.wait(lock);
      continue;
    }
    s.served = true;
    serve_until(s, lock, request);
    s.served = false;
    s.changed.notify_all();
  }
}

void put(int device, int stream, Piece piece) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  note(s, piece.awaited ? 1 : 0, stream_number(device, stream),
       piece.awaited ? piece.awaited->number : 0);
  queue(s, device, stream).push_back(std::move(piece));
  ++s.changes;
  s.changed.notify_all();
}

// Let pieces run, as far as the order wants the device to follow the host.
void follow() {
  State& s = state();
  Request request;
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    if (s.order == kDemand) return;
    if (s.order == kRandom) {
      if (draw(s, 8) != 0) return;
      request.steps = 1 + static_cast<int64_t>(draw(s, 16));
    }
  }
  WithoutGil free;
  std::unique_lock<std::mutex> lock(s.mutex);
  ask_for(s, lock, request);
}

void put_and_follow(int device, int stream, Piece piece) {
  put(device, stream, std::move(piece));
  follow();
}

} // namespace

WithoutGil::WithoutGil() : thread_(PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
WithoutGil::~WithoutGil() {
  if (thread_ != nullptr) PyEval_RestoreThread(thread_);
}

void set_order(Order order, int last, uint64_t seed) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.order = order;
  s.last = last;
  s.draws = seed * 0xd1342543de82ef95ull;
  s.made.fill(0);
}

int new_stream(int device) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  const int id = 1 + s.made.at(device)++ % (kMostStreams - 1);
  queue(s, device, id);
  return id;
}

void give(int device, int stream, std::function<void()> work) {
  put_and_follow(device, stream, {std::move(work), nullptr, nullptr});
}

void give_quietly(int device, int stream, std::function<void()> work) {
  put(device, stream, {std::move(work), nullptr, nullptr});
}

Mark record(int device, int stream) {
  auto mark = std::make_shared<Point>(Point{device, stream});
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  mark->number = ++s.recorded;
  note(s, 2, stream_number(device, stream), mark->number);
  queue(s, device, stream).push_back({nullptr, nullptr, mark});
  return mark;
}

void wait(int device, int stream, const Mark& mark) {
  put_and_follow(device, stream, {nullptr, mark, nullptr});
}

Mark gate() {
  auto made = std::make_shared<Point>();
  made->gate = true;
  return made;
}

void open(const Mark& gate) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  gate->done = true;
  ++s.changes;
  s.changed.notify_all();
}

const Point* before(const Mark& mark) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  return gate_before(s, mark);
}

void linger() {
  State& s = state();
  std::unique_lock<std::mutex> lock(s.mutex);
  const uint64_t more = s.changes + (s.order == kEager ? 0 : kAhead);
  s.changed.wait_for(lock, kMoment, [&] { return s.changes >= more || !s.requests.empty(); });
}

void reach(const Mark& mark) {
  State& s = state();
  WithoutGil free;
  std::unique_lock<std::mutex> lock(s.mutex);
  if (mark->done) return;
  Request request;
  request.target = mark;
  ask_for(s, lock, request);
}

bool is_done(const Mark& mark) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  return mark->done;
}

bool ask(const Mark& mark) {
  State& s = state();
  WithoutGil free;
  std::unique_lock<std::mutex> lock(s.mutex);
  if (!mark->done) {
    Request one;
    one.target = mark;
    one.steps = 1;
    ask_for(s, lock, one);
  }
  if (mark->done) note(s, 3, 0, mark->number);
  return mark->done;
}

void finish(const Mark& mark) {
  State& s = state();
  WithoutGil free;
  std::unique_lock<std::mutex> lock(s.mutex);
  if (!mark->done) {
    Request request;
    request.target = mark;
    ask_for(s, lock, request);
    TORCH_INTERNAL_ASSERT(mark->done, "a stream waits for what no stream will do");
  }
  note(s, 3, 0, mark->number);
  if (s.fault) std::rethrow_exception(std::exchange(s.fault, nullptr));
}

void finish_stream(int device, int stream) {
  finish(record(device, stream));
}

void finish_device(int device) {
  size_t count = 0;
  {
    State& s = state();
    std::lock_guard<std::mutex> lock(s.mutex);
    count = s.queues.at(device).size();
  }
  for (size_t i = 0; i < count; ++i) finish_stream(device, static_cast<int>(i));
}

void drain() {
  std::vector<Mark> ends;
  {
    State& s = state();
    std::lock_guard<std::mutex> lock(s.mutex);
    for (int device = 0; device < kMostDevices; ++device)
      for (size_t i = 0; i < s.queues[device].size(); ++i)
        if (!s.queues[device][i].empty()) {
          ends.push_back(std::make_shared<Point>(Point{device, static_cast<int>(i)}));
          s.queues[device][i].push_back({nullptr, nullptr, ends.back()});
        }
  }
  for (const Mark& end : ends) reach(end);
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.fault = nullptr;
}

void take_notes(bool on) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.noting = on;
  if (on) s.notes.clear();
}

int64_t count_notes() {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  return static_cast<int64_t>(s.notes.size());
}

void copy_notes(Note* to) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  std::copy(s.notes.begin(), s.notes.end(), to);
}

void say(int64_t what, int64_t value) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  note(s, 4, what, value);
}

void label(int64_t number) { t_label = number; }

int64_t pieces_run() {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  return s.run;
}

int64_t pieces_waiting() {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  int64_t count = 0;
  for (const auto& device : s.queues)
    for (const auto& q : device) count += static_cast<int64_t>(q.size());
  return count;
}

} // namespace strict
