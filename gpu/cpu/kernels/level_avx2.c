/* The kernels for AVX2 and FMA. */
#ifdef __x86_64__
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#include "vec_avx2.h"
#include "vectors.h"

const Kernels avx2_f32 = KERNELS(f32), avx2_bf16 = KERNELS(bf16);
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
