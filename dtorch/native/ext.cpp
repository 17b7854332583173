// What PyTorch asks of a device backend in C++ and cannot get from Python: a device guard that knows how many devices
// there are, the PrivateUse1 hooks, generators, and an allocator that refuses. The devices are names only: nothing here allocates or computes.
//
// The guard must be C++. Autograd's engine switches devices while it unwinds from an exception, and a guard that has to
// enter Python at that moment ends the process instead of letting the exception reach the caller of backward().

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <limits>
#include <vector>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

DeviceIndex device_count = 0;  // 0 until setup(); then final, because autograd starts its threads by it only once
thread_local DeviceIndex current_device = 0;

// Maps -1 ("the current device") to its index and refuses what is out of range.
DeviceIndex checked(DeviceIndex index) {
  if (index == -1) {
    return current_device;
  }
  TORCH_CHECK_INDEX(
      index >= 0 && index < device_count,
      "there is no device ", Device(kDevice, index), ": the last one is ", Device(kDevice, device_count - 1), ".");
  return index;
}

// Streams and events are empty: the order of work on a device is the order in which the client issued it.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  DeviceIndex deviceCount() const noexcept override { return device_count; }

  Device getDevice() const override { return Device(kDevice, current_device); }
  void setDevice(Device device) const override { current_device = checked(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = device.index(); }
  Device exchangeDevice(Device device) const override {
    const Device previous = getDevice();
    setDevice(device);
    return previous;
  }

  Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getStream(device); }
  Stream getNewStream(Device device, int) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const override { return getStream(stream.device()); }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}

  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
};

// Without an allocator, torch.UntypedStorage(device="dtorch") would end the process.
struct Refusal final : c10::Allocator {
  c10::DataPtr allocate(size_t) override {
    TORCH_CHECK(
        false, "a storage on a device of dtorch has no bytes in this process: make a tensor instead, for example with "
        "torch.empty(size, dtype=torch.uint8, device=\"dtorch\").");
  }
  void copy_data(void*, const void*, std::size_t) const override { TORCH_CHECK(false, "there are no bytes to copy."); }
};

// A CPU generator that says it belongs to one of our devices: the same seed gives the same state as on the CPU.
struct Generator final : at::CPUGeneratorImpl {
  Generator(DeviceIndex index, uint64_t seed) : CPUGeneratorImpl(seed) {
    device_ = Device(kDevice, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index(), c10::default_rng_seed_val);
    copy->set_state(*get_state());
    return copy;
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  // Pinned memory is ordinary host memory, so that code written for CUDA (DataLoader(pin_memory=True)) runs.
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
  Device getDeviceFromPtr(void*) const override { return Device(kDevice, current_device); }

  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<Generator>(checked(index), c10::default_rng_seed_val);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    static const auto* generators = [] {
      auto* all = new std::vector<at::Generator>();  // never freed: threads may outlive static destruction
      for (DeviceIndex i = 0; i < device_count; ++i) {
        all->push_back(at::make_generator<Generator>(i, c10::detail::getNonDeterministicRandom()));
      }
      return all;
    }();
    return (*generators)[checked(index)];
  }
};

PyObject* setup(PyObject*, PyObject* argument) {
  constexpr long kMost = std::numeric_limits<DeviceIndex>::max();
  const long count = PyLong_AsLong(argument);
  if (count == -1 && PyErr_Occurred()) {
    return nullptr;
  }
  if (count < 1 || count > kMost) {
    return PyErr_Format(PyExc_ValueError, "device_count must be from 1 to %ld, but is %ld.", kMost, count);
  }
  if (device_count != 0 && device_count != count) {
    return PyErr_Format(
        PyExc_RuntimeError, "the device count is %d for the rest of this process: it cannot become %ld.",
        static_cast<int>(device_count), count);
  }
  if (device_count == 0) {
    try {
      at::RegisterPrivateUse1HooksInterface(new Hooks());  // first, since it refuses a second backend
      c10::impl::registerDeviceGuard(kDevice, new Guard());
      c10::SetAllocator(kDevice, new Refusal());
    } catch (const c10::Error& error) {
      return PyErr_Format(
          PyExc_RuntimeError, "PyTorch refused the dtorch backend: %s", error.what_without_backtrace());
    }
    device_count = static_cast<DeviceIndex>(count);
  }
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"setup", setup, METH_O,
     "setup(device_count)\n--\n\n"
     "Register the device guard, hooks and generators for device_count (1 to 127) devices, for the whole process.\n\n"
     "Raises ValueError for a count out of range; RuntimeError when another backend holds PyTorch's PrivateUse1 slot,\n"
     "or when the count differs from an earlier call's. Repeating a call does nothing."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_ext", "dtorch's native part.", -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__ext() { return PyModule_Create(&module); }
