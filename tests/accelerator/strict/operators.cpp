// Operators of the device: the CPU's kernels, run on the device's bytes when the order of streams
// comes to them. What an operator gives is allocated when it is called, by its shape function (the
// Meta kernel); one whose results' shapes follow from values waits for them, as on a GPU.
#include "device.h"
#include "memory.h"
#include "streams.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <mutex>
#include <unordered_map>

namespace strict {
namespace {

using at::IValue;
using at::Tensor;
using torch::jit::Stack;

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr auto kUnseen = c10::DispatchKeySet(
    {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot});

// Kernels alone: neither autograd nor a mode of Python's sees what runs within.
struct Below {
  at::AutoDispatchBelowADInplaceOrView autograd;
  c10::impl::ExcludeDispatchKeyGuard python{kUnseen};
};

bool ours(const Tensor& t) { return t.defined() && t.device().type() == kType; }

Tensor over(const Tensor& t, c10::DispatchKey key, c10::DataPtr bytes, c10::Allocator* allocator) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(), std::move(bytes),
                       allocator, allocator != nullptr);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), t.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return made;
}

// The same bytes as a tensor of the CPU's; holds nothing: memory is freed in the order of streams.
Tensor on_host(const Tensor& t) {
  void* const bytes = real(t.storage().data_ptr().get());
  return over(t, c10::DispatchKey::CPU, {bytes, c10::DeviceType::CPU}, nullptr);
}

// A value of the host's goes along as it is now.
Tensor taken_along(const Tensor& t) {
  Tensor copy = t.clone();
  if (t.unsafeGetTensorImpl()->is_wrapped_number())
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

Tensor without_bytes(const Tensor& t) {
  return over(t, c10::DispatchKey::Meta, {nullptr, c10::DeviceType::Meta},
              c10::GetAllocator(c10::DeviceType::Meta));
}

// A copy of a value in which each tensor, device and generator is another one.
template <typename OnTensor>
IValue mapped(const IValue& value, OnTensor on_tensor, c10::DeviceType device) {
  if (value.isTensor())
    return value.toTensor().defined() ? IValue(on_tensor(value.toTensor())) : value;
  if (value.isTensorList()) {
    std::vector<Tensor> all;
    for (const Tensor& t : value.toTensorVector())
      all.push_back(t.defined() ? on_tensor(t) : t);
    return IValue(all);
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> all;
    for (const std::optional<Tensor>& t : value.toOptionalTensorList())
      all.push_back(t && t->defined() ? std::optional<Tensor>(on_tensor(*t)) : t);
    return IValue(all);
  }
  if (value.isDevice() && value.toDevice().type() == kType) return IValue(c10::Device(device));
  return value;
}

template <typename OnTensor>
void each_tensor(const IValue& value, OnTensor on_tensor) {
  mapped(value, [&](const Tensor& t) { return on_tensor(t), t; }, kType);
}

// One call of an operator: its arguments, and what becomes of them.
struct Call {
  const c10::OperatorHandle& op;
  Stack arguments;
  c10::Device device{kType};
  std::string name;

  const c10::FunctionSchema& schema() const { return op.schema(); }
  bool writes(size_t i) const {
    const auto* alias = schema().arguments()[i].alias_info();
    return alias != nullptr && alias->isWrite();
  }

  template <typename OnTensor>
  Stack copied(OnTensor on_tensor, c10::DeviceType device_type) const {
    Stack all;
    for (const IValue& value : arguments) all.push_back(mapped(value, on_tensor, device_type));
    return all;
  }
};

void find_device(Call& call) {
  bool found = false;
  for (const IValue& value : call.arguments) {
    if (!found && value.isDevice() && value.toDevice().type() == kType) {
      call.device = value.toDevice();
      found = true;
    }
    each_tensor(value, [&](const Tensor& t) {
      if (!ours(t)) {
        const bool may = value.isOptionalTensorList() || t.dim() == 0; // indices, numbers
        TORCH_CHECK(may && t.is_cpu(), "Expected all tensors to be on the same device, but "
                    "found at least two devices, strict and ", t.device().str(), ", in ", call.name);
        return;
      }
      TORCH_CHECK(!found || !call.device.has_index() || t.device() == call.device,
                  "Expected all tensors to be on the same device, but found at least two devices, ",
                  call.device.str(), " and ", t.device().str(), ", in ", call.name);
      call.device = t.device();
      found = true;
    });
  }
  if (!call.device.has_index())
    call.device = {kType, static_cast<c10::DeviceIndex>(current_device())};
}

// What results' shapes can depend on: a call's name and its arguments without values of tensors.
struct Key {
  std::string text;
  bool whole = true; // else something has no place in it

  void add(int64_t number) { text.append(reinterpret_cast<const char*>(&number), sizeof number); }
  void add(at::IntArrayRef numbers) {
    add(static_cast<int64_t>(numbers.size()));
    for (const int64_t number : numbers) add(number);
  }
  void add(double number) { text.append(reinterpret_cast<const char*>(&number), sizeof number); }
  void add(const Tensor& t) {
    add(static_cast<int64_t>(t.defined() ? static_cast<int>(t.scalar_type()) : -1));
    if (!t.defined()) return;
    add(static_cast<int64_t>(t.device().type()));
    add(static_cast<int64_t>(t.unsafeGetTensorImpl()->is_wrapped_number()));
    add(t.sizes());
    add(t.strides());
  }
  void add(const IValue& value) {
    text += '|';
    if (value.isNone()) return;
    if (value.isTensor()) return add(value.toTensor());
    if (value.isInt()) return add(value.toInt());
    if (value.isDouble()) return text += 'd', add(value.toDouble());
    if (value.isBool()) return text += 'b', add(static_cast<int64_t>(value.toBool()));
    if (value.isString()) return text += value.toStringRef(), add(static_cast<int64_t>(0));
    if (value.isDevice()) return add(static_cast<int64_t>(value.toDevice().type()));
    if (value.isGenerator()) return;
    if (value.isList()) {
      add(static_cast<int64_t>(value.toListRef().size()));
      for (const IValue& each : value.toListRef()) add(each);
      return;
    }
    whole = false;
  }
};

Key key_of(const Call& call) {
  Key key{call.name};
  key.add(static_cast<int64_t>(at::get_default_dtype_as_scalartype()));
  for (const IValue& value : call.arguments) key.add(value);
  return key;
}

// Shape functions are Python's for many operators, and take longer than the kernels of small tensors.
struct Known {
  Stack given;
  // Arguments that the results are written to, and have to grow: (which, sizes, strides).
  std::vector<std::tuple<size_t, std::vector<int64_t>, std::vector<int64_t>>> grown;
};
std::mutex g_known_lock;
std::unordered_map<std::string, Known>& known() {
  static auto* const only = new std::unordered_map<std::string, Known>;
  return *only;
}

// Raises where there is no shape function, or what the CPU's kernel words better.
Known learnt(const Call& call) {
  Known made;
  Stack stack = call.copied(
      [](const Tensor& t) { return ours(t) ? without_bytes(t) : t; }, c10::DeviceType::Meta);
  made.given = stack;
  call.op.callBoxed(&made.given);
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    if (!call.writes(i) || !call.arguments[i].isTensor()) continue;
    const Tensor& own = call.arguments[i].toTensor();
    const Tensor& wanted = stack[i].toTensor();
    if (ours(own) && own.sizes() != wanted.sizes())
      made.grown.emplace_back(i, wanted.sizes().vec(), wanted.strides().vec());
  }
  return made;
}

// What the operator gives, without bytes; none where only running it tells.
std::optional<Stack> shapes(const Call& call) {
  for (const auto& result : call.schema().returns())
    if (result.type()->kind() != c10::TypeKind::TensorType &&
        result.type()->kind() != c10::TypeKind::ListType)
      return std::nullopt;
  if (call.name == "aten::index.Tensor_out") // its caller has made room; a mask has no shape here
    return Stack{call.arguments.back()};
  const Key key = key_of(call);
  Known found;
  bool is_known = false;
  if (key.whole) {
    std::lock_guard<std::mutex> lock(g_known_lock);
    const auto at = known().find(key.text);
    is_known = at != known().end();
    if (is_known) found = at->second;
  }
  if (!is_known) {
    try {
      found = learnt(call);
    } catch (const std::exception&) {
      return std::nullopt;
    }
    if (key.whole) {
      std::lock_guard<std::mutex> lock(g_known_lock);
      known()[key.text] = found;
    }
  }
  for (const auto& [i, sizes, strides] : found.grown) {
    const Tensor& own = call.arguments[i].toTensor();
    own.resize_(sizes);
    own.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  }
  return found.given;
}

// The operator draws: with a copy of the generator as it is now, which then goes on by as much.
void draw(Call& call, Stack& stack) {
  for (size_t i = 0; i < stack.size(); ++i) {
    const auto& type = call.schema().arguments()[i].type();
    const bool generator = type->kind() == c10::TypeKind::GeneratorType ||
        (type->kind() == c10::TypeKind::OptionalType &&
         type->castRaw<c10::OptionalType>()->getElementType()->kind() ==
             c10::TypeKind::GeneratorType);
    if (!generator) continue;
    at::Generator own = call.arguments[i].isNone()
        ? default_generator(call.device.index())
        : call.arguments[i].toGenerator();
    std::lock_guard<std::mutex> lock(own.mutex());
    stack[i] = drawn_from(own);
    Stack once = call.copied(
        [](const Tensor& t) {
          return ours(t) ? at::ones(t.sizes(), at::device(at::kCPU).dtype(t.scalar_type())) : t;
        },
        c10::DeviceType::CPU);
    once[i] = inner(own);
    call.op.callBoxed(&once);
    return;
  }
}

// Indices may lie on the host: they are copied first, and the host waits, as on a GPU.
void bring_indices(Call& call) {
  for (IValue& value : call.arguments) {
    if (!value.isOptionalTensorList()) continue;
    value = mapped(value, [&](const Tensor& t) { return ours(t) ? t : t.to(call.device); }, kType);
  }
}

Tensor like(const Tensor& t, c10::Device device) {
  return at::empty_strided(t.sizes(), t.strides(),
                           at::TensorOptions().dtype(t.scalar_type()).device(device));
}

// What the caller gets for one result: an argument that was written, or new tensors of the device.
IValue result_of(const Call& call, size_t i, const IValue& given) {
  const auto* alias = call.schema().returns()[i].alias_info();
  if (alias != nullptr) {
    TORCH_CHECK(alias->isWrite(), "strict: ", call.name, " gives a view, and has no kernel here");
    for (size_t k = 0; k < call.arguments.size(); ++k) {
      const auto* other = call.schema().arguments()[k].alias_info();
      if (other != nullptr && other->beforeSets() == alias->beforeSets()) return call.arguments[k];
    }
  }
  return mapped(given, [&](const Tensor& t) { return like(t, call.device); }, kType);
}

void fill_in(const IValue& to, const IValue& from) {
  if (to.isTensor() && to.toTensor().defined()) to.toTensor().copy_(from.toTensor());
  if (!to.isTensorList()) return;
  const auto targets = to.toTensorVector(), sources = from.toTensorVector();
  for (size_t i = 0; i < targets.size(); ++i) fill_in(targets[i], sources[i]);
}

bool fresh(const Call& call, size_t i) {
  return call.schema().returns()[i].alias_info() == nullptr;
}

int stream_of(const Call& call) { return current_stream(call.device.index()); }

// Results' shapes are known: the kernel runs when its stream comes to it.
Stack run_later(Call& call, Stack stack, const Stack& given) {
  Stack results;
  auto targets = std::make_shared<std::vector<std::pair<size_t, IValue>>>();
  for (size_t i = 0; i < given.size(); ++i) {
    results.push_back(result_of(call, i, given[i]));
    if (fresh(call, i)) targets->emplace_back(i, mapped(results[i], on_host, at::kCPU));
  }
  give(call.device.index(), stream_of(call), [op = call.op, stack, targets]() mutable {
    Below below;
    op.callBoxed(&stack);
    for (const auto& [i, target] : *targets) fill_in(target, stack[i]);
    stack.clear();
    targets->clear();
  });
  return results;
}

// They are not: the host waits.
Stack run_now(Call& call, Stack stack) {
  note_wait("operator " + call.name);
  const int device = call.device.index(), stream = stream_of(call);
  auto given = std::make_shared<Stack>(std::move(stack));
  give(device, stream, [op = call.op, given] {
    Below below;
    op.callBoxed(given.get());
  });
  finish_stream(device, stream);
  Stack results;
  auto targets = std::make_shared<std::vector<std::pair<IValue, IValue>>>();
  for (size_t i = 0; i < given->size(); ++i) {
    results.push_back(result_of(call, i, (*given)[i]));
    if (fresh(call, i)) targets->emplace_back(mapped(results[i], on_host, at::kCPU), (*given)[i]);
  }
  give(device, stream, [targets] {
    Below below;
    for (const auto& [target, source] : *targets) fill_in(target, source);
  });
  return results;
}

void run(const c10::OperatorHandle& op, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  Call call{op, torch::jit::pop(*stack, count), c10::Device(kType), c10::toString(op.operator_name())};
  find_device(call);
  const c10::DeviceGuard guard(call.device);
  Below below;
  bring_indices(call);
  const auto given = shapes(call); // first: it may let results grow
  Stack on_cpu = call.copied(
      [](const Tensor& t) { return ours(t) ? on_host(t) : taken_along(t); }, at::kCPU);
  draw(call, on_cpu);
  Stack results = given ? run_later(call, std::move(on_cpu), *given)
                        : run_now(call, std::move(on_cpu));
  for (IValue& result : results) stack->push_back(std::move(result));
}

// The mean and deviation of rows are float32 on a device. The CPU's kernel has them in the type of its
// input where weights have that too, and gets them back so.
void layer_norm_backward(const c10::OperatorHandle& op, Stack* stack) {
  constexpr size_t kInput = 1, kMean = 3, kDeviation = 4, kWeight = 5; // arguments
  const size_t first = stack->size() - op.schema().arguments().size();
  const auto type = (*stack)[first + kInput].toTensor().scalar_type();
  const IValue weight = (*stack)[first + kWeight];
  if (!weight.isTensor() || !weight.toTensor().defined() || weight.toTensor().scalar_type() == type) {
    Below below;
    for (const size_t i : {kMean, kDeviation})
      (*stack)[first + i] = (*stack)[first + i].toTensor().to(type);
  }
  run(op, stack);
}

// Memory.

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool> pinned,
             std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<at::Device> device, std::optional<bool> pinned) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

const Tensor& resize(const Tensor& self, at::IntArrayRef size,
                     std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) impl->set_sizes_contiguous(size);
  if (format) impl->empty_tensor_restride(*format);
  const size_t bytes =
      (static_cast<size_t>(self.storage_offset()) + c10::multiply_integers(size)) * self.itemsize();
  if (bytes > self.storage().nbytes()) {
    const c10::DeviceGuard guard(self.device());
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  }
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return at::native::set_storage_cpu_(self, std::move(source), 0, {count}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return at::native::set_storage_cpu_(self, source.storage(), source.storage_offset(),
                                      source.sizes(), source.strides());
}

void record_stream(Tensor& self, c10::Stream stream) {
  allocator()->recordStream(self.storage().data_ptr(), stream);
}

// Dropout on a device of this kind is one operator, which has no generator among its arguments: it is
// composed here, so that it draws from the device's own, and as many numbers as the CPU's.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  const auto options = input.options().dtype(at::kBool);
  if (p == 0 || !train.value_or(true) || input.numel() == 0)
    return {input.clone(), at::ones(input.sizes(), options)};
  const Tensor mask = at::empty(input.sizes(), options).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

// Copies.

// One stretch of memory to another of the same dtype and strides: what a copy engine can do alone.
bool plain(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
      a.strides() == b.strides() && a.is_non_overlapping_and_dense() &&
      a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg();
}

void copy_within(const Tensor& from, const Tensor& to) {
  const int device = from.device().index(), other = to.device().index();
  const int stream = current_stream(device), others = current_stream(other);
  if (device != other) wait(device, stream, record(other, others));
  give(device, stream, [source = on_host(from), target = on_host(to)] {
    Below below;
    target.copy_(source);
  });
  if (device != other) wait(other, others, record(device, stream));
}

// host: the one of the two that is not the device's, which is `own`.
void copy_across(const Tensor& own, const Tensor& host, bool to_host, bool non_blocking) {
  const int device = own.device().index(), stream = current_stream(device);
  const void* const at = host.storage().data();
  const bool pinned = is_pinned(at);
  const bool late = non_blocking && pinned && plain(own, host);
  if (!late)
    note_wait(!non_blocking ? "blocking copy"
              : pinned      ? "copy that must convert"
                            : "copy of unpinned memory");
  Tensor there = on_host(own);
  Tensor here = over(host, c10::DispatchKey::CPU, {const_cast<void*>(at), at::kCPU}, nullptr);
  give(device, stream, [there, here, to_host] {
    Below below;
    if (to_host)
      here.copy_(there);
    else
      there.copy_(here);
  });
  if (late)
    use_pinned(at, device, stream);
  else
    finish_stream(device, stream);
}

Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  Below below;
  if (self.numel() == 0) return dst;
  const c10::DeviceGuard guard(ours(self) ? self.device() : dst.device());
  const Tensor source = self.expand_as(dst);
  if (ours(self) && ours(dst))
    copy_within(source, dst);
  else if (ours(dst))
    copy_across(dst, source, false, non_blocking);
  else
    copy_across(source, dst, true, non_blocking);
  return dst;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}

at::Scalar read(const Tensor& self) {
  Below below;
  note_wait("item");
  auto value = std::make_shared<at::Scalar>();
  const int device = self.device().index(), stream = current_stream(device);
  give(device, stream, [source = on_host(self), value] {
    Below within;
    *value = at::_local_scalar_dense(source);
  });
  finish_stream(device, stream);
  return *value;
}

} // namespace
} // namespace strict

TORCH_LIBRARY(strict, m) {
  m.def("default_generator(int device) -> Generator?",
        [](int64_t device) {
          return std::optional<at::Generator>(
              strict::default_generator(static_cast<int>(device)));
        });
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&strict::run>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &strict::empty);
  m.impl("empty_strided", &strict::empty_strided);
  m.impl("resize_", &strict::resize);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("set_.source_Storage", &strict::set_storage);
  m.impl("set_.source_Tensor", &strict::set_tensor);
  m.impl("record_stream", &strict::record_stream);
  m.impl("native_dropout", &strict::native_dropout);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", static_cast<at::Tensor (*)(const at::Tensor&, at::IntArrayRef)>(&at::native::view));
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  // Composed of other operators by default, in another order of sums than the CPU's kernels, or
  // handed to a device's own convolutions.
  for (const char* name : {"native_layer_norm", "convolution", "convolution_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&strict::run>());
  m.impl("native_layer_norm_backward",
         torch::CppFunction::makeFromBoxedFunction<&strict::layer_norm_backward>());
  m.impl("_copy_from", &strict::copy_from);
  m.impl("_copy_from_and_resize", &strict::copy_from_and_resize);
  m.impl("_local_scalar_dense", &strict::read);
}

#include "autocast.h"
