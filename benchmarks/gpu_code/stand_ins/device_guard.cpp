// A device guard for CUDA that does nothing: fake tensors on cuda:0 pass through autograd without a driver.
#include <c10/core/impl/DeviceGuardImplInterface.h>

using namespace c10;

namespace {

const Device DEVICE(DeviceType::CUDA, 0);

struct StandIn final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Device getDevice() const override { return DEVICE; }
  Device exchangeDevice(Device) const override { return DEVICE; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}

  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, DEVICE); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, DEVICE); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::DEFAULT, DEVICE); }
  Stream exchangeStream(Stream) const override { return Stream(Stream::DEFAULT, DEVICE); }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}

  void record(void** event, const Stream&, const DeviceIndex, const EventFlag) const override {
    *event = const_cast<Device*>(&DEVICE);
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override {}
};

StandIn stand_in;

}  // namespace

extern "C" void install_device_guard() {
  impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&stand_in);
}
