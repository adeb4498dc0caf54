// Autocast on the device: PyTorch's own lists of operators, which take their tensors in the lower
// precision, in float32, or in the widest type among them. A part of operators.cpp, whose headers of
// PyTorch's take most of what a file's compiling does.
#pragma once
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wstringop-overflow" // of IValue, wrongly, in g++ 12
#endif
#include <ATen/autocast_mode.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

namespace strict {
namespace {

enum class To { Lower, Float, Widest };

template <typename OnTensor>
void change(c10::IValue& value, OnTensor on_tensor) {
  if (value.isTensor() && value.toTensor().defined()) value = on_tensor(value.toTensor());
  if (!value.isTensorList()) return;
  std::vector<Tensor> all;
  for (const Tensor& t : value.toTensorVector()) all.push_back(on_tensor(t));
  value = c10::IValue(all);
}

template <To to>
void cast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard without(c10::DispatchKey::AutocastPrivateUse1);
  auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  auto type = to == To::Float ? at::kFloat : at::autocast::get_autocast_dtype(kType);
  const size_t first = stack->size() - arguments.size();
  if (to == To::Widest)
    for (size_t i = first; i < stack->size(); ++i)
      change((*stack)[i], [&](const Tensor& t) {
        type = at::autocast::prioritize(type, t, kType);
        return t;
      });
  for (size_t i = first; i < stack->size(); ++i)
    change((*stack)[i],
           [&](const Tensor& t) { return at::autocast::cached_cast(type, t, kType); });
  op.callBoxed(stack);
}

template <To to>
torch::CppFunction casting() {
  return torch::CppFunction::makeFromBoxedFunction<&cast<to>>();
}

} // namespace
} // namespace strict

#define ONE(OP, ...) m.impl("aten::" #OP __VA_OPT__("." #__VA_ARGS__), CASTING);

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define CASTING strict::casting<strict::To::Lower>()
  AT_FORALL_LOWER_PRECISION_FP(ONE)
#undef CASTING
#define CASTING strict::casting<strict::To::Float>()
  AT_FORALL_FP32(ONE)
  AT_FORALL_FP32_SET_OPT_DTYPE(ONE)
#undef CASTING
#define CASTING strict::casting<strict::To::Widest>()
  AT_FORALL_PROMOTE(ONE)
}
