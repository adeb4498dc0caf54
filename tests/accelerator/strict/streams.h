// Streams of the device: queues of pieces of work, and the order in which pieces of different
// streams run, which is drawn from a seed. One piece runs at a time, in a thread of the host that
// waits for one, so an order is the same every time; the host is as far ahead as the order lets it be.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace strict {

constexpr int kMostDevices = 8;
constexpr int kMostStreams = 64; // of one device; asked for more, earlier ones come again

// A point in a stream: done when everything before it has run.
struct Point {
  int device = 0;
  int stream = 0;
  bool done = false;
  bool gate = false; // done when the host says so
  double seconds = 0; // by a steady clock, when it was passed
  int64_t number = 0; // of all that were recorded
};
using Mark = std::shared_ptr<Point>;

enum Order : int {
  kEager = 0,  // a piece runs before the host goes on: no race shows
  kRandom = 1, // the next piece is drawn, and now and then the host lets some run
  kLast = 2,   // one stream runs only when the host waits for it; all others run at once
  kDemand = 3, // nothing runs that the host does not wait for: the host is far ahead
};

void set_order(Order order, int last, uint64_t seed);

// Streams, numbered from 0 (the default one) on each device.
int new_stream(int device);

// Work behind what the stream was given before. May run pieces of any stream, as the order says.
void give(int device, int stream, std::function<void()> work);
// The same, and runs nothing: for callers that must not wait, as those that free memory.
void give_quietly(int device, int stream, std::function<void()> work);
Mark record(int device, int stream);
void wait(int device, int stream, const Mark& mark);

// A point that the host opens: work behind a wait for it stays until then. All that is opened must
// be opened in the end, and who waits for the device waits for that too.
Mark gate();
void open(const Mark& gate);
// Hold back a thread that stands for a part of the device: until the host has handed out some more
// work or waits for some, and no longer than a moment, since it may wait for another process.
void linger();
// The gate before which work stands that `mark` waits for; null where there is none.
const Point* before(const Mark& mark);
// As finish, and neither raises nor counts: for threads that stand for a part of the device.
void reach(const Mark& mark);

bool is_done(const Mark& mark);
// Whether it is done; if not, one piece runs, so that who asks again and again sees it done.
bool ask(const Mark& mark);
// The host waits. Raises what the first failed piece raised.
void finish(const Mark& mark);
void finish_stream(int device, int stream);
void finish_device(int device);
// All that was given runs; what it raises is forgotten.
void drain();

// What the host has done since notes were taken, in order: work given to a stream, a wait of a stream
// for a point, a point recorded, a thread that has waited for a point or seen that it is passed, and
// what a thread has said itself. A thread says under which label it gives work.
struct Note {
  int64_t kind;   // 0 work, 1 wait, 2 point, 3 seen, 4 said
  int64_t stream; // of all devices: kMostStreams for each; or what is said
  int64_t point;
  int64_t thread;
  int64_t label;
};
void take_notes(bool on); // forgets those there are
int64_t count_notes();
void copy_notes(Note* to); // as many
void say(int64_t what, int64_t value);
void label(int64_t number);

// The count of pieces that have run, and of those that wait to run.
int64_t pieces_run();
int64_t pieces_waiting();

// Hold while the host waits for something that needs Python's lock elsewhere.
class WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  void* thread_;
};

} // namespace strict
