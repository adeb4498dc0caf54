// Memory of the device. A tensor's address lies in a window that no host code may read or write;
// the bytes lie elsewhere, at an address that only the device's own pieces of work know. Blocks,
// rounding and the order of reuse are those of CUDA's caching allocator. What is freed is filled
// with NaN, in the order of the stream on which it was allocated.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <cstdint>

namespace strict {

// Where the bytes of an address of a device are.
void* real(const void* address);
// The device of an address, -1 for one of the host.
int device_of(const void* address);

c10::DeviceAllocator* allocator();
at::HostAllocator* pinned_allocator();
bool is_pinned(const void* address);
// Work that was given to a stream reads or writes pinned memory: it is not given out again before.
void use_pinned(const void* address, int device, int stream);

void set_limits(int64_t device_bytes, int64_t pinned_bytes);

// Host access to the window ends the process, after a line that says so.
void guard_window();

} // namespace strict
