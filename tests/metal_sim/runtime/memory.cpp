#include "memory.h"

namespace metal_sim {
namespace {

// Not canonical on any 64-bit machine: bit 56 set, the kind and index of the argument in the bits above 48.
constexpr uintptr_t unbound_base = uintptr_t(1) << 56;
constexpr uintptr_t unbound_threadgroup = uintptr_t(1) << 55;

// Whether nothing orders the two accesses: different lanes with no barrier between them.
bool unordered(const Owner& before, const Owner& now) {
  if (before.group == Owner::none || (before.group == now.group && before.lane == now.lane)) return false;
  if (before.group != now.group) return true;  // threadgroups are never ordered within one launch
  if (before.threadgroup_epoch != now.threadgroup_epoch) return false;
  const bool same_simdgroup = before.lane / simd_width == now.lane / simd_width;
  return !same_simdgroup || before.simdgroup_epoch == now.simdgroup_epoch;
}

}  // namespace

void* Memory::unbound(bool threadgroup, int index) {
  return reinterpret_cast<void*>(unbound_base + (threadgroup ? unbound_threadgroup : 0) + (uintptr_t(index) << 48));
}

void Memory::clear() {
  regions_.clear();
  device_shadow_.clear();
  threadgroup_shadow_.clear();
  last_ = 0;
}

void Memory::add(Region region) {
  region.tracked = region.writable;
  for (Region& other : regions_) {  // one buffer may be bound twice, once of them const
    if (region.begin >= other.end || other.begin >= region.end) continue;
    region.tracked |= other.writable;
    other.tracked |= region.writable;
  }
  regions_.push_back(std::move(region));
}

const Region* Memory::find(uintptr_t begin, uintptr_t end, bool write) {
  auto fits = [&](const Region& r) { return begin >= r.begin && end <= r.end && (r.writable || !write); };
  if (last_ < regions_.size() && fits(regions_[last_])) return &regions_[last_];
  for (size_t i = 0; i < regions_.size(); ++i) {
    if (fits(regions_[i])) {
      last_ = i;
      return &regions_[i];
    }
  }
  return nullptr;
}

std::string Memory::check(uintptr_t address, size_t size, bool write, bool atomic, const Owner& device_owner,
                          const Owner& threadgroup_owner) {
  const Region* region = find(address, address + size, write);
  if (!region) {
    const std::string what = std::string(write ? "write" : "read") + " of " + std::to_string(size) + " bytes, ";
    if (write && find(address, address + size, false)) return what + "to memory that is const: " + describe(address);
    return what + describe(address);
  }
  if (region->kind == Region::internal || atomic) return "";
  return check_race(*region, address, size, write,
                    region->kind == Region::threadgroup ? threadgroup_owner : device_owner);
}

std::string Memory::check_race(const Region& region, uintptr_t address, size_t size, bool write, const Owner& now) {
  if (!region.tracked) return "";  // the common case: weights and activations
  Shadow& shadow = region.kind == Region::threadgroup ? threadgroup_shadow_ : device_shadow_;
  for (uintptr_t a = address; a < address + size; ++a) {
    Shadow::Cell& cell = shadow.at(a);
    const Owner* other = unordered(cell.writer, now) ? &cell.writer : nullptr;
    const bool against_write = other;
    if (write && !other && unordered(cell.reader, now)) other = &cell.reader;
    if (write && !other && unordered(cell.other_reader, now)) other = &cell.other_reader;
    if (other) {
      return std::string(write ? "write" : "read") + " of " + region.name + ", byte " +
             std::to_string(a - region.begin) + ", races with a " + (against_write ? "write" : "read") + " by thread " +
             std::to_string(other->lane) + " of threadgroup number " + std::to_string(other->group) +
             ": no barrier between them";
    }
    if (write) {
      cell.writer = now;
    } else {
      if (cell.reader.group != now.group || cell.reader.lane != now.lane) cell.other_reader = cell.reader;
      cell.reader = now;
    }
  }
  return "";
}

std::string Memory::describe(uintptr_t address) const {
  // An index may be negative: round to the nearest argument's address.
  if (const uintptr_t slot = (address + (uintptr_t(1) << 47)) >> 48; slot >> 8 == 1) {
    const bool threadgroup = slot & (unbound_threadgroup >> 48);
    return std::string(threadgroup ? "threadgroup memory " : "buffer ") + std::to_string(slot & 31) +
           ", which is not bound";
  }
  const Region* nearest = nullptr;
  auto distance = [&](const Region& r) -> uintptr_t {
    return address < r.begin ? r.begin - address : address < r.end ? 0 : address - r.end;
  };
  for (const Region& r : regions_) {
    if (r.kind != Region::internal && (!nearest || distance(r) < distance(*nearest))) nearest = &r;
  }
  if (!nearest) return "outside all memory";
  const std::string name = nearest->name + " (" + std::to_string(nearest->end - nearest->begin) + " bytes)";
  if (address >= nearest->begin && address < nearest->end) {
    return std::to_string(address - nearest->begin) + " bytes into " + name;
  }
  return std::to_string(distance(*nearest)) +
         (address < nearest->begin ? " bytes before " : " bytes past the end of ") + name;
}

}  // namespace metal_sim
