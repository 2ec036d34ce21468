// Which memory a running kernel may touch, and which of its accesses race.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace metal_sim {

constexpr int simd_width = 32;

struct Region {
  enum Kind { device, threadgroup, internal } kind;
  std::string name;
  uintptr_t begin, end;
  bool writable;
  bool tracked = false;  // whether accesses may race: some argument may write here. Set by Memory::add
};

// Which lane touched a byte, and how many barriers it had passed by then.
struct Owner {
  uint32_t group = none;
  uint16_t lane = 0;
  uint16_t simdgroup_epoch = 0;
  uint32_t threadgroup_epoch = 0;
  static constexpr uint32_t none = 0xffffffff;
};

// The last writer and readers of every touched byte, in pages made on first use.
class Shadow {
 public:
  struct Cell {
    Owner writer;
    Owner reader, other_reader;  // the last two lanes that read, so that a lane's own read hides no other's
  };
  Cell& at(uintptr_t address) {
    const uintptr_t page = address / page_size;
    if (page != last_page_ || !last_) {
      auto& cells = pages_[page];
      if (!cells) cells = std::make_unique<Cell[]>(page_size);
      last_page_ = page;
      last_ = cells.get();
    }
    return last_[address % page_size];
  }
  void clear() {
    pages_.clear();
    last_ = nullptr;
  }

 private:
  static constexpr uintptr_t page_size = 1024;
  std::unordered_map<uintptr_t, std::unique_ptr<Cell[]>> pages_;
  uintptr_t last_page_ = 0;
  Cell* last_ = nullptr;
};

// The memory of one launch. The functions that find a fault return its description, else an empty string.
class Memory {
 public:
  void clear();
  void add(Region region);
  // Threadgroup memory is private to a threadgroup: forgets the last one's accesses.
  void next_threadgroup() { threadgroup_shadow_.clear(); }

  std::string check(uintptr_t address, size_t size, bool write, bool atomic, const Owner& device_owner,
                    const Owner& threadgroup_owner);
  // Where an address lies: "12 bytes past the end of buffer 0 (124 bytes)".
  std::string describe(uintptr_t address) const;

  // What an argument that was not bound points to: an address that no memory has.
  static void* unbound(bool threadgroup, int index);

 private:
  std::vector<Region> regions_;
  size_t last_ = 0;  // index of the region of the last access
  Shadow device_shadow_, threadgroup_shadow_;

  const Region* find(uintptr_t begin, uintptr_t end, bool write);
  std::string check_race(const Region& region, uintptr_t address, size_t size, bool write, const Owner& now);
};

}  // namespace metal_sim
