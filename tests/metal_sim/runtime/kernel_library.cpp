#include "kernel_library.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>

#include "fault.h"

namespace metal_sim {
namespace {

KernelLibrary* loading = nullptr;  // its initialisers call msl_register

void find_image(void* handle, KernelLibrary& library) {
  link_map* map = nullptr;
  dlinfo(handle, RTLD_DI_LINKMAP, &map);
  std::pair<KernelLibrary*, uintptr_t> search{&library, map->l_addr};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        auto& [found, base] = *static_cast<std::pair<KernelLibrary*, uintptr_t>*>(data);
        if (info->dlpi_addr != base) return 0;
        uintptr_t end = base;
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const auto& segment = info->dlpi_phdr[i];
          if (segment.p_type == PT_LOAD) end = std::max<uintptr_t>(end, base + segment.p_vaddr + segment.p_memsz);
        }
        found->image_begin = reinterpret_cast<char*>(base);
        found->image_end = reinterpret_cast<char*>(end);
        return 1;
      },
      &search);
}

}  // namespace

std::mutex& kernel_code_mutex() {
  static std::mutex mutex;
  return mutex;
}

KernelLibrary* load_kernel_library(const std::string& path) {
  static std::map<std::string, std::unique_ptr<KernelLibrary>> loaded;
  std::lock_guard<std::mutex> guard(kernel_code_mutex());
  auto& library = loaded[path];
  if (library) return library.get();

  auto fresh = std::make_unique<KernelLibrary>();
  fresh->path = path;
  loading = fresh.get();
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  loading = nullptr;
  if (!handle) throw Fault(std::string("cannot load the compiled kernels: ") + dlerror());
  find_image(handle, *fresh);
  library = std::move(fresh);
  return library.get();
}

std::string source_position(void* address) {
  Dl_info info;
  if (!address || !dladdr(address, &info)) return "";
  char command[4200];
  // One byte back: a return address belongs to the line after the call.
  const unsigned long offset = static_cast<char*>(address) - static_cast<char*>(info.dli_fbase) - 1;
  snprintf(command, sizeof command, "addr2line -i -e '%s' %#lx 2>/dev/null", info.dli_fname, offset);
  std::string text;
  if (FILE* pipe = popen(command, "r")) {
    char line[512];
    // Kernels are compiled in this made-up folder; frames elsewhere are the stand-in library's.
    static const char prefix[] = "/metal_source/";
    while (fgets(line, sizeof line, pipe)) {
      line[strcspn(line, " \n")] = 0;
      if (!strncmp(line, prefix, sizeof prefix - 1)) text += std::string("\n    at ") + (line + sizeof prefix - 1);
    }
    pclose(pipe);
  }
  return text;
}

}  // namespace metal_sim

extern "C" void msl_register(MslKernel kernel) { metal_sim::loading->kernels[kernel.name] = kernel; }
extern "C" void msl_needs_constants(const char* names) { metal_sim::loading->needs_constants = names; }
