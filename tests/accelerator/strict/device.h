// The device as PyTorch sees it: which is current, on which stream work goes, its generator, and
// what the host has waited for.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

#include <string>

namespace strict {

int device_count();
int current_device();
int current_stream(int device);

// A copy of the generator's present state, to be drawn from on the CPU; `advance` draws the same
// numbers from the generator itself.
at::Generator drawn_from(const at::Generator& generator);
at::Generator inner(const at::Generator& generator);
const at::Generator& default_generator(int device);

// The host waits here: counted by the line of Python that it is at. what: of which kind.
void note_wait(const std::string& what);

} // namespace strict
