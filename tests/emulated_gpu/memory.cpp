// Tensors on "cuda:0" whose memory is the host's, and a kernel for them that calls the CPU's.
//
// The kernel takes the place of every operator's CUDA kernel. It gives the CPU's kernel tensors that
// share the memory of its arguments, and labels the results as tensors on the GPU.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/FakeGuardImpl.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <cstring>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace {

using at::Tensor;
using c10::IValue;

const c10::Device gpu(c10::kCUDA, 0);

// Memory of the host with the label of the GPU.
struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* memory = new c10::DataPtr(c10::GetCPUAllocator()->allocate(bytes));
    auto free = +[](void* context) { delete static_cast<c10::DataPtr*>(context); };
    return {memory->get(), memory, free, gpu};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};
Allocator allocator;

// A pointer to the memory of a storage, which it keeps.
c10::DataPtr pointer_into(const c10::Storage& storage, c10::Device device) {
  auto free = +[](void* context) { delete static_cast<c10::Storage*>(context); };
  return {const_cast<void*>(storage.data()), new c10::Storage(storage), free, device};
}

c10::Storage shared(const c10::Storage& storage, c10::Device device) {
  c10::Allocator* own = device.is_cuda() ? &allocator : c10::GetCPUAllocator();
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(),
      storage.sym_nbytes(), pointer_into(storage, device), own, /*resizable=*/true);
}

// A tensor of a storage with sizes, strides and dtype of another one.
Tensor made_of(c10::Storage storage, const Tensor& like) {
  auto* given = like.unsafeGetTensorImpl();
  c10::DispatchKeySet keys(
      storage.device().is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU);
  if (like.is_conj()) keys = keys.add(c10::DispatchKey::Conjugate);
  if (like.is_neg()) keys = keys.add(c10::DispatchKey::Negative);
  auto result = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, given->dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(given->sizes(), given->strides(), given->storage_offset());
  if (given->is_wrapped_number()) impl->set_wrapped_number(true);
  return result;
}

// The tensors of one call, on the GPU and on the host.
struct Call {
  std::vector<std::pair<Tensor, Tensor>> tensors;  // on the GPU, on the host
  std::unordered_map<c10::StorageImpl*, c10::Storage> to_host, to_gpu;
  bool has_host_tensor = false;  // scalar tensors may be on the host

  Tensor on_host(const Tensor& t) {
    if (!t.defined() || !t.is_cuda()) {
      has_host_tensor |= t.defined() && t.dim() > 0;
      return t;
    }
    for (auto& [on_gpu, host] : tensors)
      if (on_gpu.is_same(t)) return host;
    auto* storage = t.storage().unsafeGetStorageImpl();
    auto found = to_host.find(storage);
    if (found == to_host.end()) {
      found = to_host.emplace(storage, shared(t.storage(), c10::kCPU)).first;
      to_gpu.emplace(found->second.unsafeGetStorageImpl(), t.storage());
    }
    tensors.emplace_back(t, made_of(found->second, t));
    return tensors.back().second;
  }

  Tensor on_gpu(const Tensor& t) {
    if (!t.defined() || !t.is_cpu()) return t;
    for (auto& [result, host] : tensors)
      if (host.is_same(t)) return result;
    auto* storage = t.storage().unsafeGetStorageImpl();
    auto found = to_gpu.find(storage);
    if (found == to_gpu.end()) found = to_gpu.emplace(storage, shared(t.storage(), gpu)).first;
    return made_of(found->second, t);
  }

  // Give arguments the sizes and the memory that the operator has given their host's tensors.
  void take_over_changes() {
    for (auto& [on_gpu, host] : tensors) {
      auto* storage = on_gpu.storage().unsafeGetStorageImpl();
      if (on_gpu.sizes() != host.sizes() || on_gpu.strides() != host.strides())
        on_gpu.unsafeGetTensorImpl()->set_sizes_and_strides(
            host.sizes(), host.strides(), host.storage_offset());
      if (storage->data() == host.storage().data()) continue;
      storage->set_data_ptr_noswap(pointer_into(host.storage(), gpu));
      storage->set_nbytes(host.storage().nbytes());
    }
  }
};

// A value with all its tensors changed by a function.
template <class Change>
IValue changed(const IValue& value, Change change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& t : value.toTensorVector()) list.push_back(change(t));
    return list;
  }
  if (!value.isOptionalTensorList()) return value;
  c10::List<std::optional<Tensor>> list;
  for (const std::optional<Tensor>& t : value.toOptionalTensorVector())
    list.push_back(t ? std::optional<Tensor>(change(*t)) : std::nullopt);
  return list;
}

// Operators that take tensors of both devices.
const std::unordered_set<std::string> mixed = {"aten::copy_", "aten::_copy_from", "aten::index",
    "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"};

void run_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  Call call;
  bool to_gpu = false, to_host = false;
  for (size_t i = stack->size() - schema.arguments().size(); i < stack->size(); i++) {
    auto& value = (*stack)[i];
    if (value.isDevice()) {
      (value.toDevice().is_cuda() ? to_gpu : to_host) = true;
      value = c10::Device(c10::kCPU);
    } else {
      value = changed(value, [&](const Tensor& t) { return call.on_host(t); });
    }
  }
  TORCH_CHECK(call.tensors.empty() || !call.has_host_tensor || mixed.count(schema.name()),
      "Expected all tensors to be on the same device: ", schema.name());
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.take_over_changes();
  if (to_host || (!to_gpu && call.tensors.empty())) return;
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++)
    (*stack)[i] = changed((*stack)[i], [&](const Tensor& t) { return call.on_gpu(t); });
}

// What torch asks the CUDA runtime. There is no cuDNN, and random numbers are the CPU's.
struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  bool isPinnedPtr(const void*) const override { return false; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  long versionCuDNN() const override { return 0; }
  long versionRuntimeCuDNN() const override { return 0; }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
};
Hooks hooks;
std::unique_ptr<torch::Library> library;

void install(const std::vector<std::string>& left_out) {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::kCUDA)].store(
      new c10::impl::FakeGuardImpl<c10::kCUDA>());
  c10::SetAllocator(c10::kCUDA, &allocator, /*priority=*/100);
  // torch has no function that replaces its hooks: they get the virtual functions of these.
  auto& own = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
  *reinterpret_cast<void**>(&own) = *reinterpret_cast<void**>(&hooks);

  std::unordered_set<std::string> done(left_out.begin(), left_out.end());
  library = std::make_unique<torch::Library>(
      torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (auto key : {c10::DispatchKey::CUDA, c10::DispatchKey::CompositeExplicitAutograd,
           c10::DispatchKey::CompositeExplicitAutogradNonFunctional}) {
    for (auto& name : dispatcher.getRegistrationsForDispatchKey(key)) {
      if (name.name.rfind("aten::", 0) != 0 || done.count(name.name)) continue;
      auto full = name.name + "." + name.overload_name;
      auto op = dispatcher.findSchema(name);
      if (!op || !done.insert(full).second) continue;
      bool is_view = false;  // which has no kernel that touches memory
      for (auto& result : op->schema().returns())
        is_view |= result.alias_info() && !result.alias_info()->isWrite();
      if (is_view) continue;
      auto local = full.substr(6, full.size() - 6 - (name.overload_name.empty() ? 1 : 0));
      library->impl(local.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
    }
  }
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("install", &install);
  module.def("on_host", [](const Tensor& t) {
    at::AutoDispatchBelowAutograd guard;
    return Call().on_host(t.detach());
  });
}
