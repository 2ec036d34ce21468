// What Python sees of the simulator.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "encoder.h"
#include "stream.h"

namespace py = pybind11;
using namespace metal_sim;

namespace {

void set_compiler(py::function compile) {
  auto* kept = new py::function(std::move(compile));  // outlives the interpreter's teardown order
  compile_source = [kept](const CompileRequest& r) {
    py::gil_scoped_acquire gil;
    try {
      py::object constants = py::none();
      if (r.constants) {
        py::dict values;
        for (auto& [key, c] : *r.constants) values[py::cast(key)] = py::make_tuple(c.data_type, py::bytes(c.bytes));
        constants = values;
      }
      return (*kept)(r.source, r.macros, r.language_version, constants).cast<std::string>();
    } catch (py::error_already_set& e) {
      throw Fault(py::str(e.value()).cast<std::string>());
    }
  };
}

// Runs one kernel of a compiled library directly, for tests of kernels that no launcher launches.
// buffers: per argument index, the storage's data pointer and the byte offset.
void launch(const std::string& path, const std::string& name, const std::map<int, std::pair<size_t, size_t>>& buffers,
            Extent grid, Extent threads, const std::map<int, size_t>& threadgroup_memory) {
  KernelLibrary* library = load_kernel_library(path);
  if (!library->kernels.count(name)) throw Fault("no kernel named " + name);
  Launch launch{library, library->kernels.at(name), {}, threadgroup_memory, grid, threads};
  for (auto& [index, where] : buffers) {
    auto* b = reinterpret_cast<Buffer*>(where.first);
    launch.buffers[index] = {b->data + where.second, b->size - where.second};
  }
  run_on_queue([&] { run(launch); });
}

py::list dispatch_list() {
  py::list out;
  for (auto& d : dispatches()) {
    py::dict buffers, bytes;
    for (auto& [index, b] : d.buffers) {
      buffers[py::int_(index)] = py::make_tuple(reinterpret_cast<size_t>(b.buffer), b.offset, b.size);
    }
    for (auto& [index, b] : d.bytes) bytes[py::int_(index)] = py::bytes(b);
    out.append(py::make_tuple(d.kernel, py::tuple(py::cast(d.groups)), py::tuple(py::cast(d.threads)),
                              py::tuple(py::cast(d.grid)), buffers, bytes, py::cast(d.threadgroup_memory)));
  }
  return out;
}

}  // namespace

PYBIND11_MODULE(metal_sim_runtime, m) {
  m.def("set_compiler", &set_compiler);
  m.def("launch", &launch, py::call_guard<py::gil_scoped_release>());
  m.def("dispatches", &dispatch_list);
  m.def("stream_counters", &stream_counters);
  m.def("live_objects", &live_objects);
  m.def("hide_selector", &hide_selector);
  m.def("set_matrix_lane_order", [](unsigned order) { matrix_lane_order = order; });
  m.def("clear", [] {
    clear_dispatches();
    clear_stream_counters();
    drain_pools(0);
  });
}
