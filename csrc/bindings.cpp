// fastlr._C: the groups of host_group.h and device_group.h for Python. No torch header is used: a tensor is asked for
// its address, its size and what it is, and refused where that is not what the loops expect.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <string>
#include <vector>

#include "errors.h"
#include "host_group.h"
#include "protocol.h"
#ifdef FASTLR_WITH_CUDA
#include "device_group.h"
#endif

namespace py = pybind11;
using namespace fastlr;

namespace {

struct Torch {
  py::object tensor, bfloat16, float32, float64, strided;
  static const Torch& get() {
    static const Torch* torch = [] {  // never freed: the interpreter may be gone by then
      const py::module_ m = py::module_::import("torch");
      return new Torch{m.attr("Tensor"), m.attr("bfloat16"), m.attr("float32"), m.attr("float64"), m.attr("strided")};
    }();
    return *torch;
  }
};

std::string text(const py::handle& x) { return py::str(x).cast<std::string>(); }

// A dense tensor on this kind of device (and this one, for a GPU); its address.
void* place(const py::handle& t, const char* name, const char* kind, int index) {
  if (!py::isinstance(t, Torch::get().tensor)) {
    throw ArgumentError(std::string(name) + " must be a tensor, not " + text(py::type::of(t).attr("__name__")));
  }
  const py::object device = t.attr("device");
  if (device.attr("type").cast<std::string>() != kind || (index >= 0 && device.attr("index").cast<int>() != index)) {
    const std::string wanted = index < 0 ? kind : std::string(kind) + ":" + std::to_string(index);
    throw ArgumentError(std::string(name) + " is on " + text(device) + ", but this group works on " + wanted);
  }
  const py::object layout = t.attr("layout");
  if (!layout.is(Torch::get().strided) || !t.attr("is_contiguous")().cast<bool>() || t.attr("is_neg")().cast<bool>()) {
    throw ArgumentError(std::string(name) + " must be dense and contiguous: pass tensor.contiguous().resolve_neg()");
  }
  return reinterpret_cast<void*>(t.attr("data_ptr")().cast<uintptr_t>());
}

// A tensor that is reduced in place, or read only.
Job job(const py::handle& t, const char* kind, int index, Operation operation) {
  void* data = place(t, "tensor", kind, index);
  Dtype dtype = Dtype::kFloat32;
  const py::object given = t.attr("dtype");
  if (given.is(Torch::get().bfloat16)) {
    dtype = Dtype::kBfloat16;
  } else if (!given.is(Torch::get().float32)) {
    throw ArgumentError("dtype must be torch.bfloat16 or torch.float32, not " + text(given));
  }
  if (reinterpret_cast<uintptr_t>(data) % (dtype == Dtype::kBfloat16 ? 2 : 4) != 0) {
    throw ArgumentError("the tensor's memory is not aligned to its elements: pass tensor.clone()");
  }
  void* out = operation == Operation::kSquaredNorm ? nullptr : data;
  return {operation, dtype, data, out, t.attr("numel")().cast<int64_t>()};
}

Algorithm algorithm(const std::string& name) {
  if (name == "auto") return Algorithm::kAuto;
  if (name == "one-shot") return Algorithm::kOneShot;
  if (name == "two-shot") return Algorithm::kTwoShot;
  throw ArgumentError("algorithm must be auto, one-shot or two-shot, not " + name);
}

double seconds(double timeout) {
  if (!(std::isfinite(timeout) && timeout > 0)) throw ArgumentError("timeout must be a positive number of seconds");
  return timeout;
}

void check_group(int rank, int size, int64_t half_bytes) {
  if (size < 2 || size > kMaxRanks) {
    throw ArgumentError("size must be from 2 to " + std::to_string(kMaxRanks) + ", not " + std::to_string(size));
  }
  if (rank < 0 || rank >= size) {
    throw ArgumentError("rank must be from 0 to " + std::to_string(size - 1) + ", not " + std::to_string(rank));
  }
  if (half_bytes < 4096) throw ArgumentError("half_bytes must be at least 4096");
}

std::vector<std::string> strings(const std::vector<py::bytes>& given) { return {given.begin(), given.end()}; }

// Wait without the interpreter's lock, so that other threads run, but let Ctrl-C through.
template <typename Work>
auto released(Work work) {
  bool interrupted = false;
  const Idle idle = [&interrupted] {
    py::gil_scoped_acquire lock;
    interrupted = PyErr_CheckSignals() != 0;
    return !interrupted;
  };
  py::gil_scoped_release release;
  try {
    return work(idle);
  } catch (const GroupError&) {
    py::gil_scoped_acquire lock;
    if (interrupted) throw py::error_already_set();
    throw;
  }
}

void bind_host(py::module_& m) {
  py::class_<HostGroup>(m, "HostGroup", "Reductions between processes of this machine over shared memory.")
      .def(py::init([](int rank, int size, int64_t half_bytes, double timeout) {
             check_group(rank, size, half_bytes);
             return new HostGroup(rank, size, half_bytes, seconds(timeout));
           }),
           py::arg("rank"), py::arg("size"), py::arg("half_bytes"), py::arg("timeout"))
      .def("address", [](const HostGroup& g) { return py::bytes(g.address()); })
      .def("open", [](HostGroup& g, const std::vector<py::bytes>& a) { g.open(strings(a)); })
      .def("seal", &HostGroup::seal)
      .def_property_readonly("half_bytes", &HostGroup::half_bytes)
      .def("set_timeout", [](HostGroup& g, double timeout) { g.set_timeout(seconds(timeout)); })
      .def(
          "all_reduce",
          [](HostGroup& g, const py::object& tensor, bool mean, const std::string& how) {
            const Job j = job(tensor, "cpu", -1, mean ? Operation::kMean : Operation::kSum);
            const Algorithm chosen = algorithm(how);
            released([&](const Idle& idle) { return g.reduce(j, chosen, idle); });
          },
          py::arg("tensor"), py::arg("mean") = false, py::arg("algorithm") = "auto")
      .def(
          "squared_norm",
          [](HostGroup& g, const py::object& tensor) {
            const Job j = job(tensor, "cpu", -1, Operation::kSquaredNorm);
            return released([&](const Idle& idle) { return g.reduce(j, Algorithm::kTwoShot, idle); });
          },
          py::arg("tensor"));
}

#ifdef FASTLR_WITH_CUDA
void bind_device(py::module_& m) {
  py::class_<DeviceGroup>(m, "DeviceGroup", "Reductions between GPUs over CUDA IPC.")
      .def(py::init([](int rank, int size, int device, int64_t half_bytes, double timeout) {
             check_group(rank, size, half_bytes);
             if (device < 0) throw ArgumentError("device must be the index of a GPU");
             return new DeviceGroup(rank, size, device, half_bytes, seconds(timeout));
           }),
           py::arg("rank"), py::arg("size"), py::arg("device"), py::arg("half_bytes"), py::arg("timeout"))
      .def("address", [](const DeviceGroup& g) { return py::bytes(g.address()); })
      .def("open", [](DeviceGroup& g, const std::vector<py::bytes>& a) { g.open(strings(a)); })
      .def_property_readonly("blocks", &DeviceGroup::blocks)
      .def("limit_blocks", &DeviceGroup::limit_blocks)
      .def_property_readonly("half_bytes", &DeviceGroup::half_bytes)
      .def("set_timeout", [](DeviceGroup& g, double timeout) { g.set_timeout(seconds(timeout)); })
      .def("check", &DeviceGroup::check)
      .def("disconnect", &DeviceGroup::disconnect, py::call_guard<py::gil_scoped_release>())
      .def("close", &DeviceGroup::close, py::call_guard<py::gil_scoped_release>())
      .def(
          "all_reduce",
          [](DeviceGroup& g, const py::object& tensor, uintptr_t stream, bool mean, const std::string& how) {
            const Job j = job(tensor, "cuda", g.device(), mean ? Operation::kMean : Operation::kSum);
            g.reduce(j, algorithm(how), nullptr, reinterpret_cast<void*>(stream));
          },
          py::arg("tensor"), py::arg("stream"), py::arg("mean") = false, py::arg("algorithm") = "auto")
      .def(
          "squared_norm",
          [](DeviceGroup& g, const py::object& tensor, const py::object& result, uintptr_t stream) {
            const Job j = job(tensor, "cuda", g.device(), Operation::kSquaredNorm);
            void* to = place(result, "result", "cuda", g.device());
            const py::object dtype = result.attr("dtype");
            if (!dtype.is(Torch::get().float64) || result.attr("numel")().cast<int64_t>() != 1) {
              throw ArgumentError("result must be one torch.float64");
            }
            g.reduce(j, Algorithm::kTwoShot, static_cast<double*>(to), reinterpret_cast<void*>(stream));
          },
          py::arg("tensor"), py::arg("result"), py::arg("stream"));
}
#endif

void translate(std::exception_ptr thrown) {
  const auto raise = [](const char* name, const char* what) {
    const py::object type = py::module_::import("fastlr.errors").attr(name);
    PyErr_SetString(type.ptr(), what);
  };
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (const GroupError& e) {
    raise("DistributedError", e.what());
  } catch (const ArgumentError& e) {
    raise("InputError", e.what());
  }
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Reductions over ranks with a fixed order of additions: see fastlr.distributed.";
  m.attr("protocol") = kProtocol;
  m.attr("max_ranks") = kMaxRanks;
  py::register_exception_translator(translate);
  bind_host(m);
#ifdef FASTLR_WITH_CUDA
  m.attr("cuda") = true;
  m.attr("architectures") = architectures();
  bind_device(m);
#else
  m.attr("cuda") = false;
  m.attr("architectures") = "";
#endif
}
