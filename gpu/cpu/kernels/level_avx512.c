/* The kernels for AVX-512. */
#ifdef __x86_64__
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")
#endif
#include "vec_avx512.h"
#include "vectors.h"

const Kernels avx512_f32 = KERNELS(f32), avx512_bf16_kernels = KERNELS(bf16);
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
