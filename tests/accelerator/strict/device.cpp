#include "device.h"

#include "memory.h"
#include "streams.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <atomic>
#include <vector>

namespace strict {
namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

std::atomic<int> g_count{1};
std::atomic<void (*)(const char*)> g_on_wait{nullptr};
thread_local int t_device = 0;
thread_local std::array<int, kMostDevices> t_streams{};

void check_device(int index) {
  TORCH_CHECK(index >= 0 && index < g_count, "strict: device ", index, " is not there; there are ",
              g_count.load());
}

// An event: the point that it was last recorded at.
struct Event {
  Mark mark;
};
Event* event_of(void* handle) { return static_cast<Event*>(handle); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return {kType, static_cast<c10::DeviceIndex>(t_device)};
  }
  void setDevice(c10::Device device) const override {
    check_device(device.index());
    t_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { t_device = device.index(); }
  c10::Stream getStream(c10::Device device) const override {
    const auto at = with_index(device);
    return c10::Stream(c10::Stream::UNSAFE, at, t_streams.at(at.index()));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, with_index(device));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    const auto at = with_index(device);
    return c10::Stream(c10::Stream::UNSAFE, at, new_stream(at.index()));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    t_streams.at(stream.device_index()) = static_cast<int>(stream.id());
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(g_count.load());
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  bool queryStream(const c10::Stream& stream) const override {
    return ask(record(stream.device_index(), static_cast<int>(stream.id())));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    note_wait("synchronize");
    finish_stream(stream.device_index(), static_cast<int>(stream.id()));
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    note_wait("synchronize");
    finish_device(index);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex index,
              const c10::EventFlag) const override {
    TORCH_CHECK(index < 0 || index == stream.device_index(), "strict: an event of device ",
                int(index), " cannot be recorded on a stream of device ",
                int(stream.device_index()));
    if (*event == nullptr) *event = new Event;
    event_of(*event)->mark = record(stream.device_index(), static_cast<int>(stream.id()));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr)
      wait(stream.device_index(), static_cast<int>(stream.id()), event_of(event)->mark);
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || ask(event_of(event)->mark);
  }
  void synchronizeEvent(void* event) const override {
    note_wait("synchronize");
    if (event != nullptr) finish(event_of(event)->mark);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete event_of(event);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    TORCH_CHECK(from != nullptr && to != nullptr && is_done(event_of(from)->mark) &&
                    is_done(event_of(to)->mark),
                "strict: both events must be recorded and over before time between them is asked");
    return (event_of(to)->mark->seconds - event_of(from)->mark->seconds) * 1e3;
  }
  void recordDataPtrOnStream(const c10::DataPtr& ptr, const c10::Stream& stream) const override {
    allocator()->recordStream(ptr, stream);
  }

 private:
  static Mark record(int device, int stream) { return strict::record(device, stream); }
  c10::Device with_index(c10::Device device) const {
    return device.has_index() ? device : getDevice();
  }
};

// Draws what the CPU's generator draws from the same seed.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex index, at::Generator drawn = at::detail::createCPUGenerator())
      : GeneratorImpl({kType, index}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(std::move(drawn)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  GeneratorImpl* clone_impl() const override {
    return new Generator(device().index(), inner.clone());
  }

  mutable at::Generator inner;
};

const std::vector<at::Generator>& generators() {
  static const auto* const all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < kMostDevices; ++i)
      made->push_back(at::make_generator<Generator>(static_cast<c10::DeviceIndex>(i)));
    return made;
  }();
  return *all;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return g_count > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(g_count.load());
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    check_device(index);
    t_device = index;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(t_device);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto before = getCurrentDevice();
    setCurrentDevice(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? getCurrentDevice() : exchangeDevice(index);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  at::Device getDeviceFromPtr(void* data) const override {
    const int index = device_of(data);
    TORCH_CHECK(index >= 0, "strict: ", data, " is not an address of a device");
    return {kType, static_cast<c10::DeviceIndex>(index)};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index < 0 ? t_device : index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(
        static_cast<c10::DeviceIndex>(index < 0 ? t_device : index));
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto made = allocator()->allocate(bytes);
    const size_t kept = std::min(bytes, storage.nbytes());
    if (kept > 0) allocator()->copy_data(made.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(made));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

const bool g_registered = [] {
  c10::SetAllocator(kType, allocator());
  at::setHostAllocator(kType, pinned_allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

} // namespace

int device_count() { return g_count; }
int current_device() { return t_device; }
int current_stream(int device) { return t_streams.at(device); }

at::Generator inner(const at::Generator& generator) {
  TORCH_CHECK(generator.device().type() == kType, "Expected a 'strict' device type for generator "
              "but found '", generator.device().type(), "'");
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->inner;
}
at::Generator drawn_from(const at::Generator& generator) { return inner(generator).clone(); }
const at::Generator& default_generator(int device) { return generators().at(device); }

void note_wait(const std::string& what) {
  if (auto* call = g_on_wait.load()) call(what.c_str());
}

} // namespace strict

// What Python asks for.
extern "C" {
void strict_configure(int devices, int64_t device_bytes, int64_t pinned_bytes) {
  strict::drain();
  strict::allocator()->emptyCache();
  strict::pinned_allocator()->empty_cache();
  strict::g_count = devices;
  strict::t_device = 0;
  strict::t_streams.fill(0);
  strict::set_limits(device_bytes, pinned_bytes);
  strict::guard_window();
}
int strict_devices() { return strict::g_count; }
void strict_order(int order, int last, uint64_t seed) {
  strict::set_order(static_cast<strict::Order>(order), last, seed);
}
void strict_on_wait(void (*call)(const char*)) { strict::g_on_wait = call; }
void* strict_mark(int device, int stream) {
  return new strict::Mark(strict::record(device, stream));
}
void strict_reach(void* mark) {
  strict::linger();
  strict::reach(*static_cast<strict::Mark*>(mark));
}
void strict_forget(void* mark) { delete static_cast<strict::Mark*>(mark); }
const void* strict_before(void* mark) { return strict::before(*static_cast<strict::Mark*>(mark)); }
const void* strict_named(void* gate) { return static_cast<strict::Mark*>(gate)->get(); }
void* strict_gate(int device, int stream) {
  auto* made = new strict::Mark(strict::gate());
  strict::wait(device, stream, *made);
  return made;
}
void strict_open(void* gate) {
  strict::open(*static_cast<strict::Mark*>(gate));
  delete static_cast<strict::Mark*>(gate);
}
void strict_take_notes(int on) { strict::take_notes(on != 0); }
int64_t strict_count_notes() { return strict::count_notes(); }
void strict_copy_notes(void* to) { strict::copy_notes(static_cast<strict::Note*>(to)); }
void strict_say(int64_t what, int64_t value) { strict::say(what, value); }
void strict_label(int64_t number) { strict::label(number); }
int64_t strict_pieces_run() { return strict::pieces_run(); }
int64_t strict_pieces_waiting() { return strict::pieces_waiting(); }
}
