// NEON with the dot product of Armv8.2 (Apple M1, Neoverse N1 and later): sdot multiplies signed codes by signed 8-bit
// limbs of x, four at a time.
#pragma once
#include <arm_neon.h>

#include "simd.h"

namespace qgemv::cpu {

// Not used: smmla of FEAT_I8MM (not in the M1) does twice the products of sdot, but wants eight codes of a row side by
// side, a zip for each register: nothing is saved for one row of x, perhaps a third for many.
struct NeonDotprod : RegisterTypes<4> {
  static constexpr int limb_bits = 8, code_bias = 0;  // all unsigned codes are below 128
  // A panel takes 4 of the 32 registers, so the sums of products of 3 rows of x with 2 limbs take 24, of 2 rows with 3
  // limbs also 24; with the codes, x and a mask that is 30: no second panel fits. From how many rows of x on
  // unpacking pays was measured with AVX-512 only.
  static constexpr int registers = 32, unpack_tokens = 9, tile_panels = 1;
  using Limb = int8_t;

  static Float half(const uint16_t* h) { return (Float)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(h))); }
  static void store_half(uint16_t* p, Float v) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v))); }
  static Word u16(const uint16_t* s) { return (Word)vmovl_u16(vld1_u16(s)); }
  static Int bytes(const uint8_t* p) {
    const uint8x8_t four = vcreate_u8(load<uint32_t>(p));
    return (Int)vmovl_u16(vget_low_u16(vmovl_u8(four)));
  }
  static Word lookup(Word index, const int8_t* table) { return (Word)vqtbl1q_s8(vld1q_s8(table), (uint8x16_t)index); }
  static FourWords lookup_16(FourWords index, const int8_t* table) { return lookup(index, table); }
  static Word fifth_bits(Word v) {
    const uint8x16_t low_byte = {0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12};
    const uint8x16_t bit = (uint8x16_t)vdupq_n_u32(0x08040201);
    return (Word)vtstq_u8(vqtbl1q_u8((uint8x16_t)v, low_byte), bit) & 0x10101010u;
  }
  static Float fma(Float a, Float b, Float c) {
    return (Float)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
  }
  static Float min(Float a, Float b) { return (Float)vminq_f32((float32x4_t)a, (float32x4_t)b); }
  static Float max(Float a, Float b) { return (Float)vmaxq_f32((float32x4_t)a, (float32x4_t)b); }
  static Int round(Float v) { return (Int)vcvtnq_s32_f32((float32x4_t)v); }
  static int32_t reduce_max(Int v) { return vmaxvq_s32((int32x4_t)v); }

  // In the lowest of two elements: sdot repeats one, so that x takes a load and nothing else.
  static int8x8_t four_limbs(const int8_t* x) { return vcreate_s8(load<uint32_t>(x)); }
  static Int dot(Int acc, Word codes, int8x8_t four) {
    return (Int)vdotq_lane_s32((int32x4_t)acc, (int8x16_t)codes, four, 0);
  }
  static void store_limbs(int8_t* to, Int v) {
    const int16x4_t halves = vmovn_s32((int32x4_t)v);
    store(to, vget_lane_s32((int32x2_t)vmovn_s16(vcombine_s16(halves, halves)), 0));
  }
  static void sums_of_16(const int8_t* limbs, int32_t* sums) {
    for (int g = 0; g < chunk / 16; ++g) sums[g] = vaddlvq_s8(vld1q_s8(limbs + 16 * g));
  }

  // Four words of each of 16 rows, from `offset` on: out[i][r] is word i of row r.
  static void interleave_words(const uint8_t* const* rows, size_t offset, uint32_t (*out)[panel_rows]) {
    for (int p = 0; p < panel_rows; p += lanes) {
      auto row = [&](int r) { return (uint32x4_t)vld1q_u8(rows[p + r] + offset); };
      auto put = [&](int i, uint32x4_t ab, uint32x4_t cd, bool high) {
        const uint64x2_t a = (uint64x2_t)ab, c = (uint64x2_t)cd;
        vst1q_u32(out[i] + p, (uint32x4_t)(high ? vzip2q_u64(a, c) : vzip1q_u64(a, c)));
      };
      const uint32x4_t a = row(0), b = row(1), c = row(2), d = row(3);
      put(0, vzip1q_u32(a, b), vzip1q_u32(c, d), false);
      put(1, vzip1q_u32(a, b), vzip1q_u32(c, d), true);
      put(2, vzip2q_u32(a, b), vzip2q_u32(c, d), false);
      put(3, vzip2q_u32(a, b), vzip2q_u32(c, d), true);
    }
  }
};

}  // namespace qgemv::cpu
