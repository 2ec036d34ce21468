// The MPS backend of PyTorch on the simulated device: allocation, tensors, and the hooks that torch.mps asks.
#include "backend.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/MPSHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/strides.h>
#include <torch/library.h>

#include <chrono>
#include <map>
#include <mutex>

namespace metal_sim {
namespace {

const c10::Device mps(c10::kMPS, 0);

struct Allocator : c10::Allocator {
  c10::DataPtr allocate(size_t size) override { return new_data(size); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override {
    memcpy(static_cast<Buffer*>(to)->data, static_cast<const Buffer*>(from)->data, size);
  }
} allocator;

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  const auto type = c10::scalarTypeToTypeMeta(c10::dtype_or_default(dtype));
  refuse_double(type);
  auto t = at::detail::make_tensor<c10::TensorImpl>(
      new_storage(at::detail::computeStorageNbytes(size, stride, type.itemsize())),
      c10::DispatchKeySet(c10::DispatchKey::MPS), type);
  t.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return t;
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                 std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  at::Tensor t = empty_strided(size, c10::contiguous_strides(size), dtype, layout, device, pin);
  if (format) t.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return t;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const int64_t count = source.nbytes() / self.itemsize();
  return set_storage(self, std::move(source), 0, {count}, {1});
}

TORCH_LIBRARY_IMPL(aten, MPS, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
}

// One device, one stream, and everything has happened by the time it is asked about.
struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::kMPS> {
  c10::Device getDevice() const override { return mps; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, mps); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};

// torch.mps.Event: a moment on the CPU's clock.
class Events {
 public:
  uint32_t acquire() {
    std::lock_guard<std::mutex> guard(mutex_);
    times_[++last_] = {};
    return last_;
  }
  void release(uint32_t id) {
    std::lock_guard<std::mutex> guard(mutex_);
    times_.erase(id);
  }
  void record(uint32_t id) {
    std::lock_guard<std::mutex> guard(mutex_);
    times_.at(id) = std::chrono::steady_clock::now();
  }
  double milliseconds(uint32_t from, uint32_t to) {
    std::lock_guard<std::mutex> guard(mutex_);
    return std::chrono::duration<double, std::milli>(times_.at(to) - times_.at(from)).count();
  }

 private:
  std::mutex mutex_;
  uint32_t last_ = 0;
  std::map<uint32_t, std::chrono::steady_clock::time_point> times_;
} events;

struct MPSHooks : at::MPSHooksInterface {
  MPSHooks() = default;
  explicit MPSHooks(at::MPSHooksArgs) {}  // before torch 2.13
  void init() const override {}
  bool hasMPS() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isOnMacOSorNewer(unsigned, unsigned) const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  at::Allocator* getMPSDeviceAllocator() const override { return &allocator; }
  void deviceSynchronize() const override {}  // dispatches run at once
  void commitStream() const override {}
  void emptyCache() const override {}
  size_t getCurrentAllocatedMemory() const override { return allocated_bytes(); }
  size_t getDriverAllocatedMemory() const override { return allocated_bytes(); }
  size_t getRecommendedMaxMemory() const override { return size_t(16) << 30; }
  size_t getMaxBufferLength() const { return size_t(16) << 30; }
  uint32_t acquireEvent(bool) const override { return events.acquire(); }
  void releaseEvent(uint32_t id) const override { events.release(id); }
  void recordEvent(uint32_t id) const override { events.record(id); }
  void waitForEvent(uint32_t) const override {}
  void synchronizeEvent(uint32_t) const override {}
  bool queryEvent(uint32_t) const override { return true; }
  double elapsedTimeOfEvents(uint32_t from, uint32_t to) const override { return events.milliseconds(from, to); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  c10::Device getDeviceFromPtr(void*) const override { return mps; }
};

}  // namespace

Buffer* buffer_of(const c10::Storage& storage) { return static_cast<Buffer*>(const_cast<void*>(storage.data())); }

c10::DataPtr new_data(size_t size, const void* contents) {
  auto* buffer = new Buffer(size);
  if (contents) memcpy(buffer->data, contents, size);
  return {buffer, buffer, [](void* b) { release(static_cast<Buffer*>(b)); }, mps};
}

c10::Storage new_storage(size_t size, const void* contents) {
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), size, new_data(size, contents),
                                               &allocator, /*resizable=*/true);
}

at::Tensor tensor_on(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  auto t = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  t.unsafeGetTensorImpl()->set_sizes_and_strides(like.sym_sizes(), like.sym_strides(), like.sym_storage_offset());
  return t;
}

void refuse_double(caffe2::TypeMeta dtype) {
  TORCH_CHECK_TYPE(dtype != caffe2::TypeMeta::Make<double>(), "MPS has no float64");
}

REGISTER_ALLOCATOR(c10::kMPS, &allocator)
C10_REGISTER_GUARD_IMPL(MPS, Guard)

}  // namespace metal_sim

namespace at {
using metal_sim::MPSHooks;
REGISTER_MPS_HOOKS(MPSHooks)

// torch makes its hooks when something first asks, such as torch.backends.mps.is_available(). Those of a torch that
// was asked before this library was loaded are of its own class; neither class has data, so they can change to ours.
static const bool adopted = [] {
  static const MPSHooks ours;
  static_assert(sizeof ours == sizeof(void*));
  const MPSHooksInterface& torchs = detail::getMPSHooks();
  if (!torchs.hasMPS()) memcpy(const_cast<MPSHooksInterface*>(&torchs), static_cast<const void*>(&ours), sizeof ours);
  return true;
}();

namespace mps {
Allocator* GetMPSAllocator() { return &metal_sim::allocator; }
}  // namespace mps
}  // namespace at
