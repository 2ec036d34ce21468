// The one list of formats: every table, kernel and test is made from it. A new type is one file in formats/, its
// #include and its name here.
#pragma once
#include "formats/iq4_nl.h"
#include "formats/iq4_xs.h"
#include "formats/q2_k.h"
#include "formats/q3_k.h"
#include "formats/q4_0.h"
#include "formats/q4_1.h"
#include "formats/q4_k.h"
#include "formats/q5_0.h"
#include "formats/q5_1.h"
#include "formats/q5_k.h"
#include "formats/q6_k.h"
#include "formats/q8_0.h"

#define QGEMV_FORMATS(_) \
  _(Q4_0) _(Q4_1) _(Q5_0) _(Q5_1) _(Q8_0) _(Q2_K) _(Q3_K) _(Q4_K) _(Q5_K) _(Q6_K) _(IQ4_NL) _(IQ4_XS)

#ifndef __METAL_VERSION__
#undef device
#undef thread
#undef constant
#endif
